"""Exercises of chapter 09, FSDP2 in detail."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planner.models import networks
from planner.models.shapes import GPT_SHAPES, GPTShape
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from labkit.running.lab import Lab
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered
from labkit.training import models

GIB = 2**30
RANKS = 4
SHAPE = GPTShape(
    num_hidden_layers=3,
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=32,
    vocab_size=32,
)


def _traffic(**options):
    """Return the traffic of a step of the chapter's tiny GPT in MB."""
    plan = Lab(ranks=RANKS, device="cpu").plan("gpt_fsdp.py", **options)
    return sum(entry["count"] * entry["bytes"] for entry in plan.traffic()) / 1e6


ONCE = _traffic(reshard_after_forward="false")  # one all-gather and one reduce-scatter of all parameters
LLAMA = GPT_SHAPES["llama3-8b"]
(BLOCK,) = {
    sum(torch.Size(shape).numel() for shape in module.parameters.values())
    for module in networks.gpt(LLAMA, 1, 8).modules
    if module.wrapped
}
WAITING = LLAMA.num_hidden_layers * BLOCK * 2 / GIB  # all blocks in bf16


def _layout():
    """Return the units that 09.3 asks for: {unit: (its parameters, whether they stay gathered after forward)}."""
    names = [name for name, _ in models.GPT(SHAPE).named_parameters()]
    last = SHAPE.num_hidden_layers - 1
    units = {f"block {i}": ([n for n in names if n.startswith(f"blocks.{i}.")], i == last) for i in range(last + 1)}
    units["norm and head"] = [n for n in names if n.startswith(("norm.", "head."))], True
    units["the root"] = [n for n in names if n.startswith("embedding.")], True
    return units


@contextlib.contextmanager
def _world():
    """Yield a mesh of four ranks: a simulated world, with this process as rank 0."""
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
            return f"not quite: {min(whole)} is in no unit; wrap the root last, it takes the remaining parameters"
        model(torch.arange(8).view(1, 8))  # real operators on uninitialized gathered values: the results mean nothing
        after = _whole(model)
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        return _first_difference(model, after)


def _first_difference(model, after) -> str:
    modules = {"the root": model, "norm and head": model.norm}
    modules |= {f"block {i}": block for i, block in enumerate(model.blocks)}
    for unit, (names, stays) in _layout().items():
        if not hasattr(modules[unit], "unshard"):
            return f"not quite: {unit} is not a unit: fully_shard was not called on it"
        modules[unit].unshard()
        together = _whole(model)
        modules[unit].reshard()
        if extra := sorted(together - set(names)):
            return f"not quite: {extra[0]} is gathered together with {unit}; it should not be"
        if missing := sorted(set(names) - together):
            return f"not quite: {missing[0]} is not gathered together with the rest of {unit}"
        if stays and not set(names) <= after:
            return f"not quite: {unit} is freed after forward, but backward needs it at once: keep it gathered"
        if not stays and set(names) & after:
            return f"not quite: {unit} stays gathered after forward; only the last block, and norm and head, should"
    return "right"


WORLD, STEPS, MAX_NORM = 3, 3, 0.05  # of 09.0: ranks, steps, and the norm to clip to


def adapted(device="cpu"):
    """Return a small GPT with a frozen base and adapters, equal on every rank."""
    model = models.GPT(SHAPE)
    models.add_lora(model, 2)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(device)


def batches_of(rank, device="cpu") -> list[tuple]:
    """Return (inputs, targets) of each step on this rank, each of shape (2, 8)."""
    drawn = torch.randint(SHAPE.vocab_size, (STEPS, 2, 9), generator=torch.Generator().manual_seed(rank))
    return [(part[:, :-1], part[:, 1:]) for part in drawn.to(device)]


def in_one_process(ranks: int) -> tuple[list[float], dict]:
    """Return what ``fine_tune`` should return, computed in one process on all ranks' batches."""
    model = adapted()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01)
    norms = []
    for parts in zip(*map(batches_of, range(ranks)), strict=True):
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in trained.items()}


def _tuned(me, fine_tune):
    """Run ``fine_tune`` on this rank.

    Returns:
        (its result, with DTensors replaced by the word "DTensor"; the number of units it made).
    """
    model = adapted(me.device)
    result = fine_tune(model, batches_of(me.rank, me.device), init_device_mesh(me.device.type, (me.world_size,)))
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    if unanswered(result):
        return None, units
    norms, adapters = result
    named = {name: "DTensor" if isinstance(v, DTensor) else v.detach() for name, v in adapters.items()}
    return (["DTensor" if isinstance(norm, DTensor) else float(norm) for norm in norms], named), units


def judge_fine_tune(fine_tune) -> str:
    results = on_ranks(_tuned, fine_tune, ranks=WORLD)
    if all(result is None for result, _ in results):
        return "not answered yet"
    wanted = in_one_process(WORLD)
    for rank, (result, units) in enumerate(results):
        if result is None:
            return f"not quite: rank {rank} returns nothing, but others do"
        if units != SHAPE.num_hidden_layers + 1:
            return (
                f"not quite: there are {units} units instead of {SHAPE.num_hidden_layers + 1}: each block, and the root"
            )
        if difference := _tuning_differs(rank, *result, *wanted):
            return f"not quite: {difference}"
    return "right"


def _tuning_differs(rank, norms, adapters, right_norms, right) -> str | None:
    if "DTensor" in norms:
        return "a norm is a DTensor; full_tensor().item() makes it a number"
    if len(norms) != STEPS:
        return f"there are {len(norms)} norms instead of one for each of {STEPS} steps"
    for step, (norm, wanted) in enumerate(zip(norms, right_norms, strict=True), 1):
        if norm == 0:
            return f"rank {rank}: step {step} has no gradients; fully_shard replaces the parameters by DTensors: list them after calling it"
        if abs(norm - wanted) > 1e-3 * wanted:
            why = (
                "is it the norm of this rank's shards only?"
                if step == 1
                else "did step 1 not clear its gradients, or not train?"
            )
            return f"rank {rank}: the gradient's norm in step {step} is {norm:.3f}, in one process {wanted:.3f}; {why}"
    if extra := sorted(set(adapters) - set(right)):
        return f"{extra[0]} is frozen; return only trained parameters"
    if missing := sorted(set(right) - set(adapters)):
        return f"rank {rank}: {missing[0]} is missing"
    for name, value in adapters.items():
        if isinstance(value, str):
            return f"{name} is a DTensor: this rank has a shard of it; full_tensor() gathers it, on every rank"
        if value.shape != right[name].shape:
            return f"rank {rank}: {name} has the shape {tuple(value.shape)} instead of {tuple(right[name].shape)}"
        if not torch.allclose(value.cpu(), right[name], atol=1e-4):
            return f"{name} differs from training in one process; were the gradients clipped before the step?"
    return None


EXERCISES = {
    "09.0": Do(
        title="FSDP1 to FSDP2, with adapters",
        level=2,
        minutes=12,
        judge=judge_fine_tune,
        hint="Shard first: each of model.blocks, then model. Then make the optimizer, with the parameters that require gradients.\n"
        "torch.nn.utils.clip_grad_norm_ takes parameters and returns a DTensor. full_tensor() is a collective.",
        solution="""
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

def fine_tune(model, batches, mesh):
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh)
    # After fully_shard, which replaces the parameters by DTensors.
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01)
    norms = []
    for inputs, targets in batches:
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 0.05)
        norms.append(norm.full_tensor().item())  # the norm over all ranks' shards
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach().full_tensor() for name, p in trained.items()}
""",
    ),
    "09.1": Predict(
        title="traffic, accumulating and keeping",
        level=1,
        minutes=4,
        answer=_traffic(reshard_after_forward="false", accumulate=4, sync="last"),
        unit="MB",
        slips={
            "the reduce-scatter comes once per step, not after each micro-batch": 4 * ONCE,
            "that is one micro-batch: the parameters are freed after each backward, and gathered for the next": ONCE,
            "the blocks stay gathered, so backward gathers nothing": _traffic(accumulate=4, sync="last"),
            "the reduce-scatter is missing, which comes once": 4 * ONCE / 2,
            "that is MiB; traffic is in MB of 1000²": _traffic(reshard_after_forward="false", accumulate=4, sync="last")
            * 1e6
            / 2**20,
        },
        hint="In each of the four micro-batches, root and blocks are gathered once. How often are their gradients reduced?",
        solution="""
# Four all-gathers of all parameters (none in backward: the blocks stay gathered), one reduce-scatter of all gradients.
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
            "that is the whole model, as with False; with 8, an eighth of each block stays on each rank": WAITING,
            "the groups are of 8 ranks, not of all 16": WAITING / 16,
            "an element in bf16 has 2 bytes, not 4": 2 * WAITING / 8,
            "that is one block; at the end of forward, each of the 32 has left its share": WAITING
            / 8
            / LLAMA.num_hidden_layers,
            "that includes the other node's share": WAITING / 2,
        },
        hint="At the end of forward, every block has been gathered and has left 1/8 of itself on each rank. 2 bytes per element.",
        solution="""
# Each of the 32 blocks leaves an eighth of itself on each rank, in the dtype in which it was gathered.
answer = 32 * 218_112_000 * 2 / 8 / 2**30
""",
    ),
    "09.3": Do(
        title="cut as large training codes do",
        level=3,
        minutes=15,
        judge=judge_cut,
        hint="Inner units first. fully_shard takes a list of modules and makes one unit of them; reshard_after_forward\n"
        "may differ between calls. The root keeps its parameters gathered by default.",
        solution="""
from torch.distributed.fsdp import fully_shard

def cut(model, mesh):
    *others, last = model.blocks
    for block in others:
        fully_shard(block, mesh=mesh)  # freed after forward: the default for units other than the root
    # Backward starts with these: if they were freed after forward, they would be gathered again right away.
    fully_shard(last, mesh=mesh, reshard_after_forward=False)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
""",
    ),
}
