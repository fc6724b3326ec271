"""Exercises of 03_sharding_from_scratch.ipynb."""

import torch
from planner import predict

from labkit.teaching.exercises import Do, Predict, unanswered

MIB = 2**20
N = predict.numel(predict.SHAPES)
WHOLE = N + -N % 8  # with padding, for 8 ranks
SHARE = WHOLE // 8


def _judge_shard(shard) -> str:
    for length, world in ((8, 4), (10, 4), (5, 4), (7, 2), (3, 4)):
        flat = torch.arange(1.0, length + 1)
        given = [shard(flat.clone(), rank, world) for rank in range(world)]
        if all(map(unanswered, given)):
            return "not answered yet"
        case = f"a vector of {length} on {world} ranks"
        if not all(isinstance(part, torch.Tensor) and part.dim() == 1 for part in given):
            return f"not quite: {case}: a 1-D tensor is wanted from every rank"
        size = -(-length // world)
        sizes = [len(part) for part in given]
        if len(set(sizes)) > 1:
            return f"not quite: {case}: the shards have lengths {sizes}: collectives need equal ones, so pad the vector"
        if sizes[0] * world < length:
            return f"not quite: {case}: {sizes[0] * world} numbers in all: the end of the vector is lost"
        if sizes[0] != size:
            return f"not quite: {case}: shards of {sizes[0]}, where {size} would do"
        whole = torch.cat([flat, flat.new_zeros(size * world - length)])
        for rank, part in enumerate(given):
            right = whole[rank * size : (rank + 1) * size]
            if not torch.equal(part, right):
                return f"not quite: {case}: rank {rank} has {part.tolist()}, and should have {right.tolist()}"
            if part.untyped_storage().nbytes() > part.nbytes:
                return (
                    f"not quite: the numbers are right, but the shard is a view: its storage has "
                    f"{part.untyped_storage().nbytes()} bytes, and keeps the whole vector alive"
                )
    return "right"


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
            "float32 is 4 bytes a number, and you counted 8": (8 * WHOLE + 24 * SHARE) / MIB,
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
        title="cut a shard",
        level=2,
        minutes=8,
        judge=_judge_shard,
        hint="Pad first: `-len(flat) % world` zeros are missing. Then chunk. Then ask what your slice's storage holds.",
        solution="""
def shard(flat, rank, world):
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % world))  # equal parts: what the collectives need
    return padded.chunk(world)[rank].clone()  # a copy: a view would keep the whole vector alive
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
