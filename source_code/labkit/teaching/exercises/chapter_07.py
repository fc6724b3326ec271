"""Exercises of chapter 07, checkpoints."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

GIB = 2**30
EIGHT_BILLION, RANKS = 8_030_261_248, 64
STATE = 3 * 4 * EIGHT_BILLION  # the parameter and Adam's two moments, 4 bytes each
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


# Saved by two ranks, resumed on three

SAVED_AT, LAST = 3, 5  # steps
LR, LOWERED = 0.1, 0.02  # the learning rate at the start, and from the second step on, as if by a schedule


def _sharded(mesh, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 2)).double()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), torch.optim.Adam(model.parameters(), lr=LR)


def _trained(model, optimizer, mesh, steps) -> list[float]:
    """Train and return the losses of the global batch; each step's batch depends only on its number."""
    losses = []
    for step in steps:
        if step == 2:
            optimizer.param_groups[0]["lr"] = LOWERED
        rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = model(rows.chunk(mesh.size())[mesh.get_local_rank()]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh.get_group())
        losses.append(mean.item() / mesh.size())
    return losses


def _resume_on_three(me, resume, folder) -> dict:
    """Train and save on ranks 0 and 1, then resume on all three with the learner's function."""
    two, three = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
    whole = []
    if me.rank < 2:
        model, optimizer = _sharded(two, seed=1)
        _trained(model, optimizer, two, range(1, SAVED_AT + 1))
        tensors, state = get_state_dict(model, optimizer)
        checkpoint = {"model": tensors, "optimizer": state, "step": SAVED_AT}
        dcp.save(checkpoint, checkpoint_id=folder / "saved", process_group=two.get_group())
        whole = _trained(model, optimizer, two, range(SAVED_AT + 1, LAST + 1))
    dist.barrier()
    without_checkpoint = resume(folder / "nothing", *_sharded(three, seed=2))
    model, optimizer = _sharded(three, seed=2)
    step = resume(folder / "saved", model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    losses = _trained(model, optimizer, three, range(SAVED_AT + 1, LAST + 1))
    return {"whole": whole, "without checkpoint": without_checkpoint, "step": step, "rate": rate, "losses": losses}


def judge_resume(resume) -> str:
    with tempfile.TemporaryDirectory() as folder:
        result = on_ranks(_resume_on_three, resume, Path(folder), ranks=3)[0]
    if unanswered(result["step"]) and unanswered(result["without checkpoint"]):
        return "not answered yet"
    if result["without checkpoint"] != 0:
        return f"not quite: without a checkpoint it returns {result['without checkpoint']!r} instead of 0 steps"
    for number, (right, loss) in enumerate(zip(result["whole"], result["losses"], strict=True)):
        if abs(loss - right) > 1e-10 * right:
            where = f"the loss of step {SAVED_AT + 1 + number} is {loss:.4f}, and {right:.4f} without interruption"
            return f"not quite: {where}; {_forgotten(number, result['rate'])}"
    if result["step"] != SAVED_AT:
        about = f"it returns {result['step']!r}, but step {SAVED_AT} was saved"
        return f"not quite: the losses are right, but {about}: training would continue with the wrong data"
    return "right"


def _forgotten(number: int, rate: float) -> str:
    if number == 0:
        return "the parameters are not the saved ones"
    if rate != LOWERED:
        return f"the parameters are right, but the learning rate is {rate}, that of a new optimizer: set_state_dict restores the values that are not tensors"
    return "the parameters are right, so the optimizer state is wrong"


EXERCISES = {
    "07.0": Do(
        title="go on with another number of ranks",
        level=2,
        minutes=10,
        judge=judge_resume,
        hint="Start as save does: get_state_dict returns the model's and the optimizer's state, sharded over these ranks. Build the\n"
        "same dict, with step 0; dcp.load(state, checkpoint_id=where) fills it. Then load both parts with set_state_dict.",
        solution='''
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def go_on(where, model, optimizer):
    """Fill model and optimizer from the checkpoint, if there is one; return its step, or 0."""
    if not where.exists():
        return 0
    tensors, state = get_state_dict(model, optimizer)  # sharded over these ranks
    checkpoint = {"model": tensors, "optimizer": state, "step": 0}
    dcp.load(checkpoint, checkpoint_id=where)  # fills the tensors, and sets the step
    set_state_dict(model, optimizer, model_state_dict=tensors, optim_state_dict=checkpoint["optimizer"])
    return checkpoint["step"]
''',
    ),
    "07.1": Predict(
        title="what one of 64 ranks writes",
        level=1,
        minutes=3,
        answer=STATE / RANKS / GIB,
        unit="GiB",
        slips={
            "that is the whole checkpoint; each rank writes 1/64 of it": STATE / GIB,
            "that is the parameters alone; the run cannot resume without Adam's two moments": STATE / 3 / RANKS / GIB,
            "Adam has two moments per parameter, not one": STATE * 2 / 3 / RANKS / GIB,
            "that includes the gradients, which the next step computes again": STATE * 4 / 3 / RANKS / GIB,
            "those are GB (1000³); GiB are 1024³": STATE / RANKS / 1e9,
        },
        hint="Which tensors does the next step depend on? How many elements per parameter is that? Which rank writes each of them?",
        solution="""
# Parameters and Adam's two moments, 4 bytes each: 12 bytes per parameter. Each rank writes the shards it holds.
answer = 3 * 4 * 8_030_261_248 / 64 / 2**30
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
# `save` smaller; the best interval and the time lost fall with its square root.
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
