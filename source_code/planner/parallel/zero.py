# SPDX-License-Identifier: BSD-3-Clause
"""ZeRO as the course runs it: PyTorch's ZeroRedundancyOptimizer, and DeepSpeed's stages 0 to 3. Imports no torch.

The ZeRO paper counts the least that must be stored (``cost.model_state``). What these two store and send differs:

  zero1        whole parameters are assigned to ranks, the largest first, each to the rank that has the least; after the
               step each is broadcast by its rank
  deepspeed-0  without ZeRO: gradients are flattened to be reduced; in bf16 each parameter has a copy in fp32
  deepspeed-1  parameters are one flat tensor. A rank stores its part again, as master weights in fp32, and steps it;
               whole gradients wait for the last backward. They are copied into a bucket, and all-reduced
  deepspeed-2  the same, but gradients are reduced as they come, and a rank keeps the whole gradients of all parameters
               that its part overlaps
  deepspeed-3  each parameter is sharded, gathered around the operator that uses it, and its gradient reduce-scattered;
               the bucket and this rank's part of the gradients stay from step to step

Sources: torch/distributed/optim/zero_redundancy_optimizer.py; DeepSpeed's are in planner/parallel/deepspeed.py.
"""

from math import ceil, prod

from planner.ops.autograd import FP32, FP64

SUB_GROUP = 1_000_000_000  # elements that stage 3 updates together, by DeepSpeed's default
UNEVEN = ("zero1", "deepspeed-1", "deepspeed-2")  # strategies under which ranks have different peaks


# What gpt_zero.py's --engine and --stage are for ``Plan.strategy``.
STRATEGIES = {("torch", "0"): "ddp", ("torch", "1"): "zero1", ("torch", "2"): "fsdp2", ("torch", "3"): "fsdp2"}
STRATEGIES |= {("deepspeed", stage): f"deepspeed-{stage}" for stage in "0123"}


def partition_parameters(sizes: list[int], ranks: int) -> list[list[int]]:
    """Assign parameters to ranks as ZeroRedundancyOptimizer does.

    Args:
        sizes: elements of each parameter.
        ranks: how many there are.

    Returns:
        The sizes of each rank's parameters, in the order in which it steps them.
    """
    partitions = [[] for _ in range(ranks)]
    for numel in sorted(sizes, reverse=True):
        min(partitions, key=sum).append(numel)
    return partitions


def partition_numel(plan) -> int:
    """Return the elements of a rank's part of DeepSpeed's flat tensor; all parts are padded to the same even number."""
    return 2 * ceil(sum(parameter_numels(plan)) / (2 * plan.ranks))


def bucket_numel(plan) -> int:
    """Return the elements of DeepSpeed's bucket, as gpt_zero.py sets it: a block's."""
    block = next(module for module in plan.blueprint.modules if module.kind == "block")
    return sum(map(prod, block.parameters.values()))


def peak_rank_candidates(plan) -> list[int]:
    """Return the candidates for the rank with the highest peak, to within the bytes of a parameter.

    In stages 1 and 2 it is the last rank if activations are high as backward begins, with the gradients of its part. Under
    FSDP1 with frozen parameters it is the one whose shards have most of the trained ones.
    """
    if plan.strategy == "zero1":
        sizes = [sum(part) for part in partition_parameters(parameter_numels(plan), plan.ranks)]
        return [sizes.index(max(sizes))]
    if plan.flat and any(len(unit.updated) < len(unit.parameters) for unit in plan.unit_sizes):
        sizes = [sum(sum(unit.updated_numels(rank)) for unit in plan.unit_sizes) for rank in range(plan.shards)]
        return [sizes.index(max(sizes))]
    return [0, plan.ranks - 1] if plan.strategy in UNEVEN else [0]


def optimizer_numels(plan) -> list[int]:
    """Return the elements of each tensor that the optimizer of ``plan.rank`` updates."""
    if plan.strategy == "zero1":
        return partition_parameters(parameter_numels(plan), plan.ranks)[plan.rank]
    if plan.strategy == "deepspeed-3":
        return grouped_sums([ceil(numel / plan.ranks) for numel in parameter_numels(plan)], SUB_GROUP - 1)
    if plan.strategy in ("deepspeed-1", "deepspeed-2"):
        return [partition_numel(plan)]
    return parameter_numels(plan)


def persistent_state(plan) -> dict[tuple[str, str], int]:
    """Return DeepSpeed's persistent memory except Adam's two states: {(category, name): bytes}."""
    stage, itemsize, mine = plan.strategy[-1], plan.parameter_itemsize, sum(optimizer_numels(plan))
    stored = {"0": mine, "1": mine * plan.ranks, "2": mine * plan.ranks, "3": mine}[stage]
    terms = {("parameters", "parameters"): stored * itemsize}
    if stage != "0" or itemsize != FP32:
        terms["optimizer state", "master parameters in fp32"] = mine * FP32
    if stage != "0":
        terms["temporary", "norm of the last gradient"] = FP64 if stage == "3" else FP32
    if stage == "3":
        terms["gradients", "gradients, this rank's part"] = mine * itemsize
        terms["reduce-scatter", "bucket"] = bucket_numel(plan) * itemsize
    return terms


def parameter_numels(plan) -> list[int]:
    """Return the elements of each trained parameter, in the model's order."""
    (unit,) = plan.unit_sizes
    return unit.shard_numels(trained=True)


def grouped_sums(sizes: list[int], limit: int) -> list[int]:
    """Return the sums of groups of neighbors; each group ends with the one that takes its sum above the limit."""
    sums = [0]
    for numel in sizes:
        if sums[-1] > limit:
            sums.append(0)
        sums[-1] += numel
    return sums
