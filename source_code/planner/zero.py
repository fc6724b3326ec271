"""ZeRO as it is run here: PyTorch's ZeroRedundancyOptimizer, and DeepSpeed's stages 0 to 3. Imports no torch.

The ZeRO paper counts what must be kept (``cost.model_state``). What these two keep and send differs, term by term:

  zero1        whole parameters go to ranks, the largest first, each to the rank that has the least; after the step each
               is broadcast by its own
  deepspeed-0  without ZeRO: gradients are flattened to be reduced; in bf16 each parameter has a copy in fp32
  deepspeed-1  parameters are one flat tensor, of which a rank keeps its part once more, as master weights in fp32,
               and steps it; whole gradients wait for the last backward. They are copied into a bucket, and all-reduced
  deepspeed-2  likewise, as they come; what a rank keeps are the whole gradients of all parameters that its part touches
  deepspeed-3  each parameter is cut, gathered around the operator that uses it, and its gradient reduce-scattered;
               the bucket and this rank's part of the gradients stay from step to step

Sources: torch/distributed/optim/zero_redundancy_optimizer.py; DeepSpeed's are in planner/deepspeed.py.
"""

from math import ceil, prod

from planner.sizes import FP32, FP64

SUB_GROUP = 1_000_000_000  # numbers: how many parameters stage 3 updates together, by DeepSpeed's default
UNEVEN = ("zero1", "deepspeed-1", "deepspeed-2")  # where one rank's peak is not another's


# What gpt_zero.py's --engine and --stage are for ``Plan.strategy``.
STRATEGIES = {("torch", "0"): "ddp", ("torch", "1"): "zero1", ("torch", "2"): "fsdp2", ("torch", "3"): "fsdp2"}
STRATEGIES |= {("deepspeed", stage): f"deepspeed-{stage}" for stage in "0123"}


def shares(sizes: list[int], ranks: int) -> list[list[int]]:
    """ZeroRedundancyOptimizer's split of parameters of so many numbers: those of each rank, as it steps them."""
    found = [[] for _ in range(ranks)]
    for numel in sorted(sizes, reverse=True):
        min(found, key=sum).append(numel)
    return found


def partition(plan) -> int:
    """Numbers of a rank's part of DeepSpeed's flat tensor, all parts alike: padded to an even number each."""
    return 2 * ceil(sum(numels(plan)) / (2 * plan.ranks))


def bucket(plan) -> int:
    """Numbers in DeepSpeed's bucket, as gpt_zero.py sets it: a block's."""
    block = next(module for module in plan.blueprint.modules if module.kind == "block")
    return sum(map(prod, block.parameters.values()))


def fullest(plan) -> list[int]:
    """The ranks of which one has the highest peak, to within the bytes of a parameter.

    In stages 1 and 2 it is the last rank where activations are high as backward begins, with the gradients of its part.
    """
    if plan.strategy == "zero1":
        parts = [sum(part) for part in shares(numels(plan), plan.ranks)]
        return [parts.index(max(parts))]
    return [0, plan.ranks - 1] if plan.strategy in UNEVEN else [0]


def updated(plan) -> list[int]:
    """The numbers of each tensor that ``plan.rank`` updates."""
    if plan.strategy == "zero1":
        return shares(numels(plan), plan.ranks)[plan.rank]
    if plan.strategy == "deepspeed-3":
        return sums([ceil(numel / plan.ranks) for numel in numels(plan)], SUB_GROUP - 1)
    return [partition(plan)] if plan.strategy in ("deepspeed-1", "deepspeed-2") else numels(plan)


def kept(plan) -> dict[tuple[str, str], int]:
    """What DeepSpeed keeps from step to step beside the optimizer's moments: {(category, name): bytes}."""
    stage, itemsize, mine = plan.strategy[-1], plan.parameter_itemsize, sum(updated(plan))
    whole = {"0": mine, "1": mine * plan.ranks, "2": mine * plan.ranks, "3": mine}[stage]
    terms = {("parameters", "parameters"): whole * itemsize}
    if stage != "0" or itemsize != FP32:
        terms["optimizer state", "master parameters in fp32"] = mine * FP32
    if stage != "0":
        terms["temporary", "norm of the last gradient"] = FP64 if stage == "3" else FP32
    if stage == "3":
        terms["gradients", "gradients, this rank's part"] = mine * itemsize
        terms["reduce-scatter", "bucket"] = bucket(plan) * itemsize
    return terms


def numels(plan) -> list[int]:
    """The numbers of each parameter, in the model's order."""
    (unit,) = plan.resting
    return unit.tensors(trained=True)


def sums(sizes: list[int], limit: int) -> list[int]:
    """Sums of neighbours, each closed by the one that takes it above the limit."""
    sums = [0]
    for numel in sizes:
        if sums[-1] > limit:
            sums.append(0)
        sums[-1] += numel
    return sums
