"""The head's product and the cross-entropy, for some tokens at a time: the logits of all are never there together.

Logits are the largest tensor of a model with a large vocabulary, and the loss needs several as large. Nothing but the
loss and two gradients outlives a chunk: that of the hidden states, a part of which each chunk fills, and that of the
head's weight, to which each adds. So both are computed in forward, chunk by chunk, and nothing twice.
"""

import torch


def chunked_loss(x, weight, targets, chunks: int):
    """Mean cross-entropy, in nats per token and in fp32 at least: a scalar.

    x: hidden states, (batch, sequence, width). weight: the head's, (vocabulary, width). targets: int64, (batch, sequence).
    chunks: compute for one in so many parts of the tokens at a time. Under autocast the products are in its format.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return ChunkedLoss.apply(x.flatten(0, 1).to(dtype), weight.to(dtype), targets.flatten(), chunks)


class ChunkedLoss(torch.autograd.Function):
    """Of x (tokens, width) and weight (vocabulary, width) in one number format; their gradients are in it, too."""

    @staticmethod
    def forward(ctx, x, weight, targets, chunks):
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x.device)
        trains, trains_weight, *_ = ctx.needs_input_grad  # in validation, x needs none
        of_x = torch.empty_like(x) if trains else None
        of_weight = torch.zeros_like(weight) if trains and trains_weight else None
        parts = of_x.chunk(chunks) if trains else [None] * chunks
        for rows, wanted, of_rows in zip(x.chunk(chunks), targets.chunk(chunks), parts, strict=False):
            loss += one_chunk(rows, weight, wanted, len(targets), wide, of_rows, of_weight)
        ctx.save_for_backward(*(gradient for gradient in (of_x, of_weight) if gradient is not None))
        return loss

    @staticmethod
    def backward(ctx, gradient):
        """The gradients are there. They are scaled in place: a copy of the weight's could be the step's peak."""
        of_x, *of_weight = (kept.mul_(gradient) for kept in ctx.saved_tensors)
        return of_x, *(of_weight or [None]), None, None


def one_chunk(rows, weight, wanted, tokens: int, wide, of_rows, of_weight):
    """The part that some rows of x have in the loss; fills their gradient, and adds to the weight's."""
    logarithms = log_probabilities(rows, weight, wide)
    wanted = wanted[:, None]
    of_wanted = logarithms.gather(1, wanted)
    loss = of_wanted.sum().div_(-tokens)
    if of_rows is not None:  # the gradient of logits: the probabilities, less one where the target is
        probabilities = logarithms.exp_().scatter_(1, wanted, of_wanted.expm1_())
        of_logits = probabilities.div_(tokens).to(rows.dtype)
        torch.mm(of_logits, weight, out=of_rows)
        if of_weight is not None:
            of_weight.addmm_(of_logits.T, rows)
    return loss


def log_probabilities(rows, weight, wide):
    """In a function of its own: the logits go when it returns."""
    return (rows @ weight.T).to(wide).log_softmax(-1)
