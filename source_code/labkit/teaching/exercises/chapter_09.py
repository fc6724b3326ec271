# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 09, FSDP2 taken apart."""

import contextlib
import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planner.models.shapes import GPTShape
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from labkit.teaching.exercises import Do, on_ranks, unanswered
from labkit.teaching.fsdp1_to_fsdp2 import Collectives
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


BLOCK = 2 * 218_112_000  # bytes of a block of Llama 3 8B in bf16


def _layout(tied: bool):
    """Return the units that 09.3 asks for: {unit: (its parameters, whether they stay gathered after forward)}."""
    names = [name for name, _ in models.GPT(_shape(tied)).named_parameters()]
    units = {
        f"block {i}": ([n for n in names if n.startswith(f"blocks.{i}.")], False)
        for i in range(SHAPE.num_hidden_layers)
    }
    if tied:
        return units | {"embedding, norm and head": (["embedding.weight", "norm.weight"], True)}
    return units | {
        "the embedding": (["embedding.weight"], False),
        "norm and head": (["norm.weight", "head.weight"], True),
    }


def _shape(tied: bool) -> GPTShape:
    return dataclasses.replace(SHAPE, tie_word_embeddings=tied)


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
        for tied in (False, True):
            if (said := _judge_one_cut(cut, mesh, tied)) != "right":
                return f"{said} (tied weights)" if tied and said.startswith("not quite") else said
    return "right"


def _judge_one_cut(cut, mesh, tied: bool) -> str:
    model = models.GPT(_shape(tied))
    cut(model, mesh)
    whole = _whole(model)
    if len(whole) == len(list(model.parameters())):
        return "not answered yet"
    if whole:
        return f"not quite: {min(whole)} is in no unit"
    if not isinstance(model, FSDPModule):
        return "not quite: fully_shard was not called on the model itself, the root, whose hooks start each step"
    try:
        model(torch.arange(8).view(1, 8))  # real operators on uninitialized gathered values: the results mean nothing
    except ValueError as error:
        return f"not quite: forward raises {error}"
    after = _whole(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return _first_difference(model, after, tied)


def _first_difference(model, after, tied: bool) -> str:
    for unit, (names, stays) in _layout(tied).items():
        owner = model.get_submodule(
            names[0].rpartition(".")[0] if not unit.startswith("block") else unit.replace(" ", "s.")
        )
        if not isinstance(owner, FSDPModule):
            return f"not quite: {unit} is no unit of its own: fully_shard was not called on it"
        owner.unshard()
        together = _whole(model)
        owner.reshard()
        if extra := sorted(together - set(names)):
            return f"not quite: {extra[0]} is gathered together with {unit}; it should not be"
        if missing := sorted(set(names) - together):
            return f"not quite: {missing[0]} is not gathered together with the rest of {unit}"
        if stays and not set(names) <= after:
            return f"not quite: {unit} is freed after forward, but backward needs it at once: keep it gathered"
        if not stays and set(names) & after:
            return f"not quite: {unit} stays gathered after forward; only the unit with the head should"
    return "right"


WORLD, STEPS, MAX_NORM = 3, 3, 0.05  # of 09.1: ranks, steps, and the norm to clip to


def small_gpt(device="cpu", lora: int = 0):
    """Return a small GPT, equal on every rank. lora: rank of the adapters on its then frozen base; 0: none."""
    model = models.GPT(SHAPE)
    if lora:
        models.add_lora(model, lora)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(device)


def batches_of(rank, device="cpu", count=STEPS, seed=0) -> list[tuple]:
    """Return (inputs, targets) of ``count`` batches on this rank, each of shape (2, 8)."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    drawn = torch.randint(SHAPE.vocab_size, (count, 2, 9), generator=generator)
    return [(part[:, :-1], part[:, 1:]) for part in drawn.to(device)]


def in_one_process(ranks: int) -> tuple[list[float], dict]:
    """Return what ``fine_tune`` should return, computed in one process on all ranks' batches."""
    model = small_gpt(lora=2)
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
    model = small_gpt(me.device, lora=2)
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
            return f"not quite: there are {units} units instead of 4: each of the three blocks, and the root"
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
            causes = "is it the norm of this rank's shards only?", "did step 1 not clear its gradients, or not train?"
            return f"rank {rank}: the gradient's norm in step {step} is {norm:.3f}, in one process {wanted:.3f}; {causes[step > 1]}"
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


MICRO_BATCHES = (3, 2)  # in each of two steps of 09.0


def gradients_in_one_process(ranks: int, step: int) -> dict[str, torch.Tensor]:
    """Return the gradient of the mean loss over all ranks' micro-batches of a step, without an optimizer."""
    model = small_gpt()
    parts = [part for rank in range(ranks) for part in batches_of(rank, count=MICRO_BATCHES[step], seed=step)]
    inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _accumulated(me, accumulate):
    """Return of two steps: (its result, {collective: calls}, parameters still whole, {parameter: gradient or None})."""
    model = small_gpt(me.device)
    mesh = init_device_mesh(me.device.type, (me.world_size,))
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh)
    steps = []
    for step, count in enumerate(MICRO_BATCHES):
        with Collectives() as seen:
            result = accumulate(model, batches_of(me.rank, me.device, count, seed=step))
        whole = sorted(_whole(model))
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        grads = {name: p.grad for name, p in model.named_parameters()}
        steps.append(
            (None if unanswered(result) else result, seen.calls, whole, {n: _full(g) for n, g in grads.items()})
        )
        model.zero_grad()
    return steps


def _full(gradient):
    return gradient.full_tensor().cpu() if isinstance(gradient, DTensor) else None


def judge_accumulate(accumulate) -> str:
    on_each = on_ranks(_accumulated, accumulate, ranks=WORLD)
    if all(result is None for result, *_ in on_each[0]):
        return "not answered yet"
    for step, of_ranks in enumerate(zip(*on_each, strict=True)):
        wanted = gradients_in_one_process(WORLD, step)
        for rank, found in enumerate(of_ranks):
            if difference := _accumulating_differs(MICRO_BATCHES[step], wanted, *found):
                return f"not quite: rank {rank}, step {step + 1}, of {MICRO_BATCHES[step]} micro-batches: {difference}"
    return "right"


def _accumulating_differs(count, wanted, losses, calls, whole, grads) -> str | None:
    units = SHAPE.num_hidden_layers + 1
    if not isinstance(losses, list) or len(losses) != count:
        return "it should return a list with one loss per micro-batch"
    if missing := sorted(name for name, gradient in grads.items() if gradient is None):
        return f"the shard of {missing[0]} has no gradient: nothing was reduced"
    for name, gradient in grads.items():
        if not torch.allclose(gradient, wanted[name], atol=1e-5):
            if torch.allclose(gradient, count * wanted[name], atol=1e-5 * count):
                return f"the gradient is {count} times that of the mean loss: divide each loss"
            return f"the gradient of {name} is not that of one process on all micro-batches"
    if calls["reduce-scatter"] > units:
        return f"{calls['reduce-scatter']} reduce-scatters; {units} units need one each, after the last micro-batch"
    if calls["all-gather"] > units:
        return f"{calls['all-gather']} all-gathers; {units} units need one each, before the first forward"
    if whole:
        return f"{whole[0]} is still whole after the step: the optimizer updates shards, so free it after the last micro-batch"
    return None


ROOMS = [  # of 09.2: (what it is about, arguments of choose, its answer)
    ("8B, much room", (32, BLOCK, 20 * GIB, GIB, 8, False), False),
    ("8B, little room, a mesh per unit", (32, BLOCK, 10 * GIB, GIB, 8, False), True),
    ("8B, little room, one mesh for all units", (32, BLOCK, 10 * GIB, GIB, 8, True), 8),
    ("large blocks, a mesh per unit", (20, 8 * BLOCK, 30 * GIB, GIB // 2, 4, False), 4),
    ("8B, room for the eighths alone", (32, BLOCK, 2 * GIB, GIB, 8, True), True),
]


def judge_choose(choose) -> str:
    for number, (about, arguments, wanted) in enumerate(ROOMS):
        answer = choose(*arguments)
        if number == 0 and unanswered(answer):
            return "not answered yet"
        if answer is not wanted and not (wanted not in (True, False) and answer == wanted):
            return f"not quite: {about} ({', '.join(map(str, arguments))}): {answer}, but {wanted} is right"
    return "right"


EXERCISES = {
    "09.0": Do(
        title="gather once, reduce once",
        level=2,
        minutes=15,
        judge=judge_accumulate,
        hint="Three methods, all of which act on the model and every unit in it: set_reshard_after_forward,\n"
        "set_reshard_after_backward and set_requires_gradient_sync. Each keeps its value until it is called again:\n"
        "what must be true before the last micro-batch, and what before all others?",
        solution="""
import torch.nn.functional as F

def accumulate(model, micro_batches):
    model.set_reshard_after_forward(False)
    losses = []
    for number, (inputs, targets) in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        model.set_requires_gradient_sync(last)  # before the last one, gradients accumulate unsharded
        model.set_reshard_after_backward(last)  # the optimizer updates shards, so parameters are freed at the end
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / len(micro_batches)
        loss.backward()
        losses.append(loss.detach())
    return losses
""",
    ),
    "09.1": Do(
        title="FSDP1 to FSDP2, with adapters",
        level=2,
        minutes=14,
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
    "09.2": Do(
        title="what else N costs",
        level=2,
        minutes=8,
        judge=judge_choose,
        hint="Compare bytes after forward: all units whole; 1/N of them, and a communicator's buffers for each mesh.\n"
        "False sends least in all. N and False send the same between nodes. True takes no memory in between.",
        solution="""
def choose(units, unit_bytes, room, communicator, n, shared):
    if units * unit_bytes <= room:
        return False  # no second all-gather at all
    communicators = 1 if shared else units  # of a mesh's two groups, the one of n ranks communicates, so takes buffers
    if units * unit_bytes / n + communicators * communicator <= room:
        return n  # gathers inside a node; with a mesh per unit it may need more memory than False!
    return True
""",
    ),
    "09.3": Do(
        title="cut as torchtitan does",
        level=3,
        minutes=15,
        judge=judge_cut,
        hint="fully_shard takes a list of modules and makes one unit of them; reshard_after_forward may differ between\n"
        "calls. A tied weight belongs to one unit, and so do the modules that share it. The root is wrapped last,\n"
        "even if no parameter is left for it.",
        solution="""
from torch.distributed.fsdp import fully_shard

def cut(model, mesh):
    if model.head.weight is model.embedding.weight:
        fully_shard([model.embedding, model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    else:
        fully_shard(model.embedding, mesh=mesh, reshard_after_forward=True)
        # Backward starts with these: if they were freed after forward, they would be gathered again right away.
        fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
""",
    ),
}
