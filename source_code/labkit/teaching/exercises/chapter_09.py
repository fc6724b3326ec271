"""Exercises of chapter 09, FSDP2 taken apart."""

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
WAITING = LLAMA.num_hidden_layers * BLOCK * 2 / GIB  # all blocks in bf16


def _layout():
    """{unit: (its parameters, whether they are whole after forward)} that 09.3 asks for."""
    names = [name for name, _ in models.GPT(SHAPE).named_parameters()]
    last = SHAPE.num_hidden_layers - 1
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


WORLD, STEPS, LARGEST = 3, 3, 0.05  # of 09.0: ranks, steps, and the norm to which it clips


def adapted(device="cpu"):
    """A small GPT with a frozen base and adapters, the same on every rank."""
    model = models.GPT(SHAPE)
    models.add_lora(model, 2)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(device)


def batches_of(rank, device="cpu") -> list[tuple]:
    """(inputs, targets) of each step on this rank, of shape (2, 8)."""
    drawn = torch.randint(SHAPE.vocab_size, (STEPS, 2, 9), generator=torch.Generator().manual_seed(rank))
    return [(part[:, :-1], part[:, 1:]) for part in drawn.to(device)]


def in_one_process(ranks: int) -> tuple[list[float], dict]:
    """What ``fine_tune`` has to return: the whole model, all ranks' batches at once."""
    model = adapted()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01)
    norms = []
    for parts in zip(*map(batches_of, range(ranks)), strict=True):
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), LARGEST).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in trained.items()}


def _tuned(me, fine_tune):
    """(what ``fine_tune`` returned, DTensors by that word alone; how many units it made)."""
    model = adapted(me.device)
    given = fine_tune(model, batches_of(me.rank, me.device), init_device_mesh(me.device.type, (me.world_size,)))
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    if unanswered(given):
        return None, units
    norms, adapters = given
    named = {name: "DTensor" if isinstance(v, DTensor) else v.detach() for name, v in adapters.items()}
    return (["DTensor" if isinstance(norm, DTensor) else float(norm) for norm in norms], named), units


def judge_fine_tune(fine_tune) -> str:
    found = on_ranks(_tuned, fine_tune, ranks=WORLD)
    if all(given is None for given, _ in found):
        return "not answered yet"
    wanted = in_one_process(WORLD)
    for rank, (given, units) in enumerate(found):
        if given is None:
            return f"not quite: rank {rank} returns nothing, and others do"
        if units != SHAPE.num_hidden_layers + 1:
            return f"not quite: {units} units; {SHAPE.num_hidden_layers + 1} are wanted, each block and the root"
        if difference := _tuning_differs(rank, *given, *wanted):
            return f"not quite: {difference}"
    return "right"


def _tuning_differs(rank, norms, adapters, right_norms, right) -> str | None:
    if "DTensor" in norms:
        return "a norm is a DTensor; full_tensor().item() makes it a number"
    if len(norms) != STEPS:
        return f"{len(norms)} norms; one for each of {STEPS} steps is wanted"
    for step, (norm, wanted) in enumerate(zip(norms, right_norms, strict=True), 1):
        if norm == 0:
            return f"rank {rank}: step {step} found no gradient; fully_shard puts DTensors in the place of parameters: list them after it"
        if abs(norm - wanted) > 1e-3 * wanted:
            why = (
                "is it of this rank's shards alone?" if step == 1 else "has step 1 left its gradients, or not trained?"
            )
            return f"rank {rank}: the gradient's norm in step {step} is {norm:.3f}, in one process {wanted:.3f}; {why}"
    if extra := sorted(set(adapters) - set(right)):
        return f"{extra[0]} is frozen; only what was trained is to be returned"
    if missing := sorted(set(right) - set(adapters)):
        return f"rank {rank}: {missing[0]} is missing"
    for name, value in adapters.items():
        if isinstance(value, str):
            return f"{name} is a DTensor: this rank has a part of it; full_tensor() makes it whole, on every rank"
        if value.shape != right[name].shape:
            return f"rank {rank}: {name} has the shape {tuple(value.shape)}; {tuple(right[name].shape)} is whole"
        if not torch.allclose(value.cpu(), right[name], atol=1e-4):
            return f"{name} differs from training in one process; were the gradients clipped before the step?"
    return None


EXERCISES = {
    "09.0": Do(
        title="FSDP1 to FSDP2, with adapters",
        level=2,
        minutes=12,
        judge=judge_fine_tune,
        hint="Shard first: each of model.blocks, then model; only then make the optimizer, of what requires a gradient.\n"
        "torch.nn.utils.clip_grad_norm_ takes parameters and returns a DTensor. full_tensor() is a collective.",
        solution="""
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

def fine_tune(model, batches, mesh):
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh)
    # After fully_shard: it has put DTensors in the place of the parameters.
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01)
    norms = []
    for inputs, targets in batches:
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 0.05)
        norms.append(norm.full_tensor().item())  # of all ranks' shards
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
            "that is one block; all 32 are waiting at the end of forward": WAITING / 8 / LLAMA.num_hidden_layers,
            "that is the part of the other node's ranks, too": WAITING / 2,
        },
        hint="At the end of forward every block has been whole and has left one part in 8 on each rank. 2 bytes per number.",
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
