# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 03, sharding from scratch."""

import gc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from labkit.teaching.exercises import Do, on_ranks, unanswered

WORLD = 3  # the model of 03.0 has 34 parameters: two elements of padding


class _Gather(torch.autograd.Function):
    """The chapter's ``Gather``: all-gather in forward, reduce-scatter in backward. It notes what it gathers."""

    @staticmethod
    def forward(ctx, shard, unit):
        ctx.unit = unit
        full = shard.new_empty(len(shard) * WORLD)
        dist.all_gather_into_tensor(full, shard.detach())
        unit.gathered.append(StorageWeakRef(full.untyped_storage()))
        return full

    @staticmethod
    def backward(ctx, gradient):
        ctx.unit.full = None
        own = gradient.new_empty(len(gradient) // WORLD)
        dist.reduce_scatter_tensor(own, gradient)
        return own.div_(WORLD), None


class _Unit(nn.Module):
    """The chapter's ``Unit``, whose forward is the learner's function. It notes what it gathers."""

    def __init__(self, module, rank: int):
        super().__init__()
        self.module, self.full, self.gathered = module, None, []
        self.places = [(m, name) for m in module.modules() for name, _ in m.named_parameters(recurse=False)]
        self.shapes = [p.shape for p in module.parameters()]
        self.shard = nn.Parameter(_flat(module.parameters()).chunk(WORLD)[rank].clone())
        for m, name in self.places:
            delattr(m, name)

    def gather(self):
        return _Gather.apply(self.shard, self)

    def compute(self, full, *inputs):
        for (m, name), view in zip(self.places, _views(full, self.shapes), strict=True):
            setattr(m, name, view)
        output = self.module(*inputs)
        for m, name in self.places:
            delattr(m, name)
        return output

    def alive(self) -> int:
        """Count the gathered vectors that something still refers to."""
        for _ in range(20):
            gc.collect()
            count = sum(not reference.expired() for reference in self.gathered)
            if not count:
                break
            time.sleep(0.05)  # gloo's threads free their buffers a moment after a collective
        return count


def _flat(tensors):
    vector = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return nn.functional.pad(vector, (0, -len(vector) % WORLD))


def _views(vector, shapes):
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(vector[: sum(sizes)].split(sizes), shapes, strict=True)]


def _model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).double()


def _findings(me, run_unit) -> list[str] | None:
    """Train two steps with the learner's function and with a replica; return what is wrong on this rank, worst first.

    Returns:
        None if there is no answer yet. No finding ends the function early: the other ranks wait in collectives.
    """
    unit, replica = _Unit(_model(), me.rank), _model()
    findings = []
    for step in (1, 2):
        generator = torch.Generator().manual_seed(10 * step + me.rank)
        images = torch.randn(2, 5, dtype=torch.float64, generator=generator, requires_grad=True)
        unit.gathered.clear()
        output, expected = run_unit(unit, images), replica(images)
        if unanswered(output):
            return None
        if not isinstance(output, torch.Tensor):
            return [f"it returns a {type(output).__name__}; it must return the output of unit.compute"]
        if output.shape != expected.shape or not torch.allclose(output, expected):
            findings.append(f"step {step}: the output differs from a replicated module's")
        if unit.alive():
            findings.append(
                "after forward, the whole vector is still alive: autograd, a function or an attribute refers to it"
            )
        output.square().sum().backward()
        count = len(unit.gathered)
        if count != 2:
            findings.append(
                f"a step gathers {count} time{'s' * (count != 1)}; it takes 2, one in forward, one in backward"
            )
        gradients = torch.autograd.grad(expected.square().sum(), list(replica.parameters()))
        findings += _step(unit, replica, gradients, me.rank, step)
        if unit.alive():
            findings.append("after backward, a whole vector is still alive: only unit.full may refer to the second one")
    return findings


def _step(unit, replica, gradients, rank: int, step: int) -> list[str]:
    """Compare the shard's gradient with its slice of the replicas' mean, then update both from the latter."""
    mean = _flat(gradients)
    dist.all_reduce(mean)
    mean /= WORLD
    own = mean.chunk(WORLD)[rank]
    findings = []
    if unit.shard.grad is None:
        findings.append("the shard gets no gradient: autograd must see the first unit.gather()")
    elif not torch.allclose(unit.shard.grad, own):
        first = int((~torch.isclose(unit.shard.grad, own)).nonzero()[0])
        numbers = f"{unit.shard.grad[first]:.4g} instead of {own[first]:.4g}"
        findings.append(f"step {step}: element {first} of the shard's gradient is {numbers}")
    unit.shard.grad = None
    with torch.no_grad():
        unit.shard -= 0.1 * own
        for p, gradient in zip(replica.parameters(), _views(mean, unit.shapes), strict=True):
            p -= 0.1 * gradient
    return findings


def _judge_unit(run_unit) -> str:
    results = on_ranks(_findings, run_unit, ranks=WORLD)
    if all(findings is None for findings in results):
        return "not answered yet"
    for rank, findings in enumerate(results):
        if findings:
            return f"not quite: on rank {rank}, {findings[0]}"
    return "right"


def reference_pieces(sizes, rank: int, world: int) -> list[tuple[int, int]]:
    """Find the pieces as 03.1 asks for them, by visiting each position of the vector."""
    owners = [(number, index) for number, size in enumerate(sizes) for index in range(size)]
    share = -(-len(owners) // world)
    mine = owners[rank * share : (rank + 1) * share]
    indices = [[index for number, index in mine if number == wanted] for wanted in range(len(sizes))]
    return [(min(some), max(some) + 1) if some else (0, 0) for some in indices]


def _judge_pieces(pieces) -> str:
    for sizes, world in (((4, 4), 2), ((5, 1, 8, 3), 4), ((2, 3), 4), ((10,), 3), ((1, 1, 1), 3), ((7, 2), 1)):
        results = [pieces(list(sizes), rank, world) for rank in range(world)]
        if all(map(unanswered, results)):
            return "not answered yet"
        for rank, pairs in enumerate(results):
            about = f"parameters of {', '.join(map(str, sizes))} elements on {world} ranks: rank {rank}"
            if not isinstance(pairs, (list, tuple)) or len(pairs) != len(sizes):
                return (
                    f"not quite: {about} returns {pairs!r}; it must return {len(sizes)} pairs, one for each parameter"
                )
            for number, (one, right) in enumerate(zip(pairs, reference_pieces(sizes, rank, world), strict=True)):
                if not isinstance(one, (list, tuple)) or tuple(one) != right:
                    why = _why_not(one, right, sizes, number, rank, world)
                    return f"not quite: {about} returns {one!r} for parameter {number} instead of {right}{why}"
    return "right"


def _why_not(result, right, sizes, number: int, rank: int, world: int) -> str:
    """Describe the mistake if it is a known one, or return ""."""
    begin, share = sum(sizes[:number]), -(-sum(sizes) // world)
    start, stop = right
    if not isinstance(result, (list, tuple)):
        return ": not a pair"
    if right == (0, 0):
        return ": no element of it is in this shard"
    if tuple(result) == (begin + start, begin + stop):
        return ": count from the start of the parameter, not of the vector"
    if tuple(result) == (begin + start - rank * share, begin + stop - rank * share):
        return ": count from the start of the parameter, not of the shard"
    short = sum(sizes) // world  # as if there were no padding
    if short < share and tuple(result) == (
        max(rank * short - begin, 0),
        min((rank + 1) * short - begin, sizes[number]),
    ):
        return f": with the padding, every shard has {share} elements"
    return ": stop is one past the last" if tuple(result) == (start, stop - 1) else ""


def _judge_clip(clip) -> str:
    cases = (
        ([[3.0, 0.0], [0.0, 4.0], [12.0, 0.0]], 6.5),  # the norm is 13: halve
        ([[0.3, 0.0], [0.0, 0.4]], 1.0),  # the norm is 0.5: change nothing
        ([[3.0, 4.0], [0.0, 0.0]], 1.0),  # a shard of zeros: dividing by its norm gives NaN
    )
    for numbers, max_norm in cases:
        shards = [torch.tensor(each, dtype=torch.float64) for each in numbers]
        result = clip([each.clone() for each in shards], max_norm)
        if unanswered(result):
            return "not answered yet"
        norm = torch.cat(shards).norm()
        own = [each * (max_norm / each.norm()).clamp(max=1) for each in shards]
        whole = [each * (max_norm / norm).clamp(max=1) for each in shards]
        summed = [each * min(1.0, max_norm / sum(s.norm() for s in shards).item()) for each in shards]
        if len(result) != len(shards):
            return f"not quite: {len(shards)} shards went in, {len(result)} came out"
        if _same(result, whole):
            continue
        if norm <= max_norm and not _same(result, shards):
            return f"not quite: the norm is {norm:.3g}, not more than {max_norm}: change nothing"
        if _same(result, shards):
            return f"not quite: the norm is {norm:.3g}, more than {max_norm}, but nothing was scaled"
        if _same(result, own):
            return "not quite: each rank scaled by the norm of its own shard, which changes the gradient's direction"
        if _same(result, summed):
            return "not quite: norms do not add up; their squares do"
        first = next(rank for rank, (a, b) in enumerate(zip(result, whole, strict=True)) if not _same([a], [b]))
        got = [round(x, 4) for x in result[first].tolist()]
        return f"not quite: rank {first} has {got} instead of {[round(x, 4) for x in whole[first].tolist()]}"
    return "right"


def _same(result, wanted) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-12) for a, b in zip(result, wanted, strict=True))


EXERCISES = {
    "03.0": Do(
        title="a unit's forward",
        level=3,
        minutes=20,
        judge=_judge_unit,
        hint="A view shares its storage with the whole vector: compare tensor.untyped_storage().data_ptr() with the vector's.\n"
        "Take the vector's address before you define pack: a pack that refers to the vector keeps it alive.\n"
        "pack returns an activation itself, and (size, stride, offset) for a view. unpack sees which of the two it gets;\n"
        "for a view it gathers if unit.full is None, and returns unit.full.as_strided(size, stride, offset).",
        solution="""
import torch

def run_unit(unit, *inputs):
    full = unit.gather()
    address = full.untyped_storage().data_ptr()  # a number; a reference to ``full`` would keep it alive

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() != address:
            return tensor  # an activation
        return tensor.size(), tensor.stride(), tensor.storage_offset()  # a view: note where it lies

    def unpack(saved):
        if isinstance(saved, torch.Tensor):
            return saved
        if unit.full is None:
            unit.full = unit.gather()  # for the first view of this backward; the others find it there
        return unit.full.as_strided(*saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return unit.compute(full, *inputs)  # then nothing refers to ``full`` any more: it is freed
""",
    ),
    "03.1": Do(
        title="which elements are these",
        level=2,
        minutes=8,
        judge=_judge_pieces,
        hint="How long is a shard, with the padding? In the vector, the shard of `rank` spans rank * share to (rank + 1) * share,\n"
        "and each parameter starts where the previous one ends. Where do the two overlap?",
        solution="""
def pieces(sizes, rank, world):
    share = -(-sum(sizes) // world)  # elements per shard of the padded vector: rounded up
    ranges, begin = [], 0  # begin: start of this parameter in the vector
    for size in sizes:
        start, stop = max(rank * share - begin, 0), min((rank + 1) * share - begin, size)
        ranges.append((start, stop) if start < stop else (0, 0))
        begin += size
    return ranges
""",
    ),
    "03.2": Do(
        title="clip what is sharded",
        level=3,
        minutes=10,
        judge=_judge_clip,
        hint="The square of the whole norm is the sum of the squares of all elements: each rank can sum over its own shard.",
        solution="""
def clip(shards, max_norm):
    squares = [shard.square().sum() for shard in shards]  # on each rank
    norm = sum(squares).sqrt()  # with real ranks: all-reduce the sum of squares, then take the root
    factor = (max_norm / norm).clamp(max=1.0)  # the same on every rank, which preserves the direction
    return [shard * factor for shard in shards]
""",
    ),
}
