"""Selective activation checkpointing that a list of operators cannot express."""

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
