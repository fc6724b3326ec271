# SPDX-License-Identifier: BSD-3-Clause
"""Train the transformer of gpt_fsdp.py with ZeRO, by PyTorch alone or by DeepSpeed.

  python gpt_zero.py --ranks 4 --stage 1 --record run.json
  python gpt_zero.py --ranks 4 --stage 3 --engine deepspeed           # after make deepspeed
  torchrun --nproc-per-node 8 gpt_zero.py --stage 2 --engine deepspeed --preset 1b --precision bf16 --cpu-offload

  stage                   torch                                      DeepSpeed
  0  no partitioning      DistributedDataParallel                    ZeRO disabled
  1  optimizer state      DDP and ZeroRedundancyOptimizer            stage 1
  2  and gradients        FSDP2, reshard_after_forward=False         stage 2
  3  and parameters       FSDP2, reshard_after_forward=True          stage 3

ZeRO: arXiv:1910.02054. Model, initial weights, batches and losses are those of gpt_fsdp.py, step by step.
"""

import contextlib
from dataclasses import asdict, dataclass
from functools import partial

import gpt_fsdp
import torch
from labkit.measuring import records
from labkit.running import options, preflight, ranks
from labkit.running.lab_options import ZeroTraining
from labkit.training import deepspeed_zero, models
from labkit.training.loop import keep_norm
from labkit.training.weight_decay import parameter_groups
from torch.distributed.optim import ZeroRedundancyOptimizer

compute_loss = gpt_fsdp.compute_loss  # a lab has a Config, prepare and compute_loss: proofs/memory.py, proofs/parity.py


def prepare(config, me, zero=None):
    """Return (model, optimizer, step) as ``gpt_fsdp.prepare`` does.

    Args:
        config: the options.
        me: this rank.
        zero: what to give DeepSpeed as ``zero_optimization``, if not what ``settings`` has.
    """
    if config.engine == "deepspeed":
        return prepare_deepspeed(config, me, zero)
    model, _ = gpt_fsdp.build(config, me)  # DDP or FSDP2: config.strategy
    optimizer = zero_1(model, config) if config.stage == "1" else gpt_fsdp.make_optimizer(model, config)
    return model, optimizer, lambda inputs, targets: gpt_fsdp.train_step(model, optimizer, inputs, targets, config)


def zero_1(model, config):
    """Return ZeRO-1's AdamW: one rank has each parameter's state, updates the parameter, and broadcasts it."""
    return ZeroRedundancyOptimizer(parameter_groups(model, config), torch.optim.AdamW, lr=config.lr, foreach=True)


def prepare_accumulating(config, me, keep: bool, wait: bool):
    """Prepare FSDP2 with a step that says when parameters and gradients are whole.

    Args:
        config: the options, of stage 2 or 3.
        me: this rank.
        keep: keep parameters gathered until the last micro-batch.
        wait: reduce gradients only after the last micro-batch.
    """
    model, optimizer, _ = prepare(config, me)

    def step(inputs, targets):
        losses = []
        for micro in range(config.accumulate):
            last = micro == config.accumulate - 1
            model.set_reshard_after_backward(last or not keep)
            model.set_requires_gradient_sync(last or not wait)
            loss = gpt_fsdp.compute_loss(model, inputs[micro], targets[micro], config) / config.accumulate
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return model, optimizer, step


def prepare_deepspeed(config, me, zero=None):
    """Prepare DeepSpeed, which takes an unsharded model and a torch optimizer that has not stepped yet."""
    with torch.device("meta"):
        model = models.GPT(config.shape).to(config.dtype)
    preflight.refuse_if_too_big(config, me)
    for number, block in enumerate(model.blocks):
        gpt_fsdp.change_forward(block, config, number)
    model.to_empty(device=me.device)
    model.tie()
    gpt_fsdp.init_weights(model, config.seed)
    optimizer = gpt_fsdp.make_optimizer(model, config)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    changed = {"zero_optimization": zero} if zero else {}
    engine, optimizer = deepspeed_zero.initialize(model, optimizer, settings(config, block) | changed, me)
    return engine, optimizer, lambda inputs, targets: deepspeed_step(engine, optimizer, inputs, targets, config)


def settings(config, block: int) -> dict:
    """Return DeepSpeed's configuration, https://www.deepspeed.ai/docs/config-json; block: number of a block's parameters.

    Its defaults suit billions of parameters: a small model would not be partitioned at all, and use two gigabytes of
    buffers. Sizes are in elements.
    """
    zero = {
        "stage": int(config.stage),
        # Size of the buffer in which gradients are collected and reduced (default 5e8).
        "reduce_bucket_size": block,
        # Stage 3: smaller parameters are not partitioned (default 1e5).
        "stage3_param_persistence_threshold": 0,
        # Gathered parameters are freed after use if more than this are live (default 1e9), unless they are reused within
        # this distance (default 1e9). The last one is the number of elements to prefetch (default 5e7).
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "overlap_comm": False,  # stage 3's default is True; stages 1 and 2 would have a second bucket
    }
    if config.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.accumulate,
        "zero_optimization": zero,
        "bf16": {"enabled": config.precision == "bf16"},
        "gradient_clipping": config.clip or 0.0,  # by default gradients would be clipped to a norm of 1.0
        "zero_force_ds_cpu_optimizer": False,  # allow a torch optimizer with offload: DeepSpeed's must be compiled
        "steps_per_print": None,
    }


def deepspeed_step(engine, optimizer, inputs, targets, config):
    """Train one step as ``gpt_fsdp.train_step`` does. The engine scales the losses, clips, and counts micro-batches."""
    losses = []
    for micro in range(config.accumulate):
        loss = gpt_fsdp.compute_loss(engine, inputs[micro], targets[micro], config)
        losses.append(engine.backward(loss).detach())
        optimizer.step()  # to be called for each micro-batch; DeepSpeed applies the update after the last one
    keep_norm(optimizer, engine.get_global_grad_norm(), config)  # None if DeepSpeed computes none
    return losses


def train_several(me, runs: list[dict]) -> list[dict]:
    """Train several configurations one after another in the same ranks, and return a record of each.

    For a notebook: ranks start and import DeepSpeed only once.

    Args:
        me: this rank.
        runs: the options of each run, by name; "zero" if it is not that of ``settings`` (see ``prepare``); "prepare" if it
            is another function than that.
    """
    gpt_fsdp.VALIDATION_SEQUENCES = 1  # as few as possible: notebooks do not look at that loss
    found = []
    for run in runs:
        config = Config(**{name: value for name, value in run.items() if name not in ("zero", "prepare")})
        about = records.new(config.script, asdict(config), me, [me.node])
        if zero := run.get("zero"):
            about["zero_optimization"] = zero  # the planner refuses such a record
        with deepspeed_zero.contained(), contextlib.redirect_stdout(None):
            found.append(about | gpt_fsdp.train(config, me, run.get("prepare", partial(prepare, zero=zero))))
    return found


def main(config, me):
    """Run the lab on one rank. me: this rank (labkit/running/ranks.py)."""
    if config.engine == "deepspeed":
        deepspeed_zero.check()
    gpt_fsdp.main(config, me, prepare)


@dataclass(frozen=True)
class Config(ZeroTraining):
    """One run. Its options are declared in labkit/running/lab_options.py."""

    dtype = gpt_fsdp.Config.dtype


if __name__ == "__main__":
    ranks.run(main, options.parse(Config, __doc__))
