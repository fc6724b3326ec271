# SPDX-License-Identifier: BSD-3-Clause
"""Query a sharded model: a rank's shard of a parameter, an unsharded tensor, the number of FSDP units."""

import torch
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from labkit.measuring.trace import local
from labkit.training.models import whole_parameter


def part_of(parameter):
    """Return this rank's shard of a parameter and, for each dimension, its indices in the unsharded parameter.

    Returns:
        (local tensor, [1-D int64 tensor on the CPU for each dimension]).
    """
    if not isinstance(parameter, DTensor):
        return whole_parameter(parameter)
    indices = []
    for dimension, size in enumerate(parameter.shape):
        # Let DTensor compute them: shard the indices of a dimension as the parameter is sharded along it.
        index = torch.arange(size).view([-1 if d == dimension else 1 for d in range(parameter.ndim)])
        placements = [p if p.is_replicate() or p.dim == dimension else Replicate() for p in parameter.placements]
        mine = distribute_tensor(index, parameter.device_mesh, placements, src_data_rank=None)  # nothing is sent
        indices.append(local(mine).flatten().cpu())
    return local(parameter), indices


def whole(tensor):
    """Return an unsharded tensor on every rank, such as the norm of sharded gradients. Collective if it is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def count_units(model) -> int:
    """Return the number of FSDP units; the final norm and the head are one unit if the embedding is wrapped separately."""
    units = sum(isinstance(m, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)) for m in model.modules())
    return units - isinstance(getattr(model, "norm", None), fsdp.FSDPModule)
