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
        pieces = dict(reversed(pieces.items()))  # files are found in any order
        for part in torch.arange(10).chunk(readers):
            begin, end = int(part[0]), int(part[-1]) + 1
            given = read_rows(dict(pieces), begin, end)
            if unanswered(given):
                return "not answered yet"
            if message := _difference(given, whole, begin, end):
                return f"not quite: {writers} pieces, rows {begin} to {end}: {message}"
    return "right"


def _difference(given, whole, begin, end) -> str | None:
    """What is wrong with the rows given, in words, or None."""
    right = whole[begin:end]
    if not isinstance(given, torch.Tensor):
        return f"a tensor is wanted, and this is a {type(given).__name__}; torch.cat makes one of several"
    if given.dim() != 2 or given.shape[1:] != whole.shape[1:]:
        return f"each row has 2 numbers, but your tensor has the shape {tuple(given.shape)}"
    if torch.equal(given, right):
        return None
    rows = [int(row[0]) // 10 for row in given]
    if sorted(rows) == list(range(begin, end)):
        return (
            f"these are the right rows in the order {rows}; the pieces come in no certain order, so sort by first row"
        )
    if set(rows) > set(range(begin, end)):
        return (
            f"you give rows {sorted(rows)}, too many: take of each piece what it shares with rows {begin} to {end}; "
            "inside a piece counting begins at its first row"
        )
    if set(rows) < set(range(begin, end)):
        missing = sorted(set(range(begin, end)) - set(rows))
        return f"rows {missing} are missing; rows can lie in several pieces, and inside a piece counting begins at its first row"
    return f"you give rows {rows}; inside a piece counting begins at its first row, not at row 0 of the whole"


WARNED = {"nobody": [], "rank 0": [0], "rank 1": [1], "both ranks": [0, 1]}


def _votes(me, anyone):
    """What this rank is told, for each of ``WARNED``."""
    return [anyone(me.rank in warned, me.device) for warned in WARNED.values()]


def judge_anyone(anyone) -> str:
    found = on_ranks(_votes, anyone, ranks=2)
    for (who, warned), said in zip(WARNED.items(), zip(*found, strict=True), strict=True):
        if any(unanswered(one) for one in said):
            return "not answered yet"
        said = [bool(one) for one in said]
        if said[0] != said[1]:
            return (
                f"not quite: with {who} warned, rank 0 says {said[0]} and rank 1 {said[1]}: they part, and hang later"
            )
        if said[0] != bool(warned):
            missed = "one is enough: take the maximum" if warned else "nobody was warned"
            return f"not quite: with {who} warned, the ranks say {said[0]}; {missed}"
    return "right"


# Saved by two ranks, gone on with three

SAVED_AT, LAST = 3, 5  # steps
LR, LOWERED = 0.1, 0.02  # the learning rate at the start, and from the second step on, as if by a schedule


def _sharded(mesh, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 2)).double()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), torch.optim.Adam(model.parameters(), lr=LR)


def _trained(model, optimizer, mesh, steps) -> list[float]:
    """The losses of the global batch; the batch of a step is a function of its number."""
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


def _seam(me, go_on, folder) -> dict:
    """Ranks 0 and 1 train and save; then all three go on with the learner's function."""
    two, three = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
    whole = []
    if me.rank < 2:
        model, optimizer = _sharded(two, seed=1)
        _trained(model, optimizer, two, range(1, SAVED_AT + 1))
        tensors, state = get_state_dict(model, optimizer)
        found = {"model": tensors, "optimizer": state, "step": SAVED_AT}
        dcp.save(found, checkpoint_id=folder / "saved", process_group=two.get_group())
        whole = _trained(model, optimizer, two, range(SAVED_AT + 1, LAST + 1))
    dist.barrier()
    first_day = go_on(folder / "nothing", *_sharded(three, seed=2))
    model, optimizer = _sharded(three, seed=2)
    step = go_on(folder / "saved", model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    losses = _trained(model, optimizer, three, range(SAVED_AT + 1, LAST + 1))
    return {"whole": whole, "first day": first_day, "step": step, "rate": rate, "losses": losses}


def judge_go_on(go_on) -> str:
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(_seam, go_on, Path(folder), ranks=3)[0]
    if unanswered(found["step"]) and unanswered(found["first day"]):
        return "not answered yet"
    if found["first day"] != 0:
        return f"not quite: with no checkpoint there it returns {found['first day']!r}; 0 steps have been done"
    for number, (right, loss) in enumerate(zip(found["whole"], found["losses"], strict=True)):
        if abs(loss - right) > 1e-10 * right:
            where = f"the loss of step {SAVED_AT + 1 + number} is {loss:.4f}, and uninterrupted {right:.4f}"
            return f"not quite: {where}; {_forgotten(number, found['rate'])}"
    if found["step"] != SAVED_AT:
        about = f"it returns {found['step']!r} where step {SAVED_AT} was saved"
        return f"not quite: the losses are right, but {about}: the data would go on at the wrong place"
    return "right"


def _forgotten(number: int, rate: float) -> str:
    if number == 0:
        return "the parameters are not those that were saved"
    if rate != LOWERED:
        return f"the parameters are right, but the learning rate is {rate}, that of a new optimizer: what is no tensor is put back by set_state_dict"
    return "the parameters are right, so what the optimizer keeps is not"


EXERCISES = {
    "07.0": Do(
        title="go on with another number of ranks",
        level=2,
        minutes=10,
        judge=judge_go_on,
        hint="Begin as save does: get_state_dict gives this model's and this optimizer's pieces, cut for these ranks. Build the\n"
        "same dict, with a step of 0 in it; dcp.load(it, checkpoint_id=where) fills it. Then put both parts in place.",
        solution='''
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def go_on(where, model, optimizer):
    """Fill model and optimizer from the checkpoint, if there is one; return its step, or 0."""
    if not where.exists():
        return 0
    tensors, state = get_state_dict(model, optimizer)  # which pieces do these ranks hold?
    found = {"model": tensors, "optimizer": state, "step": 0}
    dcp.load(found, checkpoint_id=where)  # fills the tensors, and puts the step into the dict
    set_state_dict(model, optimizer, model_state_dict=tensors, optim_state_dict=found["optimizer"])
    return found["step"]
''',
    ),
    "07.1": Predict(
        title="what one of 64 ranks writes",
        level=1,
        minutes=3,
        answer=STATE / RANKS / GIB,
        unit="GiB",
        slips={
            "that is the whole checkpoint; each rank writes its 64th part": STATE / GIB,
            "that is the parameters alone; without Adam's two numbers the run cannot go on": STATE / 3 / RANKS / GIB,
            "Adam keeps two numbers for each parameter, not one": STATE * 2 / 3 / RANKS / GIB,
            "that has the gradient in it, which the next step makes anew": STATE * 4 / 3 / RANKS / GIB,
            "those are GB (1000³); GiB are 1024³": STATE / RANKS / 1e9,
        },
        hint="Which numbers does the next step depend on? Count them for one parameter. Who writes each of them?",
        solution="""
# Parameters and Adam's two moments, 4 bytes each: 12 bytes per parameter. Each is held by one rank, which writes it.
answer = 3 * 4 * 8_030_261_248 / 64 / 2**30
""",
    ),
    "07.2": Do(
        title="rows out of somebody else's pieces",
        level=2,
        minutes=10,
        judge=judge_read_rows,
        hint="Go through the pieces in the order of their first rows. Which rows does a piece share with begin to end: "
        "from the larger of the two beginnings to the smaller of the two ends. Subtract the piece's first row.",
        solution='''
# What a piece and a reader share goes from the larger beginning to the smaller end. Where they share nothing the
# slice must be empty; without max(..., 0) a negative index would count from the end of the piece.
import torch


def read_rows(pieces, begin, end):
    """Rows begin to end of the whole tensor. pieces: {first row: tensor of rows}, in no certain order."""
    found = []
    for first, piece in sorted(pieces.items()):
        low, high = max(begin, first), min(end, first + len(piece))
        if low < high:
            found.append(piece[low - first : high - first])
    return torch.cat(found)
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
            "once between two interruptions loses three hours each time; balance it against the 30 s": BETWEEN_FAILURES
            / 60,
            "half the time between interruptions still loses one and a half hours each time": BETWEEN_FAILURES / 120,
        },
        hint="Train t seconds between two saves. A second of training then costs 30 / t in saving. An interruption "
        "loses t / 2 on average, which makes t / 2 / 21,600 a second. For which t is the sum least? Try some, or set "
        "the derivative to zero.",
        solution="""
# Lost in each second of training: save / t + t / (2 between). The derivative, -save / t² + 1 / (2 between), is zero
# where t² = 2 save between: Young's formula (1974). At that point both losses are equal. An asynchronous save
# makes `save` smaller, and with it the best interval, and the loss, by the square root.
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
        hint="Make a tensor of this rank's answer, as a number. Which reduction of the ranks' numbers is 1 as soon as one "
        "of them is?",
        solution="""
import torch
import torch.distributed as dist


# The maximum of zeros and ones: 1 as soon as one rank was warned, and the same number on every rank.
def anyone(warned, device):
    votes = torch.tensor(int(warned), device=device)
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes)
""",
    ),
}
