# SPDX-License-Identifier: BSD-3-Clause
"""Context parallelism: the ranks of a context group share each sequence, a part of its tokens on each.

Everything but attention treats tokens one by one. In attention a token needs the keys and values of all tokens before it.
Three forms bring them together:

  ring      Each rank keeps its queries. Keys and values travel from rank to rank, and a rank merges what its queries get
            from each part by the log-sum-exp of their scores (arXiv:2310.01889).
  gather    Each rank keeps its queries, and all-gathers keys and values (Llama 3, arXiv:2407.21783, section 3.3.2).
  ulysses   An all-to-all turns a part of the tokens with all heads into all tokens of a part of the heads, and a second
            one turns the output back (arXiv:2309.14509).

In the first two, backward exchanges keys and values again instead of saving them all, and sums their gradients in fp32 at
least. A causal mask gives late tokens more work than early ones. With the "head-tail" order each rank has one part from
the beginning and one from the end of the sequence, and all ranks compute as much.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from planner.ops.context import ORDERS, chunks_of

from labkit.training import attention_kernels as kernels
from labkit.training import models


@dataclass(frozen=True)
class Context:
    """A rank in its context group.

    Attributes:
        group: the process group of the ranks that share a sequence.
        rank: in the group.
        size: of the group.
        order: which tokens a rank has: "natural", the rank's part of them in order; or "head-tail", of twice as many
            parts the rank-th from the beginning and the rank-th from the end.
    """

    group: Any
    rank: int
    size: int
    order: str = "head-tail"

    def positions(self, tokens: int, device=None) -> torch.Tensor:
        """Return the positions in the sequence of this rank's ``tokens`` tokens."""
        return positions(self.rank, self.size, tokens * self.size, self.order, device)

    def source(self, step: int) -> int:
        """Return the rank whose keys and values are here after ``step`` exchanges."""
        return (self.rank - step) % self.size

    def visible(self, source: int, tokens: int) -> tuple[slice, slice, bool] | None:
        """Return which of this rank's queries attend to which keys of rank ``source``; None: none does.

        Args:
            source: a rank of the group.
            tokens: of a rank.

        Returns:
            (queries, keys, whether causally): slices of the tokens of a rank.
        """
        every, half = slice(None), tokens // 2
        if source == self.rank:
            return every, every, True
        if self.order == "natural":
            return (every, every, False) if source < self.rank else None
        # An earlier rank's head precedes both of my parts, its tail neither; of a later one, both precede my tail.
        return (every, slice(half), False) if source < self.rank else (slice(half, None), every, False)


def positions(rank: int, size: int, seq_len: int, order: str, device=None) -> torch.Tensor:
    """Return the positions of a rank's tokens in the sequence: see ``Context.order``."""
    parts = torch.arange(seq_len, device=device).chunk(ORDERS[order] * size)
    return torch.cat([parts[number] for number in chunks_of(rank, size, order)])


class Carrier:
    """A tensor that travels around the ring, in two buffers: one is sent while the other receives."""

    def __init__(self, context: Context, tensor):
        self.context, self.tensor, self.spare = context, tensor, torch.empty_like(tensor)
        self.works = []

    def send(self):
        """Start to send the tensor to the next rank, and to receive the previous rank's."""
        group, ranks = self.context.group, dist.get_process_group_ranks(self.context.group)
        following, previous = (ranks[(self.context.rank + step) % self.context.size] for step in (1, -1))
        exchanged = (dist.isend, self.tensor, following, group), (dist.irecv, self.spare, previous, group)
        self.works = dist.batch_isend_irecv([dist.P2POp(*one) for one in exchanged])

    def arrive(self):
        """Wait for what ``send`` started: the tensor is now the previous rank's."""
        for work in self.works:
            work.wait()
        self.tensor, self.spare = self.spare, self.tensor


class Ring(torch.autograd.Function):
    """Causal attention of this rank's queries, to keys and values that travel around the ring."""

    @staticmethod
    def forward(ctx, query, key, value, context):
        """Compute with one rank's keys and values while the next rank's arrive."""
        merged, carried = Merged(query), Carrier(context, packed(key, value))
        for step in range(context.size):
            if step < context.size - 1:
                carried.send()
            merged.add(context, context.source(step), carried.tensor)
            if step < context.size - 1:
                carried.arrive()
        ctx.context, output = context, merged.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, merged.log_sum)
        return output

    @staticmethod
    def backward(ctx, gradient):
        """Keys and values travel once more; their gradients follow them, and once around the ring they are complete."""
        context, saved = ctx.context, ctx.saved_tensors
        query, key, value, *_ = saved
        carried = Carrier(context, packed(key, value))
        gradients = Carrier(context, torch.zeros_like(carried.tensor, dtype=summed_in(query)))
        query_gradient = torch.zeros_like(query, dtype=summed_in(query))
        for step in range(context.size):
            if step < context.size - 1:
                carried.send()
            found = backward_of_part(context, saved, gradient, context.source(step), carried.tensor)
            if step > 0:
                gradients.arrive()  # with what the ranks before have added
            add(found, query_gradient, gradients.tensor)
            gradients.send()
            if step < context.size - 1:
                carried.arrive()
            del found
        gradients.arrive()  # at home
        return query_gradient.to(query.dtype), *unpacked(gradients.tensor.to(query.dtype)), None


class Gather(torch.autograd.Function):
    """Causal attention of this rank's queries, to keys and values that are all-gathered."""

    @staticmethod
    def forward(ctx, query, key, value, context):
        """Gather, and attend to each rank's keys and values, one rank after another."""
        merged, gathered = Merged(query), gather(context, packed(key, value))
        for source in map(context.source, range(context.size)):
            merged.add(context, source, gathered[source])
        ctx.context, output = context, merged.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, merged.log_sum)
        return output

    @staticmethod
    def backward(ctx, gradient):
        """Gather again, and reduce-scatter the gradients of everyone's keys and values."""
        context, saved = ctx.context, ctx.saved_tensors
        query, key, value, *_ = saved
        gathered = gather(context, packed(key, value))
        gradients = torch.zeros_like(gathered, dtype=summed_in(query))
        query_gradient = torch.zeros_like(query, dtype=summed_in(query))
        for source in map(context.source, range(context.size)):
            add(backward_of_part(context, saved, gradient, source, gathered[source]), query_gradient, gradients[source])
        del gathered
        mine = torch.empty_like(gradients[0])
        dist.reduce_scatter_tensor(mine, gradients.flatten(0, 1), group=context.group)
        return query_gradient.to(query.dtype), *unpacked(mine.to(query.dtype)), None


class Merged:
    """The attention of a rank's queries to all keys so far.

    Attributes:
        output: in fp32 at least.
        log_sum: the log-sum-exp of each row's scores.
    """

    def __init__(self, query):
        self.query, self.output, self.log_sum = query, None, None

    def add(self, context: Context, source: int, keys_and_values):
        """Attend to what is visible of rank ``source``, and merge. The first source is the rank itself."""
        if (part := context.visible(source, self.query.shape[2])) is None:
            return
        queries, keys, causal = part
        key, value = (x[:, :, keys] for x in unpacked(keys_and_values))
        found = kernels.forward(self.query[:, :, queries], key, value, causal)
        if self.output is None:
            self.output, self.log_sum = found[0].to(summed_in(self.query)), found[1]
        else:
            merge(self.output[:, :, queries], self.log_sum[:, :, queries], *found)


def merge(output, log_sum, other_output, other_log_sum):
    """Merge attention to other keys into ``output`` and ``log_sum``: each counts by its share of the exponentials."""
    share = (other_log_sum - log_sum).sigmoid_()
    output.lerp_(other_output.to(output.dtype), share[..., None])
    torch.logaddexp(log_sum, other_log_sum, out=log_sum)


def backward_of_part(context: Context, saved, gradient, source: int, keys_and_values):
    """Return (part, gradients of its queries, keys, and values) of what is visible of rank ``source``; None: nothing is."""
    query, _, _, output, log_sum = saved
    if (part := context.visible(source, query.shape[2])) is None:
        return None
    queries, keys, causal = part
    key, value = (x[:, :, keys] for x in unpacked(keys_and_values))
    mine = (x[:, :, queries] for x in (gradient, query))
    whole = (x[:, :, queries] for x in (output, log_sum))
    return part, kernels.backward(*mine, key, value, *whole, causal)


def add(found, query_gradient, gradients):
    """Add what ``backward_of_part`` found to the gradients of the queries, and of the source's keys and values."""
    if found is None:
        return
    (queries, keys, _), (of_query, *of_keys_and_values) = found
    query_gradient[:, :, queries] += of_query
    for total, part in zip(unpacked(gradients), of_keys_and_values, strict=True):
        total[:, :, keys] += part


def packed(key, value):
    """Return keys and values (batch, heads, tokens, head_dim) as one tensor: (2, batch, tokens, heads, head_dim)."""
    return torch.stack([key.transpose(1, 2), value.transpose(1, 2)])


def unpacked(keys_and_values):
    """Return views of a tensor of ``packed`` as keys and values."""
    return keys_and_values.transpose(2, 3).unbind()


def gather(context: Context, tensor):
    """Return the tensor of every rank of the group: (ranks, …)."""
    out = tensor.new_empty(context.size, *tensor.shape)
    dist.all_gather_into_tensor(out.flatten(0, 1), tensor, group=context.group)
    return out


def summed_in(tensor) -> torch.dtype:
    """Return the dtype in which partial results are summed: fp32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


class AllToAll(torch.autograd.Function):
    """Split a tensor along one dimension among the ranks, and join what arrives along another; backward is the reverse."""

    @staticmethod
    def forward(ctx, x, context, split: int, joined: int):
        """Send each rank its part of dimension ``split``."""
        ctx.reverse = context, joined, split
        sent = torch.stack(x.chunk(context.size, split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=context.group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx, gradient):
        """Send each rank its part of the gradient."""
        return AllToAll.apply(gradient, *ctx.reverse), None, None, None


def ring(query, key, value, context):
    """Return causal attention. query, key, value: (batch, heads, this rank's tokens, head_dim)."""
    return Ring.apply(query, key, value, context)


def all_gather(query, key, value, context):
    """Return causal attention. Arguments: see ``ring``."""
    return Gather.apply(query, key, value, context)


def ulysses(query, key, value, context):
    """Return causal attention. Arguments: see ``ring``; the context's order must be "natural"."""
    tokens, heads = 1, 2  # dimensions of (batch, tokens, heads, head_dim)
    query, key, value = (
        AllToAll.apply(x.transpose(1, 2), context, heads, tokens).transpose(1, 2) for x in (query, key, value)
    )
    mixed = models.causal_attention(query, key, value)
    return AllToAll.apply(mixed.transpose(1, 2), context, tokens, heads).transpose(1, 2)


FORMS = {"ring": ring, "gather": all_gather, "ulysses": ulysses}


def context_group(rank: int, context: int, tensor: int, ranks: int):
    """Return the process group of the ranks that share a sequence with ``rank``: those ``tensor`` apart. Collective.

    It is a group of its own even if another has the same ranks: on a GPU each group communicates in its own stream, and
    keys and values need not wait for FSDP's gathers.

    Args:
        rank: this one.
        context: ranks that share a sequence.
        tensor: ranks of a tensor group.
        ranks: of the world.
    """
    size = context * tensor
    lists = [list(range(first + t, first + size, tensor)) for first in range(0, ranks, size) for t in range(tensor)]
    mine, _ = dist.new_subgroups_by_enumeration(lists)
    return mine


def context_parallel(model, context: Context, form: str):
    """Replace the attention of a ``GPT``, and give its tokens their positions, in place.

    Args:
        model: a ``GPT``, before or after tensor parallelism is applied.
        context: of this rank.
        form: a key of ``FORMS``.
    """
    model.positions = context.positions
    for block in model.blocks:
        block.attention.attend = partial(FORMS[form], context=context)
