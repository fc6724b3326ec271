# SPDX-License-Identifier: BSD-3-Clause
"""Tasks 5 to 8: find the fault in a run's evidence: the flight records of two runs, the losses of a third, a memory profile.

A fault is drawn and injected into a real run, which leaves the evidence. The judge injects the answered fault into the same
training if that needs no ranks: a fault that leaves the same losses, or has the same planned memory profile, is right.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import ClassVar

from labkit import UserError
from labkit.exam import losses, plans
from labkit.exam.verdicts import Verdict, number_of, quoted, text_of
from labkit.measuring import records

# Why a run hangs, ends early, or is slow: the kinds of proofs/diagnosis.py that still show in the records of a run after it
# has ended. {kind: what it is}
HANGS = {
    "exception": "a rank raises an exception of the training's code",
    "broken GPU": "a rank's GPU fails",
    "stuck outside": "a rank waits for something other than a collective, and it never comes",
    "fewer batches": "a rank has fewer batches than the others, and finishes early",
    "lone collective": "a rank calls a collective that the others do not call",
    "other shape": "a rank calls the same collective as the others, with a tensor of another shape",
    "straggler": "a rank is slower than the others in each step; nothing hangs",
    "bad sample": "a rank's batch has a value that is not finite",
    "flipped bit": "a bit of a rank's weights flips",
    "killed": "a rank's process is killed",
    "healthy": "nothing is wrong (rank stays null)",
}
LAYOUTS = {"ddp": "DDP", "fsdp2": "FSDP2", "mesh": "HSDP, 2x2 (replicas × shards)"}  # of proofs/diagnosis.py
CONTROL = "healthy"
ALIKE = 1e-4  # relative difference of losses that are taken for the same

# How a run differs from what was intended. {fault: (the options that it has instead, what it is)}
PROFILES = {
    "not sharded": ({"strategy": "ddp"}, "the model is replicated by DDP instead of sharded"),
    "parameters kept": ({"reshard_after_forward": "false"}, "gathered parameters are not freed after forward"),
    "no recomputation": ({"recompute": "none"}, "nothing is recomputed"),
    "fp32": ({"precision": "fp32"}, "it computes in fp32"),
    "gradients wait": ({"sync": "last"}, "gradients are reduced only after the last micro-batch"),
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
            f"A run on 4 ranks ({LAYOUTS[self.layout]}) hung, ended early, was slow, or was healthy. Its flight records are in "
            f"`task-{self.number:02}/`: read them with `python diagnose_hang.py --folder FOLDER`. Name the fault, and the rank "
            "that has it (from 0).",
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
        if CONTROL in (self.kind, kind):
            return _located(kind, self.kind, [])
        rank, mistake, sentence = _whole(answer.get("rank"))
        if rank is None:
            return Verdict(False, (mistake,), f"rank: {sentence}", "fault")
        return _located(kind, self.kind, [("rank", rank, self.rank)])


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
            asked = " and ".join(name for name, has in (("rank", has_rank), ("step", has_step)) if has)
            lines.append(f"- `{kind}`: {what} ({f'give its {asked}' if asked else 'rank and step stay null'})")
        return [
            f"`task-{self.number:02}.csv` has the losses of a data-parallel training on 4 ranks (as under DDP, all ranks apply "
            "the mean of their gradients). A row has a step's losses: `training 2` is rank 2's, on its own batch, and "
            "`validation 2` is that of rank 2's replica on a validation batch, the same for all ranks and steps. Name the fault, "
            "and, where the list says so, the rank that has it and the first step whose row shows it (both from 0).",
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
            given[name], mistake, sentence = _whole(answer.get(name), below) if asked else (None, "", "")
            if mistake:
                return Verdict(False, (mistake,), f"{name}: {sentence}", "run")
        if kind == "older checkpoint" and given["step"] < losses.AWAY:
            return _located(kind, self.fault.kind, [("step", given["step"], self.fault.step)], "run")
        if _alike(losses.train(self.data, losses.Fault(kind, **given)), self.rows()):
            return Verdict(True, (), f"{kind}, injected as answered, leaves these losses", "run")
        where = [(name, given[name], getattr(self.fault, name)) for name in given]
        return _located(kind, self.fault.kind, where, "run")


@dataclass(frozen=True)
class Memory:
    """A task: the memory profile of a run that may differ from what was intended. one: the intended configuration."""

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
            f"`task-{self.number:02}.csv` has the memory of rank 0, measured in a run: for each phase of a step, the bytes of "
            "each category when their sum is highest. What does the run do instead? All else is as it was meant.",
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
        phase, category, *sizes = _largest_difference(*map(plans.profile, (theirs, true)))
        would, does = (f"{size / 2**20:,.2f} MiB" for size in sizes)
        sentence = f"row {phase}, planned: {category} {would} with {fault!r}, but {does} for this run"
        mistake = "false alarm" if self.fault == CONTROL else "fault overlooked" if fault == CONTROL else "wrong fault"
        return Verdict(False, (mistake,), sentence, "plan")


def _largest_difference(one: list[dict], other: list[dict]) -> tuple[str, str, int, int]:
    """Return where two profiles differ most in the rows of the evidence: (phase, category, bytes of one, of the other)."""
    sizes = [
        {(phase, name): size for phase, of in _rows(profile).items() for name, size in of.items()}
        for profile in (one, other)
    ]
    cells = [(*cell, *(of.get(cell, 0) for of in sizes)) for cell in sizes[0] | sizes[1]]
    return max(cells, key=lambda cell: abs(cell[2] - cell[3]))


def _rows(profile: list[dict]) -> dict[str, dict]:
    """Return a planned profile in the evidence's rows, {phase: {category: bytes}}: a meter counts the loss to forward."""
    found = {}
    for row in profile:
        phase = row["phase"].split()[0].replace("loss", "forward")
        sizes = {name: size for name, size in row.items() if name != "phase"}
        if phase not in found or sum(sizes.values()) > sum(found[phase].values()):
            found[phase] = sizes
    return found


def _whole(given, below: int = losses.RANKS) -> tuple[int | None, str, str]:
    """Read a rank or a step: (the number or None, the mistake, the sentence)."""
    value, mistake, sentence = number_of(given, included=True)
    if mistake == "no answer":
        return None, mistake, sentence
    if value is None or value != int(value) or value >= below:
        return None, "not a choice", f"it must be a whole number from 0 to {below - 1}, but is {quoted(given)}"
    return int(value), "", ""


def _located(kind: str, true: str, where: list[tuple], judged_by: str = "fault") -> Verdict:
    """Judge a kind, and where it is: [(name, given, true or None if there is none), …]."""
    apart = [name for name, given, at in where if at is not None and given != at]
    if kind == true and not apart:
        return Verdict(True, (), f"it was {kind!r}", judged_by)
    if kind == true:
        what = " and ".join(apart)
        return Verdict(False, (f"right fault, wrong {what}",), f"it was {kind!r}, but the {what} differs", judged_by)
    if true == CONTROL:
        return Verdict(False, ("false alarm",), f"nothing was wrong, but the answer is {kind!r}", judged_by)
    if kind == CONTROL:
        return Verdict(False, ("fault overlooked",), "something was wrong: look again", judged_by)
    compared = [name for name, given, at in where if None not in (given, at)]
    if compared and not apart:
        what = " and ".join(compared)
        return Verdict(False, (f"right {what}, wrong fault",), f"right: {what}; but it was not {kind!r}", judged_by)
    return Verdict(False, ("wrong fault",), f"it was not {kind!r}", judged_by)


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
