"""Which results recomputation keeps, where a list of operators does not say it."""

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from labkit.training import models

PRODUCT = torch.ops.aten.mm.default  # with a weight; bmm is where attention is several operators
ATTENTION = {torch.ops.aten.bmm.default, *models.ATTENTION_OPERATORS}


def keeping_every_second_product():
    """For ``checkpoint(context_fn=…)``: keep what attention returns, and the first, third, … matrix product of the call.

    The rule of torchtitan's selective recomputation by operators (torchtitan/distributed/activation_checkpoint.py, 2024
    and 2025; since 2026 it keeps what is named).
    """
    products = {False: 0, True: 0}  # in forward; and in recomputation, where PyTorch before 2.15 asks again

    def policy(context, operator, *_, **__):
        products[context.is_recompute] += operator == PRODUCT
        kept = products[context.is_recompute] % 2 if operator == PRODUCT else operator in ATTENTION
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
