# SPDX-License-Identifier: BSD-3-Clause
"""Steps of the GPU hour: runs of labs, commands, and checks; and the rows by which each is judged (gpu_parts.py lists them)."""

import dataclasses
import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.measuring import records
from labkit.running import launch
from planner import predict
from planner.gpus import GPUS, known
from planner.models.flops import hardware_flops
from planner.timing import cost

REFERENCE = launch.SOURCE / "results" / "reference"


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


@dataclass(frozen=True)
class Step:
    """Some runs of labs, and what is to be said of their records.

    Attributes:
        name: unique in the GPU hour; of the records, too.
        runs: of (script, options); what an option's ``Path`` names is written beside the record.
        judge: (record of each run) → rows, made by ``row``.
        changes: which sentence or limit its numbers would change: "FILE: words that stand there".
        settings: environment variables.
    """

    name: str
    runs: tuple
    judge: Callable
    changes: str
    settings: dict = field(default_factory=dict)

    def lines(self, config) -> list[str]:
        before = "".join(f"{name}={value} " for name, value in self.settings.items())
        return [f"{before}python {shlex.join(self.words(config, *run))}" for run in self.runs]

    def words(self, config, script, options) -> list[str]:
        return [script, *launch.options.arguments(options | {"device": config.device})]

    def do(self, config, seconds) -> list[dict]:
        each = seconds / len(self.runs)
        return self.judge(*(self.record(config, number, each) for number in range(len(self.runs))))

    def record(self, config, number: int, seconds: float) -> dict:
        """Make one of the runs, within ``seconds``, and return its record."""
        path = records_folder(config) / f"{slug(self.name)}{f'-{number + 1}' if number else ''}.json"
        script, options = self.runs[number]
        beside = {name: str(path.with_name(value.name)) for name, value in options.items() if isinstance(value, Path)}
        words = [*self.words(config, script, options | beside), "--record", str(path)]
        follow(self.settings, words, seconds, config.device)
        return records.load(path)


@dataclass(frozen=True)
class Command:
    """A command that holds if it ends with 0. It starts with "python"."""

    name: str
    words: tuple
    changes: str

    def lines(self, config) -> list[str]:
        return [shlex.join(self.words)]

    def do(self, config, seconds) -> list[dict]:
        printed = follow({}, self.words[1:], seconds, config.device)
        return [row("ends well", holds=True, note=printed.splitlines()[-1])]


@dataclass(frozen=True)
class Check(Command):
    """A command whose last line is JSON: a list of the arguments of ``row``."""

    def do(self, config, seconds) -> list[dict]:
        printed = follow({}, self.words[1:], seconds, config.device)
        return [row(**seen) for seen in json.loads(printed.splitlines()[-1])]


def follow(settings: dict, words, seconds: float, device: str) -> str:
    """Run a Python program of source_code/ with environment variables. Returns what it printed."""
    before = ["env", *(f"{name}={value}" for name, value in settings.items())] if settings else []
    return launch.follow([*before, sys.executable, "-u", *words], None, seconds, device)


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


def efficiency(record) -> list[dict]:
    """How much of the published peak goes into all operations, recomputed ones included: what the planner assumes a GPU attains."""
    step = record["time"]["step"]
    gpu = known(record["hardware"])
    if not step or not gpu:  # a rehearsal, or a GPU that planner/gpus.py does not know
        return compute(record)
    peak = GPUS[gpu].flops[record["config"]["precision"]]
    done = hardware_flops(predict.plan_of(record)) / step["median"]
    return [row("operations over the published peak", done / peak, cost.EFFICIENCY), *compute(record)]
