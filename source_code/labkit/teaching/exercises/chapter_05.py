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

MIB, GIB = 2**20, 2**30
SHAPE = GPTShape(
    num_hidden_layers=8,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=384,
    vocab_size=4096,
)
WORLD, TOKENS, BUDGET = 4, 16, 15 * MIB  # bytes on a rank at the peak, tensors only
BLOCK, OTHERS, LAYERS, BF16 = 202_383_360, 262_148_096, 32, 2


class _TooLate(Exception):
    """A module is sharded after one around it, whose unit has taken its parameters."""


def _cut(wrap, model, mesh) -> dict[str, tuple[int, bool]]:
    """{names of a unit's modules: (bytes of the parameters that it took, whether they are kept after forward)}."""
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
    """What a rank has of a GPT that ``wrap`` has cut: its units, what is in none, the bytes at the peak of a step."""
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
    for _ in range(3):  # the first makes the meter acquainted; of the others the lower counts, as in every record
        text = torch.randint(SHAPE.vocab_size, (1, TOKENS + 1))
        with meter:
            nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(trace.peak(meter.timeline())[1])
    return {"units": units, "peak": min(peaks[1:])}


def judge_wrap(wrap) -> str:
    found = on_ranks(_trained, wrap, ranks=WORLD)[0]
    if "late" in found:
        return f"not quite: {found['late']}, whose unit has its parameters already: inner modules first, the root last"
    units = found["units"]
    if not units:
        return "not answered yet"
    if found.get("loose"):
        return (
            f"not quite: {found['loose'][0]} is in no unit: nobody shards it, and nobody averages its gradient; "
            "shard(model) makes the root of what is left"
        )
    if "model" not in units:
        return (
            "not quite: every parameter is in a unit, but the model is none: without a root each unit is one, and keeps "
            "its parameters after forward; end with shard(model)"
        )
    if found["peak"] > BUDGET:
        much = f"the peak is {found['peak'] / MIB:.1f} MiB, the budget {BUDGET / MIB:.0f}"
        return f"not quite: {much}: {_too_large(units)}"
    return "right"


def _too_large(units: dict[str, tuple[int, bool]]) -> str:
    if list(units) == ["model"]:
        return "all is one unit, and one unit is whole at once"
    root = units.pop("model")[0]
    name = max(units, key=units.get)
    kept = sum(size for size, stays in units.values() if stays)
    if kept > units[name][0]:
        return f"{kept / MIB:.1f} MiB of parameters are kept after forward, and whole together at its end"
    if 2 * root > units[name][0]:
        return f"the root has {root / MIB:.1f} MiB of parameters, whole all through backward: what is in it?"
    return f"the unit {name} has {units[name][0] / MIB:.1f} MiB of parameters, whole while any part of it computes"


def _peak(strategy, wrap, batch):
    return predict.total(predict.peak(strategy, wrap, 4, batch)[1]) / MIB


_AT_32 = predict.peak("fsdp1", "size", 4, 32)[1]  # the terms that 05.2's table shows
_WITH_IMAGES = ("activations", "temporary")
_SUM = " + ".join(f"{size:_}" for name, size in _AT_32.items() if name not in _WITH_IMAGES)
_SUM += "  # " + " + ".join(name for name in _AT_32 if name not in _WITH_IMAGES)
_IMAGES = " + ".join(f"{_AT_32[name]:_}" for name in _WITH_IMAGES)


def _forgotten(category):
    """The answer of 05.2 without one category."""
    terms = predict.peak("fsdp1", "size", 4, 8)[1]
    return (predict.total(terms) - terms[category]) / MIB


def _numel(module) -> int:
    return sum(p.numel() for p in module.parameters())


def reference_units(model, min_num_params) -> set:
    """What 05.3 asks for."""
    found = set()

    def taken(module, name):
        if _numel(module) < min_num_params:
            return 0
        inside = sum(taken(child, f"{name}.{part}" if name else part) for part, child in module.named_children())
        if not name or isinstance(module, nn.ModuleList) or _numel(module) - inside < min_num_params:
            return inside
        found.add(name)
        return _numel(module)

    taken(model, "")
    return found


def _cases():
    """(what it is, model, min_num_params)"""
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
        given, right = units_by_size(model, threshold), reference_units(model, threshold)
        if unanswered(given):
            return "not answered yet"
        given = set(given)
        where = f"{what}, min_num_params {threshold}"
        if "" in given:
            return "not quite: the root is a unit in any case; leave it out of the set"
        if wrong := sorted(given - right):
            return f"not quite: {where}: {wrong[0]!r} is none: {_why_not(model, wrong[0], threshold)}"
        if missing := sorted(right - given):
            return f"not quite: {where}: {missing[0]!r} is a unit, and yours leaves it out"
    return "right"


def _why_not(model, name, threshold) -> str:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return "the model has no module of that name"
    if isinstance(module, nn.ModuleList):
        return "a ModuleList has no forward"
    if _numel(module) < threshold:
        return f"it holds {_numel(module)}"
    inside = [unit for unit in reference_units(model, threshold) if unit.startswith(name + ".")]
    return f"{', '.join(sorted(inside))} inside it has taken its share, and what is left is less"


EXERCISES = {
    "05.0": Do(
        title="units that fit a budget",
        level=2,
        minutes=8,
        judge=judge_wrap,
        hint="What is still large once each block is a unit of its own? The root gets what no call before has taken.\n"
        "A module's name: model.embedding, model.blocks (a list), model.norm, model.head.",
        solution="""
def wrap(model, shard):
    shard(model.embedding)
    for block in model.blocks:
        shard(block)
    # Backward begins with the head: kept after forward, it need not be gathered again. The norm is used beside it.
    shard([model.norm, model.head], reshard_after_forward=False)
    shard(model)  # last: nothing is left for it, but it makes the model the root
""",
    ),
    "05.1": Predict(
        title="gathered parameters in the middle of backward",
        level=1,
        minutes=4,
        answer=BF16 * (2 * BLOCK + OTHERS) / GIB,
        unit="GiB",
        slips={
            "the next block is fetched while this one computes: two are whole": BF16 * (BLOCK + OTHERS) / GIB,
            "the root's parameters stay gathered from forward to the end of backward": BF16 * 2 * BLOCK / GIB,
            "that is one block alone; the next is fetched already, and the root is there": BF16 * BLOCK / GIB,
            "that is the whole model: what one unit in all would hold": BF16 * (LAYERS * BLOCK + OTHERS) / GIB,
            "a number in bf16 is 2 bytes, not 4": 4 * (2 * BLOCK + OTHERS) / GIB,
        },
        hint="Three things are whole: the block that computes, the one fetched ahead, and the root. 2 bytes per number.",
        solution="""
# Backward needs this block and fetches the next one meanwhile; the root was never freed. With embedding and head
# in units of their own the last term would be gone here: more than a block's worth.
block, others, bf16 = 202_383_360, 262_148_096, 2
answer = bf16 * (2 * block + others) / 2**30
""",
    ),
    "05.2": Predict(
        title="FSDP1's peak at batch 8",
        level=2,
        minutes=6,
        answer=_peak("fsdp1", "size", 8),
        unit="MiB",
        slips={
            "that is FSDP2's peak: FSDP1 holds fc1's gradient twice, as computed and packed": _peak("fsdp2", "size", 8),
            "that is the peak in one unit; with fc1 apart it is another moment": _peak("fsdp1", "unit", 8),
            "that is batch 32": _peak("fsdp1", "size", 32),
            "that is a quarter of batch 32's: shards and whole units do not shrink with the batch": _peak(
                "fsdp1", "size", 32
            )
            / 4,
            "the parameters gathered are left out": _forgotten("all-gather"),
            "the packed gradients are left out": _forgotten("reduce-scatter"),
        },
        tolerance=0.02,  # on GPUs the table has their kernels' terms, which lead to 1 % less
        hint="At the backward of fc1: parameters, optimizer state, all-gather and reduce-scatter stay as they are;\n"
        "activations and temporary are a quarter, to within a few bytes. Is fc1's the highest moment at batch 8 too?",
        solution=f"""
# fc1's backward is the highest moment, at batch 8 too. In bytes, from batch 32's terms: those with an image
# in them fall to a quarter, the others stay.
stay = {_SUM}
with_images = {_IMAGES}  # activations + temporary, at batch 32
answer = (stay + with_images / 4) / 2**20
""",
    ),
    "05.3": Do(
        title="a policy of your own",
        level=3,
        minutes=15,
        judge=judge_units,
        hint="Write an inner function that visits a module and returns how many of its parameters units have taken.\n"
        "It asks its children first, adds up what they took, and compares what is left with the threshold.",
        solution='''
from torch import nn

def units_by_size(model, min_num_params):
    found = set()

    def taken(module, name):
        """How many parameters of the module are in units, after it and all within has been asked."""
        held = sum(p.numel() for p in module.parameters())
        if held < min_num_params:
            return 0  # nothing inside can be large enough either
        inside = sum(taken(child, f"{name}.{part}" if name else part) for part, child in module.named_children())
        if name and not isinstance(module, nn.ModuleList) and held - inside >= min_num_params:
            found.add(name)
            return held
        return inside  # what is left goes to a unit further out

    taken(model, "")
    return found
''',
    ),
}
