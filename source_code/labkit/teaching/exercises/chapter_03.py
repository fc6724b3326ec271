"""Exercises of chapter 03, sharding from scratch."""

from functools import partial

import torch
import torch.distributed as dist
from planner import predict

from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

MIB = 2**20
N = predict.numel(predict.SHAPES)
WHOLE = N + -N % 8  # with padding, for 8 ranks
SHARE = WHOLE // 8

WORLD, LENGTH = 3, 6


def _gradient(rank: int):
    """Return a rank's gradient; the ranks' gradients add up without rounding."""
    return torch.arange(1.0, LENGTH + 1, dtype=torch.float64) * 10**rank * WORLD


def _noted(calls, name, call, *arguments, **options):
    calls.append(name)
    return call(*arguments, **options)


def _reduced(me, reduce):
    """Run the learner's reduction on this rank.

    Returns:
        (its result, the bytes of the result's storage, the collectives called that deliver more than a slice).
    """
    calls = []
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "gather", "broadcast"):
        setattr(dist, name, partial(_noted, calls, name, getattr(dist, name)))
    result = reduce(_gradient(me.rank), me.rank, me.world_size)
    if not isinstance(result, torch.Tensor):
        return result, 0, []
    return result.clone(), result.untyped_storage().nbytes(), calls


def _judge_reduce(reduce) -> str:
    results = on_ranks(_reduced, reduce, ranks=WORLD)
    if all(unanswered(result) for result, *_ in results):
        return "not answered yet"
    own = [_gradient(rank) for rank in range(WORLD)]
    mean = sum(own) / WORLD
    for rank, (result, *_) in enumerate(results):
        right = mean.chunk(WORLD)[rank]
        if not isinstance(result, torch.Tensor):
            return (
                f"not quite: rank {rank} returns a {type(result).__name__}; it must return a tensor, this rank's slice"
            )
        if result.shape != right.shape or not torch.allclose(result, right):
            difference = f"rank {rank} returns {result.tolist()} instead of {right.tolist()}"
            return f"not quite: {difference}{_describe(result, rank, own, mean)}"
    for rank, (result, size, calls) in enumerate(results):
        if calls:
            return (
                f"not quite: the slices are right, but {calls[0]} sends more bytes than a reduce-scatter: each rank "
                "needs only its slice of the mean"
            )
        if size > result.nbytes:
            return (
                f"not quite: the slices are right, but rank {rank}'s is a view of {result.nbytes} bytes: its "
                f"storage has {size}, and keeps the whole vector alive"
            )
    return "right"


def _describe(result, rank, own, mean) -> str:
    known = {
        "the sum over the ranks, not the mean": (mean * WORLD).chunk(WORLD)[rank],
        "the mean, divided by the number of ranks once more": (mean / WORLD).chunk(WORLD)[rank],
        "its slice of its own gradient: nothing was communicated": own[rank].chunk(WORLD)[rank],
        "the mean of the whole gradient; this rank needs its slice": mean,
        "the sum of the whole gradient; this rank needs its slice, and the mean": mean * WORLD,
    }
    known |= {f"rank {other}'s slice": mean.chunk(WORLD)[other] for other in range(WORLD) if other != rank}
    for words, tensor in known.items():
        if result.shape == tensor.shape and torch.allclose(result, tensor):
            return f": that is {words}"
    return ""


def reference_pieces(sizes, rank: int, world: int) -> list[tuple[int, int]]:
    """Find the pieces as 03.2 asks for them, by visiting each position of the vector."""
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
        title="reduce a gradient to a shard",
        level=2,
        minutes=6,
        judge=_judge_reduce,
        hint="dist.reduce_scatter_tensor(output, input) writes into `output` this rank's slice of the sum: allocate it\n"
        "first. Then divide the sum, to get the mean.",
        solution="""
import torch.distributed as dist

def shard_of_mean(gradient, rank, world):
    own = gradient.new_empty(len(gradient) // world)  # memory for the slice only
    dist.reduce_scatter_tensor(own, gradient)
    return own.div_(world)  # sum over the ranks → mean
""",
    ),
    "03.1": Predict(
        title="bytes at stage 2",
        level=1,
        minutes=4,
        answer=(4 * WHOLE + 4 * SHARE + 8 * SHARE + 4) / MIB,
        unit="MiB",
        slips={
            "that is stage 1: the gradients are sharded too": (8 * WHOLE + 8 * SHARE) / MIB,
            "that is stage 3: at stage 2 every rank keeps all parameters": 16 * SHARE / MIB,
            "that is stage 0, with nothing sharded": 16 * WHOLE / MIB,
            "one shard is missing: the gradients', or one of Adam's two moments": (4 * WHOLE + 8 * SHARE) / MIB,
            "you left out Adam's moments": (4 * WHOLE + 4 * SHARE) / MIB,
            "an element of float32 has 4 bytes, and you counted 8": (8 * WHOLE + 24 * SHARE) / MIB,
        },
        hint="There are three terms. Which of them does every rank hold in full at stage 2, and which are divided by 8?",
        solution="""
n = 1_199_882 + 6  # padded to a multiple of 8
parameters = 4 * n  # full size on every rank: stage 2 does not shard them
gradients = 4 * n // 8  # this rank's shard, after the reduce-scatter
moments = 2 * 4 * n // 8 + 4  # Adam's two for each parameter that this rank owns, and its step counter
answer = (parameters + gradients + moments) / 2**20
""",
    ),
    "03.2": Do(
        title="whose numbers are these",
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
    "03.3": Do(
        title="clip what is sharded",
        level=3,
        minutes=12,
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
