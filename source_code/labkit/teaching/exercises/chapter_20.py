# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 20, long sequences."""

import math

import torch
from planner.models import flops, networks
from planner.models.shapes import GPT_SHAPES
from planner.ops.context import Context
from planner.step.plan import Plan

from labkit.measuring.differences import largest_difference
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

RANKS, TOKENS = 4, 8  # tokens of a rank
WITHIN = 1e-12  # fp64


def _heads(count: int) -> list[torch.Tensor]:
    """Return queries, keys, and values (1, count, all tokens, 4), the same wherever they are drawn."""
    draws = torch.Generator().manual_seed(1)
    return [torch.randn(1, count, RANKS * TOKENS, 4, dtype=torch.float64, generator=draws) for _ in range(3)]


def pass_on(tensor, me):
    """Send a tensor to the next rank, and return the previous rank's. Collective."""
    import torch.distributed as dist

    received, tensor = torch.empty_like(tensor), tensor.contiguous()
    following, previous = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
    pair = [dist.P2POp(dist.isend, tensor, following), dist.P2POp(dist.irecv, received, previous)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return received


def _ringed(me, ring_attention):
    """Return (this rank's output, how often it has passed something on)."""
    from labkit.training.attention_kernels import in_steps

    passed = []

    def counting(tensor, me):
        passed.append(tensor.numel())
        return pass_on(tensor, me)

    mine = [x.chunk(RANKS, 2)[me.rank].clone() for x in _heads(2)]
    return ring_attention(*mine, me, in_steps, counting), passed


def judge_ring(ring_attention) -> str:
    results = on_ranks(_ringed, ring_attention, ranks=RANKS)
    expected = torch.nn.functional.scaled_dot_product_attention(*_heads(2), is_causal=True).chunk(RANKS, 2)
    for rank, ((output, _), whole) in enumerate(zip(results, expected, strict=True)):
        if unanswered(output):
            return "not answered yet"
        if not isinstance(output, torch.Tensor) or output.shape != whole.shape:
            shape = tuple(getattr(output, "shape", ()))
            return f"not quite: rank {rank} returns the shape {shape} instead of {tuple(whole.shape)}"
        if not largest_difference(output, whole) < WITHIN:
            return f"not quite: rank {rank} has another output than one process: {_why(rank, results, expected)}"
    many = max(len(passed) for _, passed in results)
    if many > RANKS - 1:
        return f"not quite: the output is right, but keys and values are passed on {many} times; {RANKS - 1} are enough"
    return "right"


def _why(rank: int, results, expected) -> str:
    if rank == 0:
        return "it has the first tokens. May they attend to those of other ranks, and to all of their own?"
    return f"its queries attend to {rank + 1} ranks' keys. How much does each part count, and are all parts there?"


def _exchanged(me, to_heads):
    """Return (the result, the number of elements received by all-gathers)."""
    import torch.distributed as dist

    gathered = []

    def counting(function):
        def counted(output, *arguments, **options):
            gathered.append(1)
            return function(output, *arguments, **options)

        return counted

    for name in ("all_gather", "all_gather_into_tensor"):
        setattr(dist, name, counting(getattr(dist, name)))
    mine = _heads(8)[0].chunk(RANKS, 2)[me.rank].clone()
    return to_heads(mine, me), len(gathered)


def judge_to_heads(to_heads) -> str:
    results = on_ranks(_exchanged, to_heads, ranks=RANKS)
    for rank, ((result, _), whole) in enumerate(zip(results, _heads(8)[0].chunk(RANKS, 1), strict=True)):
        if unanswered(result):
            return "not answered yet"
        if not isinstance(result, torch.Tensor) or result.shape != whole.shape:
            shape = tuple(getattr(result, "shape", ()))
            return f"not quite: rank {rank} returns the shape {shape} instead of {tuple(whole.shape)}"
        if not torch.equal(result, whole):
            return f"not quite: rank {rank} has other elements: which part goes to which rank, and where do parts join?"
    if any(gathered for _, gathered in results):
        return "not quite: the heads are right, but an all-gather brings every rank all of them; it needs a quarter"
    return "right"


COUNTED = [8, 5, 0, 2]  # tokens of each rank that count


def _gradient(me, my_loss, counts):
    """Return (this rank's loss, what FSDP makes of the gradients, the gradient of the mean over all tokens that count)."""
    import torch.distributed as dist

    draws = torch.Generator().manual_seed(1)
    x = torch.randn(RANKS, TOKENS, 3, dtype=torch.float64, generator=draws)
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    counting = torch.arange(TOKENS) < torch.tensor(counts)[:, None]
    losses = (x @ weight).square()
    (whole,) = torch.autograd.grad(losses[counting].mean(), weight)
    loss = my_loss((x[me.rank] @ weight).square(), counting[me.rank], me)
    if unanswered(loss):
        return loss, None, whole
    (mine,) = torch.autograd.grad(loss, weight)
    dist.all_reduce(mine)
    return loss.item(), mine / me.world_size, whole


def judge_my_loss(my_loss) -> str:
    for counts in ([TOKENS] * RANKS, COUNTED):
        results = on_ranks(_gradient, my_loss, counts, ranks=RANKS)
        losses, (_, mine, whole) = [loss for loss, *_ in results], results[0]
        if any(map(unanswered, losses)):
            return "not answered yet"
        about = f"with {counts} counted tokens on the ranks"
        for rank, loss in enumerate(losses):
            if not math.isfinite(loss):
                return f"not quite: {about}, the loss of rank {rank} is {loss}"
        if not largest_difference(mine, whole, relative=True) < WITHIN:
            times = (mine.norm() / whole.norm()).item()
            return f"not quite: {about}, the averaged gradient differs: it is {times:.3g} times as long as it should be"
    return "right"


FLOPS, BANDWIDTH = 4e14, 50e9


def _tokens_to_hide(shape) -> float:
    """Return the tokens of a rank at which the next keys and values arrive as fast as attention to one rank's takes."""
    seq_len, size = 65_536, 8
    context = Context(size, "ring", "head-tail", rank=size - 1)
    plan = Plan(networks.gpt(shape, 1, seq_len, context=context), ranks=size, precision="bf16", on_gpu=True)
    attending = flops.attention_flops(plan)[0] / size / FLOPS
    arriving = plan.blueprint.context.packed_bytes(2)[0] / BANDWIDTH
    return seq_len / size * arriving / attending


HIDING = _tokens_to_hide(GPT_SHAPES["llama3-8b"])

EXERCISES = {
    "20.0": Do(
        title="ring attention",
        level=3,
        minutes=15,
        judge=judge_ring,
        hint="Begin with your own keys, causally. After n exchanges you hold the keys of rank (me.rank - n) % me.world_size.\n"
        "All of its tokens come before yours, or all come after. A part whose exponentials sum to exp(s) has the share\n"
        "exp(s - total) with total = torch.logaddexp(of both). Shares need one more dimension: share[..., None].",
        solution="""
import torch

def ring_attention(query, key, value, me, attend, pass_on):
    output, log_sum = attend(query, key, value, True)  # my own tokens
    for step in range(1, me.world_size):
        key, value = pass_on(torch.stack([key, value]), me)  # on every rank, or the ring stops
        if step > me.rank:
            continue  # they come from behind the end of the sequence: later tokens
        part, part_sum = attend(query, key, value, False)  # all of them are earlier
        total = torch.logaddexp(log_sum, part_sum)
        output = (log_sum - total).exp()[..., None] * output + (part_sum - total).exp()[..., None] * part
        log_sum = total
    return output
""",
    ),
    "20.1": Do(
        title="tokens for heads",
        level=2,
        minutes=10,
        judge=judge_to_heads,
        hint="dist.all_to_all_single(received, sent) sends the first quarter of sent to rank 0, and so on, along dimension 0.\n"
        "So stack what each rank gets: its heads, of your tokens. What arrives has the same shape, one entry per sender.",
        solution="""
import torch
import torch.distributed as dist

def to_heads(x, me):
    sent = torch.stack(x.chunk(me.world_size, 1))  # entry n: my tokens of rank n's heads
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)  # entry n: rank n's tokens of my heads
    return torch.cat(received.unbind(), 2)  # in the order of the ranks, which is that of the tokens
""",
    ),
    "20.2": Do(
        title="ranks with few tokens that count",
        level=2,
        minutes=8,
        judge=judge_my_loss,
        hint="FSDP adds up the ranks' gradients and divides by the number of ranks. You want the sum of all counted losses,\n"
        "divided by the number of all counted tokens. Only that number has to be communicated.",
        solution="""
import torch.distributed as dist

def my_loss(losses, counted, me):
    total = counted.sum()
    dist.all_reduce(total)  # of all ranks
    return (losses * counted).sum() * me.world_size / total  # FSDP divides by the number of ranks
""",
    ),
    "20.3": Predict(
        title="when does the ring hide?",
        level=2,
        minutes=8,
        answer=HIDING,
        unit="tokens per rank",
        slips={
            "in head-tail order, half of the pairs with another rank's tokens are computed; and keys and values travel": HIDING
            / 2,
            "a multiplication and an addition are two operations, and bf16 has 2 bytes": 2 * HIDING,
            "8 heads of keys and values serve 32 of queries": 4 * HIDING,
        },
        hint="With t tokens per rank, attention to another rank's keys computes t · t / 2 pairs. A pair takes two\n"
        "matmuls, of 2 operations per element of a token's queries. What arrives: t keys and t values.",
        solution="""
pairs = 1 / 2  # times t · t, in head-tail order
operations = pairs * 2 * 2 * 32 * 128  # times t · t: two matmuls, 32 heads of 128 elements
arriving = 2 * 8 * 128 * 2  # bytes, times t: keys and values of 8 heads in bf16
answer = (arriving / 50e9) / (operations / 4e14)  # where t · t · operations / 400e12 = t · arriving / 50e9
""",
    ),
}
