# SPDX-License-Identifier: BSD-3-Clause
"""Short runs for chapter 08: peak memory of a lab within one launch, and training with other number formats."""

import contextlib

import torch
from planner import predict

from labkit.measuring import meters
from labkit.measuring.records import hardware
from labkit.training import models, text


def memory_record(lab, me, **options) -> dict:
    """Run two steps of a lab in the process group there is, and return a record of them. Collective.

    Args:
        lab: the module ``gpt_fsdp``.
        me: a ``ranks.Rank``.
        options: of the lab.
    """
    config = lab.Config(max_steps=2, **options)
    about = {"script": "gpt_fsdp.py", "config": vars(config), "ranks": me.world_size, "device": me.device.type}
    lab.VALIDATION_SEQUENCES, meters.TRACED_STEPS = 1, range(2)  # as few as possible: only memory is measured
    with contextlib.redirect_stdout(None):  # many runs need not announce themselves
        return about | {"hardware": hardware(me.device)} | lab.train(config, me)


def total(record: dict) -> int:
    """Return the measured peak of a record in bytes."""
    return sum(record["memory"]["peak"].values())


def expected(record: dict) -> dict[str, int]:
    """Return {category: bytes} that the planner finds at the peak of a record's run."""
    return predict.by_category(predict.plan_of(record).peak()[1])


def train_in_formats(lab, me, precision, weights, optimizer, steps=20) -> dict:
    """Train with a learning rate of 3e-5, and watch which of this rank's weights each step changes. Collective.

    Args:
        lab: the module ``gpt_fsdp``.
        me: a ``ranks.Rank``.
        precision: in which the lab computes, --precision.
        weights: dtype of the sharded weights, which the optimizer updates.
        optimizer: its class.
        steps: number of steps.

    Returns:
        "losses" and "changed" (the share of weights that a step changed) per step, "ever" (the share that any step
        changed), and "bytes" stored per parameter for weights and moments.
    """
    config = lab.Config(precision=precision, batch_size=1)
    with torch.device("meta"):
        model = models.GPT(config.shape).to(weights)
    model = lab.parallelize(model, config, me)
    optimizer = optimizer(model.parameters(), lr=3e-5, weight_decay=0.0)
    shards = [p.detach().to_local() for p in model.parameters()]
    losses, changed, ever = [], [], False
    for (x,), (y,) in lab.training_batches(text.load(me.device).train, config, me, range(steps)):
        losses.append(lab.compute_loss(model, x, y, config))
        losses[-1].backward()
        before = torch.cat([shard.flatten() for shard in shards])
        optimizer.step()
        optimizer.zero_grad()
        now = torch.cat([shard.flatten() for shard in shards]) != before
        ever = now | ever
        changed.append(now.float().mean().item())
    moments = [state[name].to_local() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "losses": [loss.item() for loss in losses],
        "changed": changed,
        "ever": ever.float().mean().item(),
        "bytes": sum(tensor.nbytes for tensor in [*shards, *moments]) / before.numel(),
    }
