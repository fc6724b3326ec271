"""Exercises of chapter 05, choosing units."""

import torch
from planner import predict
from torch import nn

from labkit.teaching.exercises import Do, Predict, unanswered

MIB, GIB = 2**20, 2**30
BLOCK, OTHERS, LAYERS, BF16 = 202_383_360, 262_148_096, 32, 2


def _peak(strategy, wrap, batch):
    return predict.total(predict.peak(strategy, wrap, 4, batch)[1]) / MIB


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
        hint="Three things are whole: the block that computes, the one fetched ahead, and the root. 2 bytes a number.",
        solution="""
# Backward needs this block and fetches the next one meanwhile; the root was never freed.
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
        hint="At the backward of fc1: parameters, optimizer state, all-gather and reduce-scatter stay as they are;\n"
        "activations and temporary are a quarter. Is it the higher of the two moments at batch 8 too?",
        solution="""
# fc1's backward is the highest moment: its terms with an image in them fall to a quarter, the others stay.
from planner import predict
moments = predict.moments("fsdp1", "size", ranks=4, batch=8)
answer = max(predict.total(terms) for terms in moments.values()) / 2**20
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
