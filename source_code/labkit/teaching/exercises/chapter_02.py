"""The exercises of chapter 02, collectives."""

import torch
import torch.distributed as dist

from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

WORLD = 4
FACTORS = (1, 10, 100, 1000)  # rank r's numbers are chunk + 1 times 10^r: each digit of a sum is a rank


def _reduced(me, function):
    """(the first number of what the function returned, or what it is instead; the numbers in each chunk it sent)"""
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

    given = function(me, chunks, shift)
    if isinstance(given, torch.Tensor) and given.shape == (2,):
        return int(given[0]), sent
    return ("nothing" if unanswered(given) else f"a {type(given).__name__}, not a chunk"), sent


def _judge_ring(function) -> str:
    found = on_ranks(_reduced, function, ranks=WORLD)
    if all(given == "nothing" for given, _ in found):
        return "not answered yet"
    for rank, (given, sent) in enumerate(found):
        if given != (rank + 1) * sum(FACTORS):
            wanted = (rank + 1) * sum(FACTORS)
            return f"not quite: rank {rank} returns {given} instead of {wanted}{_cause(given, rank, len(sent))}"
    if any(size > 2 for _, sent in found for size in sent):
        return "not quite: the sums are right, but more than a chunk is sent at a time"
    if not found[0][1]:
        return "not quite: the sums are right, but nothing went through shift: the ring is what is asked"
    if len(found[0][1]) != WORLD - 1:
        return f"not quite: the sums are right, but each rank sends {len(found[0][1])} chunks; {WORLD - 1} are enough"
    return "right"


def _cause(given, rank: int, steps: int) -> str:
    if isinstance(given, str):
        return ""
    if steps < WORLD - 1:
        return f" after {steps} steps: too few for every rank's number to have come by"
    if given == (rank + 1) * FACTORS[rank]:
        return ": that is its own number, to which nothing has been added. Which chunk is the last to arrive at a rank?"
    if given % sum(FACTORS) == 0 and 0 < given // sum(FACTORS) <= WORLD:
        return (
            f": that is the sum of chunk {given // sum(FACTORS) - 1}, complete, but on the wrong rank: begin elsewhere"
        )
    if any(given == (chunk + 1) * factor for chunk in range(WORLD) for factor in FACTORS):
        return ": that is one rank's own number: what arrives has to be added"
    digits = [given // (rank + 1) // factor % 10 for factor in FACTORS]
    if max(digits) < 3 and sum(d * f for d, f in zip(digits, FACTORS, strict=True)) == given // (rank + 1):
        for other, times in enumerate(digits):
            if times != 1:
                return f": rank {other}'s number is in it {times} times"
    return ": numbers of different chunks are mixed: which chunk arrives at this step?"


def _all_gather(tensors):
    """What the learner's function is given: an all-gather as strict as the real one."""
    if len({len(tensor) for tensor in tensors}) > 1:
        raise ValueError(
            f"all_gather wants tensors of equal length and got {', '.join(str(len(t)) for t in tensors)}: pad them first"
        )
    return torch.cat(tensors)


SENT = 1000.0  # is added to each number on its way: so one sees which have gone through the collective


def _judge_uneven(answer) -> str:
    # Every length is a case of its own: even, FSDP2's (the last ones short or empty), and any
    for lengths in ((2, 2), (3, 3, 3, 1), (3, 3, 2, 0), (1, 4, 2)):
        whole = torch.arange(1.0, sum(lengths) + 1)
        parts = whole.split(lengths)
        calls = []

        def all_gather(tensors, calls=calls):
            calls.append(len(tensors))
            return _all_gather(tensors) + SENT

        given = answer([part.clone() for part in parts], all_gather)
        if unanswered(given):
            return "not answered yet"
        where = f"parts of {', '.join(map(str, lengths))} numbers"
        if not isinstance(given, torch.Tensor):
            return f"not quite: a tensor is wanted, not a {type(given).__name__}"
        if calls != [len(parts)]:
            return f"not quite: {where}: all_gather was called {len(calls)} times; it is to be called once, with a tensor of every rank"
        if len(given) > len(whole):
            return (
                f"not quite: {where}: {len(given)} numbers came back instead of {len(whole)}: the padding is still in"
            )
        if len(given) < len(whole):
            return f"not quite: {where}: {len(given)} numbers came back instead of {len(whole)}: something real was cut off"
        if torch.equal(given, whole):
            return f"not quite: {where}: the result is made of the parts, not of what all_gather returned"
        given = given - SENT
        if not torch.equal(given, whole):
            first = int((given != whole).nonzero()[0])
            cause = "a padding zero from the middle stayed in" if given[first] == 0 else "the order is not the ranks'"
            return f"not quite: {where}: position {first} holds {given[first]:g} instead of {whole[first]:g}: {cause}"
    return "right"


GRADIENT = 50_000_000 * 2 / 1e6  # MB
LATENCY, BANDWIDTH = 40e-6, 5e9

EXERCISES = {
    "02.0": Do(
        title="The ring's first half",
        level=3,
        minutes=12,
        judge=_judge_ring,
        hint="Follow the picture: chunk 0 starts on rank 1. So which chunk does rank r send first? At each step the number of\n"
        "the chunk that a rank sends is one less than at the step before, modulo W, and what arrives is that of its left\n"
        "neighbour: one less again.",
        solution="""
def ring_reduce_scatter(me, chunks, shift):
    W = me.world_size
    for step in range(W - 1):  # rank r begins by sending chunk r − 1, and ends with the sum of chunk r
        mine, theirs = (me.rank - 1 - step) % W, (me.rank - 2 - step) % W
        chunks[theirs] = chunks[theirs] + shift(chunks[mine])
    return chunks[me.rank]
""",
    ),
    "02.1": Predict(
        title="An all-reduce in bf16",
        level=1,
        minutes=3,
        answer=2 * 7 / 8 * GRADIENT,
        unit="MB",
        slips={
            "that is both halves in full, but a rank keeps one of the eight chunks at home in each": 2 * GRADIENT,
            "that is one half only; an all-reduce is a reduce-scatter and an all-gather": 7 / 8 * GRADIENT,
            "that is with 4 bytes per number; bf16 has 2": 2 * 7 / 8 * 2 * GRADIENT,
            "that is everybody posting the whole gradient to everybody; the ring sends chunks": 7 * GRADIENT,
            "that is the size of the gradient; how often does a chunk leave a rank?": GRADIENT,
        },
        hint="How large is the gradient in MB? Cut it into 8 chunks. How many steps has a half, and what is sent in each?",
        solution="""
# 8 chunks; 7 steps in each of the two halves; one chunk a step.
gradient = 50_000_000 * 2 / 1e6  # MB
chunk = gradient / 8
answer = 2 * 7 * chunk
""",
    ),
    "02.2": Predict(
        title="When bytes outweigh latency",
        level=2,
        minutes=5,
        answer=9 * LATENCY * BANDWIDTH / 1e6,
        unit="MB",
        slips={
            "there latency and bytes take the same time: only half goes into bytes": LATENCY * BANDWIDTH / 1e6,
            "there bytes take ten times the latency: that is 10 parts of 11, not 9 of 10": 10
            * LATENCY
            * BANDWIDTH
            / 1e6,
            "that is in bytes; the answer is wanted in MB": 9 * LATENCY * BANDWIDTH,
            "that is the other way round: nine tenths of the time are latency": LATENCY * BANDWIDTH / 9 / 1e6,
        },
        hint="If nine tenths of the time are bytes, one tenth is latency. How long is the whole, then?",
        solution="""
# Latency is the tenth part, so the bytes take nine times as long as the latency.
latency, bandwidth = 40e-6, 5e9  # seconds, bytes per second
answer = 9 * latency * bandwidth / 1e6  # MB
# A unit much smaller than this wastes the link. That is one reason why FSDP gathers many parameters in one call.
""",
    ),
    "02.3": Do(
        title="Gather uneven parts",
        level=2,
        minutes=10,
        judge=_judge_uneven,
        hint="Pad every part with zeros to the longest. Afterwards each rank's piece begins at rank × longest; of it, "
        "keep what the part's own length says. Cutting at the end only is not enough.",
        solution="""
import torch


def answer(parts, all_gather):
    longest = max(len(part) for part in parts)
    padded = [torch.nn.functional.pad(part, (0, longest - len(part))) for part in parts]
    gathered = all_gather(padded)
    # The padding of a rank lies behind its own part, in the middle of the whole: cut piece by piece.
    pieces = gathered.split(longest)
    return torch.cat([piece[: len(part)] for piece, part in zip(pieces, parts)])
""",
    ),
    "02.4": Predict(
        title="Traffic with gradient accumulation",
        level=3,
        minutes=10,
        answer=(4 * 2 + 1) / 2,
        unit="times DDP's traffic",
        slips={
            "that is one micro-batch per step; FSDP gathers anew for each of the four": 3 / 2,
            "that reduce-scatters in each of the four; it has been told to wait for the last": 4 * 3 / 2,
            "you gathered once a micro-batch; the parameters are freed after forward and gathered again": (4 + 1) / 2,
            "that has DDP all-reduce in each of the four; under no_sync() it does once": (4 * 2 + 1) / (4 * 2),
            "that forgets the reduce-scatter of the last micro-batch": 4 * 2 / 2,
        },
        hint="Count halves, each (W−1)/W of the model. DDP: one all-reduce. FSDP: how many all-gathers does a micro-batch "
        "need, and how many reduce-scatters do the four have together?",
        solution="""
# Halves, each of (W−1)/W × M.
ddp = 2  # one all-reduce, in the last micro-batch
fsdp = 4 * 2 + 1  # forward and backward gather in each of four; one reduce-scatter
answer = fsdp / ddp
# Accumulation saves DDP three quarters of its traffic (8 halves become 2) and FSDP one quarter (12 become 9).
# Where memory allows, not freeing after forward (reshard_after_forward=False) halves the gathers.
""",
    ),
}
