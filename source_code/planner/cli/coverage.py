# SPDX-License-Identifier: BSD-3-Clause
"""Tell what arithmetic does not cover of a third-party model, trained as the options of plan.py say. Imports no torch."""

from math import ceil, prod

from planner import UserError, predict
from planner.cli import config_files
from planner.models import huggingface, networks
from planner.parallel.mesh import arrange
from planner.step.plan import STATES


def why_simulated(options) -> str:
    """Return why a model's peak must be simulated with the library's own code; "": arithmetic covers it."""
    family = config_files.settings(options.named).get("model_type")
    if options.shape is None:
        return f"its family {family!r} is not one that the planner knows"
    if family in huggingface.NESTED:
        return "arithmetic does not cover its image or audio tower, only a configuration like its text_config"
    unmodeled = networks.gpt(options.shape, 1, 1, tp_degree=options.tp_degree).unmodeled
    if uncovered := unmodeled or uncovered_options(options):
        return f"arithmetic does not cover {uncovered}"
    return ""


def uncovered_options(options) -> str:
    """Return what the options ask for that arithmetic does not cover; "": nothing."""
    splits, sharded = options.tp_degree > 1, options.planned_strategy == "fsdp2"
    uncovered = {
        "peft's adapters": options.lora and options.frozen != "nf4",
        "experts in fp64, which the library computes one by one": options.shape.experts and options.precision == "fp64",
        "the norm of split gradients": splits and (options.clip or options.log),
        "a weight that embedding and head share, if it is split and sharded": splits
        and sharded
        and options.tied_weights,
        f"--recompute {options.recompute} of split layers": splits and options.recompute in ("selective", "alternate"),
        "split experts under autocast": splits
        and options.shape.experts
        and options.precision == "bf16"
        and not sharded,
    }
    return next((what for what, holds in uncovered.items() if holds), "")


def persistent_with_experts(options) -> int:
    """Return the bytes that a rank stores from step to step if --mesh spreads experts over ranks.

    Each rank has some experts whole; of these FSDP shards each weight's first dimension, as of all other weights.

    Raises:
        UserError: the ranks cannot divide the experts evenly.
    """
    mesh, count = arrange(options.ranks, options.mesh), options.shape.experts.count
    if count % mesh.expert:
        raise UserError(f"--mesh {options.mesh}: {mesh.expert} ranks cannot divide {count} experts evenly")
    mine = ceil(count // mesh.expert / (mesh.shard * mesh.tensor // mesh.expert))
    plan = predict.transformer_plan(options, options.ranks, on_gpu=options.on_gpu)
    more = 0  # elements than if experts were sharded, and split, as all other weights are
    for unit in plan.unit_sizes:
        for parameter, numel in zip(unit.parameters.values(), unit.shard_numels(), strict=True):
            if parameter.name.startswith("experts."):
                more += mine * prod(parameter.shape[1:]) * mesh.tensor - numel
    copies = 1 + sum(name != "step counters" for name in STATES[plan.optimizer])
    return predict.total(plan.persistent()) + copies * more * plan.itemsize
