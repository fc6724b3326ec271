"""Simulate a training step of a lab on one rank of a larger world: the lab's own code on fake tensors.

  simulated_lab.step(gpt_fsdp, gpt_fsdp.Config(precision="bf16"), ranks=64)

A lab that can be simulated has ``untrained(config, me)``, which returns (model, optimizer, batch), and ``train_step``.
"""

from collections.abc import Callable

import torch

from labkit import UserError
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
    return simulate.step(setup(lab, config, ranks), gpu, workspaces)


def setup(lab, config, ranks: int) -> Callable:
    """Join a simulated world as rank 0 of ``ranks``, and return the argument ``setup`` of ``simulate.step``."""
    if config.strategy == "ddp":
        raise UserError("DDP cannot be simulated, because it reads the tensors' elements: choose fsdp1 or fsdp2")
    simulate.join(ranks)
    me = Rank(0, 0, ranks, "simulated", torch.device("cpu"), "fake")

    def prepare():
        # Create the parameters in the lab's dtype: ``module.to`` does not work on fake tensors.
        torch.set_default_dtype(config.dtype)
        try:
            model, optimizer, batch = lab.untrained(config, me)
        finally:
            torch.set_default_dtype(torch.float32)
        losses = []  # retained as in the lab's loop: they take memory, too

        def train(*batch):
            losses.append(lab.train_step(model, optimizer, *batch, config))

        return model, optimizer, batch, train

    return prepare
