"""The collectives of a step: what DDP, FSDP, ZeRO, a tensor group and a norm send, by arithmetic. Imports no torch.

plan: a ``predict.Plan``. A counter has {(kind, bytes of the whole tensor, ranks that take part, dimension): how many}.
"""

from collections import Counter
from dataclasses import replace

from planner.ops.autograd import FP32
from planner.parallel import zero
from planner.parallel.strategies import WIDE_GRADIENTS, Unit

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes after which DDP closes its first bucket, and each other


def of_step(plan) -> list[dict]:
    """See ``predict.Plan.traffic``."""
    times = of_norms(plan)
    reductions = plan.reductions
    if plan.strategy in ("ddp", "zero1"):
        for size in buckets(plan):
            times["all-reduce", size, plan.ranks, None] += reductions
    if plan.strategy == "zero1":
        times.update(("broadcast", size * plan.itemsize, plan.ranks, None) for size in zero.numels(plan))
    if plan.deepspeed:
        times.update({(kind, size, plan.ranks, None): n for (kind, size), n in of_deepspeed(plan).items()})
    if plan.tensor > 1:
        times.update(of_tensor_group(plan, reductions))
    shard, replicate = ("shard", "replicate") if plan.strategy == "fsdp2" else (None, None)
    for number, unit in enumerate(plan.resting):
        if not plan.shards_parameters:
            continue
        part = unit.shard(trained=True) * plan.itemsize
        if plan.replicas > 1:
            times["all-reduce", part, plan.replicas, replicate] += reductions
        if plan.shards == 1 and plan.strategy == "fsdp2":  # with itself it has nothing to exchange
            continue
        gathered = unit.shard() * plan.shards * plan.compute_itemsize
        # What FSDP1 does not free after forward, it does not free after backward either, if gradients wait.
        stays = plan.flat and plan.reshard == "false"
        times["all-gather", gathered, plan.shards, shard] += reductions if stays else plan.micro_batches
        # The root stays from forward to backward, and so does a head that is apart, but for FSDP1's.
        if number and plan.reshard != "false" and (plan.flat or unit.kind != "head"):
            again = (plan.part_kept, None) if plan.part_kept else (plan.shards, shard)
            times["all-gather", gathered, *again] += plan.micro_batches
        times["reduce-scatter", part * plan.shards, plan.shards, shard] += reductions
    ordered = sorted(times.items(), key=lambda item: (*item[0][:3], item[0][3] or ""))
    names = ("kind", "bytes", "ranks", "dimension")
    return [dict(zip(names, key, strict=True)) | {"count": n} for key, n in ordered if n and key[1]]


def of_norms(plan) -> Counter:
    """FSDP1 adds up one number in fp32; FSDP2 the norms of all parameters, along each dimension in which they are cut."""
    if not plan.clip or not plan.shards_parameters:
        return Counter()
    if plan.flat:
        return Counter({("all-reduce", FP32, plan.shards, None): 1})
    norms = sum(len(unit.tensors(trained=True)) for unit in plan.resting) * plan.itemsize
    dimensions = {"shard": plan.shards, "tensor": plan.tensor}
    return Counter({("all-reduce", norms, size, name): 1 for name, size in dimensions.items() if size > 1})


def of_tensor_group(plan, reductions: int) -> Counter:
    """Activations and their gradients, the loss's sums, and the gradients of what each rank of a group has whole."""
    exchange, times = plan.blueprint.tensor, Counter()
    activation = exchange.numel * plan.compute_itemsize
    times["all-gather", activation, exchange.parts, "tensor"] = exchange.gathers * plan.micro_batches
    times["reduce-scatter", activation, exchange.parts, "tensor"] = exchange.scatters * plan.micro_batches
    times["all-reduce", exchange.rows * plan.itemsize, exchange.parts, "tensor"] = 3 * plan.micro_batches
    itemsize = plan.compute_itemsize if plan.torch < WIDE_GRADIENTS else plan.itemsize
    for unit in plan.resting:
        for parameter in unit.everywhere:
            times["all-reduce", parameter.numel * itemsize, exchange.parts, "tensor"] += reductions
    return times


def of_deepspeed(plan) -> Counter:
    """{(kind, bytes): how many}, as its rules have sent them. Each micro-batch after the first adds the same."""

    def sent(micro_batches):
        same = plan if micro_batches == plan.micro_batches else replace(plan, micro_batches=micro_batches)
        return same.steady[2]

    one = sent(1)
    two = sent(2) if plan.micro_batches > 1 else one
    return Counter({key: n + (plan.micro_batches - 1) * (two[key] - n) for key, n in one.items()})


def buckets(plan) -> list[int]:
    """The sizes of DDP's all-reduces, in bytes. A bucket is closed when it has reached its limit."""
    sizes, filled, limit = [], 0, FIRST_BUCKET
    for module in reversed(plan.blueprint.modules):
        arriving = Unit([module], plan.blueprint.tied, 1, False, plan.itemsize).tensors(trained=True)
        # A bias's gradient is there before its weight's, but not through autocast's casts.
        if not (plan.autocast and any(name.endswith("bias") for name in module.parameters)):
            arriving.reverse()
        for parameter in arriving:
            filled += parameter * plan.itemsize
            if filled >= limit:
                sizes.append(filled)
                filled, limit = 0, BUCKET
    return [*sizes, filled] if filled else sizes
