# SPDX-License-Identifier: BSD-3-Clause
"""Train the same network in eight ways on this machine, the rungs of a ladder, and compare their costs.

  python ladder.py                         (or: make run)
  python ladder.py --data mnist --ranks 4

Each rung is a run of mnist_fsdp.py in new processes. Its record, and tables with the measured and predicted peak memory of
each rung, are written to results/runs/ after every rung; at the end, a figure, too.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal

import pandas
from labkit import UserError
from labkit.measuring import meters, records
from labkit.measuring.trace import CATEGORIES
from labkit.running import launch, ranks, site
from labkit.running.options import Options, option, parse
from labkit.teaching import plots
from labkit.training import datasets
from planner import predict
from tqdm import tqdm

# (label, options of mnist_fsdp.py)
RUNGS = [
    ("one process", {"strategy": "single"}),
    ("DDP", {"strategy": "ddp"}),
    ("FSDP1, one unit", {"strategy": "fsdp1"}),
    ("FSDP1, by size", {"strategy": "fsdp1", "wrap": "size"}),
    ("FSDP2, one unit", {"strategy": "fsdp2"}),
    ("FSDP2, by size", {"strategy": "fsdp2", "wrap": "size"}),
    ("FSDP2, CPU offload", {"strategy": "fsdp2", "wrap": "size", "cpu_offload": True}),
    ("FSDP2, resumed", {"strategy": "fsdp2", "wrap": "size"}),
]
EPOCHS = {"mnist": 1, "mnist-5k": 3}
IMAGES = {"mnist": 60000, "mnist-5k": 4000}  # size of the training set
# The meter's results start with the second traced step, which the second half of a resumed run must reach. With an odd
# number of steps, it has one more than the first half.
FEWEST_STEPS = 2 * (meters.TRACED_STEPS[1] + 1) - 1


@dataclass(frozen=True)
class Config(Options):
    """The options of the whole ladder."""

    data: Literal[("auto", *EPOCHS)] = option(
        "mnist-5k", "data set; mnist-5k needs no download, mnist takes nearly five times as long"
    )
    epochs: int | None = option(None, "passes over the training set (default: 1 of mnist, 3 of mnist-5k)", least=1)
    ranks: int | None = option(
        None, "ranks of each rung except the first (default: one per GPU, or 4 with fewer than two GPUs)", least=1
    )
    batch_size: int = option(32, "images per step on each rank", least=1)


def climb(config: Config) -> Iterator[dict]:
    """Run every rung, and yield {"label", "record", "predicted"} for each."""
    common, steps = shared(config)
    with tqdm(total=len(RUNGS), unit="rung", position=0) as rungs:
        for label, options in RUNGS:
            rungs.set_description(f"{label:18}")
            with tqdm(total=0, unit="step", position=1, leave=False) as bar:

                def show(step, total, bar=bar):
                    bar.total = total
                    bar.update(step - bar.n)

                run = partial(run_and_resume, steps // 2) if label.endswith("resumed") else launch.run
                record = run("mnist_fsdp.py", on_progress=show, **common, **options)
            rungs.update()
            yield {"label": label, "record": record, "predicted": predicted_peak(record)}


def shared(config: Config) -> tuple[dict, int]:
    """Return (the options that all rungs share, the number of steps on several ranks).

    Raises:
        UserError: there are too few steps.
    """
    data = datasets.prepare(config.data)
    epochs = config.epochs or EPOCHS[data]
    gpus = site.gpus_here()
    world_size = config.ranks or (gpus if gpus > 1 else 4)  # a single rank would not shard anything
    on_gpus = world_size <= gpus
    if gpus and not on_gpus:
        print(f"{world_size} ranks, and GPUs for {gpus}: the ladder climbs on the CPU", flush=True)
    steps = epochs * (IMAGES[data] // (world_size * config.batch_size))
    if steps < FEWEST_STEPS:
        raise UserError(
            f"{steps} steps on {world_size} ranks are too few to be measured and resumed half-way, which takes "
            f"{FEWEST_STEPS}: lower --batch-size, or raise --epochs"
        )
    common = {
        "ranks": world_size,
        "device": "cuda" if on_gpus else "cpu",
        "cluster": launch.Cluster(launcher="local"),
        "quiet": True,
        "data": data,
        "epochs": epochs,
        "batch_size": config.batch_size,
    }
    return common, steps


def run_and_resume(half: int, script: str, **options) -> dict:
    """Stop after ``half`` steps, resume from the checkpoint, and return the record of the second run."""
    folder = launch.RUNS / f"checkpoints-{datetime.now():%Y%m%d-%H%M%S-%f}"
    try:
        launch.run(script, checkpoint=folder, max_steps=half, **options)
        return launch.run(script, checkpoint=folder, resume=True, **options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def predicted_peak(record: dict) -> int | None:
    """Return the planner's peak in bytes; None for offload from a GPU, since the total would mix GPU and CPU memory."""
    if not record["memory"] or (record["config"]["cpu_offload"] and record["device"] != "cpu"):
        return None
    return predict.total(predict.peak_of(record)[1])


def memory_table(runs: list[dict]) -> pandas.DataFrame:
    """Return a table of rank 0's peak memory by category in MiB, and of the measured and predicted totals in bytes."""
    used = [c for c in CATEGORIES if any(run["record"]["memory"]["peak"][c] for run in runs)]
    rows = []
    for run in runs:
        peak = run["record"]["memory"]["peak"]
        row = {"rung": run["label"], "ranks": run["record"]["ranks"], "units": run["record"]["units"] or "–"}
        row |= {category: f"{peak[category] / plots.MIB:.1f}" if peak[category] else "–" for category in used}
        row |= {
            "measured": f"{sum(peak.values()):,}",
            "predicted": f"{run['predicted']:,}" if run["predicted"] else "–",
        }
        rows.append(row)
    return pandas.DataFrame(rows)


def speed_table(runs: list[dict]) -> pandas.DataFrame:
    """Return a table of each rung's step time, throughput, traffic and accuracy."""
    return pandas.DataFrame([{"rung": run["label"], **_speed(run["record"])} for run in runs])


def _speed(record: dict) -> dict:
    step, accuracy = record["time"]["step"], record["accuracy"]
    row = {"step [ms]": "–", "samples/s": "–"}
    if step:
        median, low, high = (step[k] * 1e3 for k in ("median", "p10", "p90"))
        row = {
            "step [ms]": f"{median:.0f} ({low:.0f}–{high:.0f})",
            "samples/s": f"{record['time']['samples_per_second']:.0f}",
        }
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        size = sum(t["count"] * t["bytes"] for t in record["traffic"] if t["kind"] == kind)
        row[f"{kind} [MB]"] = f"{size / 1e6:.2f}" if size else "–"
    row["accuracy"] = f"{accuracy['correct']}/{accuracy['total']} ({accuracy['correct'] / accuracy['total']:.2%})"
    return row


def as_markdown(table: pandas.DataFrame) -> str:
    return table.to_markdown(index=False, disable_numparse=True)


def tables(runs: list[dict]) -> str:
    """Format both tables as Markdown."""
    return "\n\n".join(
        [
            plots.caption(runs[-1]["record"]),
            "Peak memory of rank 0 by category [MiB]; all of it, measured and predicted [bytes]:",
            as_markdown(memory_table(runs)),
            "Step time (10th–90th percentile), throughput, size of the tensors in a step's collectives, test accuracy:",
            as_markdown(speed_table(runs)),
        ]
    )


def read(folder: Path) -> list[dict]:
    """Read the runs of an earlier ladder from its records.

    Raises:
        UserError: their number is not that of the rungs.
    """
    loaded = [records.load(path) for path in sorted(folder.glob("*.json"))]
    if len(loaded) != len(RUNGS):
        raise UserError(f"{folder} holds {len(loaded)} records, and a ladder has {len(RUNGS)}: climb it again")
    return [
        {"label": label, "record": record, "predicted": predicted_peak(record)}
        for (label, _), record in zip(RUNGS, loaded, strict=True)
    ]


def write_last(runs: list[dict], folder: Path):
    """Write the record of the last run, and the tables of all runs so far, so that a later failure loses nothing."""
    name = runs[-1]["label"].lower().replace(", ", "-").replace(" ", "-")
    records.write(folder / f"{len(runs) - 1}-{name}.json", runs[-1]["record"])
    (folder / "ladder.md").write_text(tables(runs) + "\n")


def main():
    config = parse(Config, __doc__)
    folder = launch.RUNS / f"ladder-{datetime.now():%Y%m%d-%H%M%S}"
    runs = []
    try:
        for run in climb(config):
            runs.append(run)
            write_last(runs, folder)
    except UserError as error:
        if runs:
            print(f"Tables and records of the rungs before: {folder}")
        ranks.exit_with_error(str(error))
    plots.ladder(runs, folder / "ladder.png")
    print(f"\n{tables(runs)}\n\nTables, picture and records: {folder}")


if __name__ == "__main__":
    main()
