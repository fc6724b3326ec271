# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing beyond PyTorch's options: a policy with a counter, and inputs in CPU memory."""

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from labkit.training import models

MATMUL = torch.ops.aten.mm.default  # of linear layers; bmm is part of attention if that is several operators
ATTENTION = {torch.ops.aten.bmm.default, *models.ATTENTION_OPERATORS}


def save_every_second_matmul():
    """Save the outputs of attention, and of the first, third, … matmul; pass this as ``checkpoint(context_fn=…)``.

    This is torchtitan's selective activation checkpointing by operators (torchtitan/distributed/activation_checkpoint.py,
    2024 and 2025; since 2026 it saves a list of operators).
    """
    matmuls = {False: 0, True: 0}  # in forward, and in recomputation, where PyTorch before 2.15 calls the policy, too

    def policy(context, operator, *_, **__):
        matmuls[context.is_recompute] += operator == MATMUL
        saved = matmuls[context.is_recompute] % 2 if operator == MATMUL else operator in ATTENTION
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def with_offloaded_inputs(forward):
    """Return a checkpointed forward whose saved input is in CPU memory between forward and backward.

    ``save_on_cpu`` sees only what is saved outside of ``checkpoint``: the tensors among its arguments. Its copies
    run on the stream that computes, so they take time of the step. On the CPU it copies nothing.

    Args:
        forward: forward(x, *others); of these only x is a tensor.
    """

    def offloaded(x, *others):
        with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda):
            return forward(x, *others)

    return offloaded
