# SPDX-License-Identifier: BSD-3-Clause
"""Plan the configurations of the exam's tasks, and state them in words."""

from dataclasses import replace
from functools import cache

from planner import predict
from planner.cli import commands
from planner.parallel.mesh import arrange
from planner.step.plan import Plan
from planner.timing import cost

from labkit.running.lab_options import LABS
from labkit.running.plan_options import Config

PLANNED = "plan.py"  # the "script" of a configuration that is planned for GPUs, not run
NODE = 8  # GPUs on a node
OPTIMIZER_NAMES = {"adamw": "AdamW", "sgd": "SGD without momentum", "momentum": "SGD with momentum"}
RECOMPUTE_NAMES = {
    "none": "nothing is recomputed",
    "full": "every block is recomputed in backward from its input (full activation checkpointing)",
    "selective": "blocks are recomputed selectively: results of matmuls and attention are saved",
}


def plan_of(one: dict) -> Plan:
    """Plan a configuration of the exam.

    Args:
        one: {"script", "ranks", "config"}, and for MNIST "batch_size", as proofs/configurations.py has them; script plan.py
            stands for a run on GPUs, which is planned only.

    Raises:
        UserError: it cannot be planned.
    """
    return _plan(one["script"], one["ranks"], one.get("batch_size"), tuple(sorted(one["config"].items())))


@cache  # for the PyTorch that the planner assumes, whichever is installed: a seed's budgets are the same everywhere
def _plan(script: str, ranks: int, batch_size: int | None, config: tuple) -> Plan:
    if script == PLANNED:
        return replace(commands.plan_from_options(Config(ranks=ranks, **dict(config))), torch=Plan.torch)
    sizes = {"batch_size": batch_size} if batch_size else {}
    options = LABS[script](**dict(config), **sizes)
    if hasattr(options, "mesh"):
        arrange(ranks, options.mesh, options.reshard_after_forward)
    return options.plan(ranks, on_gpu=False, workspaces=False, torch=Plan.torch)


def peak_bytes(plan: Plan) -> int:
    """Return the planned peak of a rank, in bytes."""
    return predict.total(plan.peak()[1])


def traffic_bytes(collectives: list[dict]) -> int:
    """Return a step's traffic: the sum of all collectives' whole tensors, in bytes, as records and plans list them."""
    return sum(each["count"] * each["bytes"] for each in collectives)


def measured_or_planned(one: dict, measured: dict | None = None) -> tuple[int, int]:
    """Return (peak of rank 0, traffic of a step) of a configuration, in bytes.

    Args:
        one: the configuration.
        measured: a run's "memory" and "traffic", as its record has them; None: plan it.
    """
    if measured:
        return sum(measured["memory"]["peak"].values()), traffic_bytes(measured["traffic"])
    plan = plan_of(one)
    return peak_bytes(plan), traffic_bytes(plan.traffic())


def sent_bytes(plan: Plan) -> float:
    """Return the bytes that a rank sends in a step if all collectives are rings."""
    return sum(each["count"] * cost.ring_bytes(each, plan, NODE)["rank"] for each in plan.traffic())


def leaving_bytes(plan: Plan) -> float:
    """Return the bytes that leave a node of ``NODE`` ranks in a step, with rings."""
    return cost.inter_node_bytes(plan.traffic(), plan, NODE)


def profile(plan: Plan) -> list[dict]:
    """Return the memory of each phase of a step at its highest: [{"phase", category: bytes, …}, …]."""
    return [{"phase": phase} | predict.by_category(terms) for phase, (_, terms) in plan.timeline().items()]


def in_words(one: dict) -> list[str]:
    """State a configuration, one line for each fact. It names no option of the labs."""
    config = {"precision": "fp32"} | one["config"]
    lines = [_network(one, config), _strategy(one["ranks"], config), _formats(config)]
    if one["script"] != "mnist_fsdp.py":
        lines += [f"Optimizer: {OPTIMIZER_NAMES[config.get('optimizer', 'adamw')]}; {_recompute(config)}."]
    if config.get("accumulate", 1) > 1:
        when = "after every micro-batch" if config.get("sync", "every") == "every" else "only after the last one"
        lines.append(f"A step has {config['accumulate']} micro-batches; the ranks reduce gradients {when}.")
    return [line for line in lines if line]


def _recompute(config: dict) -> str:
    chunks = config.get("loss_chunks", 1)
    loss = f"; the loss is computed in {chunks} chunks" if chunks > 1 else ""
    return RECOMPUTE_NAMES[config.get("recompute", "none")] + loss


def _network(one: dict, config: dict) -> str:
    if one["script"] == "mnist_fsdp.py":
        return (
            f"The course's MNIST network, with dropout and Adadelta, on {one['ranks']} ranks on the CPU; "
            f"{one['batch_size']} images on each rank."
        )
    where = "H100 GPUs" if one["script"] == PLANNED else "ranks on the CPU"
    sizes = f"{config['batch_size']} × {config['seq_len']:,} tokens"
    return f"The transformer {config['preset']}, on {one['ranks']} {where}; a micro-batch has {sizes} on each rank."


def _strategy(ranks: int, config: dict) -> str:
    strategy = config["strategy"]
    if strategy == "ddp":
        return f"Strategy: DDP on {ranks} ranks, with buckets of the default size."
    mesh = config.get("mesh")
    layout = f"HSDP, {mesh} (replicas × shards)" if mesh else f"sharded over all {ranks} ranks"
    kept = "kept until backward" if config.get("reshard_after_forward") == "false" else "freed after forward"
    return f"Strategy: {strategy.upper()}, {layout}; {_units(config)}; gathered parameters are {kept}."


def _units(config: dict) -> str:
    return {
        "unit": "the whole model is one unit",
        "size": "each layer of at least 20,000 parameters is a unit, and the root has the rest",
        "blocks": "each block is a unit, and the root has the rest",
        "blocks+embeddings": "each block, the embedding, and the head are units, and the root has the rest",
    }[config["wrap"]]


def _formats(config: dict) -> str:
    weights = config.get("weights", "fp32")
    return f"It computes in {config['precision']}; parameters, gradients, and optimizer state are in {weights}."
