"""Exercises of chapter 09, FSDP2 taken apart."""

import contextlib

import torch
import torch.distributed as dist
from planner import networks
from planner.shapes import GPT_SHAPES, GPTShape
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from labkit.running.lab import Lab
from labkit.teaching.exercises import Do, Predict
from labkit.training import models

GIB = 2**30
RANKS = 4
SHAPE = GPTShape(layers=3, width=16, heads=2, kv_heads=2, hidden=32, vocabulary=32)


def _traffic(**options):
    """MB of a step of the chapter's tiny GPT."""
    plan = Lab(ranks=RANKS, device="cpu").plan("gpt_fsdp.py", **options)
    return sum(entry["count"] * entry["bytes"] for entry in plan.traffic()) / 1e6


ONCE = _traffic(reshard_after_forward="false")  # a gather and a reduction of all parameters
LLAMA = GPT_SHAPES["llama3-8b"]
(BLOCK,) = {
    sum(torch.Size(shape).numel() for shape in module.parameters.values())
    for module in networks.gpt(LLAMA, 1, 8).modules
    if module.wrapped
}
WAITING = LLAMA.layers * BLOCK * 2 / GIB  # all blocks in bf16


def _layout():
    """{unit: (its parameters, whether they are whole after forward)} that 09.3 asks for."""
    names = [name for name, _ in models.GPT(SHAPE).named_parameters()]
    last = SHAPE.layers - 1
    units = {f"block {i}": ([n for n in names if n.startswith(f"blocks.{i}.")], i == last) for i in range(last + 1)}
    units["norm and head"] = [n for n in names if n.startswith(("norm.", "head."))], True
    units["the root"] = [n for n in names if n.startswith("embedding.")], True
    return units


@contextlib.contextmanager
def _world():
    """A mesh of four ranks, of which this process is the first and the others are not there."""
    joined = not dist.is_initialized()
    if joined:
        from labkit.measuring import simulate

        simulate.join(RANKS)
    try:
        yield init_device_mesh("cpu", (dist.get_world_size(),))
    finally:
        if joined:
            dist.destroy_process_group()


def _whole(model) -> set:
    return {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}


def judge_cut(cut) -> str:
    with _world() as mesh:
        model = models.GPT(SHAPE)
        cut(model, mesh)
        whole = _whole(model)
        if len(whole) == len(list(model.parameters())):
            return "not answered yet"
        if whole:
            return f"not quite: no unit has taken {min(whole)}; the root takes what is left, and comes last"
        model(torch.arange(8).view(1, 8))  # real operators on whatever the gathers left: values mean nothing here
        after = _whole(model)
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        return _first_difference(model, after)


def _first_difference(model, after) -> str:
    places = {"the root": model, "norm and head": model.norm}
    places |= {f"block {i}": block for i, block in enumerate(model.blocks)}
    for unit, (names, stays) in _layout().items():
        if not hasattr(places[unit], "unshard"):
            return f"not quite: {unit} is no unit: fully_shard was not called on it"
        places[unit].unshard()
        together = _whole(model)
        places[unit].reshard()
        if extra := sorted(together - set(names)):
            return f"not quite: {extra[0]} becomes whole together with {unit}; it should not"
        if missing := sorted(set(names) - together):
            return f"not quite: {missing[0]} does not become whole together with the rest of {unit}"
        if stays and not set(names) <= after:
            return f"not quite: {unit} is freed after forward, but backward needs it at once: let it stay"
        if not stays and set(names) & after:
            return f"not quite: {unit} stays whole after forward; only the last block and norm and head should"
    return "right"


EXERCISES = {
    "09.1": Predict(
        title="traffic, accumulating and keeping",
        level=1,
        minutes=4,
        answer=_traffic(reshard_after_forward="false", accumulate=4, sync="last"),
        unit="MB",
        slips={
            "the reduction comes once a step, not after each micro-batch": 4 * ONCE,
            "that is one micro-batch: the parameters are freed after each backward, and gathered for the next": ONCE,
            "with the blocks kept, backward gathers nothing": _traffic(accumulate=4, sync="last"),
            "that is without the reduction, which comes once": 4 * ONCE / 2,
            "that is MiB; traffic is in MB of 1000²": _traffic(reshard_after_forward="false", accumulate=4, sync="last")
            * 1e6
            / 2**20,
        },
        hint="In each of the four micro-batches root and blocks are gathered once. How often are they reduced?",
        solution="""
# Four gathers of everything (none in backward: the blocks are there), one reduction of everything.
block, root = 787_456, 262_656  # bytes
answer = (4 * (root + 4 * block) + (root + 4 * block)) / 1e6
""",
    ),
    "09.2": Predict(
        title="what a node's worth costs",
        level=2,
        minutes=5,
        answer=WAITING / 8,
        unit="GiB",
        slips={
            "that is the whole model waiting, which is False; with 8, an eighth of each block waits": WAITING,
            "the groups are of 8 ranks, not of all 16": WAITING / 16,
            "a number in bf16 is 2 bytes, not 4": 2 * WAITING / 8,
            "that is one block; all 32 are waiting at the end of forward": WAITING / 8 / LLAMA.layers,
            "that is the part of the other node's ranks, too": WAITING / 2,
        },
        hint="At the end of forward every block has been whole and has left one part in 8 on each rank. 2 bytes a number.",
        solution="""
# Each of the 32 blocks leaves an eighth of itself, in the number format in which it was gathered.
answer = 32 * 218_112_000 * 2 / 8 / 2**30
""",
    ),
    "09.3": Do(
        title="cut as large training codes do",
        level=3,
        minutes=15,
        judge=judge_cut,
        hint="Inner units first. fully_shard takes a list of modules and makes one unit of them; reshard_after_forward\n"
        "may differ from call to call. The root keeps its parameters by itself.",
        solution="""
from torch.distributed.fsdp import fully_shard

def cut(model, mesh):
    *others, last = model.blocks
    for block in others:
        fully_shard(block, mesh=mesh)  # freed after forward: the default of what is not the root
    # Backward begins with these: whoever frees them after forward fetches them again a moment later.
    fully_shard(last, mesh=mesh, reshard_after_forward=False)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
""",
    ),
}
