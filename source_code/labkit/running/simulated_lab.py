# SPDX-License-Identifier: BSD-3-Clause
"""Simulate a training step of a lab on one rank of a larger world: the lab's own code on fake tensors.

  simulated_lab.step(gpt_fsdp, gpt_fsdp.Config(precision="bf16"), ranks=64)

A lab that can be simulated has ``unsharded(config)``, which builds the model on the current device; ``fsdp1`` and ``fsdp2``,
named after their strategies, which shard it; ``make_optimizer``; and ``train_step``. It may have ``in_simulation``, which
returns the context of a simulated step. DDP's step is that of one process, with DDP's buckets.

If all blocks of the lab's model are alike, apart from its own ``recompute_every``, it says so by ``EQUAL_BLOCKS``. Then only
three models with few blocks are simulated, and the step is extended (labkit/measuring/equal_blocks.py).
"""

import contextlib
import dataclasses
from collections.abc import Callable

import torch

from labkit.measuring import equal_blocks, simulate
from labkit.measuring.gpu_operators import GpuOperators
from labkit.running.ranks import Rank

MIN_PERIODS = 4  # of equal blocks: ends, and some in between
EXTENDED_STRATEGIES = ("single", "fsdp1", "fsdp2")  # DDP's buckets do not repeat themselves with the blocks
EXTENDED_OPTIMIZERS = ("adamw", "adamw-fused", "adamw-for-loop", "momentum", "sgd")  # Muon's ranks share the matrices


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
    counts, more = few_blocks(lab, config)
    few = [traced(lab, with_blocks(config, count), ranks, gpu, workspaces) for count in counts]
    if few and (extended := equal_blocks.extended(few, more)):
        return simulate.summary(*extended)
    return simulate.summary(*traced(lab, config, ranks, gpu, workspaces))


def traced(lab, config, ranks: int, gpu: GpuOperators | None = None, workspaces: bool = True) -> equal_blocks.Traced:
    """Trace all blocks of a step. Arguments: see ``step``."""
    reductions = 0
    if config.strategy == "ddp":  # the step of one process, with DDP's buckets
        reductions = 1 if getattr(config, "sync", "last") == "last" else config.accumulate
        config = dataclasses.replace(config, strategy="single")
    return simulate.traced(setup(lab, config, ranks), gpu, workspaces, ddp_reductions=reductions)


def with_blocks(config, count: int):
    """Return the options of a model with ``count`` blocks."""
    shape = dataclasses.replace(config.shape, num_hidden_layers=count)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    # The shape is a property that follows from --preset: a subclass has another one.
    return type(type(config).__name__, (type(config),), {"shape": shape})(**values)


def few_blocks(lab, config) -> tuple[list[int], int]:
    """Return (the numbers of blocks to simulate, the periods of blocks to add); ([], 0) to simulate all blocks."""
    if not getattr(lab, "EQUAL_BLOCKS", False) or config.shape.layers or config.clip or config.log:
        return [], 0  # layers: they differ. clip, log: the norms of all parameters are stacked, which grows a size
    if config.strategy not in EXTENDED_STRATEGIES or config.optimizer not in EXTENDED_OPTIMIZERS:
        return [], 0
    blocks, period = config.shape.num_hidden_layers, config.recompute_every if config.recompute != "none" else 1
    fewest = MIN_PERIODS * period + 2 * config.prefetch  # the units gathered ahead must not reach from end to end
    fewest += (blocks - fewest) % period
    counts = [fewest, fewest + period, fewest + 2 * period]
    return (counts, (blocks - counts[-1]) // period) if sum(counts) < blocks else ([], 0)


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
