"""One training, however it is shared: the losses of each way to share it, beside those of one process.

  python equivalence.py                    every way, on 2 and on 4 ranks, in float64 and in fp32; a table and a record
  python equivalence.py --record here.json

One model, one set of first values, one order of the text, one global batch. In float64 the ways differ by the order in
which they add, some 1e-15; what computes something else differs by far more. fp32 is what people train in.
"""

import contextlib
import io
import os
from dataclasses import dataclass
from importlib import import_module

import pandas
from labkit import UserError, holds
from labkit.measuring import meters, records
from labkit.measuring.differences import largest_difference
from labkit.running import cells, launch, progress, ranks
from labkit.running.options import Options, option, parse
from labkit.training import deepspeed_zero, jax_world

STEPS = 20
SEQUENCES, LENGTH = 8, 16  # in a step, of all ranks together; tokens of each
# The largest relative difference of a loss. fp32's catches a forgotten weight decay (7e-5), which 1e-4 would not.
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
RANKS = (2, 4)
JAX = "gpt_jax"  # one process, with devices in the place of ranks


@dataclass(frozen=True)
class Way:
    """One way to share the training.

    lab: the script, which has a Config and a ``prepare``, gpt_jax.py a ``train``. options: of its Config.
    """

    name: str
    lab: str
    options: dict
    ranks: tuple[int, ...] = RANKS
    precisions: tuple[str, ...] = tuple(TOLERANCE)


ALONE = Way("one process", "gpt_fsdp", {"strategy": "single"}, ranks=(1,))
WAYS = [
    Way("DDP", "gpt_fsdp", {"strategy": "ddp"}),
    Way("FSDP1", "gpt_fsdp", {"strategy": "fsdp1"}),
    Way("FSDP1, SHARD_GRAD_OP", "gpt_fsdp", {"strategy": "fsdp1", "reshard_after_forward": "false"}),
    Way("FSDP2", "gpt_fsdp", {}),
    Way("FSDP2, kept after forward", "gpt_fsdp", {"reshard_after_forward": "false"}),
    Way("FSDP2, half kept", "gpt_fsdp", {"reshard_after_forward": "2"}),
    Way("HSDP 2x2", "gpt_fsdp", {"mesh": "2x2"}, ranks=(4,)),
    *(Way(f"ZeRO-{stage}, torch", "gpt_zero", {"stage": str(stage)}) for stage in (1, 2, 3)),
    # DeepSpeed knows no float64.
    *(
        Way(f"ZeRO-{stage}, DeepSpeed", "gpt_zero", {"stage": str(stage), "engine": "deepspeed"}, precisions=("fp32",))
        for stage in (1, 2, 3)
    ),
    # Not on 4 ranks: the model has two heads of keys and values to split.
    Way("tensor parallel", "gpt_fsdp", {"mesh": "tensor=2"}, ranks=(2,)),
    Way("FSDP2 2 x tensor parallel 2", "gpt_fsdp", {"mesh": "shard=2,tensor=2"}, ranks=(4,)),
    *(
        Way(f"pipeline, {schedule}", "gpt_pipeline", {"schedule": schedule, "accumulate": 4})
        for schedule in ("gpipe", "1f1b")
    ),
    *(Way(f"JAX, {strategy}", JAX, {"strategy": strategy}) for strategy in ("replicated", "fsdp", "fsdp-explicit")),
]


def config_of(way: Way, count: int, precision: str, steps: int):
    """The options of one run: the same sequences in a step, whatever the number of ranks that share them."""
    lab = import_module(way.lab)
    options = {"max_steps": steps, "seq_len": LENGTH, "precision": precision, "device": "cpu"} | way.options
    if way.lab == JAX:
        return lab.Config(**options, devices=count, batch_size=SEQUENCES // count)
    parts = lab.Config(**options).arranged(count).data * way.options.get("accumulate", 1)
    return lab.Config(**options, batch_size=SEQUENCES // parts)


def losses_of(me, ways: list[tuple[Way, str]], steps: int) -> list[list[float]]:
    """Run on every rank: the losses of each (way, precision), step by step."""
    import gpt_fsdp

    os.environ.pop(progress.VARIABLE, None)  # a bar that starts again with each run would say nothing
    meters.TRACED_STEPS = range(0)  # tracing slows, and here the losses are asked for
    found = []
    for way, precision in ways:
        # Dozens of runs would each tell their losses.
        with contextlib.redirect_stdout(io.StringIO()), deepspeed_zero.contained():
            lab = import_module(way.lab)
            config = config_of(way, me.world_size, precision, steps)
            found.append(gpt_fsdp.train(config, me, lab.prepare, lab.compute_loss)["losses"])
    return found


def losses_under_jax(me, runs: list[tuple[Way, int, str]], steps: int) -> list[list[float]]:
    """The same of each (way, devices, precision), in one process."""
    os.environ.pop(progress.VARIABLE, None)
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiling is most of these short runs
    jax_world.load(max(RANKS), "cpu")  # JAX makes its devices once; smaller runs take some of them
    found = []
    for way, count, precision in runs:
        with contextlib.redirect_stdout(io.StringIO()):
            world = jax_world.load(count, "cpu", precision)
            found.append(import_module(JAX).train(config_of(way, count, precision, steps), world)["losses"])
    return found


def runnable() -> list[Way]:
    """The ways that this machine can go: without DeepSpeed or JAX, the others."""
    ways = [way for way in WAYS if way.options.get("engine") != "deepspeed" or holds(deepspeed_zero.check)]
    return [way for way in ways if way.lab != JAX or holds(jax_world.check)]


def run(ways: list[Way], steps: int = STEPS) -> list[dict]:
    """[{"way", "ranks", "precision", "losses", "difference"}, …]: the largest relative difference to one process."""
    here = launch.Cluster(launcher="local")
    done = []
    for count in (1, *RANKS):
        mine = [
            (way, precision)
            for way in [ALONE, *ways]
            if count in way.ranks and way.lab != JAX
            for precision in way.precisions
        ]
        if not mine:
            continue
        found = cells.on_ranks(losses_of, mine, steps, ranks=count, cluster=here, timeout=600)[0]
        done += [(way, count, precision, losses) for (way, precision), losses in zip(mine, found, strict=True)]
    if under_jax := [
        (w, count, precision) for w in ways if w.lab == JAX for count in w.ranks for precision in w.precisions
    ]:
        found = cells.on_ranks(losses_under_jax, under_jax, steps, ranks=1, cluster=here, timeout=600)[0]
        done += [(*run, losses) for run, losses in zip(under_jax, found, strict=True)]

    alone = {precision: losses for way, _, precision, losses in done if way is ALONE}
    rows = []
    for way, count, precision, losses in done:
        difference = largest_difference(losses, alone[precision], relative=True)
        about = {"way": way.name, "lab": way.lab, "options": way.options, "ranks": count, "precision": precision}
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
    """The command line is made from these fields."""

    record: str | None = option(None, "where the record goes (default: results/runs/)")


def main():
    options = parse(Config, __doc__)
    try:
        path = records.new_path("equivalence", options.record)
        rows = run(runnable())
    except UserError as error:
        ranks.leave(str(error))
    print(table(rows).to_markdown(index=False, disable_numparse=True))
    records.write_rows(path, rows, steps=STEPS)
    print(f"\n{len(rows)} runs of {STEPS} steps; record: {path}")


if __name__ == "__main__":
    main()
