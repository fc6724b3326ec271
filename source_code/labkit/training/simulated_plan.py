# SPDX-License-Identifier: BSD-3-Clause
"""Simulate the step that the options of plan.py describe, where arithmetic does not know the model's operators."""

import math

import torch
from planner.cli.commands import plan_from_options
from planner.parallel.mesh import arrange
from planner.predict import total

from labkit import UserError
from labkit.measuring.gpu_operators import GpuOperators
from labkit.running import simulated_lab
from labkit.training import hf_models, own_model

STEP_COUNTER = 4  # bytes of AdamW's counter of a parameter's steps, which is in the CPU's memory


def of_module(options) -> dict:
    """Simulate a step of the user's own model (--module).

    Args:
        options: of plan.py.

    Returns:
        {"parameters", "trained": elements, "units", "persistent": bytes by arithmetic, and the keys of ``peak_of``}.

    Raises:
        UserError: the model cannot be loaded or simulated.
    """
    build = own_model.load(options.module)
    plan = plan_from_options(options, own_model.blueprint(options.module, build))
    with own_model.as_user_error(f"{options.module} cannot be simulated"):
        how = options.strategy, options.precision, options.reshard_after_forward
        traced = own_model.step(build, options.ranks, *how, gpu=_gpu(options))
    trained = sum(unit.numel(trained=True) for unit in plan.unit_sizes)
    sizes = {"parameters": plan.blueprint.numel, "trained": trained, "units": len(plan.units)}
    return sizes | {"persistent": total(plan.persistent())} | peak_of(traced)


def of_library(options, lab, config) -> dict:
    """Simulate a step of a third-party model, as a lab trains it.

    Args:
        options: of plan.py.
        lab: hf_fsdp.py, as a module.
        config: the lab's options.

    Returns:
        {"parameters", "trained": elements, "persistent": bytes by arithmetic; simulated ones if --mesh splits weights;
        "experts": the library's implementation or None, and the keys of ``peak_of``}.

    Raises:
        UserError: the model cannot be built or simulated.
    """
    _check(options, config)
    with own_model.as_user_error(f"{options.named} cannot be simulated"):
        with torch.device("meta"):
            model = lab.unsharded(config)
        traced = simulated_lab.step(lab, config, options.ranks, _gpu(options))
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    mesh = arrange(options.ranks, options.mesh)
    found = {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in trained),
        "persistent": persistent_bytes(model, config.strategy, mesh.shard, options.on_gpu),
        "experts": _experts(model),
    }
    if options.splits_model:
        found["persistent"] = sum(traced["start"][category] for category in ("parameters", "optimizer state"))
    return found | peak_of(traced)


def _check(options, config):
    """Check that the library knows the model, and as many positions as --seq-len has.

    Raises:
        UserError: it does not.
    """
    try:
        _, longest = hf_models.vocabulary_and_positions(config.architecture)
    except UserError as error:
        raise UserError(f"{error}; or describe it as a function: --module FILE.py:function") from None
    if longest and longest < options.seq_len:
        raise UserError(f"--seq-len {options.seq_len} is longer than the {longest} positions that this model supports")


def _experts(model) -> str | None:
    """Return the library's implementation of a model's experts; None if it has none that can be chosen."""
    routed = any(type(module).__name__.endswith("Experts") for module in model.modules())
    return getattr(model.config.get_text_config(), "_experts_implementation", None) if routed else None


def _gpu(options) -> GpuOperators | None:
    return GpuOperators() if options.on_gpu else None


def persistent_bytes(model, strategy: str, shards: int, on_gpu: bool) -> int:
    """Return what a rank stores from step to step with AdamW, by arithmetic on the sizes of parameters and buffers.

    Args:
        model: unsharded, with memory or on the meta device.
        strategy: "single", "ddp", or "fsdp2", which shards the first dimension of each parameter in equal parts, padded.
        shards: ranks that share one model under FSDP2.
        on_gpu: whether AdamW's step counters are elsewhere.
    """
    bytes_ = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in model.parameters():
        mine = parameter.nbytes
        if strategy == "fsdp2" and shards > 1:
            mine = math.ceil(parameter.shape[0] / shards) * (parameter.nbytes // parameter.shape[0])
        states = 3 if parameter.requires_grad else 1  # itself, and AdamW's two moments
        bytes_ += states * mine + (STEP_COUNTER if parameter.requires_grad and not on_gpu else 0)
        bytes_ += parameter.nbytes if strategy == "ddp" and parameter.requires_grad else 0  # DDP's buckets
    return bytes_


def peak_of(traced: dict) -> dict:
    """Return the results of a simulated step that plan.py prints.

    Args:
        traced: as ``simulate.step`` returns it.

    Returns:
        {"simulated": peak in bytes, "simulated_at": where, "simulated_by_category": {category: bytes}, "collectives":
        [{"kind", "bytes", "dimension", "count"}, …]}.
    """
    peak = {name: size for name, size in traced["peak"].items() if size}
    where = f"{traced['peak_phase']}, {traced['peak_operator']}"
    found = {"simulated": sum(peak.values()), "simulated_at": where, "simulated_by_category": peak}
    return found | {"collectives": traced["traffic"]}
