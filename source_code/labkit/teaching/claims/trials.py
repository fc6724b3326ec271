# SPDX-License-Identifier: BSD-3-Clause
"""What chapter 21 measures: short runs on a few ranks, and PyTorch's interfaces. Each function runs on every rank."""

import contextlib
import inspect

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

KEPT = {"strategy": "fsdp2", "reshard_after_forward": "false"}
# {name: (ranks, options of gpt_fsdp.py)}: runs of the tiny transformer, which the notebook starts
RUNS = {
    "one process": (1, {"strategy": "single"}),
    "FSDP, 2 ranks": (2, {}),
    "FSDP, 4 ranks": (4, {}),
    "DDP": (4, {"strategy": "ddp"}),
    "FSDP, kept": (4, KEPT),
    "FSDP, bf16": (4, {"precision": "bf16"}),
    "DDP, bf16": (4, {"strategy": "ddp", "precision": "bf16"}),
}


def ddp_state(me, view: bool) -> float:
    """Return what DDP has of a model's state in the optimizer's step, over 4P. view: ``gradient_as_bucket_view``."""
    from labkit.measuring.trace import StepTrace

    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
    optimizer = torch.optim.AdamW(ddp.parameters())
    trace = StepTrace(ddp, optimizer, me.device)
    for step in range(4):  # the first creates the moments; the tracer needs two to see the buckets
        with trace if step else contextlib.nullcontext():
            ddp(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    names = ("parameters", "gradients", "optimizer state", "all-reduce buckets")
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    stepping = [each for each in trace.timeline() if each["phase"] == "optimizer"]
    return max(sum(each[name] for name in names) for each in stepping) / (4 * parameters)


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Muon": torch.optim.Muon,
    "ZeRO-1 with AdamW": lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.AdamW),
}


def optimizer_bytes(me, name: str) -> int:
    """Return the bytes in collectives of one optimizer step on two matrices, which FSDP2 shards, except for ZeRO-1."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from labkit.measuring.trace import StepTrace

    mesh = init_device_mesh(me.device.type, (me.world_size,))
    layers = nn.ModuleList([nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False)])
    for layer in layers if not name.startswith("ZeRO") else ():
        fully_shard(layer, mesh=mesh)
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = OPTIMIZERS[name](layers.parameters())
    with StepTrace(layers, optimizer, me.device) as trace:
        optimizer.step()
    return sum(size * count for (_, size, _), count in trace.collectives.items())


def networks() -> dict[str, nn.Module]:
    """Return networks for the size-based policy: {name: module}."""
    from labkit.training.models import Net

    return {
        "MNIST net": Net(),
        "with BatchNorm2d(16)": nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 32, 3)),
        "with MultiheadAttention": nn.TransformerEncoderLayer(64, 4, 128),
    }


def wrapped_share(me, least: int) -> dict[str, tuple]:
    """Return what FSDP1 makes units: {network: (share of the layers that have parameters of their own, the parameters of
    the smallest of these layers, whether one is inside nn.MultiheadAttention)}."""
    from functools import partial

    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    policy, found = partial(size_based_auto_wrap_policy, min_num_params=least), {}
    for name, network in networks().items():
        layers = [each for each in network.modules() if list(each.parameters(recurse=False))]
        smallest = min(sum(each.numel() for each in layer.parameters(recurse=False)) for layer in layers)
        inside = any(isinstance(each, nn.MultiheadAttention) for each in network.modules())
        sharded = FullyShardedDataParallel(network, auto_wrap_policy=policy, device_id=torch.device("cpu"))
        units = [each.module for each in sharded.modules() if isinstance(each, FullyShardedDataParallel)]
        share = sum(any(layer is unit for unit in units) for layer in layers) / len(layers)
        found[name] = share, smallest, inside
    return found


def _sharded_model(me):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 6))
    return fully_shard(model, mesh=init_device_mesh("cpu", (me.world_size,)))


def save(me, folder: str):
    """Save a sharded model in two ways, with one file per rank each, and return its weights, whole."""
    import torch.distributed.checkpoint as dcp

    model = _sharded_model(me)
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/DCP")
    shards = {name: tensor.to_local() for name, tensor in model.state_dict().items()}
    torch.save(shards, f"{folder}/shard-{me.rank}")
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


def load_fails(me, folder: str, way: str, saved: dict) -> bool:
    """Return whether this number of ranks cannot load what was saved, or loads something else. way: "DCP", "torch.save"."""
    import torch.distributed.checkpoint as dcp

    model = _sharded_model(me)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    try:
        if way == "DCP":
            dcp.load(state, checkpoint_id=f"{folder}/DCP")
        else:
            for name, shard in torch.load(f"{folder}/shard-{me.rank}").items():
                state[name].to_local().copy_(shard)
    except (RuntimeError, dcp.api.CheckpointException):
        return True
    return not all(torch.equal(tensor.full_tensor(), saved[name]) for name, tensor in state.items())


def accepts(call, *arguments, **options) -> tuple[bool, str]:
    """Return whether a call accepts its arguments, and what it raises if not."""
    try:
        call(*arguments, **options)
    except TypeError as error:
        return False, f"{type(error).__name__}: {error}"
    except Exception as error:  # it has accepted them, and lacks something else, such as a process group
        return True, f"{type(error).__name__}: {error}"
    return True, "nothing"


def parameters_of(call) -> list[str]:
    """Return the names of a call's parameters."""
    return list(inspect.signature(call).parameters)
