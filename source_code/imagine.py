"""Simulate a step of gpt_fsdp.py, or of a network of one's own, on one rank of a world that is not there.

Used by plan.py --simulate and notebook 11; labkit/simulate.py does the work, on tensors without memory.
"""

import gpt_fsdp
import torch
from labkit import UserError, models, simulate
from labkit.ranks import Rank
from labkit.shapes import GPTShape
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)


def gpt(ranks: int, shape: GPTShape | None = None, **options) -> dict:
    """A step with the options of gpt_fsdp.py, on rank 0 of ``ranks``: what ``simulate.step`` returns.

    shape: another than the preset's. Joins the world at the first call; a process can be in one only.
    """
    config = gpt_fsdp.Config(**options)
    if config.strategy == "ddp":
        raise UserError("DDP cannot be simulated: it looks inside the tensors; choose fsdp1 or fsdp2")
    simulate.join(ranks)
    me = Rank(0, 0, ranks, "imagined", torch.device("cpu"), "fake")

    def setup():
        model = with_default(config.dtype, lambda: models.GPT(shape or config.shape))
        if config.lora:
            with_default(config.dtype, lambda: models.add_adapters(model, config.lora))
        for block in model.blocks:
            gpt_fsdp.change_forward(block, config)
        with simulate.ranks_are_real():
            if config.strategy == "fsdp1":
                model = gpt_fsdp.fsdp1(model, config, me)
            elif config.strategy == "fsdp2":
                gpt_fsdp.fsdp2(model, config, me)
        optimizer = gpt_fsdp.make_optimizer(model, config)
        tokens = torch.zeros(config.accumulate, config.batch_size, config.seq_len, dtype=torch.long)
        losses = []

        def train(inputs, targets):
            for micro in range(config.accumulate):  # as in gpt_fsdp.py's loop
                with gpt_fsdp.gradients_wait(model, config, last=micro == config.accumulate - 1):
                    loss = gpt_fsdp.compute_loss(model, inputs[micro], targets[micro], config) / config.accumulate
                    loss.backward()
                losses.append(loss.detach())
            if config.clip:
                gpt_fsdp.clip(model, config)
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, (tokens, torch.zeros_like(tokens)), train

    return simulate.step(setup)


def with_default(dtype: torch.dtype, make):
    """``make()`` with new parameters in that number format: on tensors without memory ``module.to`` does not work."""
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def network(build, ranks: int, strategy: str, precision: str = "fp32", reshard: str = "true") -> dict:
    """A step of AdamW on a network of one's own, on rank 0 of ``ranks``: what ``simulate.step`` returns.

    build() → (module, inputs, loss), where loss(module, *inputs) is the number to minimise.
    """
    if strategy not in ("single", "fsdp1", "fsdp2"):
        raise UserError(f"{strategy} cannot be simulated: choose single, fsdp1 or fsdp2")
    simulate.join(ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def setup():
        module, inputs, loss_of = build()
        if strategy != "single":
            with simulate.ranks_are_real():
                module = sharded(module, strategy, precision, reshard, mesh)
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], foreach=True)

        def train(*inputs):
            loss_of(module, *inputs).backward()
            optimizer.step()
            optimizer.zero_grad()

        return module, optimizer, tuple(inputs), train

    return simulate.step(setup)


def units_of(module: nn.Module) -> list[nn.Module]:
    """What becomes a unit of its own: the members of each ModuleList."""
    return [member for part in module.modules() if isinstance(part, nn.ModuleList) for member in part]


def sharded(module, strategy, precision, reshard, mesh):
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if precision == "bf16" else {}
    units = units_of(module)
    if strategy == "fsdp1":
        whole = ShardingStrategy.FULL_SHARD if reshard == "true" else ShardingStrategy.SHARD_GRAD_OP
        return FullyShardedDataParallel(
            module,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            auto_wrap_policy=lambda module, recurse, **_: recurse or any(module is unit for unit in units),
            sharding_strategy=whole,
            mixed_precision=MixedPrecision(**bf16) if bf16 else None,
        )
    keep = int(reshard) if reshard.isdecimal() else reshard == "true"
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=keep, mp_policy=MixedPrecisionPolicy(**bf16))
    return fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**bf16))
