"""Exercises of 03_sharding_from_scratch.ipynb."""

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
    """A rank's own gradient: its numbers and those of the other ranks sum up without rounding."""
    return torch.arange(1.0, LENGTH + 1, dtype=torch.float64) * 10**rank * WORLD


def _noted(calls, name, call, *arguments, **options):
    calls.append(name)
    return call(*arguments, **options)


def _reduced(me, reduce):
    """(what the function returned; the bytes of its storage; the collectives that bring more than a slice)"""
    calls = []
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "gather", "broadcast"):
        setattr(dist, name, partial(_noted, calls, name, getattr(dist, name)))
    given = reduce(_gradient(me.rank), me.rank, me.world_size)
    if not isinstance(given, torch.Tensor):
        return given, 0, []
    return given.clone(), given.untyped_storage().nbytes(), calls


def _judge_reduce(reduce) -> str:
    found = on_ranks(_reduced, reduce, ranks=WORLD)
    if all(unanswered(given) for given, *_ in found):
        return "not answered yet"
    own = [_gradient(rank) for rank in range(WORLD)]
    mean = sum(own) / WORLD
    for rank, (given, *_) in enumerate(found):
        right = mean.chunk(WORLD)[rank]
        if not isinstance(given, torch.Tensor):
            return f"not quite: rank {rank} returns a {type(given).__name__}; a tensor is wanted, this rank's slice"
        if given.shape != right.shape or not torch.allclose(given, right):
            said = f"rank {rank} returns {given.tolist()} instead of {right.tolist()}"
            return f"not quite: {said}{_what_it_is(given, rank, own, mean)}"
    for rank, (given, size, calls) in enumerate(found):
        if calls:
            return (
                f"not quite: the slices are right, but {calls[0]} sends more than a reduce-scatter, by the law: each rank "
                "needs its slice of the mean, and no more"
            )
        if size > given.nbytes:
            return (
                f"not quite: the slices are right, but rank {rank}'s is a view: its storage has {size} bytes for "
                f"{given.nbytes}, and keeps the whole vector alive"
            )
    return "right"


def _what_it_is(given, rank, own, mean) -> str:
    known = {
        "the sum over the ranks; a mean is wanted": (mean * WORLD).chunk(WORLD)[rank],
        "the mean, divided by the ranks once more": (mean / WORLD).chunk(WORLD)[rank],
        "its slice of its own gradient: no rank has heard of another's": own[rank].chunk(WORLD)[rank],
        "the mean of the whole gradient; this rank needs its slice": mean,
        "the sum of the whole gradient; this rank needs its slice, and the mean": mean * WORLD,
    }
    known |= {f"rank {other}'s slice": mean.chunk(WORLD)[other] for other in range(WORLD) if other != rank}
    for words, tensor in known.items():
        if given.shape == tensor.shape and torch.allclose(given, tensor):
            return f": that is {words}"
    return ""


def reference_pieces(sizes, rank: int, world: int) -> list[tuple[int, int]]:
    """By looking at each place of the vector, one after the other."""
    owners = [(number, place) for number, size in enumerate(sizes) for place in range(size)]
    share = -(-len(owners) // world)
    mine = owners[rank * share : (rank + 1) * share]
    places = [[place for number, place in mine if number == wanted] for wanted in range(len(sizes))]
    return [(min(some), max(some) + 1) if some else (0, 0) for some in places]


def _judge_pieces(pieces) -> str:
    for sizes, world in (((4, 4), 2), ((5, 1, 8, 3), 4), ((2, 3), 4), ((10,), 3), ((1, 1, 1), 3), ((7, 2), 1)):
        given = [pieces(list(sizes), rank, world) for rank in range(world)]
        if all(map(unanswered, given)):
            return "not answered yet"
        for rank, found in enumerate(given):
            about = f"parameters of {', '.join(map(str, sizes))} numbers on {world} ranks: rank {rank}"
            if not isinstance(found, (list, tuple)) or len(found) != len(sizes):
                return f"not quite: {about} returns {found!r}; {len(sizes)} pairs are wanted, one for each parameter"
            for number, (one, right) in enumerate(zip(found, reference_pieces(sizes, rank, world), strict=True)):
                if not isinstance(one, (list, tuple)) or tuple(one) != right:
                    why = _why_not(one, right, sizes, number, rank, world)
                    return f"not quite: {about} says {one!r} of parameter {number}, and should say {right}{why}"
    return "right"


def _why_not(given, right, sizes, number: int, rank: int, world: int) -> str:
    """What went wrong, where it can be told."""
    begin, share = sum(sizes[:number]), -(-sum(sizes) // world)
    start, stop = right
    if not isinstance(given, (list, tuple)):
        return ": a pair is wanted"
    if right == (0, 0):
        return ": nothing of it lies in this shard"
    if tuple(given) == (begin + start, begin + stop):
        return ": counted from the parameter's own beginning, not from the vector's"
    if tuple(given) == (begin + start - rank * share, begin + stop - rank * share):
        return ": counted from the parameter's own beginning, not from the shard's"
    short = sum(sizes) // world  # as if there were no padding
    if short < share and tuple(given) == (max(rank * short - begin, 0), min((rank + 1) * short - begin, sizes[number])):
        return f": with the padding, every shard has {share} numbers"
    return ": stop is one past the last" if tuple(given) == (start, stop - 1) else ""


def _judge_clip(clip) -> str:
    cases = (
        ([[3.0, 0.0], [0.0, 4.0], [12.0, 0.0]], 6.5),  # the norm is 13: halve
        ([[0.3, 0.0], [0.0, 0.4]], 1.0),  # the norm is 0.5: leave as it is
        ([[3.0, 4.0], [0.0, 0.0]], 1.0),  # a shard of zeros: divide by no shard's own norm
    )
    for numbers, max_norm in cases:
        shards = [torch.tensor(each, dtype=torch.float64) for each in numbers]
        given = clip([each.clone() for each in shards], max_norm)
        if unanswered(given):
            return "not answered yet"
        norm = torch.cat(shards).norm()
        own = [each * (max_norm / each.norm()).clamp(max=1) for each in shards]
        whole = [each * (max_norm / norm).clamp(max=1) for each in shards]
        summed = [each * min(1.0, max_norm / sum(s.norm() for s in shards).item()) for each in shards]
        if len(given) != len(shards):
            return f"not quite: {len(shards)} shards went in, {len(given)} came out"
        if _same(given, whole):
            continue
        if norm <= max_norm and not _same(given, shards):
            return f"not quite: the norm is {norm:.3g}, not more than {max_norm}: nothing is to be changed"
        if _same(given, shards):
            return f"not quite: the norm is {norm:.3g}, more than {max_norm}, but nothing was scaled"
        if _same(given, own):
            return "not quite: each rank scaled by the norm of its own shard: the gradient's direction has changed"
        if _same(given, summed):
            return "not quite: norms do not add up; their squares do"
        first = next(rank for rank, (a, b) in enumerate(zip(given, whole, strict=True)) if not _same([a], [b]))
        got = [round(x, 4) for x in given[first].tolist()]
        return f"not quite: rank {first} has {got}, and should have {[round(x, 4) for x in whole[first].tolist()]}"
    return "right"


def _same(given, wanted) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-12) for a, b in zip(given, wanted, strict=True))


EXERCISES = {
    "03.0": Do(
        title="reduce a gradient to a shard",
        level=2,
        minutes=6,
        judge=_judge_reduce,
        hint="dist.reduce_scatter_tensor(output, input) writes into `output` this rank's slice of the sum: make room for it\n"
        "first. Then divide: a sum is not yet a mean.",
        solution="""
import torch.distributed as dist

def shard_of_mean(gradient, rank, world):
    own = gradient.new_empty(len(gradient) // world)  # room for the slice, and for nothing else
    dist.reduce_scatter_tensor(own, gradient)
    return own.div_(world)  # the sum over the ranks becomes their mean
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
            "one shard is missing: the gradient's, or one of Adam's two moments": (4 * WHOLE + 8 * SHARE) / MIB,
            "you left out Adam's moments": (4 * WHOLE + 4 * SHARE) / MIB,
            "float32 is 4 bytes per number, and you counted 8": (8 * WHOLE + 24 * SHARE) / MIB,
        },
        hint="Three terms. Which of them has every rank whole at stage 2, and which of them divided by 8?",
        solution="""
n = 1_199_882 + 6  # padded to a multiple of 8
parameters = 4 * n  # whole on every rank: stage 2 leaves them alone
gradients = 4 * n // 8  # what the reduce-scatter left here
moments = 2 * 4 * n // 8 + 4  # two of Adam's for each parameter that this rank owns, and the counter
answer = (parameters + gradients + moments) / 2**20
""",
    ),
    "03.2": Do(
        title="whose numbers are these",
        level=2,
        minutes=8,
        judge=_judge_pieces,
        hint="With the padding, how long is a shard? In the vector, rank's goes from rank * share to (rank + 1) * share, and each\n"
        "parameter begins where the one before it ends. Where do the two overlap?",
        solution="""
def pieces(sizes, rank, world):
    share = -(-sum(sizes) // world)  # of the padded vector: rounded up
    found, begin = [], 0  # where this parameter begins in the vector
    for size in sizes:
        start, stop = max(rank * share - begin, 0), min((rank + 1) * share - begin, size)
        found.append((start, stop) if start < stop else (0, 0))
        begin += size
    return found
""",
    ),
    "03.3": Do(
        title="clip what is sharded",
        level=3,
        minutes=12,
        judge=_judge_clip,
        hint="The square of the whole norm is the sum of the squares of all elements: each rank can add up its own.",
        solution="""
def clip(shards, max_norm):
    squares = [shard.square().sum() for shard in shards]  # each rank its own
    norm = sum(squares).sqrt()  # on real ranks: all-reduce one number, then the root
    factor = (max_norm / norm).clamp(max=1.0)  # the same on every rank, so that the direction stays
    return [shard * factor for shard in shards]
""",
    ),
}
