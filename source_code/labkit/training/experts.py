# SPDX-License-Identifier: BSD-3-Clause
"""A mixture of experts: a router chooses a few of a block's feed-forward networks for each token.

``MixtureOfExperts`` runs in one process, and under any data parallelism. With expert parallelism (``spread``), each rank
has some of the experts, and two all-to-alls of each block bring every token to its experts and back: ``dispatch`` and
``combine``.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planner.models import shapes
from torch import nn

from labkit.measuring.trace import local

AUXILIARY_COEFFICIENT = 0.01  # of the loss for balance (arXiv:2101.03961, section 2.2)
BIAS_RATE = 0.001  # by which a step changes an expert's bias (arXiv:2408.15664, section 4.1; arXiv:2412.19437)


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of experts, of which each token uses ``top_k``, and of a shared one that every token uses.

    Attributes:
        counts: int64 (experts,), tokens of the last forward that each expert has computed, of this rank's tokens.
        group: the ranks among which the experts are spread; None: this rank has all of them.
    """

    def __init__(self, hidden_size: int, settings: shapes.Experts, shared: nn.Module | None = None):
        super().__init__()
        self.router = Router(hidden_size, settings)
        self.experts = Experts(hidden_size, settings)
        self.shared = shared
        self.capacity_factor, self.counts, self.group = settings.capacity_factor, None, None

    def forward(self, x):
        """Return the weighted sum of the chosen experts' outputs, of the shape of x, (batch, length, hidden_size)."""
        weights, chosen = self.router(x)
        order, self.counts = sort_by_expert(chosen, len(self.router.weight), self.capacity_factor)
        token = order // chosen.shape[-1]  # of each row
        rows = x.flatten(0, 1)[token]
        if self.group is None:
            rows = self.experts(rows, self.counts)
        else:
            rows, counts, route = dispatch(rows, self.counts, self.group)
            rows = combine(self.experts(rows, counts), route, self.group)
        rows = rows * weights.flatten()[order].unsqueeze(-1)
        # index_add would save the rows for backward, which needs only their tokens.
        index = token.unsqueeze(-1).expand_as(rows)
        out = torch.zeros_like(x).flatten(0, 1).scatter_add(0, index, rows).view_as(x)
        return out if self.shared is None else out + self.shared(x)


class Router(nn.Linear):
    """Choose experts by the largest of a softmax, whose values, divided by their sum, weigh the experts' outputs.

    Attributes:
        bias_for_choice: with balance "bias", (experts,): is added to choose experts, not to weigh them; else None.
        auxiliary: with balance "loss", the factor of the loss for balance.
    """

    def __init__(self, hidden_size: int, settings: shapes.Experts):
        super().__init__(hidden_size, settings.count, bias=False)
        self.top_k, self.balance, self.auxiliary = settings.top_k, settings.balance, AUXILIARY_COEFFICIENT
        self.register_buffer("bias_for_choice", torch.zeros(settings.count) if settings.balance == "bias" else None)

    def forward(self, x):
        """Return (weights, experts) of x (batch, length, hidden_size), both (batch, length, top_k)."""
        logits = super().forward(x)
        scores = logits.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        if self.bias_for_choice is None:
            weights, chosen = scores.topk(self.top_k)
        else:
            chosen = (scores.detach() + self.bias_for_choice).topk(self.top_k).indices
            weights = scores.gather(-1, chosen)
        if self.balance == "loss" and torch.is_grad_enabled():
            weights = WithLoss.apply(weights, self.auxiliary * balance_loss(scores, chosen))
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), chosen


class Experts(nn.Module):
    """SwiGLU networks. Each matrix of all experts is one parameter, of three dimensions, the first of which is the expert."""

    def __init__(self, hidden_size: int, settings: shapes.Experts):
        super().__init__()
        count, size = settings.count, settings.intermediate_size
        self.gate_up = nn.Parameter(torch.empty(count, 2 * size, hidden_size))
        self.down = nn.Parameter(torch.empty(count, hidden_size, size))

    def forward(self, rows, counts):
        """Return each expert's outputs.

        Args:
            rows: (rows, hidden_size), those of the first expert first.
            counts: int64 (experts,), rows of each expert.
        """
        gate, up = grouped_matmul(rows, local(self.gate_up), counts).chunk(2, dim=-1)  # spread, they are DTensors
        return grouped_matmul(F.silu(gate) * up, local(self.down), counts)


# Expert parallelism by hand


def sort_by_expert(chosen, experts: int, capacity_factor: float | None):
    """Sort pairs of a token and an expert by expert, and drop those above an expert's capacity.

    An expert's capacity is that of one sequence, capacity_factor × length × top_k / experts, rounded up. So it does not
    depend on which rank has which sequences. A sequence's last tokens are dropped: their experts add nothing to them.

    Args:
        chosen: int64 (batch, length, top_k), the experts of each token.
        experts: their number.
        capacity_factor: None: nothing is dropped.

    Returns:
        (order, counts): the pairs' indices in ``chosen``, flattened, by expert; and how many of them each expert has.
    """
    batch, length, top_k = chosen.shape
    if capacity_factor is None:
        return chosen.flatten().argsort(stable=True), chosen.flatten().bincount(minlength=experts)
    sequence = torch.arange(batch, device=chosen.device).view(-1, 1, 1)
    key = (chosen * batch + sequence).flatten()  # by expert, then by sequence
    order, sizes = key.argsort(stable=True), key.bincount(minlength=experts * batch)
    begins = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    capacity = math.ceil(capacity_factor * length * top_k / experts)
    kept = torch.arange(len(order), device=order.device) - begins < capacity
    return order[kept], sizes.clamp(max=capacity).view(experts, batch).sum(1)


class AllToAll(torch.autograd.Function):
    """Exchange rows among the ranks of a group; backward exchanges their gradients in the opposite direction."""

    @staticmethod
    def forward(ctx, rows, sends: list[int], receives: list[int], group):
        ctx.exchange = receives, sends, group
        received = rows.new_empty(sum(receives), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, *ctx.exchange), None, None, None


def dispatch(rows, counts, group):
    """Bring each row to the rank that has its expert. Collective.

    Args:
        rows: (rows, hidden_size), by expert.
        counts: int64 (experts,), rows of each expert.
        group: the ranks, each with as many experts.

    Returns:
        (rows, counts, route): the rows of this rank's experts, by expert; how many each of these has; and the way back.
    """
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    counts, theirs = (of.view(group.size(), -1) for of in (counts, theirs))  # of each rank and its experts, or mine
    sends, receives = counts.sum(1).tolist(), theirs.sum(1).tolist()
    received = AllToAll.apply(rows, sends, receives, group)
    expert = torch.arange(theirs.shape[1], device=rows.device).repeat(len(theirs)).repeat_interleave(theirs.flatten())
    order = expert.argsort(stable=True)  # rows arrive by rank
    return received[order], theirs.sum(0), (order, sends, receives)


def combine(outputs, route, group):
    """Bring each expert's outputs back to the ranks of their tokens, in the order of ``dispatch``'s rows. Collective."""
    order, sends, receives = route
    return AllToAll.apply(outputs[order.argsort()], receives, sends, group)


# Grouped matmul


def grouped_matmul(rows, weights, counts):
    """Multiply each expert's rows by its weight.

    Args:
        rows: (rows, in), by expert.
        weights: (experts, out, in).
        counts: int64 (experts,), rows of each expert.

    Returns:
        (rows, out).
    """
    if rows.dtype == torch.float64:  # for which PyTorch has no kernel (2.15)
        return MatmulLoop.apply(rows, weights, counts.tolist())
    return F.grouped_mm(rows, weights.transpose(-2, -1), offs=counts.cumsum(0, dtype=torch.int32))


class MatmulLoop(torch.autograd.Function):
    """A grouped matmul, expert by expert. It allocates only its results, as PyTorch's kernel does."""

    @staticmethod
    def forward(ctx, rows, weights, counts: list[int]):
        ctx.save_for_backward(rows, weights)
        ctx.counts = counts
        out = rows.new_empty(len(rows), weights.shape[1])
        for mine, weight, into in zip(rows.split(counts), weights, out.split(counts), strict=True):
            torch.mm(mine, weight.T, out=into)
        return out

    @staticmethod
    def backward(ctx, gradient):
        rows, weights = ctx.saved_tensors
        of_rows, of_weights = torch.empty_like(rows), torch.empty_like(weights)
        pieces = (tensor.split(ctx.counts) for tensor in (rows, gradient, of_rows))
        for mine, its, into, weight, of_weight in zip(*pieces, weights, of_weights, strict=True):
            torch.mm(its, weight, out=into)
            torch.mm(its.T, mine, out=of_weight)
        return of_rows, of_weights, None


# Balance


def balance_loss(scores, chosen):
    """Return the loss for balance: experts × Σ (share chosen × mean score), 1 if each expert is chosen equally often.

    Its gradient lowers the scores of experts that are chosen more often.

    It is that of arXiv:2101.03961 (section 2.2) for each sequence (arXiv:2412.19437, section 2.1.2), averaged: so the mean
    over ranks does not depend on which rank has which sequences.

    Args:
        scores: (batch, length, experts), the softmax.
        chosen: int64 (batch, length, top_k).
    """
    ones = torch.ones_like(chosen, dtype=scores.dtype).flatten(1)
    share = scores.new_zeros(len(scores), scores.shape[-1]).scatter_add(1, chosen.flatten(1), ones) / ones.shape[1]
    return scores.shape[-1] * (share * scores.mean(1)).sum(-1).mean()


class WithLoss(torch.autograd.Function):
    """Return ``x``, and add ``loss`` to what is minimized: its gradient is 1."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        dtype, device = ctx.like
        return gradient, torch.ones((), dtype=dtype, device=device)


# A model's mixtures


def layers(model) -> list[MixtureOfExperts]:
    """Return the mixtures of a model, the first block's first."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def prepare(model, micro_batches: int):
    """Divide the loss for balance by the number of micro-batches, as the loss itself is, and keep biases in fp32."""
    for layer in layers(model):
        layer.router.auxiliary = AUXILIARY_COEFFICIENT / micro_batches
        if layer.router.bias_for_choice is not None:  # a step's change would be lost in bf16
            layer.router.bias_for_choice = layer.router.bias_for_choice.float()


def tokens_of(model) -> list[torch.Tensor]:
    """Return the tokens that each expert has computed of this rank's last micro-batch.

    Returns:
        [int64 (layers, experts)]; [] for a model without experts.
    """
    counts = [layer.counts for layer in layers(model)]
    return [torch.stack(counts)] if counts else []


@torch.no_grad()
def after_step(model, routing: list[torch.Tensor]):
    """Keep a step's routing for the record, and adjust the biases by it, with balance "bias". Collective.

    The bias of each expert with fewer tokens than the mean is raised, and the others' are lowered.

    Args:
        model: of any strategy.
        routing: ``tokens_of`` each micro-batch.
    """
    if not routing:
        return
    model.routing = routing
    balanced = [(index, layer.router) for index, layer in enumerate(layers(model)) if layer.router.balance == "bias"]
    if not balanced:
        return
    counts = torch.stack(routing).sum(0)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(counts)
    for index, router in balanced:
        tokens = counts[index].to(router.bias_for_choice.dtype)
        router.bias_for_choice += BIAS_RATE * (tokens.mean() - tokens).sign()
