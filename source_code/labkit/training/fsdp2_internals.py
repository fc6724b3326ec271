# SPDX-License-Identifier: BSD-3-Clause
"""Classes that FSDP2's public methods ask for, and that PyTorch keeps in private modules.

Private PyTorch used here, and only here: ``_fully_shard._fsdp_api`` (the base classes that ``set_custom_all_gather`` and
``set_custom_reduce_scatter`` name), and ``_fully_shard._fsdp_common`` (the result of a ``shard_placement_fn`` that chooses
a mesh: PyTorch 2.12 and newer).
"""

from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["AllGather", "ReduceScatter", "ShardPlacementResult", "placement_on"]

ShardPlacementResult = getattr(_fsdp_common, "ShardPlacementResult", None)


def placement_on(mesh, placement):
    """Return what a ``shard_placement_fn`` returns to shard a parameter among the ranks of a mesh of its own.

    Args:
        mesh: a device mesh of one dimension.
        placement: ``Shard(dimension)``.
    """
    return ShardPlacementResult(placement=placement, mesh_info=_fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0))
