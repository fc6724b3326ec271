# SPDX-License-Identifier: BSD-3-Clause
"""Try every public knob of FSDP2, and FSDP1's constructor arguments, against what arithmetic predicts.

  python -m proofs.knobs                          # all trials on 2, 3, and 4 ranks; a table and a record
  python -m proofs.knobs --only set_reshard       # those of knobs whose name or setting has this text

Knobs are what the installed PyTorch offers (``names``). source_code/samples/knobs.json has a row for each: what it changes,
since which PyTorch, and its trap. A trial sets a knob, trains a small network on real ranks (gloo), and measures with the
course's meters: bytes that stay from step to step, bytes at the peak, each collective with its bytes, the order of gathers and
reductions, exact gradients, or process groups. Its prediction is the planner's where the planner covers the setting, and else a
few lines of arithmetic (proofs/knob_trials/). A trial holds if both are equal on every rank. What only NCCL and GPUs can show is
not tried; its row names a source.
"""

import dataclasses
import enum
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pandas
from labkit import UserError
from labkit.measuring import records
from labkit.running import gpus, launch, notebook_ranks, ranks
from labkit.running.options import Options, option, parse
from labkit.training import fsdp2_internals
from torch.distributed import fsdp

from proofs.knob_trials import bench, fsdp1, fsdp1_precision, precision, reducing, sharding, unsharding
from proofs.knob_trials.bench import Trial

ROWS = launch.SOURCE / "samples" / "knobs.json"
GROUPS = (sharding, unsharding, reducing, precision, fsdp1, fsdp1_precision)  # the files that have trials
SECONDS = 300  # that the trials of one number of ranks may take
OLDEST, NEWEST = "2.11", (2, 15)  # PyTorch's versions of which the rows tell
# Names of torch.distributed.fsdp that configure checkpoints (chapter 07), and neither memory nor traffic of a step
CHECKPOINTS = ("StateDict", "OptimState")


def names() -> list[str]:
    """Return the knobs of the installed PyTorch: "fully_shard: mesh", "FSDPModule.reshard", "ShardingStrategy.NO_SHARD", …"""
    public = [name for name in fsdp.__all__ if not any(word in name for word in CHECKPOINTS)]
    found = [knob for name in public for knob in _knobs_of(name, getattr(fsdp, name))]
    if fsdp2_internals.ShardPlacementResult:  # what a shard_placement_fn may return
        found += _knobs_of("ShardPlacementResult", fsdp2_internals.ShardPlacementResult)
    return sorted(found)


def _knobs_of(name: str, public) -> list[str]:
    """Return the knobs of a class or function: its members, fields, arguments, or public methods."""
    if name in ("fully_shard", "FullyShardedDataParallel"):
        arguments = [argument for argument in inspect.signature(public).parameters if argument != "self"]
        methods = [".no_sync"] if inspect.isclass(public) else []  # FSDP1's others are in chapter 09
        return [f"{name}: {argument}" for argument in arguments] + [name + method for method in methods]
    if inspect.isclass(public) and issubclass(public, enum.Enum):
        members = [member.name for member in public]
    elif dataclasses.is_dataclass(public):
        members = [field.name for field in dataclasses.fields(public)]
    elif inspect.isclass(public):
        members = [member for member in vars(public) if not member.startswith("_")]
    else:
        members = []
    return [f"{name}.{member}" for member in members] or [name]


def rows() -> dict[str, dict]:
    """Return {knob: its row of samples/knobs.json}.

    A row has "changes": a list of what the knob changes; "text": a sentence; "since": "2.11" if that has it, else "after 2.11";
    and if there is one, "pull": the pull request that proposes it; "trap"; "fsdp2": the counterpart of one of FSDP1; "source":
    who says so, of what is not tried.
    """
    return json.loads(ROWS.read_text())


def unexplained(found: list[str], explained: dict[str, dict]) -> dict[str, list[str]]:
    """Compare the knobs of the installed PyTorch with rows.

    Args:
        found: of ``names``.
        explained: of ``rows``.

    Returns:
        {"no row": knobs without one, "no such knob": rows of no knob, "neither tried nor sourced": knobs whose row names no source,
        and that no trial sets}.
    """
    tried = {each.knob for each in trials()}
    expected = [name for name, row in explained.items() if row["since"] == OLDEST or bench.installed() >= NEWEST]
    return {
        "no row": [name for name in found if name not in explained],
        "no such knob": [name for name in expected if name not in found],
        "neither tried nor sourced": [n for n, row in explained.items() if n not in tried and not row.get("source")],
    }


def trials() -> list[Trial]:
    """Return all trials, in the order of ``GROUPS``."""
    return [each for group in GROUPS for each in bench.TRIALS if each.function.__module__ == group.__name__]


def possible() -> list[Trial]:
    """Return the trials of knobs that the installed PyTorch has."""
    there = names()
    return [each for each in trials() if each.knob in there]


def run(chosen: list[Trial]) -> Iterator[dict]:
    """Run trials, those of one number of ranks in one launch.

    Yields:
        {"knob", "setting", "ranks", "predicted", "measured": of the first rank on which they differ, or of rank 0, "equal": whether
        they are equal on every rank}.
    """
    here = launch.Cluster(launcher="local")
    for count in sorted({each.ranks for each in chosen}):
        some = [each for each in chosen if each.ranks == count]
        wanted = [trials().index(each) for each in some]
        by_rank = notebook_ranks.on_ranks(on_a_rank, wanted, ranks=count, cluster=here, timeout=SECONDS)
        for each, found in zip(some, zip(*by_rank, strict=True), strict=True):
            differing = [pair for pair in found if pair[0] != pair[1]]
            predicted, measured = (differing or found)[0]
            about = {"knob": each.knob, "setting": each.setting, "ranks": count}
            yield about | {"predicted": predicted, "measured": measured, "equal": not differing}


def on_a_rank(me, wanted: list[int]) -> list[tuple[dict, dict]]:
    """Run trials on this rank; wanted: their places in ``trials()``. Collective."""
    return bench.run_here(me, [trials()[place] for place in wanted])


def quantities(values: dict) -> str:
    """Return a trial's quantities in words: "peak 34,844; all-gather of 4,096: 8"."""
    parts = []
    for name, value in values.items():
        kind, of, size = name.partition(" of ")
        if of and size.isdecimal():
            parts.append(f"{value} × {kind} of {int(size):,}")
        elif isinstance(value, list) and len(set(map(str, value))) == 1:
            parts.append(f"{name}: {len(value)} × {value[0]}" if len(value) > 1 else f"{name}: {value[0]}")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            shown = f"{shown:,}" if isinstance(shown, int) and not isinstance(shown, bool) else shown
            parts.append(f"{name}: {shown}")
    return "; ".join(parts)


def table(found: list[dict]) -> str:
    """Return trials as a Markdown table."""
    lines = []
    for row in found:
        values = quantities(row["measured"])
        if not row["equal"]:
            values = f"**predicted** {quantities(row['predicted'])}; **measured** {values}"
        lines.append(
            {"knob": row["knob"], "setting": row["setting"], "ranks": row["ranks"], "predicted = measured": values}
        )
    return pandas.DataFrame(lines).to_markdown(index=False, disable_numparse=True)


def counts(found: list[dict]) -> str:
    """Return how many knobs and settings were tried, and how many were as predicted."""
    equal = sum(row["equal"] for row in found)
    return f"{len({row['knob'] for row in found})} knobs in {len(found)} settings, {equal} of them as predicted"


@dataclass(frozen=True)
class Config(Options):
    """What is tried, and where the record goes. The command line is made from these fields."""

    only: str | None = option(None, "try the knobs whose name or setting has this text")
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def main():
    config = parse(Config, __doc__)
    gpus.hide()
    chosen = [each for each in possible() if not config.only or config.only in f"{each.knob} {each.setting}"]
    try:
        if not chosen:
            raise UserError(f"no knob and no setting has {config.only!r}: give another --only")
        path, found = records.new_path("knobs", config.record), []
        for row in run(chosen):
            found.append(row)
            records.write_rows(path, found, knobs=names())
    except UserError as error:
        ranks.exit_with_error(str(error))
    print(table(found))
    print(f"\n{counts(found)}\nrecord: {path}")


if __name__ == "__main__":
    main()
