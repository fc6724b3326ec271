# SPDX-License-Identifier: BSD-3-Clause
"""Compute logits and cross-entropy in chunks of tokens, so that the logits of all tokens never exist at once.

Logits are the largest tensor of a model with a large vocabulary, and the loss needs several of that size. Only the loss
and two gradients outlive a chunk: the gradient of the hidden states, of which each chunk fills some rows, and the
gradient of the head's weight, to which each chunk adds. Both are computed in forward, chunk by chunk, so that nothing is
recomputed.
"""

import torch


def chunked_loss(x, weight, targets, chunks: int, summed: bool = False):
    """Return the mean cross-entropy, in nats per token: a scalar, in at least fp32.

    Under autocast the matmuls run in its dtype.

    Args:
        x: hidden states, (batch, sequence, hidden_size).
        weight: of the head, (vocabulary, hidden_size).
        targets: int64, (batch, sequence).
        chunks: number of chunks of tokens.
        summed: whether to return the sum instead of the mean, leaving out targets below 0.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return ChunkedLoss.apply(x.flatten(0, 1).to(dtype), weight.to(dtype), targets.flatten(), chunks, summed)


class ChunkedLoss(torch.autograd.Function):
    """Chunked loss of x (tokens, hidden_size) and weight (vocabulary, hidden_size); gradients have their dtype."""

    @staticmethod
    def forward(ctx, x, weight, targets, chunks, summed):
        loss_dtype = torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=loss_dtype, device=x.device)
        trains, trains_weight, *_ = ctx.needs_input_grad  # in validation, x needs no gradient
        x_grad = torch.empty_like(x) if trains else None
        weight_grad = torch.zeros_like(weight) if trains and trains_weight else None
        x_grads = x_grad.chunk(chunks) if trains else [None] * chunks
        for rows, row_targets, rows_grad in zip(x.chunk(chunks), targets.chunk(chunks), x_grads, strict=False):
            tokens = None if summed else len(targets)
            loss += one_chunk(rows, weight, row_targets, tokens, loss_dtype, rows_grad, weight_grad)
        ctx.save_for_backward(*(gradient for gradient in (x_grad, weight_grad) if gradient is not None))
        return loss

    @staticmethod
    def backward(ctx, gradient):
        """Scale the gradients of forward, in place: a copy of the weight's could be the step's peak."""
        x_grad, *weight_grad = (saved.mul_(gradient) for saved in ctx.saved_tensors)
        return x_grad, *(weight_grad or [None]), None, None, None


def one_chunk(rows, weight, targets, tokens: int | None, loss_dtype, rows_grad, weight_grad):
    """Return the contribution of one chunk to the loss, and compute its gradients.

    Args:
        rows: hidden states of the chunk, (rows, hidden_size).
        weight: of the head, (vocabulary, hidden_size).
        targets: int64, (rows,).
        tokens: number of tokens of all chunks, by which the loss is divided; None: it is not, and targets below 0 are
            left out.
        loss_dtype: dtype of the logits, from the softmax on, and of the loss.
        rows_grad: filled with the gradient of ``rows``; None: no gradients.
        weight_grad: the gradient of ``weight`` is added to it; None: the weight is frozen.
    """
    log_probs = log_probabilities(rows, weight, loss_dtype)
    targets = targets[:, None]
    ignored = targets < 0 if tokens is None else None
    targets = targets if tokens else targets.clamp(min=0)
    target_log_probs = log_probs.gather(1, targets)
    if ignored is not None:
        loss = target_log_probs.masked_fill(ignored, 0.0).sum().neg_()
    else:
        loss = target_log_probs.sum().div_(-tokens)
    if rows_grad is not None:  # the gradient of the logits: the probabilities, minus one at the target
        probabilities = log_probs.exp_().scatter_(1, targets, target_log_probs.expm1_())
        probabilities = probabilities.masked_fill_(ignored, 0.0) if ignored is not None else probabilities.div_(tokens)
        logits_grad = probabilities.to(rows.dtype)
        torch.mm(logits_grad, weight, out=rows_grad)
        if weight_grad is not None:
            weight_grad.addmm_(logits_grad.T, rows)
    return loss


def log_probabilities(rows, weight, dtype):
    """Return the log-probabilities (rows, vocabulary). A separate function, so that its logits are freed on return."""
    return (rows @ weight.T).to(dtype).log_softmax(-1)
