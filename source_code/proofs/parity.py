# SPDX-License-Identifier: BSD-3-Clause
"""Check loss parity: every way to share a training computes the losses of one process, step by step.

  python -m proofs.parity        all variants, on 2 and on 4 ranks, in float64 and in fp32; a table and a record
  python -m proofs.parity --record here.json

All variants have the same model, initial weights, order of the text, and global batch. In float64 they differ only by
the order of additions, about 1e-15; a variant that computes something else differs by far more. fp32 is what people
train in.
"""

import contextlib
import io
import os
from dataclasses import dataclass
from importlib import import_module

import pandas
from labkit import UserError, succeeds
from labkit.measuring import meters, records
from labkit.measuring.differences import largest_difference
from labkit.running import launch, notebook_ranks, progress, ranks
from labkit.running.options import Options, option, parse
from labkit.training import deepspeed_zero, jax_world

STEPS = 20
SEQUENCES, LENGTH = 8, 16  # in a step, of all ranks together; tokens of each
# The largest relative difference of a loss. fp32's catches a forgotten weight decay (7e-5), which 1e-4 would not.
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
RANKS = (2, 4)
JAX = "gpt_jax"  # one process, with devices in the place of ranks


@dataclass(frozen=True)
class Variant:
    """One way to share the training.

    Attributes:
        name: as the table shows it.
        lab: the script; it has a Config and a ``prepare`` (gpt_jax.py: a ``train``).
        options: of the lab's Config.
        ranks: the numbers of ranks to train on.
        precisions: keys of TOLERANCE.
    """

    name: str
    lab: str
    options: dict
    ranks: tuple[int, ...] = RANKS
    precisions: tuple[str, ...] = tuple(TOLERANCE)


BASELINE = Variant("one process", "gpt_fsdp", {"strategy": "single"}, ranks=(1,))
VARIANTS = [
    Variant("DDP", "gpt_fsdp", {"strategy": "ddp"}),
    Variant("FSDP1", "gpt_fsdp", {"strategy": "fsdp1"}),
    Variant("FSDP1, SHARD_GRAD_OP", "gpt_fsdp", {"strategy": "fsdp1", "reshard_after_forward": "false"}),
    Variant("FSDP2", "gpt_fsdp", {}),
    Variant("FSDP2, kept after forward", "gpt_fsdp", {"reshard_after_forward": "false"}),
    Variant("FSDP2, half kept", "gpt_fsdp", {"reshard_after_forward": "2"}),
    Variant("HSDP 2x2", "gpt_fsdp", {"mesh": "2x2"}, ranks=(4,)),
    *(Variant(f"ZeRO-{stage}, torch", "gpt_zero", {"stage": str(stage)}) for stage in (1, 2, 3)),
    # DeepSpeed knows no float64.
    *(
        Variant(
            f"ZeRO-{stage}, DeepSpeed", "gpt_zero", {"stage": str(stage), "engine": "deepspeed"}, precisions=("fp32",)
        )
        for stage in (1, 2, 3)
    ),
    # Not on 4 ranks: the model has two heads of keys and values to split.
    Variant("tensor parallel", "gpt_fsdp", {"mesh": "tensor=2"}, ranks=(2,)),
    Variant("FSDP2 2 x tensor parallel 2", "gpt_fsdp", {"mesh": "shard=2,tensor=2"}, ranks=(4,)),
    *(
        Variant(f"pipeline, {schedule}", "gpt_pipeline", {"schedule": schedule, "accumulate": 4})
        for schedule in ("gpipe", "1f1b")
    ),
    Variant("JAX, replicated", JAX, {"strategy": "replicated"}),
    Variant("JAX, fsdp", JAX, {"strategy": "fsdp-activations"}),  # left to the compiler
    Variant("JAX, fsdp-explicit", JAX, {"strategy": "fsdp-explicit"}),
]


def config_of(variant: Variant, count: int, precision: str, steps: int):
    """Return a run's options: a step has the same sequences, whatever the number of ranks that share them."""
    lab = import_module(variant.lab)
    options = {"max_steps": steps, "seq_len": LENGTH, "precision": precision, "device": "cpu"} | variant.options
    if variant.lab == JAX:
        return lab.Config(**options, devices=count, batch_size=SEQUENCES // count)
    parts = lab.Config(**options).arranged(count).data * variant.options.get("accumulate", 1)
    return lab.Config(**options, batch_size=SEQUENCES // parts)


def losses_of(me, variants: list[tuple[Variant, str]], steps: int) -> list[list[float]]:
    """Train each (variant, precision), and return its losses, step by step. Collective."""
    import gpt_fsdp

    os.environ.pop(progress.VARIABLE, None)  # a progress bar for dozens of short runs would mean nothing
    meters.TRACED_STEPS = range(0)  # tracing is slow, and only the losses of the steps are needed here
    gpt_fsdp.VALIDATION_SEQUENCES = 1
    all_losses = []
    for variant, precision in variants:
        # Dozens of runs would each print their losses.
        with contextlib.redirect_stdout(io.StringIO()), deepspeed_zero.contained():
            lab = import_module(variant.lab)
            config = config_of(variant, me.world_size, precision, steps)
            all_losses.append(gpt_fsdp.train(config, me, lab.prepare, lab.compute_loss)["losses"])
    return all_losses


def losses_under_jax(me, runs: list[tuple[Variant, int, str]], steps: int) -> list[list[float]]:
    """Train each (variant, devices, precision) under JAX, in one process, and return its losses, step by step."""
    os.environ.pop(progress.VARIABLE, None)
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiling is most of these short runs
    jax_world.load(max(RANKS), "cpu")  # JAX makes its devices once; smaller runs take some of them
    all_losses = []
    for variant, count, precision in runs:
        with contextlib.redirect_stdout(io.StringIO()):
            world = jax_world.load(count, "cpu", precision)
            all_losses.append(import_module(JAX).train(config_of(variant, count, precision, steps), world)["losses"])
    return all_losses


def runnable() -> list[Variant]:
    """Return the variants that can run here: those of DeepSpeed and JAX only where these are installed."""
    variants = [
        variant
        for variant in VARIANTS
        if variant.options.get("engine") != "deepspeed" or succeeds(deepspeed_zero.check)
    ]
    return [variant for variant in variants if variant.lab != JAX or succeeds(jax_world.check)]


def run(variants: list[Variant], steps: int = STEPS) -> list[dict]:
    """Train the variants, and return a row for each run.

    Returns:
        [{"way": the variant's name, "ranks", "precision", "losses", "difference"}, …], with the largest relative difference
        of a loss from one process's.
    """
    here = launch.Cluster(launcher="local")
    done = []
    for count in (1, *RANKS):
        mine = [
            (variant, precision)
            for variant in [BASELINE, *variants]
            if count in variant.ranks and variant.lab != JAX
            for precision in variant.precisions
        ]
        if not mine:
            continue
        all_losses = notebook_ranks.on_ranks(losses_of, mine, steps, ranks=count, cluster=here, timeout=600)[0]
        done += [
            (variant, count, precision, losses) for (variant, precision), losses in zip(mine, all_losses, strict=True)
        ]
    if under_jax := [
        (w, count, precision) for w in variants if w.lab == JAX for count in w.ranks for precision in w.precisions
    ]:
        all_losses = notebook_ranks.on_ranks(losses_under_jax, under_jax, steps, ranks=1, cluster=here, timeout=600)[0]
        done += [(*run, losses) for run, losses in zip(under_jax, all_losses, strict=True)]

    alone = {precision: losses for variant, _, precision, losses in done if variant is BASELINE}
    rows = []
    for variant, count, precision, losses in done:
        difference = largest_difference(losses, alone[precision], relative=True)
        about = {
            "way": variant.name,
            "lab": variant.lab,
            "options": variant.options,
            "ranks": count,
            "precision": precision,
        }
        rows.append(about | {"losses": losses, "difference": difference})
    return rows


def table(rows: list[dict]) -> pandas.DataFrame:
    return pandas.DataFrame(
        {
            "way": row["way"],
            "ranks": row["ranks"],
            "numbers": row["precision"],
            "loss in step 1": f"{row['losses'][0]:.6f}",
            f"in step {STEPS}": f"{row['losses'][-1]:.6f}",
            "largest difference": f"{row['difference']:.1e}",
            "": "equal" if row["difference"] <= TOLERANCE[row["precision"]] else "DIFFERS",
        }
        for row in rows
    )


@dataclass(frozen=True)
class Config(Options):
    """Where the record goes. The command line is made from this field."""

    record: str | None = option(None, "where the record goes (default: results/runs/)")


def main():
    options = parse(Config, __doc__)
    try:
        path = records.new_path("parity", options.record)
        rows = run(runnable())
    except UserError as error:
        ranks.exit_with_error(str(error))
    print(table(rows).to_markdown(index=False, disable_numparse=True))
    records.write_rows(path, rows, steps=STEPS)
    print(f"\n{len(rows)} runs of {STEPS} steps; record: {path}")


if __name__ == "__main__":
    main()
