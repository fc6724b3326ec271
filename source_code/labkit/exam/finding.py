# SPDX-License-Identifier: BSD-3-Clause
"""Tasks 5 to 8: find the fault in a run's evidence: the flight records of two hangs, the losses of a run, a memory profile.

What was drawn is put into a real run, and the evidence is what that run leaves. The judge puts the answered fault into the
same training, where that takes no ranks, and compares what it leaves: a fault with the same losses, or with the same memory
profile, is right.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import ClassVar

from labkit import UserError
from labkit.exam import losses, plans
from labkit.exam.verdicts import Verdict, number_of, text_of
from labkit.measuring import records

# What may be behind a hang, or a job that ends early: of the kinds of proofs/diagnosis.py, those that the records of a run
# that is over still show. {kind: what it is}
HANGS = {
    "exception": "a rank raises an exception of the training's code",
    "broken GPU": "a rank's GPU fails",
    "stuck outside": "a rank waits outside of any collective, for something that does not come",
    "fewer batches": "a rank has fewer batches than the others, and finishes early",
    "lone collective": "a rank calls a collective that the others do not call",
    "other shape": "a rank calls a collective with a tensor of another shape",
    "straggler": "a rank is slower than the others in each step; nothing hangs",
    "bad sample": "a rank's batch has a value that is not finite",
    "flipped bit": "a bit of a rank's weights flips",
    "killed": "a rank's process is killed",
    "healthy": "nothing is wrong, and no rank is to blame (leave rank out)",
}
CONTROL = "healthy"
ALIKE = 1e-4  # relative: what the same training leaves twice

# What a run does not do as intended. {fault: (the options that it has instead, what it is)}
PROFILES = {
    "not sharded": ({"strategy": "ddp"}, "the model is replicated by DDP instead of sharded"),
    "parameters kept": ({"reshard_after_forward": "false"}, "gathered parameters are not freed after forward"),
    "no recomputation": ({"recompute": "none"}, "nothing is recomputed"),
    "fp32": ({"precision": "fp32"}, "it computes in fp32"),
    "gradients wait": ({"sync": "last"}, "gradients are reduced after the last micro-batch only"),
    "twice the batch": ({}, "each micro-batch has twice as many sequences"),
    "no optimizer state": ({"optimizer": "sgd"}, "the optimizer keeps no state"),
    "healthy": ({}, "the run does what it should"),
}


@dataclass(frozen=True)
class Hang:
    """A task: flight records, of a run on 4 ranks with a fault.

    Attributes:
        number: of the task.
        kind, layout, rank, step: of the fault, as proofs/diagnosis.py draws them.
    """

    number: int
    kind: str
    layout: str
    rank: int
    step: int

    fields: ClassVar[dict] = {"fault": None, "rank": None}

    def statement(self) -> list[str]:
        """Return the lines of the task."""
        return [
            f"A run on 4 ranks ({self.layout}) hangs, ends early, or seems slow. Its flight records are in "
            f"`task-{self.number:02}/`: read them with `python diagnose_hang.py --folder FOLDER`. Name the fault and its rank.",
            "",
            *(f"- `{kind}`: {what}" for kind, what in HANGS.items()),
        ]

    def to_run(self, answer: dict) -> None:
        """Return nothing: the run was before."""

    def judge(self, answer: dict, measured=None) -> Verdict:
        """Judge an answer by the fault that was put into the run."""
        kind, mistake, sentence = text_of(answer.get("fault"), HANGS)
        if kind is None:
            return Verdict(False, (mistake,), f"fault: {sentence}", "fault")
        rank, wrong = _whole(answer.get("rank")) if self.kind != CONTROL and kind != CONTROL else (None, "")
        if wrong:
            return Verdict(False, (wrong,), f"rank: {wrong}", "fault")
        return _located(kind, self.kind, [("rank", rank, self.rank if self.kind != CONTROL else None)])


@dataclass(frozen=True)
class Loss:
    """A task: the losses of a training on 4 ranks, with a fault. data: the seed of the training's data."""

    number: int
    data: int
    fault: losses.Fault

    fields: ClassVar[dict] = {"fault": None, "rank": None, "step": None}

    def statement(self) -> list[str]:
        """Return the lines of the task."""
        lines = []
        for kind, (has_rank, has_step, what) in losses.FAULTS.items():
            asked = [name for name, has in (("rank", has_rank), ("step", has_step)) if has]
            lines.append(f"- `{kind}`: {what} ({' and '.join(asked) or 'neither rank nor step'} asked)")
        return [
            f"`task-{self.number:02}.csv` has the losses of a data-parallel training on 4 ranks: in each step every rank's "
            "training loss, and the loss of every rank's replica on one validation batch, the same on all ranks. Name the "
            "fault, and, where they are asked, its rank and the step in which it first shows. Both count from 0.",
            "",
            *lines,
        ]

    def rows(self) -> list[dict]:
        """Return the evidence."""
        return losses.train(self.data, self.fault)

    def to_run(self, answer: dict) -> None:
        """Return nothing: the judge trains in its own process."""

    def judge(self, answer: dict, measured=None) -> Verdict:
        """Judge an answer: train with the answered fault, and compare the losses."""
        kind, mistake, sentence = text_of(answer.get("fault"), losses.FAULTS)
        if kind is None:
            return Verdict(False, (mistake,), f"fault: {sentence}", "run")
        has = losses.FAULTS[kind]
        given = {}
        for name, asked, below in (("rank", has[0], losses.RANKS), ("step", has[1], losses.STEPS)):
            given[name], wrong = _whole(answer.get(name), below) if asked else (None, "")
            if wrong:
                return Verdict(False, (wrong,), f"{name}: {wrong}", "run")
        if kind == "older checkpoint" and given["step"] < losses.AWAY:
            return _located(kind, self.fault.kind, [("step", given["step"], self.fault.step)], "run")
        if _alike(losses.train(self.data, losses.Fault(kind, **given)), self.rows()):
            return Verdict(True, (), f"{kind}, injected as answered, leaves these losses", "run")
        where = [(name, given[name], getattr(self.fault, name)) for name in given]
        return _located(kind, self.fault.kind, where, "run")


@dataclass(frozen=True)
class Memory:
    """A task: the memory profile of a run that does not do as intended. one: the intended configuration."""

    number: int
    one: dict
    fault: str

    fields: ClassVar[dict] = {"fault": None}

    def statement(self) -> list[str]:
        """Return the lines of the task."""
        return [
            "A run was meant to be this:",
            "",
            *(f"- {line}" for line in plans.in_words(self.one)),
            "",
            f"`task-{self.number:02}.csv` has the memory of rank 0 in each phase of a step, at its highest, measured: bytes by "
            "category. What does the run do instead?",
            "",
            *(f"- `{fault}`: {what}" for fault, (_, what) in PROFILES.items()),
        ]

    def to_run(self, answer: dict) -> None:
        """Return nothing: the run was before."""

    def run_with(self, fault: str) -> dict:
        """Return the configuration of the run with a fault."""
        config = self.one["config"]
        changes = {"batch_size": 2 * config["batch_size"]} if fault == "twice the batch" else PROFILES[fault][0]
        return self.one | {"config": config | changes}

    def judge(self, answer: dict, measured=None) -> Verdict:
        """Judge an answer: plan the run with the answered fault, and compare the profiles."""
        fault, mistake, sentence = text_of(answer.get("fault"), PROFILES)
        if fault is None:
            return Verdict(False, (mistake,), f"fault: {sentence}", "plan")
        theirs, true = (plans.plan_of(self.run_with(each)) for each in (fault, self.fault))
        if plans.profile(theirs) == plans.profile(true):
            return Verdict(True, (), f"a run with {fault!r} has this profile", "plan")
        sizes = [f"{plans.peak_bytes(each) / 1e6:,.2f} MB" for each in (theirs, true)]
        return Verdict(
            False, ("wrong fault",), f"with {fault!r} its peak would be {sizes[0]}, and it is {sizes[1]}", "plan"
        )


def _whole(given, below: int = losses.RANKS) -> tuple[int | None, str]:
    """Read a rank or a step: (the number or None, the mistake)."""
    value, mistake, _ = number_of(given, included=True)
    if value is None or value != int(value) or value >= below:
        return None, mistake or "not a number"
    return int(value), ""


def _located(kind: str, true: str, where: list[tuple], judged_by: str = "fault") -> Verdict:
    """Judge a kind, and where it is: [(name, given, true or None if there is none), …]."""
    apart = [name for name, given, at in where if at is not None and given != at]
    if kind == true and not apart:
        return Verdict(True, (), f"it was {kind}", judged_by)
    if kind == true:
        what = " and ".join(apart)
        return Verdict(False, (f"right fault, wrong {what}",), f"it was {kind}, but with another {what}", judged_by)
    if true == "healthy":
        return Verdict(False, ("false alarm",), f"nothing was wrong, and {kind} was answered", judged_by)
    if kind == "healthy":
        return Verdict(False, ("fault overlooked",), f"something was wrong: {true}", judged_by)
    compared = [name for name, given, at in where if None not in (given, at)]
    if compared and not apart:
        what = " and ".join(compared)
        return Verdict(False, (f"right {what}, wrong fault",), f"the {what} is right, and it was not {kind}", judged_by)
    return Verdict(False, ("wrong fault",), f"it was not {kind}", judged_by)


def _alike(some: list[dict], others: list[dict]) -> bool:
    """Return whether two trainings have the same losses, not finite ones included."""
    pairs = [
        (a, b)
        for one, other in zip(some, others, strict=True)
        for name in ("training", "validation")
        for a, b in zip(one[name], other[name], strict=True)
    ]
    return all(math.isclose(a, b, rel_tol=ALIKE) or (not math.isfinite(a) and not math.isfinite(b)) for a, b in pairs)


# The draw


@cache
def drill_rows() -> list[dict]:
    """Return the draws of the diagnosis drill whose fault and rank the course's tool named: its committed record.

    Raises:
        UserError: there is no record.
    """
    paths = sorted((records.RESULTS / "reference").glob("diagnosis-*.json"))
    if not paths:
        raise UserError("there is no record of proofs/diagnosis.py in results/reference/: the exam draws from it")
    rows = json.loads(paths[-1].read_text())["rows"]
    return [row for row in rows if row["kind_right"] and row["rank_right"] and row["kind"] in HANGS]


def hang(number: int, random: Random, turn: int) -> Hang:
    """Draw a hang; ``turn`` selects its kind."""
    kinds = [*HANGS]
    kind = kinds[(turn + (number - 5) * len(kinds) // 2) % len(kinds)]
    row = random.choice([row for row in drill_rows() if row["kind"] == kind])
    return Hang(number, kind, row["layout"], row["rank"], row["step"])


def loss(number: int, random: Random, turn: int) -> Loss:
    """Draw a training with a fault; ``turn`` selects its kind."""
    kind = [*losses.FAULTS][turn % len(losses.FAULTS)]
    has_rank, has_step, _ = losses.FAULTS[kind]
    rank = random.randrange(losses.RANKS) if has_rank else None
    step = random.randrange(losses.AWAY + 1, losses.STEPS - 4) if has_step else None
    return Loss(number, random.randrange(10**6), losses.Fault(kind, rank, step))


def memory(number: int, random: Random, turn: int) -> Memory:
    """Draw a run with a fault; ``turn`` selects it."""
    config = {"preset": "tiny", "strategy": "fsdp2", "wrap": "blocks", "reshard_after_forward": "true"}
    config |= {"batch_size": random.choice((3, 4, 5, 6)), "seq_len": random.choice((48, 64, 80, 96))}
    config |= {"precision": "bf16", "recompute": "full", "accumulate": random.choice((2, 3)), "sync": "every"}
    one = {"script": "gpt_fsdp.py", "ranks": 4, "config": config}
    return Memory(number, one, [*PROFILES][turn % len(PROFILES)])


def draw(number: int, random: Random, turn: int):
    """Draw task ``number``, 5 to 8. turn: the seed, which sets what must differ between consecutive seeds."""
    return {5: hang, 6: hang, 7: loss, 8: memory}[number](number, random, turn)
