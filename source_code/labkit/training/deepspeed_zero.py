"""DeepSpeed's ZeRO behind one door: which version, its configuration, and where it keeps what it keeps.

Private parts of DeepSpeed used here, and only here: the table of operators that it may compile
(``deepspeed.ops.__compatible_ops__``) and the attributes of its optimizers that hold flat buffers.
"""

import contextlib
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


@contextlib.contextmanager
def contained():
    """What comes after in this process is PyTorch's own: stage 3 leaves a product of its own in the place of F.linear."""
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def initialize(model, optimizer, settings: dict, me):
    """(engine, optimizer) of a model with its values and a torch optimizer; settings: DeepSpeed's configuration.

    The optimizer returned takes DeepSpeed's whole step, and has what others have: ``param_groups``, ``state``, hooks.
    """
    engine, *_ = load(me).initialize(model=model, optimizer=optimizer, config=settings)
    # Stage 0 in bf16 has made a step already, with gradients of zero, so that Adam's correction of its first steps is
    # one step ahead, and the losses are others. The state is made anew in the first step.
    engine.basic_optimizer.state.clear()
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
    zero, adam = engine.optimizer, engine.basic_optimizer
    for parameter in engine.module.parameters():
        yield "parameters", getattr(parameter, "ds_tensor", parameter.detach())  # stage 3: this rank's partition
        if parameter.grad is not None:
            yield "gradients", parameter.grad
    for buffer in engine.module.buffers():
        yield "parameters", buffer
    for state in adam.state.values():
        yield from (("optimizer state", value) for value in state.values() if isinstance(value, torch.Tensor))
    # The master copies, which the torch optimizer steps: of this rank's partition (stages 1 and 2; 3), kept also where
    # the model is in fp32 itself; of all parameters (stage 0 in bf16)
    whole = [master for group in getattr(zero, "fp32_groups", ()) for master in group]
    split = [getattr(zero, name, ()) for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")]
    yield from (("optimizer state", master.detach()) for master in (*whole, *split[0], *split[1]))
    for gradients in getattr(zero, "averaged_gradients", {}).values():  # stages 1 and 2: summed, until the step is done
        yield from (("gradients", gradient) for gradient in gradients or ())
    if getattr(zero, "grad_partitions_flat_buffer", None) is not None:  # stage 3 never frees it
        yield "gradients", zero.grad_partitions_flat_buffer
    for bucket in getattr(zero, "ipg_buckets", {}).values():
        if isinstance(bucket.buffer, torch.Tensor):  # nor this; of stages 1 and 2 it is a list, empty between steps
            yield "reduce-scatter", bucket.buffer


def estimates(numel: int, largest_layer: int, ranks: int) -> dict[int, int]:
    """Bytes of GPU memory per rank of one node by DeepSpeed's own estimators of model state, without offload: {stage: bytes}.

    numel: parameters of the model; largest_layer: of its largest layer.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # this is arithmetic: no device need be found for it
    stage_2 = import_module("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs
    stage_3 = import_module("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs
    nowhere = {"num_gpus_per_node": ranks, "num_nodes": 1, "cpu_offload": False}
    return {2: stage_2(numel, **nowhere)[1], 3: stage_3(numel, largest_layer, cpu_offload_params=False, **nowhere)[1]}
