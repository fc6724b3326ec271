# SPDX-License-Identifier: BSD-3-Clause
"""Count the process groups of a rank, and the communicators among them. Imports no torch.

Each process group on GPUs has an NCCL communicator: from the start if ``init_process_group`` was given a device_id, as
in the labs (torch 2.15, device_mesh.py: ``split_group`` for each dimension), else from its first collective. One that
communicates has buffers, too (planner/gpus.py has their size):

  default group        all ranks
  mesh dimension       a group for each dimension, also one of size 1, except a dimension of all ranks, which reuses the
                       default group (torch 2.15, device_mesh.py: ``_init_one_process_group``)
  context group        of the ranks that share each sequence, a group even if it has all ranks
  post-forward mesh    ``fully_shard(…, reshard_after_forward=N)`` builds a device mesh of its own, (ranks / N, N), so two
                       groups, in each call (_fsdp_init.py: ``_get_post_forward_mesh_info``; pytorch/pytorch#153302). Only
                       the second one communicates (pytorch/pytorch#118017).

The groups of gloo that save checkpoints and read data are not counted: they have no memory on a GPU.
tests/test_groups.py compares with the groups that PyTorch makes.
"""

from typing import NamedTuple

from planner.parallel.mesh import Mesh

POST_FORWARD = "post-forward, shard"  # the group of the N ranks that share what is kept after forward


class Group(NamedTuple):
    """Process groups of one rank that are alike.

    Attributes:
        name: "default", or the mesh dimension.
        ranks: in each of them.
        communicates: whether training runs collectives on it.
        count: how many there are.
    """

    name: str
    ranks: int
    communicates: bool = True
    count: int = 1


def of_training(
    lab: str, ranks: int, strategy: str, mesh: Mesh, reshard: str = "true", post_forward_meshes: int = 1
) -> list[Group]:
    """Return the process groups that a training makes on each rank.

    Args:
        lab: the script; or "", for a script that calls ``fully_shard`` on one mesh dimension.
        ranks: how many train.
        strategy: as in ``Plan``.
        mesh: of these ranks.
        reshard: --reshard-after-forward.
        post_forward_meshes: meshes for ``reshard`` N: 1 if all units share one, as in gpt_fsdp.py; else one for each unit.
    """
    groups = [Group("default", ranks)]
    if strategy.startswith("deepspeed"):  # 0.19 communicates in a copy of the default group
        return [*groups, Group("data parallel", ranks)]
    if mesh.pipeline > 1 or strategy not in ("fsdp1", "fsdp2"):
        return groups
    dimensions = _of_transformers(mesh) if lab == "hf_fsdp.py" and ranks > 1 else _of_mesh(mesh)
    if mesh.context > 1:  # never the default group: see context_parallel.context_group
        groups.append(Group("context", mesh.context))
    if reshard.isdecimal() and int(reshard) != mesh.shards:
        kept = int(reshard)
        others = mesh.replicate * mesh.shards // kept
        dimensions += [Group("post-forward, replicate", others, False, post_forward_meshes)]
        dimensions += [Group(POST_FORWARD, kept, True, post_forward_meshes)]
    return groups + [group for group in dimensions if group.ranks != ranks]


def _of_mesh(mesh: Mesh) -> list[Group]:
    """Return the groups of gpt_fsdp.py's device mesh, which omits dimensions of size 1, except FSDP's."""
    sizes = {"replicate": mesh.replicate, "shard": mesh.shards, "tensor": mesh.tensor}
    made = [Group(name, size, size > 1) for name, size in sizes.items() if size > 1 or name == "shard"]
    if mesh.expert == 1:
        return made
    own = {"expert_shard": mesh.shards // mesh.expert, "expert": mesh.expert}
    return made + [Group(name, size, size > 1) for name, size in own.items()]


def _of_transformers(mesh: Mesh) -> list[Group]:
    """Return the groups of the two device meshes that transformers takes: of the experts, and of all other weights."""
    shards = mesh.shard * mesh.tensor // mesh.expert
    dense = {"pp": 1, "dp_replicate": mesh.replicate, "fsdp": mesh.shard, "tp": mesh.tensor}
    expert = {"pp": 1, "dp_replicate": mesh.replicate, "efsdp": shards, "ep": mesh.expert}
    groups = [Group(name, size, size > 1) for name, size in dense.items()]
    # Without expert parallelism, experts are sharded as all other weights are.
    return groups + [Group(name, size, size > 1 and mesh.expert > 1) for name, size in expert.items()]


def total(groups: list[Group]) -> int:
    """Return the number of process groups."""
    return sum(group.count for group in groups)


def communicators(groups: list[Group]) -> int:
    """Return how many process groups of several ranks communicate.

    The others have a communicator, too, but no buffers: NCCL connects ranks at the first collective (since 2.22,
    NCCL_RUNTIME_CONNECT).
    """
    return sum(group.count for group in groups if group.communicates and group.ranks > 1)
