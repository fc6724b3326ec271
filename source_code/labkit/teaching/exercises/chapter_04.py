# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 04, FSDP in one unit."""

import torch
import torch.nn.functional as F
from planner import predict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from labkit.teaching.exercises import Do, on_ranks, unanswered

MIB = 2**20
WORLD, STEPS, LR, NORM = 2, 3, 0.5, 0.1  # the norm limit is low enough to clip in every step


def _small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def _batches(rank: int | None = None) -> list:
    """Return (inputs, labels) of each step, for one rank or for all ranks together."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(STEPS, WORLD, 4, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(2, (STEPS, WORLD, 4), generator=generator)
    if rank is None:
        return list(zip(inputs.flatten(1, 2), labels.flatten(1, 2), strict=True))
    return list(zip(inputs[:, rank], labels[:, rank], strict=True))


def _alone(clips=True, clears=True) -> tuple[list, list]:
    """Train in one process on all ranks' batches and return (losses, parameters).

    clips: whether to clip the norm. clears: whether to call zero_grad().
    """
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
    """Run ``train`` on this rank; return its losses, the first loss of the rank's batch, and the state of the model."""
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
    results = on_ranks(_sharded, train, ranks=WORLD)
    if (units := results[0]["units"]) and "the model" not in units:
        return f"not quite: module {units[0]} is a unit, and the model is not; make one unit, the model"
    if any("ungathered" in result for result in results):
        return "not quite: a layer computes with a DTensor that was not gathered. FSDP gathers when the model is called, as model(inputs)"
    if unanswered(results[0]["losses"]):
        return "not answered yet"
    if "the model" not in results[0]["units"]:
        return "not quite: the model's parameters are not DTensors: fully_shard was not called on it"
    if inner := [name for name in results[0]["units"] if name != "the model"]:
        return f"not quite: module {inner[0]} is a separate unit; make one unit, the model"
    losses, whole = _alone()
    for rank, result in enumerate(results):
        if len(result["losses"]) != STEPS:
            return f"not quite: {STEPS} batches, and {len(result['losses'])} losses on rank {rank}"
        if difference := _of_losses(rank, [float(loss) for loss in result["losses"]], losses, result["first"]):
            return difference if not _same(results[0]["whole"], list(_small().parameters())) else _UNTRAINED
    if not _same(results[0]["whole"], whole):
        return f"not quite: the losses are right, and the parameters at the end are not: {_why(results[0]['whole'])}"
    return "right"


_UNTRAINED = (
    "not quite: three steps have not changed any parameter. Is optimizer.step() called, and was the optimizer made "
    "after fully_shard? An optimizer made earlier holds the old parameters"
)


def _of_losses(rank: int, losses: list, right: list, own: float) -> str | None:
    """Describe the first difference and its likely cause, or return None."""
    for step, (loss, wanted) in enumerate(zip(losses, right, strict=True)):
        if abs(loss - wanted) < 1e-9:
            continue
        if abs(loss - wanted) < 1e-6:
            return (
                f"not quite: step {step + 1}, rank {rank}: the loss is equal only to fp32 precision; "
                "torch.tensor(loss.item()) is fp32, while loss.detach().clone() keeps the loss's dtype"
            )
        about = f"not quite: step {step + 1}, rank {rank}: the loss is {loss:.6f}, one process on all batches has {wanted:.6f}"
        if step == 0 and abs(loss - own) < 1e-9:
            return f"{about}: that is the loss of this rank's batch, not the mean over the ranks"
        if step == 0 and abs(loss - WORLD * wanted) < 1e-9:
            return f"{about}: that is the sum of the ranks' losses, not their mean"
        if step == 0:
            return about
        for cause, variant in _VARIANTS.items():
            if abs(loss - _alone(**variant)[0][step]) < 1e-9:
                return f"{about}: {cause}"
        return f"{about}: the first is right, so check how a step updates the parameters"
    return None


_VARIANTS = {
    "the gradient's norm was not clipped, or not between backward and the optimizer's step": {"clips": False},
    "the gradients of the previous step were not cleared": {"clears": False},
}


def _why(whole: list) -> str:
    for cause, variant in _VARIANTS.items():
        if _same(whole, _alone(**variant)[1]):
            return cause
    return "does each step end with optimizer.step()?"


def _same(some: list, others: list) -> bool:
    return all(torch.allclose(a, b, atol=1e-9) for a, b in zip(some, others, strict=True))


def judge_rows_of(rows_of) -> str:
    for rows, world_size in ((8, 4), (10, 4), (5, 4), (2, 3)):
        chunks = torch.arange(rows).chunk(world_size)  # how a DTensor is sharded
        for rank in range(world_size):
            result = rows_of(rank, world_size, rows)
            if unanswered(result):
                return "not answered yet"
            right = len(chunks[rank]) if rank < len(chunks) else 0
            first = min(rank * len(chunks[0]), rows)
            where = f"{rows} rows on {world_size} ranks: rank {rank} gets rows {first} to {first + right}"
            if result[1] - result[0] != right:
                return f"not quite: {where}, that is {right} rows; your function gives it {result[1] - result[0]}"
            if right and tuple(result) != (first, first + right):
                return f"not quite: {where}, not {result[0]} to {result[1]}"
    return "right"


BATCH = 32  # of the chapter's runs: the peaks of DDP and FSDP2 are then at the same operator
_TERMS = {  # {term of FSDP2's peak: what decides it}
    "parameters": "between steps, a rank keeps 1/W of every parameter, also while the whole ones are gathered",
    "gradients": "backward has not ended: no gradient has been reduced to a shard yet",
    "optimizer state": "a rank has the state of its shard only",
    "activations": "they depend on the rank's own batch, which FSDP does not shard",
    "temporary": "they depend on the rank's own batch, which FSDP does not shard",
    "all-gather": "a unit is gathered as a whole, and this one is the whole model",
    "reduce-scatter": "the reduce-scatter waits for the last gradient of the unit; until then, gradients are whole",
    "all-reduce buckets": "DDP keeps them; FSDP has none",
}


def judge_at_peak(at_peak) -> str:
    for ranks in (2, 4):
        ddp, right = (predict.peak(*what, ranks=ranks, batch=BATCH)[1] for what in (("ddp",), ("fsdp2", "unit")))
        result = at_peak(dict.fromkeys(_TERMS, 0) | ddp, ranks)
        if unanswered(result):
            return "not answered yet"
        if unknown := set(result) - set(_TERMS):
            return f"not quite: {min(unknown)!r} is no term of the peak; the terms are {', '.join(_TERMS)}"
        for term, why in _TERMS.items():
            size, wanted = result.get(term, 0), right.get(term, 0)
            if not abs(size - wanted) <= 0.01 * wanted:
                return f"not quite: {term}, {size / MIB:.2f} MiB on {ranks} ranks, is too {_off(size, wanted)}: {why}"
    return "right"


def _off(size: float, wanted: float) -> str:
    return "large" if size > wanted else "small"


EXERCISES = {
    "04.0": Do(
        title="a training loop in one unit",
        level=2,
        minutes=10,
        judge=judge_train,
        hint="fully_shard(model, mesh=mesh), then the optimizer, then the usual loop. torch.nn.utils.clip_grad_norm_ works\n"
        "on DTensors. FSDP averages gradients, but not losses: dist.all_reduce(loss) sums them over mesh.size() ranks.",
        solution=f"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

def train(model, batches, mesh):
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr={LR})  # after fully_shard, so that it updates the shards
    losses = []
    for inputs, labels in batches:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), {NORM})  # the norm over all shards
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # only for logging: FSDP has already averaged the gradients
        losses.append(mean.item() / mesh.size())
    return losses
""",
    ),
    "04.1": Do(
        title="the terms of FSDP2's peak",
        level=2,
        minutes=6,
        judge=judge_at_peak,
        hint="Ask three questions of each term. Is it persistent? Then FSDP shards it. Does computing need it whole? Then it is\n"
        "gathered, or waits for the reduce-scatter. Does it depend on the batch? Then it stays.",
        solution="""
# Two terms are persistent, and sharded. The parameters are there twice: the shard, and the gathered whole. The
# gradients of fc1 and fc2 wait for the reduce-scatter. The batch's terms stay, and DDP's buckets go.
def at_peak(ddp, ranks):
    return {
        "parameters": ddp["parameters"] / ranks,
        "optimizer state": ddp["optimizer state"] / ranks,
        "all-gather": ddp["parameters"],
        "reduce-scatter": ddp["gradients"],
        "activations": ddp["activations"],
        "temporary": ddp["temporary"],
    }
""",
    ),
    "04.2": Do(
        title="the rows that FSDP2 gives to a rank",
        level=2,
        minutes=5,
        judge=judge_rows_of,
        hint="Every rank except the last ones gets the same number of rows: rows / world_size, rounded up.",
        solution="""
# Each shard has the same size, rounded up, until the rows run out. The last ranks may get fewer rows, or none:
# 5 rows on 4 ranks are 2, 2, 1 and 0. min() keeps the bounds of an empty shard inside the tensor.
from math import ceil


def rows_of(rank, world_size, rows):
    size = ceil(rows / world_size)
    return min(rank * size, rows), min((rank + 1) * size, rows)
""",
    ),
}
