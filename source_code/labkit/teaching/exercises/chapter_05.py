# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 05, choosing units."""

import torch
from planner import predict
from planner.models.shapes import GPTShape
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from labkit.measuring import trace
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered
from labkit.training.models import GPT

MIB = 2**20
SHAPE = GPTShape(
    num_hidden_layers=8,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=384,
    vocab_size=4096,
)
WORLD, TOKENS, BUDGET = 4, 16, 15 * MIB  # BUDGET: bytes per rank at the peak, tensors only


class _TooLate(Exception):
    """A module was sharded after one that contains it, whose unit already has its parameters."""


def _cut(wrap, model, mesh) -> dict[str, tuple[int, bool]]:
    """Wrap the model with the learner's function and list its units.

    Returns:
        {names of a unit's modules: (bytes of its parameters, whether they stay gathered after forward)}.
    """
    names = {module: name or "model" for name, module in model.named_modules()}
    made = []

    def shard(modules, **options):
        listed = [modules] if isinstance(modules, nn.Module) else list(modules)
        for module in listed:
            if around := [outer for unit, *_ in made for outer in unit if module in set(outer.modules())]:
                raise _TooLate(f"{names[module]} comes after {names[around[0]]}")
        own = {p for module in listed for p in module.parameters() if not isinstance(p, DTensor)}
        made.append((listed, sum(p.nbytes for p in own), options.get("reshard_after_forward") is False))
        fully_shard(modules, mesh=mesh, **options)

    wrap(model, shard)
    return {", ".join(names[module] for module in unit): about for unit, *about in made}


def _trained(me, wrap) -> dict:
    """Train a GPT wrapped by ``wrap``; return its units, the parameters outside any unit, and the peak in bytes."""
    model = GPT(SHAPE)
    try:
        units = _cut(wrap, model, init_device_mesh("cpu", (me.world_size,)))
    except _TooLate as late:
        return {"late": str(late)}
    loose = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if not units or loose or "model" not in units:
        return {"units": units, "loose": loose}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    meter = trace.StepTrace(model, optimizer, torch.device("cpu"))
    peaks = []
    for _ in range(3):  # the first warms up the tracer; the lower of the others counts, as in every record
        text = torch.randint(SHAPE.vocab_size, (1, TOKENS + 1))
        with meter:
            nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(trace.peak(meter.timeline())[1])
    return {"units": units, "peak": min(peaks[1:])}


def judge_wrap(wrap) -> str:
    result = on_ranks(_trained, wrap, ranks=WORLD)[0]
    if "late" in result:
        return f"not quite: {result['late']}, whose unit already has its parameters: inner modules first, the root last"
    units = result["units"]
    if not units:
        return "not answered yet"
    if result.get("loose"):
        return (
            f"not quite: {result['loose'][0]} is in no unit: it is not sharded, and its gradient is not averaged; "
            "shard(model) makes the root unit, which takes all remaining parameters"
        )
    if "model" not in units:
        return (
            "not quite: every parameter is in a unit, but the model is not one: without a root, each unit acts as a root "
            "and keeps its parameters after forward; end with shard(model)"
        )
    if result["peak"] > BUDGET:
        much = f"the peak is {result['peak'] / MIB:.1f} MiB, the budget {BUDGET / MIB:.0f}"
        return f"not quite: {much}: {_too_large(units)}"
    return "right"


def _too_large(units: dict[str, tuple[int, bool]]) -> str:
    if list(units) == ["model"]:
        return "there is one unit, so all parameters are gathered at once"
    root = units.pop("model")[0]
    name = max(units, key=units.get)
    gathered = sum(size for size, stays in units.values() if stays)
    if gathered > units[name][0]:
        return f"{gathered / MIB:.1f} MiB of parameters stay gathered after forward, all at the same time"
    if 2 * root > units[name][0]:
        return f"the root has {root / MIB:.1f} MiB of parameters, gathered throughout backward: what is in it?"
    return f"the unit {name} has {units[name][0] / MIB:.1f} MiB of parameters, gathered while any part of it computes"


def _peak(strategy, wrap, batch):
    return predict.total(predict.peak(strategy, wrap, 4, batch)[1]) / MIB


def _lowered_by_size(strategy, batch):
    """Return by how many MiB units by size lower the peak; negative where they raise it."""
    return _peak(strategy, "unit", batch) - _peak(strategy, "size", batch)


_AT_32 = predict.peak("fsdp1", "size", 4, 32)[1]  # the terms of FSDP1 by size in the chapter's table
_FIXED = [name for name in _AT_32 if name not in ("activations", "temporary")]
_SUM = " + ".join(f"{_AT_32[name] / MIB:.2f}" for name in _FIXED) + "  # " + " + ".join(_FIXED)
_RELU2_AT_8 = predict.total(predict.snapshots("fsdp1", "unit", 4, 8)["backward of relu2"]) / MIB


def _numel(module) -> int:
    return sum(p.numel() for p in module.parameters())


def reference_units(model, min_num_params) -> set:
    """Return the names of the units that 05.2 asks for."""
    units = set()

    def taken(module, name):
        if _numel(module) < min_num_params:
            return 0
        inside = sum(taken(child, f"{name}.{part}" if name else part) for part, child in module.named_children())
        if not name or isinstance(module, nn.ModuleList) or _numel(module) - inside < min_num_params:
            return inside
        units.add(name)
        return _numel(module)

    taken(model, "")
    return units


def _cases():
    """Yield (description, model, min_num_params)."""
    with torch.device("meta"):
        flat = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 1))
        nested = nn.Sequential()
        for name in ("first", "second"):
            block = nn.Sequential()
            block.wide, block.narrow, block.norm = nn.Linear(10, 20), nn.Linear(10, 4), nn.LayerNorm(5)
            nested.add_module(name, block)
        listed = nn.Module()
        listed.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
    yield "layers of 110 and 11 parameters", flat, 100
    yield "two layers, none large enough", flat, 1000
    yield "a layer of 110 parameters, exactly the threshold", flat, 110
    yield "blocks of 274 parameters, their layers of 220, 44 and 10", nested, 250
    yield "blocks of 274 parameters, their layers of 220, 44 and 10", nested, 100
    yield "blocks of 274 parameters, their layers of 220, 44 and 10", nested, 50
    yield "blocks of 274 parameters, their layers of 220, 44 and 10", nested, 400
    yield "a ModuleList of three layers of 110", listed, 200


def judge_units(units_by_size) -> str:
    for what, model, threshold in _cases():
        result, right = units_by_size(model, threshold), reference_units(model, threshold)
        if unanswered(result):
            return "not answered yet"
        result = set(result)
        where = f"{what}, min_num_params {threshold}"
        if "" in result:
            return "not quite: the root is a unit in any case; leave it out of the set"
        if wrong := sorted(result - right):
            return f"not quite: {where}: {wrong[0]!r} is not a unit: {_why_not(model, wrong[0], threshold)}"
        if missing := sorted(right - result):
            return f"not quite: {where}: {missing[0]!r} is a unit, but missing from your set"
    return "right"


def _why_not(model, name, threshold) -> str:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return "the model has no module of that name"
    if isinstance(module, nn.ModuleList):
        return "a ModuleList has no forward"
    if _numel(module) < threshold:
        return f"it has {_numel(module)} parameters"
    inside = [unit for unit in reference_units(model, threshold) if unit.startswith(name + ".")]
    return f"{', '.join(sorted(inside))} inside it are units, and the remaining parameters are fewer"


EXERCISES = {
    "05.0": Do(
        title="units that fit a budget",
        level=2,
        minutes=8,
        judge=judge_wrap,
        hint="What is still large once each block is its own unit? The root takes all parameters that are in no other unit.\n"
        "Module names: model.embedding, model.blocks (a list), model.norm, model.head.",
        solution="""
def wrap(model, shard):
    shard(model.embedding)
    for block in model.blocks:
        shard(block)
    # Backward starts with the head: left gathered after forward, it needs no second all-gather. The norm comes right before it.
    shard([model.norm, model.head], reshard_after_forward=False)
    shard(model)  # last: it has no parameters left, but it makes the model the root
""",
    ),
    "05.1": Predict(
        title="FSDP1 by size, 8 images",
        level=2,
        minutes=6,
        answer=_lowered_by_size("fsdp1", 8),
        unit="MiB",
        slips={
            "the size is right; the sign says that units by size help here": -_lowered_by_size("fsdp1", 8),
            "in one unit, compare the two moments: at 8 images the packing is higher than relu2": _RELU2_AT_8
            - _peak("fsdp1", "size", 8),
            "activations and temporary belong to 8 images, a quarter of the table's": _peak("fsdp1", "unit", 8)
            - _peak("fsdp1", "size", 32),
            "that is FSDP2": _lowered_by_size("fsdp2", 8),
        },
        tolerance=0.03,  # from numbers with two decimals
        hint="In one unit, take the higher of two moments: relu2's, and the packing at the end of backward, when\n"
        "parameters are gathered, and all gradients are there twice. By size, the peak stays in fc1's backward.",
        solution=f"""
# One unit, at the end of backward: shards, optimizer state, gathered parameters, all gradients twice, and 8 images.
one_unit = 1.14 + 2.29 + 4.58 + 2 * 4.58 + 0.02
# By size, in fc1's backward: only activations and temporary depend on the batch.
fixed = {_SUM}
by_size = fixed + ({_AT_32["activations"] / MIB:.2f} + {_AT_32["temporary"] / MIB:.2f}) * 8 / 32
answer = one_unit - by_size  # negative: by size, fc1's gradient is packed while activations are still there
""",
    ),
    "05.2": Do(
        title="a policy of your own",
        level=3,
        minutes=15,
        judge=judge_units,
        hint="Write an inner function that visits a module and returns how many of its parameters are in units.\n"
        "It visits the children first, adds up their results, and compares the remaining parameters with the threshold.",
        solution='''
from torch import nn

def units_by_size(model, min_num_params):
    units = set()

    def taken(module, name):
        """Return how many parameters of the module are in units, after visiting it and everything inside."""
        held = sum(p.numel() for p in module.parameters())
        if held < min_num_params:
            return 0  # no module inside can be large enough either
        inside = sum(taken(child, f"{name}.{part}" if name else part) for part, child in module.named_children())
        if name and not isinstance(module, nn.ModuleList) and held - inside >= min_num_params:
            units.add(name)
            return held
        return inside  # the remaining parameters go to a unit further out

    taken(model, "")
    return units
''',
    ),
}
