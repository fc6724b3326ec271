# SPDX-License-Identifier: BSD-3-Clause
"""Expert parallelism under FSDP2: the experts of each block are spread over ranks, and sharded on a device mesh of their own.

All ranks train on different sequences. They are one dimension "shard" for every other parameter, and for experts two, as in
torchtitan and transformers: "expert_shard" × "expert". Along "expert", ranks have different experts; along "expert_shard",
FSDP shards those.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from labkit.measuring.trace import local
from labkit.training import experts
from labkit.training.weight_decay import by_mesh


def expert_mesh(ranks: int, ep_degree: int, device_type: str) -> DeviceMesh:
    """Return the device mesh of the experts: neighboring ranks have different ones."""
    names = ("expert_shard", "expert")
    return init_device_mesh(device_type, (ranks // ep_degree, ep_degree), mesh_dim_names=names)


def spread(model: nn.Module, mesh: DeviceMesh, settings: dict):
    """Spread the experts of each block over the ranks of ``mesh["expert"]``, and make an FSDP2 unit of a rank's experts.

    A rank's experts compute tokens of all ranks of its group, each of which divides its loss by its own tokens: the sum of
    their gradients is ``ep_degree`` times too large. FSDP averages only over "expert_shard"; a hook does the rest. (Its
    ``set_gradient_divide_factor`` divides fp64 twice on a mesh of one rank: PyTorch 2.15.)

    Args:
        model: with mixtures of experts.
        mesh: as ``expert_mesh`` returns it.
        settings: further arguments of ``fully_shard``.
    """
    ep_degree = mesh["expert"].size()
    for layer in experts.layers(model):
        layer.group = mesh["expert"].get_group()
        for name, parameter in list(layer.experts.named_parameters()):
            mine = distribute_tensor(parameter, mesh["expert"], [Shard(0)], src_data_rank=None)
            setattr(layer.experts, name, nn.Parameter(mine))
        fully_shard(layer.experts, **settings | {"mesh": mesh["expert_shard"]})
        layer.experts.set_all_reduce_hook(lambda gradient: gradient.div_(ep_degree))


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradient of a model whose parameters are on two device meshes. Collective.

    ``torch.nn.utils.clip_grad_norm_`` fails here, as it stacks the norms of all gradients, and ``stack`` takes DTensors of one mesh; called once for each
    mesh, it would scale dense and expert parameters by different factors. Every element of the gradient is on exactly one
    rank: the squared norm is the sum of those of all ranks' shards.

    Args:
        model: sharded, without replicas.
        max_norm: as of ``clip_grad_norm_``.

    Returns:
        The norm before, over all parameters and ranks.
    """
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    squared = nn.utils.get_total_norm([local(parameter.grad) for parameter in trained]).square()
    dist.all_reduce(squared)
    norm = squared.sqrt()
    for group in by_mesh({"params": trained}):
        nn.utils.clip_grads_with_norm_(group["params"], max_norm, norm)
    return norm
