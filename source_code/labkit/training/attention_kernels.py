# SPDX-License-Identifier: BSD-3-Clause
"""Attention that also returns the log-sum-exp of each row's scores, and its backward, as two functions.

``scaled_dot_product_attention`` discards the log-sum-exp, which merges partial results. Private PyTorch used here, and only
here: the operators that it calls (``torch.ops.aten._scaled_dot_product_flash_attention…``), of which torch 2.11 to 2.15
have these signatures. On a GPU flash attention takes bf16 and fp16; other formats are computed with the scores in memory.
The GPU's branch has not run on one yet.
"""

import torch

aten = torch.ops.aten


def forward(query, key, value, causal: bool):
    """Return (output, log-sum-exp) of attention.

    Args:
        query: (batch, query heads, queries, head_dim).
        key, value: (batch, kv heads, keys, head_dim); each of their heads serves several query heads.
        causal: whether query i attends to keys 0 to i; else to all keys.

    Returns:
        The output, as query, and the log-sum-exp of its scores, (batch, query heads, queries), in fp32 at least.
    """
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    if query.dtype in (torch.bfloat16, torch.float16):
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[:2]
    return in_steps(query, key, value, causal)


def in_steps(query, key, value, causal: bool):
    """Compute ``forward`` with the scores in memory."""
    scores = _scores(query, key, causal)
    return scores.softmax(-1) @ _per_query_head(value, query), scores.logsumexp(-1)


def backward(gradient, query, key, value, output, log_sum, causal: bool):
    """Return the gradients of query, key, and value.

    ``output`` and ``log_sum`` may be those of more keys than these. Then the probabilities are those among all keys, and
    the gradients are these keys' part of the whole.

    Args:
        gradient: of the output.
        query, key, value, causal: as in ``forward``.
        output, log_sum: what the whole attention returned.
    """
    tensors = gradient, query, key, value, output, log_sum
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal)
    if query.dtype in (torch.bfloat16, torch.float16):
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of the dropout, of which there is none
        lengths = query.shape[2], key.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            *tensors, None, None, *lengths, 0.0, causal, seed, seed.new_empty(())
        )
    return backward_in_steps(*tensors, causal)


def backward_in_steps(gradient, query, key, value, output, log_sum, causal: bool):
    """Compute ``backward`` with the scores in memory."""
    weights = (_scores(query, key, causal) - log_sum[..., None]).exp()
    keys, values = _per_query_head(key, query), _per_query_head(value, query)
    scores = weights * (gradient @ values.mT - (gradient * output).sum(-1, keepdim=True)) / query.shape[-1] ** 0.5
    key_gradient, value_gradient = scores.mT @ query, weights.mT @ gradient
    return scores @ keys, *(g.unflatten(1, (key.shape[1], -1)).sum(2) for g in (key_gradient, value_gradient))


def _scores(query, key, causal):
    scores = query @ _per_query_head(key, query).mT / query.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf) if causal else scores


def _per_query_head(x, query):
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)
