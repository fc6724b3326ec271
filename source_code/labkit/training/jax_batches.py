# SPDX-License-Identifier: BSD-3-Clause
"""Shard gpt_jax.py's batches over the devices: the same sequences as gpt_fsdp.py's, of a step and of validation."""

from math import prod

import jax
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from labkit.training import text


def batch_axes(mesh) -> tuple[str, ...]:
    """Return the axes along which the batch is sharded."""
    return tuple(axis for axis in mesh.axis_names if axis != "tensor")


def training_batches(tokens, config, mesh, steps):
    """Yield the micro-batches of each step: (inputs, targets), each (accumulate, batch, seq_len), sharded along the batch.

    They are gpt_fsdp.py's: each device along the axes of the batch reads the sequences of one rank there.
    """
    placed = NamedSharding(mesh, P(None, batch_axes(mesh)))
    accumulate, batch, _ = config.batch_shape(mesh.size)
    for step in steps:
        starts = text.starts(tokens, config.seq_len, accumulate * batch, config.seed, step).view(accumulate, batch)
        yield on_devices(text.sequences(tokens, starts, config.seq_len), placed)


def on_devices(batch, sharding):
    """Convert token ids from PyTorch tensors to sharded JAX arrays."""
    return [jax.device_put(part.numpy().astype("int32"), sharding) for part in batch]


def evaluate(training, tokens, config, at_least: int):
    """Return the mean loss on the validation text, on the same sequences as gpt_fsdp.py.

    Args:
        training: gpt_jax.py's.
        tokens: of the validation text.
        config: the options.
        at_least: number of sequences; one for each device along the axes of the batch, if those are more.
    """
    _, batch, _ = config.batch_shape(training.mesh.size)
    total = max(at_least, prod(training.mesh.shape[axis] for axis in batch_axes(training.mesh)))
    starts = torch.linspace(0, len(tokens) - config.seq_len - 1, total).long()
    losses = []
    for first in range(0, total, batch):  # always the same shape, which needs only one compilation
        part = starts[torch.arange(first, first + batch) % total]
        inputs, targets = on_devices(
            text.sequences(tokens, part, config.seq_len), NamedSharding(training.mesh, P(batch_axes(training.mesh)))
        )
        losses += training.losses(training.params, inputs, targets).tolist()
    return sum(losses[:total]) / total
