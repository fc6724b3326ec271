# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 18, optimizers that need whole matrices."""

import torch
from planner.models import networks
from planner.models.shapes import GPT_SHAPES
from planner.parallel import muon
from planner.step.plan import Plan

from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

RANKS = 4
SHAPES = [(8, 3), (4, 6), (12, 2), (8, 5)]  # matrix n belongs to rank n; 4 ranks share their rows evenly


def _matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def _shards(rank: int) -> list[torch.Tensor]:
    return [matrix.chunk(RANKS)[rank].contiguous() for matrix in _matrices()]


def _exchanged(me, to_owner):
    """Return (the result, the numbers of elements received by all-gathers and by all-to-alls)."""
    import torch.distributed as dist

    received = {"all_gather": 0, "all_to_all_single": 0}

    def counting(name, function):
        def counted(output, *arguments, **options):
            outputs = output if isinstance(output, list) else [output]
            received["all_gather" if "gather" in name else name] += sum(each.numel() for each in outputs)
            return function(output, *arguments, **options)

        return counted

    for name in ("all_gather", "all_gather_into_tensor", "all_to_all_single"):
        setattr(dist, name, counting(name, getattr(dist, name)))
    return to_owner(_shards(me.rank), [torch.Size(shape) for shape in SHAPES], me), received


def judge_to_owner(to_owner) -> str:
    results = on_ranks(_exchanged, to_owner, ranks=RANKS)
    for rank, (result, _) in enumerate(results):
        if unanswered(result):
            return "not answered yet"
        matrix, about = _matrices()[rank], f"rank {rank}, which owns matrix {rank}"
        if not isinstance(result, torch.Tensor) or result.shape != matrix.shape:
            shape = tuple(getattr(result, "shape", ()))
            return f"not quite: {about}, returns the shape {shape} instead of {tuple(matrix.shape)}"
        if not torch.equal(result, matrix):
            return f"not quite: {about}, has other elements: in which order do the ranks' rows arrive?"
    if any(received["all_gather"] for _, received in results):
        return "not quite: the matrices are right, but an all-gather brings each one to every rank; one rank needs it"
    return "right"


COSTS = [  # (shapes, ranks); the first case is easy to check by hand
    ([(4, 4), (8, 8), (4, 4), (8, 8)], 2),
    ([(64, 64), (256, 64), (32, 64), (64, 256)] * 3, 4),
    ([(16, 16)] * 5, 4),
    ([(8, 8), (64, 8), (8, 64), (16, 16), (8, 8), (32, 32)], 3),
]


def _seconds(found: list[list[int]], shapes) -> int:
    """Return what the ranks wait for: in each round, its costliest matrix."""
    return sum(max(muon.newton_schulz_flops(shapes[index]) for index in members) for members in found)


def judge_rounds(rounds) -> str:
    for shapes, ranks in COSTS:
        found = rounds(list(shapes), ranks)
        if unanswered(found):
            return "not answered yet"
        about = f"shapes {shapes} on {ranks} ranks: {found}"
        if sorted(index for members in found for index in members) != list(range(len(shapes))):
            return f"not quite: {about}: each matrix's index, from 0, must be in exactly one round"
        if max(map(len, found)) > ranks:
            return f"not quite: {about}: a round has at most one matrix for each of the {ranks} ranks"
        least, taken = _seconds(muon.rounds(shapes, ranks), shapes), _seconds(found, shapes)
        if taken > least:
            return f"not quite: {about}: the ranks wait for {taken:,} operations, and {least:,} are enough"
    return "right"


def _plan(ranks: int) -> Plan:
    network = networks.gpt(GPT_SHAPES["llama3-8b"], 1, 8)
    return Plan(network, strategy="fsdp2", ranks=ranks, precision="bf16", optimizer="muon")


def _average_flops(ranks: int) -> float:
    """Return the operations of Newton–Schulz on Llama 3 8B, divided by the number of ranks."""
    return sum(map(muon.newton_schulz_flops, muon.matrices(_plan(ranks)))) / ranks


BUSIEST = {ranks: muon.step_flops(_plan(ranks)) for ranks in (64, 256)}
COUNT = len(muon.matrices(_plan(64)))

EXERCISES = {
    "18.0": Do(
        title="all rows of a matrix go to its owner",
        level=2,
        minutes=12,
        judge=judge_to_owner,
        hint="dist.all_to_all_single(received, sent, received_splits, sent_splits) sends a flat tensor in consecutive parts,\n"
        "part n to rank n. You send your rows of matrix n to rank n. How many elements of your own matrix has each rank?",
        solution="""
import torch
import torch.distributed as dist

def to_owner(shards, shapes, me):
    mine = shapes[me.rank]
    received = shards[0].new_empty(mine)
    sent = torch.cat([shard.flatten() for shard in shards])
    # Each rank has equally many rows of my matrix; what I send differs from matrix to matrix.
    from_each = [mine.numel() // me.world_size] * me.world_size
    to_each = [shard.numel() for shard in shards]
    dist.all_to_all_single(received.view(-1), sent, from_each, to_each)
    return received  # rank 0's rows arrive first, so they are in order
""",
    ),
    "18.1": Do(
        title="which matrices share a round",
        level=2,
        minutes=8,
        judge=judge_rounds,
        hint="All ranks wait for the costliest matrix of a round. So a cheap matrix next to an expensive one costs nothing,\n"
        "and an expensive one alone in a round of cheap ones costs most. min(shape) and max(shape) decide the cost.",
        solution="""
def cost(shape):  # of Newton-Schulz, up to a factor: A = X Xᵀ and a product with X, and A A
    return 2 * min(shape) ** 2 * max(shape) + min(shape) ** 3

def rounds(shapes, ranks):
    # Alike with alike: then each round waits for its costliest matrix, and hardly longer than for the others.
    order = sorted(range(len(shapes)), key=lambda index: -cost(shapes[index]))
    return [order[begin : begin + ranks] for begin in range(0, len(order), ranks)]
""",
    ),
    "18.2": Predict(
        title="four times as many ranks, and how many times fewer operations?",
        level=2,
        minutes=8,
        answer=BUSIEST[64] / BUSIEST[256],
        unit="times",
        slips={
            "that would be so if all rounds took equally long: with costly matrices first, the last rounds are cheap": 4.0,
            f"{COUNT} matrices on {COUNT} owners would take a {COUNT}th each if all of them cost the same": COUNT / 64,
            "on 64 ranks, too, the busiest rank computes more than a 64th": _average_flops(64) / BUSIEST[256],
        },
        hint="The 96 matrices of the feed-forward network cost most, then 64 of 4096 × 4096, then 64 of 1024 × 4096.\n"
        "Fill rounds of 64 in this order, and add up the costliest of each round. On 256 ranks there is one round.",
        solution="""
def cost(short, long):
    return 2 * short**2 * long + short**3

feed_forward, query, key = cost(4096, 14336), cost(4096, 4096), cost(1024, 4096)
# 64 ranks: 64 of the 96 costliest; the other 32 with 32 queries and outputs; 32 of these with 32 keys and values; the rest.
# 256 ranks: one round, with all 224; 32 ranks own none.
answer = (feed_forward + feed_forward + query + key) / feed_forward
""",
    ),
}
