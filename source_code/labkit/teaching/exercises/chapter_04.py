"""Exercises of chapter 04, FSDP in one unit."""

from math import ceil

import torch
import torch.nn.functional as F
from planner import predict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

MIB = 2**20
NUMBERS = predict.numel(predict.SHAPES)
SHARD = 4 * ceil(NUMBERS / 8)


WORLD, STEPS, LR, NORM = 2, 3, 0.5, 0.1  # the norm is limited so that it bites in each step


def _small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def _batches(rank: int | None = None) -> list:
    """Of each step (inputs, labels): a rank's, or those of all ranks together."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(STEPS, WORLD, 4, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(2, (STEPS, WORLD, 4), generator=generator)
    if rank is None:
        return list(zip(inputs.flatten(1, 2), labels.flatten(1, 2), strict=True))
    return list(zip(inputs[:, rank], labels[:, rank], strict=True))


def _alone(clips=True, clears=True) -> tuple[list, list]:
    """(losses, parameters) of one process on all ranks' batches. clips: it limits the norm; clears: gradients go."""
    model = _small()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for inputs, labels in _batches():
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        if clears:
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def _sharded(me, train) -> dict:
    """What ``train`` returns on a rank, the first loss of that rank's own batch, and what has become of the model."""
    model = _small()
    inputs, labels = _batches(me.rank)[0]
    first = F.cross_entropy(_small()(inputs), labels).item()
    mesh = init_device_mesh("cpu", (me.world_size,))
    losses = ungathered = None
    try:
        losses = train(model, _batches(me.rank), mesh)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        ungathered = True
    units = [name or "the model" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if ungathered:
        return {"ungathered": True, "units": units}
    whole = [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return {"losses": losses, "first": first, "units": units, "whole": whole}


def judge_train(train) -> str:
    found = on_ranks(_sharded, train, ranks=WORLD)
    if (units := found[0]["units"]) and "the model" not in units:
        return f"not quite: module {units[0]} is a unit, and the model is none; one unit is wanted, the model's"
    if any("ungathered" in one for one in found):
        return (
            "not quite: a layer met a DTensor: nobody gathered it. FSDP gathers when the model is called, model(inputs)"
        )
    if unanswered(found[0]["losses"]):
        return "not answered yet"
    if "the model" not in found[0]["units"]:
        return "not quite: the model's parameters are no DTensors: fully_shard has not been called on it"
    if inner := [name for name in found[0]["units"] if name != "the model"]:
        return f"not quite: module {inner[0]} is a unit of its own; one unit is wanted, the model's"
    losses, whole = _alone()
    for rank, one in enumerate(found):
        if len(one["losses"]) != STEPS:
            return f"not quite: {STEPS} batches, and {len(one['losses'])} losses on rank {rank}"
        if difference := _of_losses(rank, [float(loss) for loss in one["losses"]], losses, one["first"]):
            return difference if not _same(found[0]["whole"], list(_small().parameters())) else _UNTRAINED
    if not _same(found[0]["whole"], whole):
        return f"not quite: the losses are right, and the parameters at the end are not: {_why(found[0]['whole'])}"
    return "right"


_UNTRAINED = (
    "not quite: after three steps all parameters are as they were. Is optimizer.step() called, and was the optimizer made "
    "after fully_shard? One that is made before holds the old parameters"
)


def _of_losses(rank: int, losses: list, right: list, own: float) -> str | None:
    """The first difference, with what leads to it."""
    for step, (loss, wanted) in enumerate(zip(losses, right, strict=True)):
        if abs(loss - wanted) < 1e-9:
            continue
        if abs(loss - wanted) < 1e-6:
            return (
                f"not quite: step {step + 1}, rank {rank}: the loss is equal in fp32 only; torch.tensor(loss.item()) is "
                "fp32, loss.detach().clone() is as exact as the loss"
            )
        about = f"not quite: step {step + 1}, rank {rank}: the loss is {loss:.6f}, one process on all batches has {wanted:.6f}"
        if step == 0 and abs(loss - own) < 1e-9:
            return f"{about}: that is the loss of this rank's batch; the mean over the ranks is wanted"
        if step == 0 and abs(loss - WORLD * wanted) < 1e-9:
            return f"{about}: that is the sum of the ranks' losses, not their mean"
        if step == 0:
            return about
        for cause, variant in _VARIANTS.items():
            if abs(loss - _alone(**variant)[0][step]) < 1e-9:
                return f"{about}: {cause}"
        return f"{about}: the first is right, so look at what a step does to the parameters"
    return None


_VARIANTS = {
    "the gradient's norm was not limited, or not between backward and the optimizer's step": {"clips": False},
    "the gradients of the step before are still there": {"clears": False},
}


def _why(whole: list) -> str:
    for cause, variant in _VARIANTS.items():
        if _same(whole, _alone(**variant)[1]):
            return cause
    return "do all steps end with the optimizer's?"


def _same(some: list, others: list) -> bool:
    return all(torch.allclose(a, b, atol=1e-9) for a, b in zip(some, others, strict=True))


def judge_rows_of(rows_of) -> str:
    for rows, world_size in ((8, 4), (10, 4), (5, 4), (2, 3)):
        chunks = torch.arange(rows).chunk(world_size)  # how a DTensor is cut
        for rank in range(world_size):
            given = rows_of(rank, world_size, rows)
            if unanswered(given):
                return "not answered yet"
            right = len(chunks[rank]) if rank < len(chunks) else 0
            first = min(rank * len(chunks[0]), rows)
            where = f"{rows} rows on {world_size} ranks: rank {rank} gets rows {first} to {first + right}"
            if given[1] - given[0] != right:
                return f"not quite: {where}, that is {right}, and you give it {given[1] - given[0]}"
            if right and tuple(given) != (first, first + right):
                return f"not quite: {where}, not {given[0]} to {given[1]}"
    return "right"


def judge_flat_shard(flat_shard) -> str:
    for shapes, world_size in (([(4, 2), (4,)], 4), ([(3, 3), (3,), (2, 3)], 4), ([(5,)], 3)):
        tensors = [
            torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) + 10 * i for i, shape in enumerate(shapes)
        ]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        size = ceil(len(flat) / world_size)
        padded = torch.cat([flat, torch.zeros(size * world_size - len(flat))])
        for rank in range(world_size):
            given, right = flat_shard(tensors, rank, world_size), padded[rank * size : (rank + 1) * size]
            if unanswered(given):
                return "not answered yet"
            where = f"{len(flat)} numbers on {world_size} ranks, rank {rank}"
            if given.dim() != 1:
                return f"not quite: {where}: a tensor with one dimension is wanted, yours has {given.dim()}"
            if len(given) != size:
                return (
                    f"not quite: {where}: every rank holds {size} numbers, padding included, and yours has {len(given)}"
                )
            if not torch.equal(given, right):
                return f"not quite: {where}: it holds {right.tolist()}, and yours {given.tolist()}"
    return "right"


EXERCISES = {
    "04.0": Do(
        title="a training loop in one unit",
        level=2,
        minutes=10,
        judge=judge_train,
        hint="fully_shard(model, mesh=mesh), then the optimizer, then the loop you know. torch.nn.utils.clip_grad_norm_ knows\n"
        "DTensors. FSDP averages gradients; nobody averages losses: dist.all_reduce(loss) sums them, mesh.size() ranks.",
        solution=f"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

def train(model, batches, mesh):
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr={LR})  # after fully_shard: it gets the shards
    losses = []
    for inputs, labels in batches:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), {NORM})  # the norm of all shards together
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # only to tell it: FSDP has averaged the gradients
        losses.append(mean.item() / mesh.size())
    return losses
""",
    ),
    "04.1": Predict(
        title="what persists on 8 ranks with Adam",
        level=1,
        minutes=3,
        answer=3 * SHARD / MIB,
        unit="MiB",
        slips={
            "that is the parameters alone; Adam's two numbers per parameter persist too": SHARD / MIB,
            "Adam keeps two numbers for each parameter, not one": 2 * SHARD / MIB,
            "that has a gradient in it, and gradients are gone between steps": 4 * SHARD / MIB,
            "the parameters are sharded too, not the optimizer state alone": (4 * NUMBERS + 2 * SHARD) / MIB,
            "that is what DDP holds; each rank has an eighth of it": 3 * 4 * NUMBERS / MIB,
            "those are MB (1000²); MiB are 1024²": 3 * SHARD / 1e6,
        },
        hint="Three numbers persist for each parameter. How many parameters does one of 8 ranks hold, rounded up?",
        solution="""
# One rank's slice of the flat parameter: 1,199,882 / 8, rounded up. It persists three times over, the
# parameter and Adam's two moments, 4 bytes each. Gradients are made in backward and go at zero_grad().
from math import ceil

shard = ceil(1_199_882 / 8)
answer = 3 * 4 * shard / 2**20
""",
    ),
    "04.2": Do(
        title="the rows that FSDP2 gives to a rank",
        level=2,
        minutes=5,
        judge=judge_rows_of,
        hint="Every rank but the last ones gets the same number of rows: rows / world_size, rounded up.",
        solution="""
# All parts are of one size, rounded up, until the rows run out. The last ranks may get fewer, or none:
# 5 rows on 4 ranks are 2, 2, 1 and 0. min() keeps an empty part inside the tensor.
from math import ceil


def rows_of(rank, world_size, rows):
    size = ceil(rows / world_size)
    return min(rank * size, rows), min((rank + 1) * size, rows)
""",
    ),
    "04.3": Do(
        title="FSDP1's shard of a flat parameter",
        level=2,
        minutes=5,
        judge=judge_flat_shard,
        hint="torch.cat of the flattened tensors; torch.nn.functional.pad to a multiple of world_size; then a slice.",
        solution="""
# One long tensor, a few zeros so that it divides evenly, equal parts. Unlike FSDP2's, a part may begin
# in the middle of a row of one parameter and end in the middle of another parameter.
import torch
import torch.nn.functional as F


def flat_shard(tensors, rank, world_size):
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    flat = F.pad(flat, (0, -len(flat) % world_size))
    return flat.chunk(world_size)[rank]
""",
    ),
}
