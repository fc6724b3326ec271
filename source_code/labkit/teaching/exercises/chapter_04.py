"""Exercises of chapter 04, FSDP in one unit."""

from math import ceil

import torch
from planner import predict

from labkit.teaching.exercises import Do, Predict, unanswered

MIB = 2**20
NUMBERS = predict.numel(predict.SHAPES)
SHARD = 4 * ceil(NUMBERS / 8)


def judge_rows_of(rows_of) -> str:
    for rows, world_size in ((8, 4), (10, 4), (5, 4), (2, 3)):
        chunks = torch.arange(rows).chunk(world_size)  # how a DTensor is cut
        for rank in range(world_size):
            given = rows_of(rank, world_size, rows)
            if unanswered(given):
                return "not answered yet"
            right = len(chunks[rank]) if rank < len(chunks) else 0
            first = min(rank * len(chunks[0]), rows)
            where = f"{rows} rows on {world_size} ranks: rank {rank} gets rows {first} to {first + right}"
            if given[1] - given[0] != right:
                return f"not quite: {where}, that is {right}, and you give it {given[1] - given[0]}"
            if right and tuple(given) != (first, first + right):
                return f"not quite: {where}, not {given[0]} to {given[1]}"
    return "right"


def judge_flat_shard(flat_shard) -> str:
    for shapes, world_size in (([(4, 2), (4,)], 4), ([(3, 3), (3,), (2, 3)], 4), ([(5,)], 3)):
        tensors = [
            torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) + 10 * i for i, shape in enumerate(shapes)
        ]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        size = ceil(len(flat) / world_size)
        padded = torch.cat([flat, torch.zeros(size * world_size - len(flat))])
        for rank in range(world_size):
            given, right = flat_shard(tensors, rank, world_size), padded[rank * size : (rank + 1) * size]
            if unanswered(given):
                return "not answered yet"
            where = f"{len(flat)} numbers on {world_size} ranks, rank {rank}"
            if given.dim() != 1:
                return f"not quite: {where}: a tensor with one dimension is wanted, yours has {given.dim()}"
            if len(given) != size:
                return (
                    f"not quite: {where}: every rank holds {size} numbers, padding included, and yours has {len(given)}"
                )
            if not torch.equal(given, right):
                return f"not quite: {where}: it holds {right.tolist()}, and yours {given.tolist()}"
    return "right"


EXERCISES = {
    "04.1": Predict(
        title="what persists on 8 ranks with Adam",
        level=1,
        minutes=3,
        answer=3 * SHARD / MIB,
        unit="MiB",
        slips={
            "that is the parameters alone; Adam's two numbers a parameter persist too": SHARD / MIB,
            "Adam keeps two numbers for each parameter, not one": 2 * SHARD / MIB,
            "that has a gradient in it, and gradients are gone between steps": 4 * SHARD / MIB,
            "the parameters are sharded too, not the optimizer state alone": (4 * NUMBERS + 2 * SHARD) / MIB,
            "that is what DDP holds; each rank has an eighth of it": 3 * 4 * NUMBERS / MIB,
            "those are MB (1000²); MiB are 1024²": 3 * SHARD / 1e6,
        },
        hint="Three numbers persist for each parameter. How many parameters does one of 8 ranks hold, rounded up?",
        solution="""
# One rank's slice of the flat parameter: 1,199,882 / 8, rounded up. It persists three times over, the
# parameter and Adam's two moments, 4 bytes each. Gradients are made in backward and go at zero_grad().
from math import ceil

shard = ceil(1_199_882 / 8)
answer = 3 * 4 * shard / 2**20
""",
    ),
    "04.2": Do(
        title="the rows that FSDP2 gives to a rank",
        level=2,
        minutes=5,
        judge=judge_rows_of,
        hint="Every rank but the last ones gets the same number of rows: rows / world_size, rounded up.",
        solution="""
# All parts are of one size, rounded up, until the rows run out. The last ranks may get fewer, or none:
# 5 rows on 4 ranks are 2, 2, 1 and 0. min() keeps an empty part inside the tensor.
from math import ceil


def rows_of(rank, world_size, rows):
    size = ceil(rows / world_size)
    return min(rank * size, rows), min((rank + 1) * size, rows)
""",
    ),
    "04.3": Do(
        title="FSDP1's shard of a flat parameter",
        level=2,
        minutes=5,
        judge=judge_flat_shard,
        hint="torch.cat of the flattened tensors; torch.nn.functional.pad to a multiple of world_size; then a slice.",
        solution="""
# One long tensor, a few zeros so that it divides evenly, equal parts. Unlike FSDP2's, a part may begin
# in the middle of a row of one parameter and end in the middle of another parameter.
import torch
import torch.nn.functional as F


def flat_shard(tensors, rank, world_size):
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    flat = F.pad(flat, (0, -len(flat) % world_size))
    return flat.chunk(world_size)[rank]
""",
    ),
}
