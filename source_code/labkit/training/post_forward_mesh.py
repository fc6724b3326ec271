# SPDX-License-Identifier: BSD-3-Clause
"""Let FSDP2 units share one post-forward mesh.

``fully_shard(unit, reshard_after_forward=N)`` builds a device mesh, and so two process groups, in each call:
pytorch/pytorch#153302. On GPUs each of them has a communicator, of which one communicates and so takes buffers
(planner/parallel/groups.py). Torch 2.11 to 2.15 have no public option against it.

Private PyTorch used here, and only here: the function of FSDP2 that builds this mesh.
"""

from contextlib import AbstractContextManager

from torch.distributed.fsdp._fully_shard import _fully_shard

from labkit.measuring.replaced import replaced


def shared() -> AbstractContextManager:
    """Return a context in which all calls of ``fully_shard`` with the same N share the first one's post-forward mesh.

    All of them must shard over the same device mesh.
    """
    build, made = _fully_shard._get_post_forward_mesh_info, {}

    def first(reshard_after_forward, *about):
        if isinstance(reshard_after_forward, bool):  # no mesh of its own
            return build(reshard_after_forward, *about)
        if reshard_after_forward not in made:
            made[reshard_after_forward] = build(reshard_after_forward, *about)
        return made[reshard_after_forward]

    return replaced(_fully_shard, _get_post_forward_mesh_info=first)
