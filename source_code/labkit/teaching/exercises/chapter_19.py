# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 19, mixtures of experts."""

import logging
import math
from itertools import permutations

import torch
import torch.distributed as dist

from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

RANKS, OWN, WIDTH = 4, 2, 3  # ranks, experts of each, elements of a row


def _routing(rank: int) -> torch.Tensor:
    """Return the rows of a rank for each of the 8 experts; some have none, and no rank has as many as another."""
    return torch.tensor([[3, 0, 1, 2, 0, 5, 1, 1], [0, 0, 4, 1, 2, 2, 0, 3], [1, 1, 1, 0, 0, 0, 6, 2], [2] * 8][rank])


def _rows(rank: int) -> list[torch.Tensor]:
    """Return a rank's rows of each expert: their first element is 100 × expert + 10 × rank, plus 1 for each row."""
    counts = _routing(rank).tolist()
    first = [torch.arange(n) + 100.0 * expert + 10 * rank for expert, n in enumerate(counts)]
    return [values.view(-1, 1).repeat(1, WIDTH).double() for values in first]


def _exchange(rows, sends, receives):
    """Exchange rows, unless two ranks disagree, at which gloo would end the process.

    Raises:
        ValueError: they do, on all ranks.
    """
    sizes = [None] * RANKS
    dist.all_gather_object(sizes, (list(sends), list(receives), len(rows)))
    for source, (to_each, _, count) in enumerate(sizes):
        if sum(to_each) != count:
            raise ValueError(f"rank {source} has {count} rows, and sends {sum(to_each)}")
        for rank, (_, from_each, _) in enumerate(sizes):
            if to_each[rank] != from_each[source]:
                raise ValueError(
                    f"rank {source} sends {to_each[rank]} rows to rank {rank}, which expects {from_each[source]}"
                )
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receives, sends)
    return received


def _dispatched(me, dispatch):
    """Return (rows, counts, whether the way back is right) as ``dispatch`` gives them."""
    rows = torch.cat(_rows(me.rank))
    found = dispatch(rows, _routing(me.rank), _exchange, me)
    if unanswered(found):
        return None
    received, counts, (order, sends, receives) = found
    try:
        back = _exchange(received[torch.as_tensor(order).argsort()], receives, sends)
    except ValueError:
        return received, counts, False
    return received, counts, torch.equal(back, rows)


def judge_dispatch(dispatch) -> str:
    results = on_ranks(_dispatched, dispatch, ranks=RANKS)
    for rank, found in enumerate(results):
        if found is None:
            return "not answered yet"
        received, counts, returned = found
        mine = range(rank * OWN, (rank + 1) * OWN)
        expected = torch.cat([_rows(source)[expert] for expert in mine for source in range(RANKS)])
        about = f"rank {rank}, which has experts {mine[0]} and {mine[-1]}"
        if len(received) != len(expected):
            return f"not quite: {about}, gets {len(received)} rows instead of {len(expected)}"
        tokens = [int(sum(_routing(source)[expert] for source in range(RANKS))) for expert in mine]
        if torch.as_tensor(counts).tolist() != tokens:
            return f"not quite: {about}: its experts have {tokens} rows, not {torch.as_tensor(counts).tolist()}"
        if sorted(received[:, 0].tolist()) != sorted(expected[:, 0].tolist()):
            return f"not quite: {about}, gets rows of other experts"
        if (received[:, 0] // 100).tolist() != (expected[:, 0] // 100).tolist():
            return f"not quite: {about}: rows arrive by rank; all rows of the first expert must come first"
        if not returned:
            return f"not quite: {about}: order, sends and receives do not lead the outputs back to their rows"
    return "right"


# Which experts share a rank

TOKENS = [  # (tokens of each expert, ranks)
    ([900, 800, 100, 200], 2),
    ([512, 33, 480, 20, 256, 300, 190, 257], 4),
    ([700, 650, 90, 80, 60, 400, 30, 20], 2),
    ([1000, 10, 20, 30, 40, 50, 900, 60], 2),
]
SLACK = 1.05  # times the least possible


def _fullest(owners, tokens, ranks: int) -> int:
    loads = [0] * ranks
    for owner, count in zip(owners, tokens, strict=True):
        loads[owner] += count
    return max(loads)


def _least(tokens, ranks: int) -> int:
    """Return the rows of the fullest rank in the best placement: all are tried."""
    slots = [rank for rank in range(ranks) for _ in range(len(tokens) // ranks)]
    return min(_fullest(owners, tokens, ranks) for owners in set(permutations(slots)))


def judge_place(place) -> str:
    for tokens, ranks in TOKENS:
        owners = place(list(tokens), ranks)
        if unanswered(owners):
            return "not answered yet"
        about = f"tokens {tokens} on {ranks} ranks: {owners}"
        if len(owners) != len(tokens) or any(owner not in range(ranks) for owner in owners):
            return f"not quite: {about}: return one rank, from 0 to {ranks - 1}, for each expert"
        if len({list(owners).count(rank) for rank in range(ranks)}) > 1:
            return f"not quite: {about}: each rank must have equally many experts, as one parameter holds them"
        least, found = _least(tokens, ranks), _fullest(owners, tokens, ranks)
        if found > SLACK * least:
            return f"not quite: {about}: the fullest rank gets {found:,} rows, and {least:,} are possible"
    return "right"


# Clipping across two meshes

MAX_NORM = 0.5


def _gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 4, generator=generator, dtype=torch.float64) * scale for scale in (0.3, 1.0)]


def _clipped(me, clip):
    """Return (norm, gradients) of two parameters, one sharded over all ranks, one as experts are."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    # A DTensor of two dimensions is reduced along one after another; PyTorch 2.15 warns that this is slower than one.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dense = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_shard", "expert"))
    groups = []
    for gradient, mesh in zip(_gradients(1), (dense, experts), strict=True):
        placements = [Shard(0)] * mesh.ndim
        parameter = nn.Parameter(distribute_tensor(torch.zeros(8, 4, dtype=torch.float64), mesh, placements))
        parameter.grad = distribute_tensor(gradient, mesh, placements)
        groups.append([parameter])
    norm = clip(groups, MAX_NORM)
    if unanswered(norm):
        return None
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
    return norm.item(), [parameter.grad.full_tensor() for (parameter,) in groups]


def judge_clip(clip) -> str:
    gradients = _gradients(1)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
    for rank, found in enumerate(on_ranks(_clipped, clip, ranks=RANKS)):
        if found is None:
            return "not answered yet"
        own, clipped = found
        factors = [(a / b).mean().item() for a, b in zip(clipped, gradients, strict=True)]
        if not math.isclose(factors[0], factors[1], rel_tol=1e-6):
            return f"not quite: dense gradients are scaled by {factors[0]:.3f}, the experts' by {factors[1]:.3f}"
        if not math.isclose(own, norm, rel_tol=1e-6):
            return f"not quite: rank {rank} returns the norm {own:.4f}; that of all parameters is {norm:.4f}"
        if not math.isclose(factors[0], MAX_NORM / norm, rel_tol=1e-4):
            return f"not quite: the norm is right; gradients are scaled by {factors[0]:.3f}, not {MAX_NORM / norm:.3f}"
    return "right"


# From how many tokens on is dispatching more traffic than gathering?

QWEN = {"experts": 128, "top_k": 8, "size": 1536}  # Qwen3-235B-A22B: experts, those of a token, intermediate size


def break_even(gathered=2, reduced=4, exchanges=6, row=2, top_k=QWEN["top_k"]) -> float:
    """Return the tokens of a rank for which both ways send equally many bytes; the hidden size cancels.

    Args:
        gathered, reduced: bytes of an element, in each of two all-gathers, and in the reduce-scatter.
        exchanges: all-to-alls of a step.
        row: bytes of an element in an all-to-all.
        top_k: experts of a token.
    """
    return (2 * gathered + reduced) * QWEN["experts"] * 3 * QWEN["size"] / (exchanges * row * top_k)


EXERCISES = {
    "19.0": Do(
        title="tokens go to their experts",
        level=3,
        minutes=15,
        judge=judge_dispatch,
        hint="First exchange the counts: each rank sends every rank as many numbers as that rank has experts. Their sums,\n"
        "rank by rank, are the split sizes of the rows. Then give each received row the number of its expert\n"
        "(repeat_interleave), and sort by it (argsort(stable=True)).",
        solution="""
import torch

def dispatch(rows, counts, exchange, me):
    own = len(counts) // me.world_size  # experts of a rank
    equal = [own] * me.world_size
    arriving = exchange(counts, equal, equal).view(me.world_size, own)  # by rank, and by expert of mine
    sends = counts.view(me.world_size, own).sum(1).tolist()
    receives = arriving.sum(1).tolist()
    received = exchange(rows, sends, receives)
    expert = torch.arange(own).repeat(me.world_size).repeat_interleave(arriving.flatten())
    order = expert.argsort(stable=True)  # rows arrive by rank; my experts want them by expert
    return received[order], arriving.sum(0), (order, sends, receives)
""",
    ),
    "19.1": Do(
        title="which experts share a rank",
        level=2,
        minutes=10,
        judge=judge_place,
        hint="Begin with the fullest expert. Give each one to the rank with the fewest tokens so far that still has room.",
        solution="""
def place(tokens, ranks):
    owners, loads = [None] * len(tokens), [0] * ranks
    for expert in sorted(range(len(tokens)), key=lambda each: -tokens[each]):
        free = [rank for rank in range(ranks) if owners.count(rank) < len(tokens) // ranks]
        owners[expert] = min(free, key=loads.__getitem__)
        loads[owners[expert]] += tokens[expert]
    return owners
""",
    ),
    "19.2": Do(
        title="one norm across two meshes",
        level=2,
        minutes=10,
        judge=judge_clip,
        hint="torch.nn.utils has get_total_norm(tensors) and clip_grads_with_norm_(parameters, max_norm, norm).\n"
        "A DTensor norm's full_tensor() is the same on all ranks. How does a norm follow from the norms of its parts?",
        solution="""
import torch

def clip(groups, max_norm):
    norms = [torch.nn.utils.get_total_norm([parameter.grad for parameter in group]).full_tensor() for group in groups]
    norm = torch.linalg.vector_norm(torch.stack(norms))  # of plain tensors, which have no mesh
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm
""",
    ),
    "19.3": Predict(
        title="tokens from which dispatching sends more",
        level=2,
        minutes=8,
        answer=break_even(),
        unit="tokens",
        slips={
            "recomputation repeats dispatch and combine, too": break_even(exchanges=4),
            "gradients are reduced in fp32": break_even(reduced=2),
            "each token is sent to 8 experts": break_even(top_k=1),
            "rows travel in bf16": break_even(row=4),
        },
        tolerance=0.02,
        hint="Per block, FSDP gathers 128 experts twice and reduces their gradients once. Each has 3 matrices of the hidden size\n"
        "times 1,536. A row has hidden-size elements; how often is it sent in a step?",
        solution="""
# h: hidden size. Bytes per block; with W ranks, both ways send (W - 1) / W of them.
# FSDP:    128 experts * 3 * 1536 * h elements, gathered twice (2 bytes), reduced once (4 bytes)
# experts: tokens * 8 * h elements, 6 times (dispatch and combine: forward, recomputation, backward), 2 bytes each
answer = (2 * 2 + 4) * 128 * 3 * 1536 / (6 * 2 * 8)
""",
    ),
}
