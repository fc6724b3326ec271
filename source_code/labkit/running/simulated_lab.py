# SPDX-License-Identifier: BSD-3-Clause
"""Simulate a training step of a lab on one rank of a larger world: the lab's own code on fake tensors.

  simulated_lab.step(gpt_fsdp, gpt_fsdp.Config(precision="bf16"), ranks=64)

A lab that can be simulated has ``unsharded(config)``, which builds the model on the current device; ``fsdp1`` and ``fsdp2``,
named after their strategies, which shard it; ``make_optimizer``; and ``train_step``. It may have ``in_simulation``, which
returns the context of a simulated step. DDP's step is that of one process, with DDP's buckets.
"""

import contextlib
import dataclasses
from collections.abc import Callable

import torch

from labkit.measuring import simulate
from labkit.measuring.gpu_operators import GpuOperators
from labkit.running.ranks import Rank


def step(lab, config, ranks: int, gpu: GpuOperators | None = None, workspaces: bool = True) -> dict:
    """Simulate a step of a lab on rank 0 of a world of ``ranks``.

    Args:
        lab: the lab script, as a module.
        config: the lab's options.
        ranks: size of the simulated world. This process can join only one at a time.
        gpu: a GPU's operators instead of the CPU's.
        workspaces: whether to count the workspaces of a GPU's operators.

    Returns:
        Memory and traffic as ``simulate.step`` returns them.

    Raises:
        UserError: the options cannot be simulated.
    """
    reductions = 0
    if config.strategy == "ddp":  # the step of one process, with DDP's buckets
        reductions = 1 if getattr(config, "sync", "last") == "last" else config.accumulate
        config = dataclasses.replace(config, strategy="single")
    return simulate.step(setup(lab, config, ranks), gpu, workspaces, ddp_reductions=reductions)


def setup(lab, config, ranks: int) -> Callable:
    """Join a simulated world as rank 0 of ``ranks``, and return the argument ``setup`` of ``simulate.step``."""
    simulate.join(ranks)
    me = Rank(0, 0, ranks, "simulated", torch.device("cpu"), "fake")

    def prepare():
        # Create the parameters in the lab's dtype: ``module.to`` does not work on fake tensors.
        torch.set_default_dtype(config.dtype)
        try:
            with simulate.real_tensors(), torch.device("meta"):
                model = lab.unsharded(config)
            simulate.allocate(model)
            if config.strategy.startswith("fsdp"):
                with simulate.real_tensors():
                    model = getattr(lab, config.strategy)(model, config, me)
            optimizer = lab.make_optimizer(model, config)
            batch = _batch(config, ranks)
        finally:
            torch.set_default_dtype(torch.float32)
        losses = []  # retained as in the lab's loop: they take memory, too

        def train(*batch):
            with getattr(lab, "in_simulation", contextlib.nullcontext)():
                losses.append(lab.train_step(model, optimizer, *batch, config))

        return model, optimizer, batch, train

    return prepare


def _batch(config, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the zeros of a rank's batch: tokens and targets, or, without ``seq_len``, MNIST's images and labels."""
    if hasattr(config, "seq_len"):
        tokens = torch.zeros(config.accumulate, config.batch_size, config.seq_len, dtype=torch.long)
        return tokens, torch.zeros_like(tokens)
    size = config.batch_size_of(ranks)
    return torch.zeros(size, 1, 28, 28, dtype=config.dtype), torch.zeros(size, dtype=torch.long)
