"""Draw faults at random, and count how often ``diagnose_hang.py`` names the right one, and the rank that has it.

  python -m proofs.diagnosis                        240 draws: a table and a record
  python -m proofs.diagnosis --draws 5 --seed 7     five draws

A draw is a fault, a rank, a step, and a layout: DDP or FSDP2 on 4 ranks, or FSDP2 on a mesh of 2 replicas x 2 shards. Every
training looks at its losses and replicas as ``labkit/measuring/rank_checks.py`` proposes, and records its collectives. The
report is taken when the run has ended, or when it has been quiet for some seconds; the ranks are still there then.

``named`` reads the fault and its ranks off the first lines of the report, as a reader would. It knows nothing of the draw.
Two kinds are controls: in a healthy run, and in one with a single pause, nothing may be named.
"""

import contextlib
import io
import os
import queue
import random
import re
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import diagnose_hang
import faults
import pandas
import torch
import torch.distributed as dist
from labkit import UserError
from labkit.measuring import flight_recorder, rank_checks, records
from labkit.running import launch, notebook_ranks, ranks
from labkit.running.options import Options, option, parse
from torch.nn.parallel import DistributedDataParallel

WORLD, STEPS, CHECK_EVERY = 4, 12, 4
LAYOUTS = ("ddp", "fsdp2", "mesh")
QUIET, PATIENCE = 1.5, 10.0  # seconds: without a collective, until a record is written; until a collective fails
SETTLED = 2.0  # seconds that a record of a quiet rank must have been there
LIMIT = 90  # seconds for a run

FAULTS = {  # {kind: the layouts it is drawn on}
    "killed": LAYOUTS,
    "stopped": LAYOUTS,
    "exception": LAYOUTS,
    "broken GPU": LAYOUTS,
    "stuck outside": LAYOUTS,
    "interpreter held": LAYOUTS,
    "fewer batches": LAYOUTS,
    "lone collective": LAYOUTS,
    "other shape": LAYOUTS,
    "other dtype": LAYOUTS,
    "other order": ("mesh",),
    "straggler": LAYOUTS,
    "bad sample": LAYOUTS,
    "flipped bit": ("ddp", "mesh"),  # where there are replicas
    "healthy": LAYOUTS,
    "one pause": LAYOUTS,
}
CONTROLS = ("healthy", "one pause")
KINDS = {  # {kind whose report named kind and rank in all draws of the record: what happens on the rank}
    "killed": "its process gets SIGKILL",
    "stopped": "its process gets SIGSTOP",
    "exception": "it raises an error of the program",
    "broken GPU": "it raises an error of CUDA that no program causes",
    "stuck outside": "it waits for something that is no collective",
    "fewer batches": "it leaves the training loop before the others",
    "lone collective": "it calls a collective that the others do not call",
    "straggler": "it is slow in each step",
    "bad sample": "a NaN enters in its batch",
}
NOTHING = "nothing"  # what is named for a control

SENTENCES = [  # (kind, how a line of the report begins), in the order in which they are tried on each line
    ("broken GPU", r"ranks? (?P<ranks>[\d, -]+) failed: .*CUDA error"),
    ("bad sample", r"ranks? [\d, -]+ failed: NotFinite: .* on ranks? (?P<ranks>[\d, ]+)$"),
    ("flipped bit", r"ranks? [\d, -]+ failed: ReplicasDiffer: ranks? (?P<ranks>[\d, ]+) holds?"),
    ("exception", r"ranks? (?P<ranks>[\d, -]+) failed: "),
    ("killed", r"rank (?P<ranks>\d+) is dead:"),
    ("stopped", r"rank (?P<ranks>\d+) is stopped:"),
    ("interpreter held", r"rank (?P<ranks>\d+) is there .* but none of its Python runs"),
    ("other order", r"deadlock: ranks (?P<ranks>[\d, -]+) wait for each other"),
    ("lone collective", r"ranks? (?P<ranks>[\d, -]+) and .* differ in .*called from different lines$"),
    ("lone collective", r"ranks? (?P<ranks>[\d, -]+) and .* differ in what they called"),
    ("other shape", r"ranks? (?P<ranks>[\d, -]+) and .* differ in the shape"),
    ("other dtype", r"ranks? (?P<ranks>[\d, -]+) and .* differ in the type"),
    ("fewer batches", r"  ranks? (?P<ranks>[\d, -]+) had left \(finished\)"),
    ("stuck outside", r"  ranks? (?P<ranks>\d+) is at"),
    ("straggler", r"rank (?P<ranks>\d+) is a straggler"),
    ("another size", r"rank \d+ was aborted in "),  # gloo: neither which one, nor whose
    (NOTHING, r"no rank is missing"),
]


@dataclass(frozen=True)
class Draw:
    """What happens in a run: the fault, on this rank, at this step."""

    kind: str
    layout: str
    rank: int
    step: int


def draws(number: int, seed: int, kinds=FAULTS) -> list[Draw]:
    """Draw faults of some kinds, each equally often as far as possible, in random order."""
    rng = random.Random(seed)
    kinds = [kind for _ in range(-(-number // len(kinds))) for kind in rng.sample([*kinds], len(kinds))]
    return [
        Draw(kind, rng.choice(FAULTS[kind]), rng.randrange(WORLD), rng.randrange(1, STEPS // 2))
        for kind in kinds[:number]
    ]


# On the ranks


@dataclass(frozen=True)
class Training:
    """A model in a layout, and its process groups. everyone: all ranks; replicas: those with this rank's parameters."""

    model: torch.nn.Module
    everyone: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    groups: tuple  # the layout's groups, in the order in which a step uses them


def build(me, layout: str) -> Training:
    """Build the model of a layout. Its collectives fail after ``PATIENCE`` seconds."""
    everyone = dist.new_group(timeout=timedelta(seconds=PATIENCE), group_desc="everyone")
    model = faults.network().to(me.device)
    if layout == "ddp":
        return Training(DistributedDataParallel(model, process_group=everyone), everyone, everyone, (everyone,))
    if layout == "fsdp2":
        mesh = faults.DeviceMesh.from_group(everyone, me.device.type, mesh_dim_names=("shard",))
    else:
        mesh = faults.hybrid_mesh(me, PATIENCE)
    for block in model[:3]:
        faults.fully_shard(block, mesh=mesh)
    model = faults.fully_shard(model, mesh=mesh)
    if layout == "fsdp2":
        return Training(model, everyone, None, (everyone,))
    groups = mesh["shard"].get_group(), mesh["replicate"].get_group()
    return Training(model, everyone, groups[1], (*groups, everyone))


def train(me, folder: str, draw: Draw):
    """Train; at the draw's step, its rank has the fault."""
    with flight_recorder.recorder(folder, quiet=QUIET):
        training = build(me, draw.layout)
        optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
        finite = rank_checks.FirstNonFinite(me.device)
        for step in range(STEPS):
            inputs, classes = load(me, step)
            at = me.rank == draw.rank and step >= draw.step
            begin = BEFORE.get(draw.kind) if at and (step == draw.step or draw.kind in LASTING) else None
            if begin and begin(inputs) == "leave":
                return
            loss = faults.train_step(training.model, optimizer, inputs, classes)
            finite.see(step, loss)
            kind = draw.kind if at and step == draw.step else ""
            log(training, loss, kind)
            if kind == "flipped bit":
                weights = [rank_checks.local(each) for each in training.model.parameters()]
                faults.flip_a_bit(next(each for each in weights if each.numel()))
            if step % CHECK_EVERY == CHECK_EVERY - 1:
                finite.raise_if_any(training.everyone)
                if training.replicas:
                    rank_checks.raise_if_replicas_differ(training.model, training.replicas, training.everyone)


def load(me, step: int):
    return faults.batch(me, step)


def log(training: Training, loss, kind: str):
    """Reduce a step's metrics in each group: the mean loss, and three more."""
    if kind == "lone collective":
        best_loss(training, loss)
    groups = training.groups[::-1] if kind == "other order" else training.groups
    metrics = torch.zeros(5 if kind == "other shape" else 4)
    for group in groups:
        dist.all_reduce(metrics.double() if kind == "other dtype" else metrics, group=group)


def best_loss(training: Training, loss):
    """Reduce a number that only one rank wants."""
    dist.all_reduce(loss, op=dist.ReduceOp.MIN, group=training.groups[0])


def is_killed(_):
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped(_):
    os.kill(os.getpid(), signal.SIGSTOP)


def raises(_):
    raise ValueError("sample 4711 has no class")


def has_a_broken_gpu(_):
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")  # as a broken GPU makes PyTorch raise


def waits(_):
    queue.Queue().get()


def holds_the_interpreter(_):
    re.match(r"(a+)+b", "a" * 40)  # for hours, in C


def has_no_more_batches(_):
    return "leave"


def is_slow(_):
    time.sleep(0.3)


def pauses(_):
    time.sleep(1.2 * QUIET)


def has_a_bad_sample(inputs):
    inputs[5, 7] = torch.nan


BEFORE = {  # what happens before the training step
    "killed": is_killed,
    "stopped": is_stopped,
    "exception": raises,
    "broken GPU": has_a_broken_gpu,
    "stuck outside": waits,
    "interpreter held": holds_the_interpreter,
    "fewer batches": has_no_more_batches,
    "straggler": is_slow,
    "one pause": pauses,
    "bad sample": has_a_bad_sample,
}
LASTING = ("straggler",)  # at each step from the draw's on


# The diagnosis


def named(report: str) -> tuple[str, list[int]]:
    """Return (the fault, the ranks) that the first lines of a report name; ("?", []) if they name none."""
    for line in report.splitlines():
        for kind, pattern in SENTENCES:
            if match := re.match(pattern, line):
                some = match.groupdict().get("ranks") or ""
                return kind, [rank for part in some.split(",") for rank in _range(part)]
    return "?", []


def _range(part: str) -> range:
    first, _, last = part.strip().partition("-")
    return range(int(first), int(last or first) + 1) if first else range(0)


@contextlib.contextmanager
def recorded(draw: Draw):
    """Run a draw; yield the folder of its flight records once it is quiet, when its ranks are still there, or has ended."""
    with (
        tempfile.TemporaryDirectory(dir=records.ensure_writable_dir(launch.RUNS), prefix=".diagnosis-") as folder,
        ThreadPoolExecutor(1) as thread,
    ):
        here = launch.Cluster(launcher="local")
        running = thread.submit(
            notebook_ranks.on_ranks, train, folder, draw, ranks=WORLD, device="cpu", cluster=here, timeout=LIMIT
        )
        first_seen = {}
        while not running.done():
            there = {path.name for path in Path(folder).glob("flight_*")}
            first_seen = {name: first_seen.get(name, time.monotonic()) for name in there}
            if any(time.monotonic() - since > QUIET + SETTLED for since in first_seen.values()):
                break
            time.sleep(0.1)
        yield folder
        with contextlib.suppress(launch.RunFailed):
            running.result()


def report_of(draw: Draw) -> str:
    """Run a draw, and return the report on it."""
    with recorded(draw) as folder:
        return diagnose_hang.report(folder)


def judged(draw: Draw) -> dict:
    """Run a draw, and return a row of the record: the draw, what was named, and whether it is right."""
    report = report_of(draw)
    kind, some = named(report)
    wanted = NOTHING if draw.kind in CONTROLS else draw.kind
    row = asdict(draw) | {"named": kind, "ranks_named": some, "kind_right": kind == wanted}
    row["rank_right"] = not some if draw.kind in CONTROLS else some == [draw.rank]
    row["rank_among"] = row["rank_right"] or (draw.rank in some and len(some) < WORLD)
    return row | ({} if row["kind_right"] and row["rank_right"] else {"report": report.splitlines()[:8]})


def run(number: int, seed: int, at_once: int, keep=lambda rows: None) -> list[dict]:
    """Run draws, some at once (most of their time they wait), and return the rows. keep: called with the rows so far."""
    rows = []
    with ThreadPoolExecutor(at_once) as threads, contextlib.redirect_stdout(io.StringIO()):
        for row in threads.map(judged, draws(number, seed)):
            rows.append(row)
            keep(rows)
            right = (
                "right" if row["kind_right"] and row["rank_right"] else f"named {row['named']}, {row['ranks_named']}"
            )
            print(
                f"{len(rows)}: {row['kind']}, {row['layout']}, rank {row['rank']}: {right}", file=sys.stderr, flush=True
            )
    return rows


def table(rows: list[dict]) -> pandas.DataFrame:
    """Return, per kind and in all: the draws, and in how many the fault, the rank, and both were named."""
    frame = pandas.DataFrame(rows)
    frame["both"] = frame["kind_right"] & frame["rank_right"]
    columns = {
        "draws": ("kind_right", "size"),
        "fault": ("kind_right", "sum"),
        "rank among those named": ("rank_among", "sum"),
    }
    columns |= {"rank": ("rank_right", "sum"), "fault and rank": ("both", "sum")}
    by_kind = frame.groupby("kind").agg(**columns).reindex([kind for kind in FAULTS if kind in set(frame["kind"])])
    return pandas.concat([by_kind, pandas.DataFrame([by_kind.sum()], index=["all"])]).rename_axis("kind").reset_index()


@dataclass(frozen=True)
class Config(Options):
    """How many draws. The command line is made from these fields."""

    draws: int = option(240, "number of draws", least=1)
    seed: int = option(1, "of the draws")
    at_once: int = option(3, "runs at the same time", least=1)
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def main():
    options = parse(Config, __doc__)
    try:
        path = records.new_path("diagnosis", options.record)
        keep = lambda rows: records.write_rows(path, rows, seed=options.seed)  # noqa: E731
        rows = run(options.draws, options.seed, options.at_once, keep)
    except UserError as error:
        ranks.exit_with_error(str(error))
    print(table(rows).to_markdown(index=False))
    print(f"\nrecord: {path}")


if __name__ == "__main__":
    main()
