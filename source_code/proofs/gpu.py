# SPDX-License-Identifier: BSD-3-Clause
"""The GPU hour: what only a machine with GPUs can show, in parts of at most eight minutes.

  python -m proofs.gpu                    (make gpu) every part, on all GPUs of this machine
  python -m proofs.gpu --part smoke       (make gpu PART=smoke) one of them
  python -m proofs.gpu --dry-run          (make gpu DRY=1) what it would run
  python -m proofs.gpu --device cpu       a rehearsal of the same steps on the CPU, with small shapes

It needs no network, and of packages what the labs need. Records go to results/reference/<gpu>/ (a rehearsal's to
results/runs/gpu-hour/), or to --folder; a table says what holds, what does not, and by how much. Started again, a part
goes on with what is not done, then with what has failed, until nothing is left.
"""

import dataclasses
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labkit import UserError
from labkit.measuring import records
from labkit.running import launch, site
from labkit.running.options import Options, exit_with_error, option, parse
from planner import predict

SECONDS, MIN_STEP_SECONDS = 8 * 60, 60  # that a part may take; that a step needs to begin
REFERENCE = launch.SOURCE / "results" / "reference"
FAILS = "fails"
LLAMA = {"precision": "bf16", "batch_size": 1, "seq_len": 8192, "max_steps": 9}
FORMATS = ("fp32", "bf16", "fp64")
WAYS = {  # of gpt_fsdp.py, each tried for a few steps
    "one process": {"strategy": "single"},
    "DDP": {"strategy": "ddp"},
    "FSDP1": {"strategy": "fsdp1"},
    "FSDP1, offload": {"strategy": "fsdp1", "cpu_offload": True},
    "FSDP2": {},
    "FSDP2, kept": {"reshard_after_forward": "false"},
    "FSDP2, offload and clip": {"cpu_offload": True, "clip": 1.0},
    "FSDP2, prefetch": {"prefetch": 2},
    "FSDP2, two micro-batches": {"accumulate": 2, "sync": "last"},
    "FSDP2, LoRA": {"lora": 4},
    "FSDP2, fused AdamW": {"optimizer": "adamw-fused"},
    "FSDP2, compiled": {"compile": True},
    "FSDP2, recomputed, compiled, bf16": {"compile": True, "recompute": "selective", "precision": "bf16"},
}


@dataclass(frozen=True)
class Config(Options):
    """Which parts to run, and where. The command line is made from these fields."""

    part: Literal["smoke", "operators", "worlds", "planner", "yours", "speed", "notebooks", "tests"] | None = option(
        None, "which part (default: one after the other)"
    )
    dry_run: bool = option(False, "print what would run, and run nothing")
    force: bool = option(False, "start over, even where records exist")
    device: Literal["cuda", "cpu"] = option("cuda", "cpu: a rehearsal with small shapes")
    folder: str | None = option(
        None, "where records go (default: results/reference/<gpu>; of a rehearsal, results/runs/gpu-hour)"
    )

    @property
    def gpus(self) -> int:
        return site.gpus_here()

    @property
    def ranks(self) -> int:
        """World size of runs on all GPUs (at least 1); of a rehearsal, 2."""
        return max(1, self.gpus) if self.device == "cuda" else 2


@dataclass(frozen=True)
class Step:
    """Some runs of labs, and what is to be said of their records: rows made by ``row``."""

    name: str
    runs: tuple  # of (script, options)
    judge: Callable  # (record of each run) → rows

    def lines(self, config) -> list[str]:
        return [f"python {shlex.join(self.words(config, *run))}" for run in self.runs]

    def words(self, config, script, options) -> list[str]:
        return [script, *launch.options.arguments(options | {"device": config.device})]

    def do(self, config, seconds) -> list[dict]:
        each = seconds / len(self.runs)
        return self.judge(*(self.record(config, number, each) for number in range(len(self.runs))))

    def record(self, config, number: int, seconds: float) -> dict:
        """Make one of the runs, within ``seconds``, and return its record."""
        path = records_folder(config) / f"{slug(self.name)}{f'-{number + 1}' if number else ''}.json"
        words = [*self.words(config, *self.runs[number]), "--record", str(path)]
        launch.follow([sys.executable, "-u", *words], None, seconds, config.device)
        return records.load(path)


@dataclass(frozen=True)
class Command:
    """A command that holds if it ends with 0."""

    name: str
    words: tuple

    def lines(self, config) -> list[str]:
        return [shlex.join(self.words)]

    def do(self, config, seconds) -> list[dict]:
        printed = launch.follow([sys.executable, "-u", *self.words[1:]], None, seconds, config.device)
        return [row("ends well", holds=True, note=printed.splitlines()[-1])]


def row(what, measured=None, expected=None, limit=None, holds=None, note="") -> dict:
    """One thing seen. It holds if it is within ``limit``, relative, of what was expected; without either it is a fact."""
    off = None if expected in (None, 0) else measured / expected - 1
    if limit is not None:
        holds = measured == expected if off is None else abs(off) <= limit
    return {"what": what, "measured": measured, "expected": expected, "off": off, "holds": holds, "note": note}


# Judging a record


def ran(record) -> list[dict]:
    bad = sum(not math.isfinite(loss) for loss in record["losses"])
    return [row("losses that are no numbers", bad, 0, limit=0)]


def as_planned(record) -> list[dict]:
    """The tracer's bytes and collectives against the plan."""
    where, terms = predict.peak_of(record)
    plan, memory = predict.plan_of(record), record["memory"]
    seen = [row("tracer's peak, bytes", sum(memory["peak"].values()), predict.total(terms), 1e-4, note=where)]
    for name, size in predict.by_category(plan.persistent()).items():
        seen.append(row(f"as a step begins, {name}, bytes", memory["start"][name], size, 0))
    counted, planned = (
        sum(e["count"] * e["bytes"] for e in entries) for entries in (record["traffic"], plan.traffic())
    )
    return [*seen, row("collectives of a step, bytes", counted, planned, 0)]


def as_planned_for_others(record) -> list[dict]:
    """Compare a record of hf_fsdp.py with its plan: transformers' modules have small tables as buffers besides the parameters."""
    return [seen for seen in as_planned(record) if seen["what"] != "as a step begins, parameters, bytes"]


def allocated(record) -> list[dict]:
    """The allocator against the plan: what no arithmetic knows is said as a factor."""
    seen = record["memory"]["allocator"]
    if not seen:  # a rehearsal
        return as_planned(record)
    plan = predict.total(dataclasses.replace(predict.plan_of(record), workspaces=True).peak()[1])
    return [
        row("allocated at the peak, bytes", seen["allocated"], plan, 0.02),
        row("reserved over allocated", seen["reserved"] / seen["allocated"]),
        row("reserved over the plan", seen["reserved"] / plan),
        row("retries", seen["retries"]),
        *compute(record),
    ]


def compute(record) -> list[dict]:
    step = record["time"]["step"]
    return (
        [row("seconds a step computes", step["median"], note=f"{step['p10']:.4g} to {step['p90']:.4g}")] if step else []
    )


def step_ratio(one, other) -> list[dict]:
    first, second = (record["time"]["step"]["median"] for record in (one, other))
    return [row("step time, the first over the second", first / second)]


def rate_ratio(one, other) -> list[dict]:
    first, second = (record["time"]["samples_per_second"] for record in (one, other))
    return [row("samples/s, the first over the second", first / second)]


def share(*seen) -> list[dict]:
    """How much of what multiplying matrices reaches goes into the model."""
    what = "model FLOPs over the measured matmul ceiling"
    how = {False: "eager", True: "compiled"}
    return [row(what, one["matmul_ceiling_fraction"]["value"], note=how[one["config"]["compile"]]) for one in seen]


# The parts


def smoke(config):
    yield Command("hello", ("python", "hello.py", "--ranks", str(config.ranks), "--device", config.device))
    for strategy in ("single", "ddp", "fsdp1", "fsdp2"):
        options = {"strategy": strategy, "data": "mnist-5k", "max_steps": 12} | all_of_them(config, strategy)
        yield Step(f"mnist {strategy}", (("mnist_fsdp.py", options),), ran)
    for name, options in WAYS.items():
        if config.device == "cuda" or ("compile" not in options and name != "FSDP1, offload"):
            common = {"max_steps": 12} | all_of_them(config, options.get("strategy"))
            yield Step(f"gpt {name}", (("gpt_fsdp.py", common | options),), ran)
    if config.ranks % 2 == 0:
        mesh = {"mesh": f"2x{config.ranks // 2}", "ranks": config.ranks, "max_steps": 12}
        yield Step("gpt HSDP", (("gpt_fsdp.py", mesh),), ran)


def all_of_them(config, strategy) -> dict:
    return {} if strategy == "single" else {"ranks": config.ranks}


def operators(config):
    for precision in FORMATS:
        options = {"strategy": "single", "precision": precision, "data": "mnist-5k", "max_steps": 6}
        yield Step(f"mnist planned {precision}", (("mnist_fsdp.py", options),), as_planned)
    for precision in FORMATS:
        for recompute in ("none", "selective", "full"):
            options = {"strategy": "single", "precision": precision, "recompute": recompute, "max_steps": 6}
            yield Step(f"gpt planned {precision} {recompute}", (("gpt_fsdp.py", options),), as_planned)
    for optimizer in ("adamw-fused", "adamw-for-loop", "momentum"):
        options = {"strategy": "single", "optimizer": optimizer, "max_steps": 6}
        yield Step(f"gpt planned {optimizer}", (("gpt_fsdp.py", options),), as_planned)


def worlds(config):
    tries = {
        "FSDP2 in 8": {"ranks": 8},
        "FSDP2 in 64 bf16": {"ranks": 64, "precision": "bf16", "recompute": "full"},
        "FSDP2 in 8 kept": {"ranks": 8, "reshard_after_forward": "false"},
        "FSDP1 in 8 bf16": {"ranks": 8, "strategy": "fsdp1", "precision": "bf16"},
        "HSDP 2x4": {"ranks": 8, "mesh": "2x4"},
        "LoRA in 8": {"ranks": 8, "lora": 4},
    }
    for name, options in tries.items():
        yield Step(f"world {name}", (("one_rank.py", {"max_steps": 6} | options),), as_planned)


def planner(config):
    tries = {
        "8b on 8 selective": {"preset": "llama3-8b", "ranks": 8, "recompute": "selective"},
        "8b on 8 full": {"preset": "llama3-8b", "ranks": 8, "recompute": "full"},
        "70b on 64 full": {"preset": "llama3-70b", "ranks": 64, "recompute": "full"},
    }
    for name, options in tries.items():
        common = LLAMA if config.device == "cuda" else {"precision": "bf16", "max_steps": 9, "preset": "tiny"}
        yield Step(f"planner {name}", (("one_rank.py", options | common),), allocated)


def yours(config):
    """A model of Hugging Face's: in one process and on all GPUs, as planned where the plan knows its operators."""
    small = {"config": "samples/llama_small.json", "max_steps": 6, "seq_len": 64}
    for strategy in ("single", "fsdp2"):
        options = small | {"strategy": strategy} | all_of_them(config, strategy)
        for recompute in ("none", "full"):
            run = ("hf_fsdp.py", options | {"recompute": recompute})
            yield Step(f"hf planned {strategy} {recompute}", (run,), as_planned_for_others)
        yield Step(f"hf bf16 {strategy}", (("hf_fsdp.py", options | {"precision": "bf16", "clip": 1.0}),), ran)
    options = small | all_of_them(config, "fsdp2") | {"lora": 8}
    yield Step("hf adapters", (("hf_fsdp.py", options),), ran)


def speed(config):
    mnist = {"data": "mnist-5k", "max_steps": 60}
    one = ("mnist_fsdp.py", mnist | {"strategy": "fsdp2", "ranks": 1})
    yield Step("fsdp2 over the plain loop", (one, ("mnist_fsdp.py", mnist | {"strategy": "single"})), step_ratio)
    loaders = [("mnist_fsdp.py", mnist | {"strategy": "single", "loader": name}) for name in ("memory", "torchvision")]
    yield Step("loader memory over torchvision", tuple(loaders), rate_ratio)
    large = {"preset": "1b", "precision": "bf16", "batch_size": 4, "seq_len": 2048}
    model = {"strategy": "single", "max_steps": 20, "recompute": "selective"} | (
        large if config.device == "cuda" else {}
    )
    compiled = [("gpt_fsdp.py", model | {"compile": compile}) for compile in (False, config.device == "cuda")]
    yield Step("1b eager and compiled", tuple(compiled), share)


def notebooks(config):
    for path in sorted((launch.SOURCE.parent / "notebooks").glob("[0-9]*.ipynb")):
        words = ("python", "-m", "pytest", "--nbval-lax", "-q", "-p", "no:cacheprovider", f"../notebooks/{path.name}")
        yield Command(f"notebook {path.name[:2]}", words)


def tests(config):
    words = ("python", "-m", "pytest", "-q", "-m", "not long and not slurm and not browser", "../tests")
    yield Command("short tests, beside GPUs", words)


PARTS = {part.__name__: part for part in (smoke, operators, worlds, planner, yours, speed, notebooks, tests)}


# Running them


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def records_folder(config) -> Path:
    """Return the folder of this machine's records: a GPU's are references, a rehearsal's are not."""
    import torch

    if config.folder:
        return Path(config.folder).resolve()
    return (REFERENCE if config.device == "cuda" else launch.RUNS / "gpu-hour") / slug(
        records.hardware(torch.device(config.device))
    )


def run_part(name: str, config) -> list[dict]:
    """Run what is not done yet of a part, while its time lasts. Returns the rows of all that is done."""
    path, deadline = records_folder(config) / "rows" / f"{name}.json", time.monotonic() + SECONDS
    rows = earlier(path) if path.exists() and not config.force else []
    done, failed = ({each["step"] for each in rows if (each["what"] == FAILS) is bad} for bad in (False, True))
    steps = [step for step in PARTS[name](config) if step.name not in done]
    steps.sort(key=lambda step: step.name in failed)
    for number, step in enumerate(steps):
        left = deadline - time.monotonic()
        if left < MIN_STEP_SECONDS:
            note = f"{len(steps) - number} steps of {name} are left: start it again"
            return [*rows, about(name, step, row("not run, as the part's time is up", holds=False, note=note))]
        print(f"{name}: {step.name}", flush=True)
        try:
            seen = step.do(config, left)
        except UserError as error:  # a failed run is one, too: the others are worth having all the same
            seen = [row(FAILS, holds=False, note=str(error)[-2000:])]
        rows = [each for each in rows if each["step"] != step.name] + [about(name, step, each) for each in seen]
        records.write(path, rows)
    return rows


def earlier(path: Path) -> list[dict]:
    """The rows of what is done already. UserError: they are none."""
    try:
        rows = json.loads(path.read_text())
        if isinstance(rows, list) and all(
            {"step", "what", "holds", "measured", "expected", "off", "note"} <= row.keys() for row in rows
        ):
            return rows
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        pass
    raise UserError(f"{path} is not what proofs/gpu.py writes: remove it, or give --force")


def about(part: str, step, seen: dict) -> dict:
    return {"part": part, "step": step.name} | seen


def table(rows: list[dict]) -> str:
    """Print which rows hold, which do not, and by how much."""
    lines = [f"{'step':32} {'what':44} {'measured':>16} {'expected':>16} {'off':>10}  holds"]
    for each in rows:
        sizes = [shown(each[name]) for name in ("measured", "expected")]
        off = "" if each["off"] is None else f"{each['off']:+.4%}"
        holds = {True: "yes", False: "NO"}.get(each["holds"], "")
        note = (each["note"].strip().splitlines() or [""])[-1]
        lines.append(
            f"{each['step']:32} {each['what']:44} {sizes[0]:>16} {sizes[1]:>16} {off:>10}  {holds:5} {note}".rstrip()
        )
    failed = sum(each["holds"] is False for each in rows)
    held = sum(each["holds"] is True for each in rows)
    return "\n".join([*lines, "", f"{held} hold, {failed} do not, {len(rows) - held - failed} are facts"])


def shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if value % 1 else f"{value:,.0f}"


def main(config) -> int:
    names = [config.part] if config.part else list(PARTS)
    if config.dry_run:
        for name in names:
            print(f"{name}:")
            for step in PARTS[name](config):
                print(f"  {step.name}", *(f"      {line}" for line in step.lines(config)), sep="\n")
        return 0
    if config.device == "cuda" and not config.gpus:
        raise UserError("PyTorch sees no GPU here: --dry-run (make gpu DRY=1) prints what it would run on one")
    records.check_writable(records_folder(config) / "rows.json", "--folder")
    os.environ.setdefault("FSDP_LABS_DEVICE", "auto" if config.device == "cuda" else "cpu")
    rows = [each for name in names for each in run_part(name, config)]
    print(table(rows))
    return 1 if any(each["holds"] is False for each in rows) else 0


if __name__ == "__main__":
    asked = parse(Config, __doc__)
    try:
        sys.exit(main(asked))
    except UserError as error:
        exit_with_error(str(error))
