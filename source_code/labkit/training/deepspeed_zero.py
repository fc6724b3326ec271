# SPDX-License-Identifier: BSD-3-Clause
"""Use DeepSpeed's ZeRO: check its version, initialize an engine, and find its persistent tensors.

Private parts of DeepSpeed used here, and only here: the table of operators that it may compile
(``deepspeed.ops.__compatible_ops__``) and the attributes of its optimizers that hold flat buffers.
"""

import contextlib
import importlib.metadata
import logging
import os
from importlib import import_module
from unittest import mock

import torch
import torch.distributed as dist

from labkit import UserError

VERSION = "0.19.8"  # as in requirements-deepspeed.txt; private attributes change between versions
INSTEAD = "run make deepspeed, or use --engine torch"


def check():
    """Check that the supported version of DeepSpeed is installed.

    Raises:
        UserError: it is not.
    """
    try:
        installed = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"DeepSpeed is not installed: {INSTEAD}") from None
    if installed != VERSION:
        raise UserError(f"DeepSpeed {installed} is installed, and only {VERSION} is supported: {INSTEAD}")


def load(me):
    """Import ``deepspeed`` for this rank's device type, and return the module. me: a ``ranks.Rank``."""
    os.environ["DS_ACCELERATOR"] = me.device.type  # read at import; by default it uses a GPU if there is one
    os.environ["LOCAL_RANK"] = str(me.local_rank)  # selects the rank's GPU; srun does not set it
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed = import_module("deepspeed")
    _skip_compiling_muon()
    # On the CPU it would compile a shared-memory all-reduce at the first start, which takes 14 seconds and a C++ compiler.
    # It is for inference: training never calls it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _skip_compiling_muon():
    """Import DeepSpeed's Muon uncompiled: it calls torch.compile at import, which imports Inductor, 6 seconds per rank.

    Every ZeRO engine imports it, to check the optimizer's type. The labs never step it.
    """
    with mock.patch.object(torch, "compile", lambda *_, **__: lambda function: function):
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")


@contextlib.contextmanager
def contained():
    """Restore F.linear at the end of the context: stage 3 replaces it with its own and never restores it."""
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def initialize(model, optimizer, settings: dict, me):
    """Initialize DeepSpeed, and return (engine, optimizer).

    Args:
        model: with its initial weights.
        optimizer: a torch optimizer of its parameters.
        settings: DeepSpeed's configuration.
        me: a ``ranks.Rank``.

    Returns:
        The engine, and an optimizer whose ``step`` is the engine's. It has ``param_groups``, ``state``, and
        hooks, like any torch optimizer.
    """
    engine, *_ = load(me).initialize(model=model, optimizer=optimizer, config=settings)
    # Stage 0 in bf16 has already made a step with zero gradients, so that Adam's bias correction is one step ahead and
    # the losses differ. The first step recreates the state.
    engine.basic_optimizer.state.clear()
    engine.persistent_tensors = lambda: persistent_tensors(engine)
    engine.process_group_names = lambda: process_group_names(engine)
    return engine, Optimizer(engine)


class Optimizer(torch.optim.Optimizer):
    """Step as ``engine.step`` does: clip, step this rank's partition, all-gather the parameters, free the gradients.

    The gradients have been reduced in ``engine.backward``.
    """

    def __init__(self, engine):
        super().__init__(engine.basic_optimizer.param_groups, {})
        self.engine, self.state = engine, engine.basic_optimizer.state

    def step(self, closure=None):
        self.engine.step()


def persistent_tensors(engine):
    """Yield (category, tensor) for the persistent memory of this rank, as ``trace.persistent_tensors`` does."""
    zero, adam = engine.optimizer, engine.basic_optimizer
    for parameter in engine.module.parameters():
        yield "parameters", parameter.detach()  # under stage 3 empty, unless it stays gathered
        for name in ("ds_tensor", "ds_secondary_tensor"):  # stage 3: this rank's partition, and hpZ's second one
            if getattr(parameter, name, None) is not None:
                yield "parameters", getattr(parameter, name)
        if parameter.grad is not None:
            yield "gradients", parameter.grad
    for buffer in engine.module.buffers():
        yield "parameters", buffer
    for state in adam.state.values():
        yield from (("optimizer state", value) for value in state.values() if isinstance(value, torch.Tensor))
    # The master weights, which the torch optimizer updates: of this rank's partition (stages 1 to 3), even if the model
    # is in fp32; of all parameters (stage 0 in bf16)
    whole = [master for group in getattr(zero, "fp32_groups", ()) for master in group]
    split = [getattr(zero, name, ()) for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")]
    yield from (("optimizer state", master.detach()) for master in (*whole, *split[0], *split[1]))
    for gradients in getattr(
        zero, "averaged_gradients", {}
    ).values():  # stages 1 and 2: reduced gradients, until the step
        yield from (("gradients", gradient) for gradient in gradients or ())
    if getattr(zero, "grad_partitions_flat_buffer", None) is not None:  # stage 3 never frees it
        yield "gradients", zero.grad_partitions_flat_buffer
    for bucket in getattr(zero, "ipg_buckets", {}).values():
        if isinstance(bucket.buffer, torch.Tensor):  # nor this one; in stages 1 and 2 it is a list, empty between steps
            yield "reduce-scatter", bucket.buffer


def process_group_names(engine) -> dict[tuple, str]:
    """Map the ranks of the process group of hpZ, in which stage 3 gathers for backward, to its name."""
    for parameter in engine.module.parameters():
        if (group := getattr(parameter, "ds_zero_param_process_group", None)) is not None:
            return {tuple(dist.get_process_group_ranks(group)): "hpz"}
    return {}


def defaults(stage: int) -> dict:
    """Return DeepSpeed's own ``zero_optimization`` settings for a stage: {key in the JSON file: value}."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # reading them needs no device
    section = import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    return section(stage=stage).model_dump(mode="json", by_alias=True)


def estimates(numel: int, largest_layer: int, ranks: int) -> dict[int, int]:
    """Return the GPU memory of model states per rank by DeepSpeed's own estimators, on one node without offload.

    Args:
        numel: number of the model's parameters.
        largest_layer: number of parameters of its largest layer.
        ranks: number of ranks.

    Returns:
        {stage: bytes}.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # arithmetic that needs no device
    stage_2 = import_module("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs
    stage_3 = import_module("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs
    setting = {"num_gpus_per_node": ranks, "num_nodes": 1, "cpu_offload": False}
    return {2: stage_2(numel, **setting)[1], 3: stage_3(numel, largest_layer, cpu_offload_params=False, **setting)[1]}
