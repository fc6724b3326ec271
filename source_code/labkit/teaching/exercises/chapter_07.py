# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 07, checkpoints."""

import os
import signal
import tempfile
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from labkit.running import launch
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

SAVING, BETWEEN_FAILURES = 30, 6 * 3600  # seconds


def judge_read_rows(read_rows) -> str:
    whole = 10 * torch.arange(10).view(10, 1) + torch.arange(2)
    for writers, readers in ((4, 4), (4, 3), (3, 4), (5, 1), (2, 5)):
        pieces = {int(part[0]): whole[part] for part in torch.arange(10).chunk(writers)}
        pieces = dict(reversed(pieces.items()))  # the order of files is arbitrary
        for part in torch.arange(10).chunk(readers):
            begin, end = int(part[0]), int(part[-1]) + 1
            result = read_rows(dict(pieces), begin, end)
            if unanswered(result):
                return "not answered yet"
            if message := _difference(result, whole, begin, end):
                return f"not quite: {writers} pieces, rows {begin} to {end}: {message}"
    return "right"


def _difference(result, whole, begin, end) -> str | None:
    """Describe what is wrong with the rows returned, or return None."""
    right = whole[begin:end]
    if not isinstance(result, torch.Tensor):
        return f"the result must be a tensor, not a {type(result).__name__}; torch.cat joins several"
    if result.dim() != 2 or result.shape[1:] != whole.shape[1:]:
        return f"each row has 2 elements, but your tensor has the shape {tuple(result.shape)}"
    if torch.equal(result, right):
        return None
    rows = [int(row[0]) // 10 for row in result]
    if sorted(rows) == list(range(begin, end)):
        return f"these are the right rows in the order {rows}; the pieces come in arbitrary order, so sort by first row"
    if set(rows) > set(range(begin, end)):
        return (
            f"you return rows {sorted(rows)}, too many: take only the part of each piece within rows {begin} to {end}; "
            "indices inside a piece start at its first row"
        )
    if set(rows) < set(range(begin, end)):
        missing = sorted(set(range(begin, end)) - set(rows))
        return f"rows {missing} are missing; rows can be in several pieces, and indices inside a piece start at its first row"
    return f"you return rows {rows}; indices inside a piece start at its first row, not at row 0 of the whole tensor"


WARNED = {"no rank": [], "rank 0": [0], "rank 1": [1], "both ranks": [0, 1]}


def _votes(me, anyone):
    """Return the learner's result on this rank for each case of ``WARNED``."""
    return [anyone(me.rank in warned, me.device) for warned in WARNED.values()]


def judge_anyone(anyone) -> str:
    results = on_ranks(_votes, anyone, ranks=2)
    for (who, warned), votes in zip(WARNED.items(), zip(*results, strict=True), strict=True):
        if any(unanswered(vote) for vote in votes):
            return "not answered yet"
        first, second = map(bool, votes)
        if first != second:
            return f"not quite: with {who} warned, rank 0 returns {first} and rank 1 {second}: they diverge, and hang later"
        if first != bool(warned):
            missed = "one is enough: take the maximum" if warned else "no rank was warned"
            return f"not quite: with {who} warned, the ranks return {first}; {missed}"
    return "right"


# Saved by two ranks, of which one is killed during the second save, and resumed on three

FIRST, SECOND, LAST = 2, 4, 7  # steps: of the saves, and the last one that is compared


class Batches:
    """Load a batch per step; the state is the number of batches loaded, as a StatefulDataLoader's."""

    def __init__(self):
        self.loaded = 0

    def next(self) -> torch.Tensor:
        self.loaded += 1
        return torch.randn(6, 8, generator=torch.Generator().manual_seed(self.loaded), dtype=torch.float64)

    def state_dict(self) -> dict:
        return {"loaded": self.loaded}

    def load_state_dict(self, state: dict):
        self.loaded = state["loaded"]


def _training(mesh, seed: int) -> tuple:
    """Return (model, optimizer, scheduler, batches) of a training that has not begun."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 2)).double()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(fully_shard(model, mesh=mesh).parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * LAST), Batches()


def _train(parts, mesh, steps: int) -> list[dict]:
    """Train some steps, and return each one's batch, learning rate, and loss of the global batch."""
    model, optimizer, scheduler, batches = parts
    made = []
    for _ in range(steps):
        loss = model(batches.next().chunk(mesh.size())[mesh.get_local_rank()]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh.get_group())
        rate = optimizer.param_groups[0]["lr"]
        made.append({"batch": batches.loaded, "rate": rate, "loss": mean.item() / mesh.size()})
        scheduler.step()
    return made


def _killing_writer(me):
    """Return a replacement for DCP's ``write_data``: rank 0 writes its file, then rank 1 is killed. Collective."""
    control, write = dist.new_group(backend="gloo"), dcp.FileSystemWriter.write_data

    def write_data(*arguments):
        written = write(*arguments) if me.rank == 0 else None
        dist.barrier(control)
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    return write_data


def _save_and_be_killed(me, recipe, folder):
    """Save twice on two ranks; rank 1 is killed before it writes its file of the second save. Return what load returned."""
    mesh = DeviceMesh("cpu", [0, 1])
    parts = _training(mesh, seed=1)
    first = recipe.load(folder, *parts)
    if unanswered(first) or first != 0:
        return first
    _train(parts, mesh, FIRST)
    recipe.save(folder, FIRST, *parts)
    _train(parts, mesh, SECOND - FIRST)
    dcp.FileSystemWriter.write_data = _killing_writer(me)
    recipe.save(folder, SECOND, *parts)
    return 0


def _resume_on_three(me, recipe, folder) -> dict:
    """Train without interruption; resume from what the killed run left; save once more, and resume from that."""
    mesh = DeviceMesh("cpu", [0, 1, 2])
    whole = _train(_training(mesh, seed=1), mesh, LAST)
    parts = _training(mesh, seed=2)
    step = recipe.load(folder, *parts)
    if step != FIRST:
        return {"step": step}
    made = _train(parts, mesh, SECOND - FIRST)
    recipe.save(folder, SECOND, *parts)
    made += _train(parts, mesh, LAST - SECOND)
    again = recipe.load(folder, *_training(mesh, seed=3))
    return {"step": step, "whole": whole[FIRST:], "made": made, "again": again}


def judge_recipe(recipe) -> str:
    if isinstance(recipe, types.FunctionType):
        return "not answered yet"
    if missing := [name for name in ("save", "load") if not callable(getattr(recipe, name, None))]:
        return f"the answer must be a class with the functions save and load; {missing[0]} is missing"
    with tempfile.TemporaryDirectory() as folder:
        try:
            first = on_ranks(_save_and_be_killed, recipe, Path(folder), ranks=2)[0]
        except launch.RunFailed as error:
            if "rank 1 was killed by SIGKILL" not in str(error):
                raise
        else:
            if unanswered(first):
                return "not answered yet"
            if first != 0:
                return f"not quite: without a checkpoint load returns {first!r} instead of 0 steps"
            return "not quite: save did not write a file by dcp.save on rank 1, where the judge kills it"
        result = on_ranks(_resume_on_three, recipe, Path(folder), ranks=3)[0]
    if result["step"] == SECOND:
        return f"not quite: load returns step {SECOND}, whose save was killed before it was complete"
    if result["step"] != FIRST:
        return f"not quite: load returns {result['step']!r}; step {FIRST} was saved completely"
    for number, (right, made) in enumerate(zip(result["whole"], result["made"], strict=True)):
        if message := _forgotten(number, right, made):
            return f"not quite: in step {FIRST + 1 + number} {message}"
    if result["again"] != SECOND:
        return f"not quite: after step {SECOND} was saved completely, load returns {result['again']!r}"
    return "right"


def _forgotten(number: int, right: dict, made: dict) -> str | None:
    """Describe what a resumed step shows to be missing, or return None."""
    if made["batch"] != right["batch"]:
        return f"batch {made['batch']} is read, and should be {right['batch']}: the loader's state is not restored"
    if abs(made["rate"] - right["rate"]) > 1e-12:
        return f"the learning rate is {made['rate']:.4f}, and {right['rate']:.4f} without interruption: the " + (
            "optimizer's param_groups are not restored" if number == 0 else "scheduler's state is not restored"
        )
    if abs(made["loss"] - right["loss"]) > 1e-10 * right["loss"]:
        values = f"the loss is {made['loss']:.4f}, and {right['loss']:.4f} without interruption"
        if number == 0:
            return f"{values}: these are not the parameters of step {FIRST}. Did the killed save overwrite them?"
        return f"{values}: the parameters were right, so the optimizer state is wrong"
    return None


RECIPE = (launch.SOURCE / "minimal" / "checkpoint.py").read_text()

# When a warning may come at the worst moment, and how long the run then needs [s]
STEP, EVALUATION, WRITING, SAVE = 2, 90, 50, 60

EXERCISES = {
    "07.0": Do(
        title="a recipe that survives a kill",
        level=3,
        minutes=15,
        judge=judge_recipe,
        hint="Save to a folder with another name, such as step-00000004.partial; when dcp.save has returned, rank 0 renames it.\n"
        "load takes the newest name that is complete, starts from the same dict, and puts the parts back. A state_dict that is\n"
        "no tensor goes through pickle.dumps and back. Which calls must every rank make, and which only rank 0?",
        solution=RECIPE
        + """

class Recipe:
    save, load = save, load
""",
    ),
    "07.1": Predict(
        title="when to be warned",
        level=2,
        minutes=6,
        answer=EVALUATION + 2 * STEP + SAVE,
        unit="seconds",
        slips={
            "a save in progress ends during the evaluation; both worst cases cannot come together": EVALUATION
            + 2 * STEP
            + WRITING
            + SAVE,
            "the warning may also come as the evaluation begins": max(2 * STEP, WRITING) + SAVE,
            "the write goes on during the two steps, and the warning may also come as the evaluation begins": 2 * STEP
            + WRITING
            + SAVE,
            "after the evaluation the state must still be saved": EVALUATION + 2 * STEP,
            "the vote is counted a step later: two steps": EVALUATION + STEP + SAVE,
            "the first of the two steps is the one that ends with the vote": EVALUATION + 3 * STEP + SAVE,
        },
        hint="Put the warning at two moments: just after a save was started in the background, and as an evaluation begins. What "
        "must the run finish in each case before its state is on the disk? The longer one counts.",
        solution="""
# As the evaluation begins: 90 s until the next vote, two steps until it is counted, and the save. A save in the
# background has ended by then. Just after one was started: its 50 s, in which the two steps also run, and the save: 110 s.
evaluation, step, writing, save = 90, 2, 50, 60  # seconds
answer = max(evaluation + 2 * step, 2 * step, writing) + save
""",
    ),
    "07.2": Do(
        title="rows out of somebody else's pieces",
        level=2,
        minutes=10,
        judge=judge_read_rows,
        hint="Go through the pieces in the order of their first rows. A piece overlaps rows begin to end from the "
        "larger of the two starts to the smaller of the two ends. Subtract the piece's first row.",
        solution='''
# A piece and the rows to read overlap from the larger start to the smaller end. If they do not overlap, skip the
# piece: a negative index would count from its end.
import torch


def read_rows(pieces, begin, end):
    """Rows begin to end of the whole tensor. pieces: {first row: tensor of rows}, in arbitrary order."""
    parts = []
    for first, piece in sorted(pieces.items()):
        low, high = max(begin, first), min(end, first + len(piece))
        if low < high:
            parts.append(piece[low - first : high - first])
    return torch.cat(parts)
''',
    ),
    "07.3": Predict(
        title="how often to save",
        level=3,
        minutes=8,
        answer=(2 * SAVING * BETWEEN_FAILURES) ** 0.5 / 60,
        unit="minutes",
        slips={
            "an interruption costs half an interval on average, not a whole one": (SAVING * BETWEEN_FAILURES) ** 0.5
            / 60,
            "that is in seconds": (2 * SAVING * BETWEEN_FAILURES) ** 0.5,
            "saving once between two interruptions loses three hours each time; balance that against the 30 s": BETWEEN_FAILURES
            / 60,
            "half the time between interruptions still loses one and a half hours each time": BETWEEN_FAILURES / 120,
        },
        hint="Train t seconds between two saves. Saving then costs 30 / t per second of training. An interruption "
        "loses t / 2 on average, or t / 2 / 21,600 per second. For which t is the sum smallest? Try some values, or set "
        "the derivative to zero.",
        solution="""
# Time lost per second of training: save / t + t / (2 between). Its derivative, -save / t² + 1 / (2 between), is zero
# at t² = 2 save between: Young's formula (1974). At that point both terms are equal. An asynchronous save makes
# `save` smaller; the best interval and the time lost fall with its square root, but an interval cannot be shorter
# than the writing takes in the background.
save, between = 30, 6 * 3600  # seconds
answer = (2 * save * between) ** 0.5 / 60
""",
        tolerance=0.03,
    ),
    "07.4": Do(
        title="has anyone been warned",
        level=2,
        minutes=5,
        judge=judge_anyone,
        hint="Turn this rank's answer into a tensor of 0 or 1. Which reduction returns 1 as soon as one rank has a 1?",
        solution="""
import torch
import torch.distributed as dist


# The maximum is 1 as soon as one rank was warned, and every rank gets the same result.
def anyone(warned, device):
    votes = torch.tensor(int(warned), device=device)
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes)
""",
    ),
}
