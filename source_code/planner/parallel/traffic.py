# SPDX-License-Identifier: BSD-3-Clause
"""The collectives of a step: the traffic of DDP, FSDP, ZeRO, a tensor group, and gradient clipping. Imports no torch.

A counter has {(kind, bytes of the unsharded tensor, ranks that take part, mesh dimension): how many}.
"""

from collections import Counter
from dataclasses import replace

from planner.ops.autograd import FP32
from planner.parallel import expert_parallel, muon, zero
from planner.parallel.strategies import NORM_GRADIENTS_IN_FP32, Unit, needed_in_backward

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes after which DDP closes its first bucket, and each other


def step_collectives(plan) -> list[dict]:
    """Return the collectives of a step of a ``Plan``: see ``Plan.traffic``."""
    counts = norm_collectives(plan) + scaler_collectives(plan) + muon.collectives(plan)
    counts += expert_parallel.collectives(plan)
    if plan.strategy in ("ddp", "zero1"):
        for size in ddp_buckets(plan):
            counts["all-reduce", size, plan.ranks, None] += plan.reductions
        counts["broadcast", plan.blueprint.buffers, plan.ranks, None] += plan.reductions
    if plan.strategy == "zero1":
        sizes = zero.parameter_numels(plan)
        counts.update(("broadcast", numel * plan.itemsize, plan.ranks, None) for numel in sizes)
    if plan.deepspeed:
        sent = deepspeed_collectives(plan)
        counts.update({(kind, size, plan.ranks, None): n for (kind, size), n in sent.items()})
    if plan.tp_degree > 1:
        counts.update(tensor_parallel_collectives(plan))
    for key, count in plan.blueprint.context.collectives(plan.compute_itemsize).items():
        counts[key] += count * plan.micro_batches
    if plan.shards_parameters:
        for number, unit in enumerate(plan.unit_sizes):
            counts.update(unit_collectives(plan, unit, is_root=number == 0))
    ordered = sorted(counts.items(), key=lambda item: (*item[0][:3], item[0][3] or ""))
    names = ("kind", "bytes", "ranks", "dimension")
    return [dict(zip(names, key, strict=True)) | {"count": n} for key, n in ordered if n and key[1]]


def unit_collectives(plan, unit: Unit, is_root: bool) -> Counter:
    """Count the collectives of an FSDP unit in a step."""
    counts, reductions = Counter(), plan.reductions
    shard, replicate = ("shard", "replicate") if plan.strategy == "fsdp2" else (None, None)
    shard_bytes = unit.shard_numel(trained=True) * plan.itemsize
    if plan.replicas > 1:
        counts["all-reduce", shard_bytes, plan.replicas, replicate] += reductions
    if unit.shards == 1 and plan.strategy == "fsdp2":  # a group of one rank exchanges nothing
        return counts
    shards = unit.shards
    if shards != plan.shards:
        shard = "expert_shard"
    gathered = unit.shard_numel() * shards * plan.compute_itemsize
    # What FSDP1 does not free after forward, it does not free after backward either, if gradients wait.
    stays = plan.flat and plan.reshard == "false"
    counts["all-gather", gathered, shards, shard] += reductions if stays else plan.micro_batches
    # The root stays gathered from forward to backward, and so does a separately wrapped head, except under FSDP1.
    needed = not plan.flat or needed_in_backward(unit)
    if not is_root and plan.reshard != "false" and needed and (plan.flat or unit.kind != "head"):
        group = (plan.reshard_degree, None) if plan.reshard_degree else (shards, shard)
        counts["all-gather", gathered, *group] += plan.micro_batches
    counts["reduce-scatter", shard_bytes * shards, shards, shard] += reductions
    return counts


def norm_collectives(plan) -> Counter:
    """Count the all-reduces that clip gradients.

    FSDP1 sums one element in fp32; FSDP2 the norms of all parameters, along each dimension in which they are sharded.
    """
    if not plan.clip or not plan.shards_parameters:
        return Counter()
    if plan.flat:
        return Counter({("all-reduce", FP32, plan.shards, None): 1})
    if plan.ep_degree > 1:
        return Counter({("all-reduce", plan.itemsize, plan.ranks, "shard"): 1})  # of the squared norms of all ranks
    norms = sum(len(unit.shard_numels(trained=True)) for unit in plan.unit_sizes) * plan.itemsize
    dimensions = {"shard": plan.shards, "tensor": plan.tp_degree}
    return Counter({("all-reduce", norms, size, name): 1 for name, size in dimensions.items() if size > 1})


def scaler_collectives(plan) -> Counter:
    """Count the all-reduces of fp16's gradient scaler: the flag for an overflow, in fp32.

    FSDP2's is a DTensor, which is reduced along the dimension in which gradients are sharded; FSDP1's goes to all ranks.
    """
    size, dimension = (plan.ranks, None) if plan.flat else (plan.shards, "shard")
    if plan.precision != "fp16" or not plan.shards_parameters or size == 1:
        return Counter()
    return Counter({("all-reduce", FP32, size, dimension): 1})


def tensor_parallel_collectives(plan) -> Counter:
    """Count a tensor group's collectives: activations, their gradients, the loss's sums, replicated parameters' gradients."""
    exchange, counts = plan.blueprint.tensor_parallel, Counter()
    tp_degree, activation = exchange.tp_degree, exchange.numel * plan.compute_itemsize
    matmul_itemsize = 2 if plan.autocast else plan.compute_itemsize
    routing_itemsize = max(FP32, plan.compute_itemsize) if exchange.routing_in_fp32 else matmul_itemsize
    of_micro_batch = [
        ("all-gather", activation, exchange.gathers),
        ("reduce-scatter", activation, exchange.scatters),
        ("all-reduce", exchange.rows * plan.itemsize, 3),
        ("all-reduce", exchange.numel * matmul_itemsize, exchange.matmul_sums),
        ("all-reduce", activation, exchange.sums),
        ("all-gather", exchange.logits * matmul_itemsize, 1),
        ("all-reduce", exchange.routing_weights * routing_itemsize, exchange.routing_sums),
    ]
    for kind, size, count in of_micro_batch:
        counts[kind, size, tp_degree, "tensor"] += count * plan.micro_batches
    before_bf16_norms = plan.torch < NORM_GRADIENTS_IN_FP32
    itemsize = plan.compute_itemsize if before_bf16_norms or exchange.logits else plan.itemsize
    times = plan.micro_batches if exchange.logits else plan.reductions
    for unit in plan.unit_sizes:
        for parameter in filter(exchange.reduces_gradient_of, unit.replicated):
            counts["all-reduce", parameter.numel * itemsize, tp_degree, "tensor"] += times
    return counts


def deepspeed_collectives(plan) -> Counter:
    """Count DeepSpeed's collectives, as the simulated step sends them: {(kind, bytes): how many}.

    Each micro-batch after the first adds the same.
    """

    def sent(micro_batches):
        same = plan if micro_batches == plan.micro_batches else replace(plan, micro_batches=micro_batches)
        return same.steady_step.sent

    one = sent(1)
    two = sent(2) if plan.micro_batches > 1 else one
    return Counter({key: n + (plan.micro_batches - 1) * (two[key] - n) for key, n in one.items()})


def ddp_buckets(plan) -> list[int]:
    """Return the bytes of each of DDP's all-reduces."""
    sizes = []
    for module in reversed(plan.blueprint.modules):
        unit = Unit([module], plan.blueprint.tied, shards=1, flat=False, itemsize=plan.itemsize)
        numels = unit.shard_numels(trained=True)
        # A bias's gradient is ready before its weight's, but not through autocast's casts.
        if not (plan.autocast and any(name.endswith("bias") for name in module.parameters)):
            numels.reverse()
        sizes += [numel * plan.itemsize for numel in numels]
    return bucket_sizes(sizes)


def bucket_sizes(gradients: list[int]) -> list[int]:
    """Return the bytes of DDP's buckets. A bucket is closed when it has reached its limit.

    Args:
        gradients: bytes of each, in the order in which they are ready.
    """
    sizes, filled, limit = [], 0, FIRST_BUCKET
    for size in gradients:
        filled += size
        if filled >= limit:
            sizes.append(filled)
            filled, limit = 0, BUCKET
    return [*sizes, filled] if filled else sizes
