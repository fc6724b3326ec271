"""DeepSpeed's ZeRO behind one door: which version, its configuration, and where it keeps what it keeps.

Private parts of DeepSpeed used here, and only here: the table of operators that it may compile
(``deepspeed.ops.__compatible_ops__``) and the attributes of its optimizers that hold flat buffers.
"""

import importlib.metadata
import logging
import os
from importlib import import_module

import torch

from labkit import UserError

VERSION = "0.19.8"  # as requirements-deepspeed.txt has it; what lies where changes between versions
INSTEAD = "run make deepspeed, or use --engine torch"


def check():
    """UserError: DeepSpeed is not installed, or of a version whose insides this file does not know."""
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"DeepSpeed is not installed: {INSTEAD}") from None
    if found != VERSION:
        raise UserError(f"DeepSpeed {found} is installed, and {VERSION} is what is supported: {INSTEAD}")


def load(me):
    """The module ``deepspeed``, imported for this rank's kind of device. me: a ``ranks.Rank``."""
    os.environ["DS_ACCELERATOR"] = me.device.type  # read at import; left to itself it takes a GPU where there is one
    os.environ["LOCAL_RANK"] = str(me.local_rank)  # srun does not set it, and it says which GPU is this rank's
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed = import_module("deepspeed")
    # On the CPU it would compile an all-reduce through shared memory at the first start: 14 seconds and a C++ compiler,
    # for inference. Training never calls it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def initialize(model, optimizer, settings: dict, me):
    """(engine, optimizer) of a model with its values and a torch optimizer; settings: DeepSpeed's configuration.

    The optimizer returned takes DeepSpeed's whole step, and has what others have: ``param_groups``, ``state``, hooks.
    """
    engine, *_ = load(me).initialize(model=model, optimizer=optimizer, config=settings)
    engine.persistent_tensors = lambda: persistent_tensors(engine)
    return engine, Optimizer(engine)


class Optimizer(torch.optim.Optimizer):
    """DeepSpeed's step: sums and norms of gradients, the torch optimizer on this rank's partition, the gathering."""

    def __init__(self, engine):
        super().__init__(engine.basic_optimizer.param_groups, {})
        self.engine, self.state = engine, engine.basic_optimizer.state

    def step(self, closure=None):
        self.engine.step()


def persistent_tensors(engine):
    """Yield (category, tensor) for what outlives a step on this rank, as ``trace.persistent_tensors`` does."""
    for parameter in engine.module.parameters():
        yield "parameters", getattr(parameter, "ds_tensor", parameter.detach())  # stage 3: this rank's partition
        if parameter.grad is not None:
            yield "gradients", parameter.grad
    for buffer in engine.module.buffers():
        yield "parameters", buffer
    for state in engine.basic_optimizer.state.values():
        yield from (("optimizer state", value) for value in state.values() if isinstance(value, torch.Tensor))
