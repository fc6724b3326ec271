"""Exercises of chapter 13, ZeRO."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planner.models import networks
from planner.models.shapes import GPT_SHAPES
from torch import nn

from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

GIB = 2**30
RANKS = 8
LLAMA = networks.gpt(GPT_SHAPES["llama3-8b"], 1, 8).numel
MASTER, MOMENTS, HALF = 4, 8, 2  # bytes per parameter: fp32 copy, Adam's two moments in fp32, a bf16 element


def _persistent(whole: float, shared: float) -> float:
    """Return GiB per rank of Llama 3 8B, from the bytes per parameter that are replicated and that are sharded."""
    return LLAMA * (whole + shared / RANKS) / GIB


SIZES = [  # (elements of each tensor, ranks); the first case is easy to check by hand
    ([7, 5, 4, 3, 3], 2),
    ([4, 4, 4, 4], 4),
    ([9, 1, 1, 1, 1, 1, 1], 3),
    ([1, 1, 1, 6, 2], 2),
    ([5], 3),
]


def greedy(sizes: list[int], ranks: int) -> list[list[int]]:
    """Assign the largest tensor first, each to the rank with the fewest elements; break ties in order."""
    parts = [[] for _ in range(ranks)]
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        least = min(range(ranks), key=lambda rank: sum(sizes[n] for n in parts[rank]))
        parts[least].append(number)
    return parts


def judge_partition(partition) -> str:
    for sizes, ranks in SIZES:
        result = partition(list(sizes), ranks)
        if unanswered(result):
            return "not answered yet"
        about = f"sizes {sizes} on {ranks} ranks: {result}"
        if len(result) != ranks:
            return f"not quite: {about}: return a list for each rank, {ranks} of them"
        if sorted(n for part in result for n in part) != list(range(len(sizes))):
            return f"not quite: {about}: each tensor's index, from 0, must be in exactly one list"
        loads, right = (
            sorted(sum(sizes[n] for n in part) for part in parts) for parts in (result, greedy(sizes, ranks))
        )
        if loads != right:
            return f"not quite: {about}: the ranks have {loads} elements instead of {right}{_slip(loads, sizes, ranks)}"
    return "right"


def _slip(loads, sizes, ranks) -> str:
    in_order = [0] * ranks
    for size in sizes:
        in_order[in_order.index(min(in_order))] += size
    round_robin = [sum(sorted(sizes, reverse=True)[rank::ranks]) for rank in range(ranks)]
    if loads == sorted(in_order):
        return "; assign the largest tensor first, whatever its position in the model"
    if loads == sorted(round_robin):
        return "; assign each tensor to the rank with the fewest elements, not to the next rank"
    return ""


WORLD = 3


def _small():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def _hooked(me, to_owner):
    """Run backward with ``to_owner`` as a hook.

    Returns:
        (this rank's own gradients, the gradients after ``to_owner``, the number of calls of all_reduce).
    """
    images = torch.randn(5, 3, generator=torch.Generator().manual_seed(me.rank))
    plain, model = _small(), _small()
    F.mse_loss(plain(images), torch.zeros(5, 2)).backward()
    calls, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda *arguments, **options: calls.append(1) or all_reduce(*arguments, **options)
    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda p, n=number: to_owner(p, n % me.world_size, me))
    F.mse_loss(model(images), torch.zeros(5, 2)).backward()
    return [p.grad for p in plain.parameters()], [p.grad for p in model.parameters()], len(calls)


def judge_to_owner(to_owner) -> str:
    results = on_ranks(_hooked, to_owner, ranks=WORLD)
    if all(_same(own, left) for owns, lefts, _ in results for own, left in zip(owns, lefts, strict=True)):
        return "not answered yet"
    for number in range(len(results[0][0])):
        owner, owns = number % WORLD, [own[number] for own, _, _ in results]
        left, mean = results[owner][1][number], sum(owns) / WORLD
        about = f"gradient {number}, which rank {owner} owns"
        if left is None:
            return f"not quite: {about}: the owner has none; only the other ranks free it"
        if not torch.allclose(left, mean):
            what = "the sum, not the mean" if torch.allclose(left, sum(owns)) else "not the mean of all ranks'"
            return f"not quite: {about}: the owner has {what}"
        if holders := [rank for rank in range(WORLD) if rank != owner and results[rank][1][number] is not None]:
            return f"not quite: {about}: rank {holders[0]} still holds one, so it saves no memory"
    if results[0][2]:
        return "not quite: the gradients are right, but all_reduce brings the mean to every rank; one rank needs it"
    return "right"


def _same(own, left) -> bool:
    return left is not None and torch.equal(own, left)


EXERCISES = {
    "13.1": Predict(
        title="what ZeRO-2 keeps of Llama 3 8B",
        level=1,
        minutes=4,
        answer=_persistent(HALF, MASTER + MOMENTS),
        unit="GiB",
        slips={
            "stage 2 replicates the parameters on each rank; that is stage 3": _persistent(0, HALF + MASTER + MOMENTS),
            "the fp32 copy of the parameters is sharded as well, like the moments": _persistent(HALF + MASTER, MOMENTS),
            "there is a copy of the parameters in fp32, too: the optimizer updates that one": _persistent(
                HALF, MOMENTS
            ),
            "nothing is sharded there; the optimizer state is sharded in stage 2": _persistent(
                HALF + MASTER + MOMENTS, 0
            ),
            "that is in GB of 1000³; memory is reported in GiB": _persistent(HALF, MASTER + MOMENTS) * GIB / 1e9,
        },
        hint="Every rank holds all parameters in bf16. The optimizer state is in fp32, and sharded: how many bytes per parameter?",
        solution=f"""
# 2 bytes per parameter, replicated on each rank; 4 + 8 more (an fp32 copy, two moments), sharded over the ranks.
answer = {LLAMA:_} * (2 + 12 / {RANKS}) / 2**30
""",
    ),
    "13.2": Do(
        title="who steps which parameter",
        level=2,
        minutes=8,
        judge=judge_partition,
        hint="sorted(range(len(sizes)), key=lambda number: -sizes[number]) gives the indices, the largest tensor first.",
        solution="""
def partition(sizes, ranks):
    parts, loads = [[] for _ in range(ranks)], [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        least = loads.index(min(loads))
        parts[least].append(number)
        loads[least] += sizes[number]
    return parts
""",
    ),
    "13.3": Do(
        title="a gradient goes to its owner",
        level=3,
        minutes=10,
        judge=judge_to_owner,
        hint="dist.reduce(tensor, dst=…) sums on one rank. Every rank must call it, for the same gradients in the same order;\n"
        "gloo has no mean, so the owner divides.",
        solution="""
import torch.distributed as dist

def to_owner(parameter, owner, me):
    dist.reduce(parameter.grad, dst=owner)
    if me.rank == owner:
        parameter.grad /= me.world_size
    else:
        parameter.grad = None  # freed while backward still runs: this is what stage 2 adds to stage 1
""",
    ),
}
