# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 02, collectives."""

import torch
import torch.distributed as dist

from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

WORLD = 4
FACTORS = (1, 10, 100, 1000)  # rank r's elements are (chunk + 1) × 10^r, so that each digit of a sum belongs to a rank


def _reduced(me, function):
    """Run the learner's ring on this rank.

    Returns:
        (the first element of the result, or a description if it is no chunk; the number of elements of each send).
    """
    chunks = [torch.full((2,), (chunk + 1) * FACTORS[me.rank]) for chunk in range(WORLD)]
    sent = []

    def shift(outgoing):
        incoming = torch.empty_like(outgoing)
        right, left = (me.rank + 1) % WORLD, (me.rank - 1) % WORLD
        for request in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, outgoing.contiguous(), right), dist.P2POp(dist.irecv, incoming, left)]
        ):
            request.wait()
        sent.append(outgoing.numel())
        return incoming

    result = function(me, chunks, shift)
    if isinstance(result, torch.Tensor) and result.shape == (2,):
        return int(result[0]), sent
    return ("nothing" if unanswered(result) else f"a {type(result).__name__}, not a chunk"), sent


def _judge_ring(function) -> str:
    results = on_ranks(_reduced, function, ranks=WORLD)
    if all(result == "nothing" for result, _ in results):
        return "not answered yet"
    for rank, (result, sent) in enumerate(results):
        if result != (rank + 1) * sum(FACTORS):
            wanted = (rank + 1) * sum(FACTORS)
            return f"not quite: rank {rank} returns {result} instead of {wanted}{_cause(result, rank, len(sent))}"
    if any(size > 2 for _, sent in results for size in sent):
        return "not quite: the sums are right, but more than one chunk is sent at a time"
    if not results[0][1]:
        return "not quite: the sums are right, but nothing went through shift: send around the ring"
    if len(results[0][1]) != WORLD - 1:
        return f"not quite: the sums are right, but each rank sends {len(results[0][1])} chunks; {WORLD - 1} are enough"
    return "right"


def _cause(result, rank: int, steps: int) -> str:
    if isinstance(result, str):
        return ""
    if steps < WORLD - 1:
        return f" after {steps} steps: too few for every rank's contribution to arrive"
    if result == (rank + 1) * FACTORS[rank]:
        return (
            ": that is its own contribution, to which nothing was added. Which chunk is the last to arrive at a rank?"
        )
    if result % sum(FACTORS) == 0 and 0 < result // sum(FACTORS) <= WORLD:
        return f": that is the sum of chunk {result // sum(FACTORS) - 1}, complete, but on the wrong rank: start with another chunk"
    if any(result == (chunk + 1) * factor for chunk in range(WORLD) for factor in FACTORS):
        return ": that is one rank's contribution: add each chunk that arrives"
    digits = [result // (rank + 1) // factor % 10 for factor in FACTORS]
    if max(digits) < 3 and sum(d * f for d, f in zip(digits, FACTORS, strict=True)) == result // (rank + 1):
        for other, times in enumerate(digits):
            if times != 1:
                return f": rank {other}'s contribution is in it {times} times"
    return ": different chunks are mixed: which chunk arrives at this step?"


def _all_gather(tensors):
    """Concatenate tensors of equal length, as strict as the real all-gather; passed to the learner's function."""
    if len({len(tensor) for tensor in tensors}) > 1:
        raise ValueError(
            f"all_gather needs tensors of equal length but got {', '.join(str(len(t)) for t in tensors)}: pad them first"
        )
    return torch.cat(tensors)


SENT = 1000.0  # added to each element on the way, to see which went through the collective


def _judge_uneven(answer) -> str:
    # Three kinds of lengths: equal, FSDP2's (the last ones short or empty), and arbitrary
    for lengths in ((2, 2), (3, 3, 3, 1), (3, 3, 2, 0), (1, 4, 2)):
        whole = torch.arange(1.0, sum(lengths) + 1)
        parts = whole.split(lengths)
        calls = []

        def all_gather(tensors, calls=calls):
            calls.append(len(tensors))
            return _all_gather(tensors) + SENT

        result = answer([part.clone() for part in parts], all_gather)
        if unanswered(result):
            return "not answered yet"
        where = f"parts of {', '.join(map(str, lengths))} elements"
        if not isinstance(result, torch.Tensor):
            return f"not quite: the result must be a tensor, not a {type(result).__name__}"
        if calls != [len(parts)]:
            return (
                f"not quite: {where}: all_gather was called {len(calls)} times; call it once, with one tensor per rank"
            )
        if len(result) > len(whole):
            return (
                f"not quite: {where}: {len(result)} elements came back instead of {len(whole)}: the padding is still in"
            )
        if len(result) < len(whole):
            return (
                f"not quite: {where}: {len(result)} elements came back instead of {len(whole)}: real data was cut off"
            )
        if torch.equal(result, whole):
            return f"not quite: {where}: the result is made of the parts, not of the tensor that all_gather returned"
        result = result - SENT
        if not torch.equal(result, whole):
            first = int((result != whole).nonzero()[0])
            cause = "a padding zero from the middle stayed in" if result[first] == 0 else "the order is not the ranks'"
            return f"not quite: {where}: position {first} holds {result[first]:g} instead of {whole[first]:g}: {cause}"
    return "right"


LATENCY, BANDWIDTH = 40e-6, 5e9

EXERCISES = {
    "02.0": Do(
        title="The ring's first half",
        level=3,
        minutes=12,
        judge=_judge_ring,
        hint="Follow the picture: chunk 0 starts on rank 1. Which chunk does rank r send first, then? At each step, a rank sends\n"
        "the chunk whose number is one less than at the previous step, modulo W. It receives the chunk that its left\n"
        "neighbor sends: one less again.",
        solution="""
def ring_reduce_scatter(me, chunks, shift):
    W = me.world_size
    for step in range(W - 1):  # rank r first sends chunk r − 1, and ends with the sum of chunk r
        mine, theirs = (me.rank - 1 - step) % W, (me.rank - 2 - step) % W
        chunks[theirs] = chunks[theirs] + shift(chunks[mine])
    return chunks[me.rank]
""",
    ),
    "02.1": Predict(
        title="When bytes outweigh latency",
        level=2,
        minutes=5,
        answer=9 * LATENCY * BANDWIDTH / 1e6,
        unit="MB",
        slips={
            "at that size latency and transfer take the same time: only half of it is transfer": LATENCY
            * BANDWIDTH
            / 1e6,
            "at that size the transfer takes ten times the latency: 10 parts of 11, not 9 of 10": 10
            * LATENCY
            * BANDWIDTH
            / 1e6,
            "that is in bytes; the question is in MB": 9 * LATENCY * BANDWIDTH,
            "that is the other way round: nine tenths of the time is latency": LATENCY * BANDWIDTH / 9 / 1e6,
        },
        hint="If nine tenths of the time is transfer, one tenth is latency. How long is the total, then?",
        solution="""
# Latency is one tenth of the time, so the transfer takes nine times the latency.
latency, bandwidth = 40e-6, 5e9  # seconds, bytes per second
answer = 9 * latency * bandwidth / 1e6  # MB
# A unit much smaller than this wastes the link. That is one reason why FSDP gathers many parameters in one call.
""",
    ),
    "02.2": Do(
        title="Gather uneven parts",
        level=2,
        minutes=10,
        judge=_judge_uneven,
        hint="Pad every part with zeros to the longest. In the result, each rank's piece starts at rank × longest; keep "
        "as many elements of it as the part has. Cutting off only the end is not enough.",
        solution="""
import torch


def answer(parts, all_gather):
    longest = max(len(part) for part in parts)
    padded = [torch.nn.functional.pad(part, (0, longest - len(part))) for part in parts]
    gathered = all_gather(padded)
    # A rank's padding follows its own part, in the middle of the result: cut piece by piece.
    pieces = gathered.split(longest)
    return torch.cat([piece[: len(part)] for piece, part in zip(pieces, parts)])
""",
    ),
    "02.3": Predict(
        title="Traffic with gradient accumulation",
        level=3,
        minutes=10,
        answer=(4 * 2 + 1) / 2,
        unit="times DDP's traffic",
        slips={
            "that is one micro-batch per step; FSDP gathers again for each of the four": 3 / 2,
            "that reduce-scatters in each of the four; here it waits for the last": 4 * 3 / 2,
            "you gathered once per micro-batch; the parameters are freed after forward and gathered again": (4 + 1) / 2,
            "that has DDP all-reduce in each of the four; under no_sync() it does once": (4 * 2 + 1) / (4 * 2),
            "that forgets the reduce-scatter of the last micro-batch": 4 * 2 / 2,
        },
        hint="Count halves, each (W−1)/W of the model. DDP: one all-reduce. FSDP: how many all-gathers does a micro-batch "
        "need, and how many reduce-scatters do all four need?",
        solution="""
# In halves of an all-reduce, each (W−1)/W × M.
ddp = 2  # one all-reduce, in the last micro-batch
fsdp = 4 * 2 + 1  # forward and backward gather in each of four; one reduce-scatter
answer = fsdp / ddp
# Accumulation saves DDP three quarters of its traffic (8 halves become 2) and FSDP one quarter (12 become 9).
# Where memory allows, not freeing after forward (reshard_after_forward=False) halves the gathers.
""",
    ),
}
