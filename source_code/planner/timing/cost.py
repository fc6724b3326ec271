# SPDX-License-Identifier: BSD-3-Clause
"""Predict the time of a step: its collectives within and across nodes, and which of them are hidden. Imports no torch.

A ring of n ranks sends (n−1)/n of a tensor over each of its edges to gather or to reduce-scatter it, and twice that to
all-reduce it (chapter 02). Of its edges, one each way crosses the boundary of each node that it touches. So

  time of a collective = steps of the ring × latency + the larger of
      bytes a rank sends / bandwidth of its link,  bytes that leave a node / bandwidth of the node's network

Bandwidths are bytes per second in one direction. Latencies are seconds: of one step of a ring, over the slowest link that
it crosses. These are bounds for rings: no real network is faster. Not modeled: NCCL's trees, and all-gathers in two
levels, first among nodes and then within, which take fewer steps with many ranks.

Floats are summed with ``fsum``: the result of ``sum`` depends on Python's version (3.12 made it more exact).
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import fsum

from planner.models.flops import attention_flops, hardware_flops, model_flops
from planner.ops.autograd import FP32
from planner.parallel import muon
from planner.parallel.pipeline import bubble
from planner.step.plan import Plan
from planner.timing import overlap


@dataclass(frozen=True)
class Link:
    """A rank's link within its node, or a node's network.

    Attributes:
        bandwidth: bytes per second in one direction.
        latency: seconds.
        source: where these are from.
    """

    bandwidth: float
    latency: float
    source: str


# Share of a GPU's published peak that computing attains, operations counted as the hardware does them: fitted to
# torchtitan's eager runs of Llama 3.1 8B with FSDP2 in bf16, 5,762 tokens per second of a GPU on 8 H100s and 5,605 on 128
# (benchmarks/llama3_h100_202412_torchtitan.md, December 2024; their H100s are limited to 500 W). Compiled, the same runs
# attained 0.39.
EFFICIENCY = 0.33

# Published peaks; a measured figure (chapter 02) is better.
LINKS = {
    "nvlink": Link(450e9, 3e-6, "NVLink 4, one direction: NVIDIA H100 data sheet"),
    "pcie": Link(64e9, 5e-6, "PCI Express 5.0, 16 lanes, one direction"),
}
NETWORKS = {
    "infiniband": Link(8 * 50e9, 5e-6, "eight NDR InfiniBand adapters a node, 400 Gbit/s each"),
    "ethernet": Link(12.5e9, 30e-6, "Ethernet, 100 Gbit/s per node"),
}


# How often a backend sends all but one of n parts of a tensor along its ring. (A broadcast or a reduction to one rank
# sends all of it along n − 1 of n edges, which is as much on average.) gloo makes a reduce-scatter from an all-reduce, of
# which it keeps a part (chapter 02).
RING = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1, "reduce": 1, "all-to-all": 1}
PASSES = {"ring": RING, "gloo": RING | {"reduce-scatter": 2}}


def ring_bytes(collective: dict, plan: Plan, node_size: int, backend: str = "ring") -> dict:
    """Return the bytes that one collective sends: {"rank": by a rank, "node": out of a node, "steps": of the ring}.

    Of unequal nodes, it is the one that most bytes leave. Ranks are numbered node by node: the ranks of a tensor group
    are neighbors, the ranks that shard a model are a tensor group apart, and the replicas of a shard as far apart as
    possible.

    Args:
        collective: of ``plan.traffic()``, or of a record. A record does not say how many ranks take part; the plan does,
            except with reshard_after_forward=N.
        plan: the run's.
        node_size: ranks on each node.
        backend: "ring", for rings as NCCL's, or "gloo".
    """
    in_ring = collective.get("dimension") == "context"
    if collective["kind"] in ("send", "receive") and in_ring:  # to the next rank of a context group
        sent = collective["bytes"] if collective["kind"] == "send" else 0
        leaving = _leaving_edges(plan.ranks, plan.cp_degree, plan.tp_degree, node_size) * sent
        return {"rank": sent, "node": leaving, "steps": bool(sent)}
    if collective["kind"] in ("send", "receive"):  # by a stage of a pipeline; a link carries both directions at once
        sent = collective["bytes"] if collective["kind"] == "send" else 0
        return {"rank": sent, "node": sent * (plan.ranks > node_size), "steps": bool(sent)}
    dimension = _dimension(collective, plan) or ""
    sizes = {"tensor": plan.tp_degree, "context": plan.cp_degree, "shard": plan.shards, "replicate": plan.replicas}
    sizes |= {"expert": plan.ep_degree, "expert_shard": plan.shards // plan.ep_degree}
    n = collective.get("ranks") or sizes.get(dimension, plan.ranks)
    passes = PASSES[backend][collective["kind"]]
    edge = passes * (n - 1) / n * collective["bytes"]
    strides = {"shard": plan.tp_degree, "context": plan.tp_degree, "replicate": plan.ranks // n}
    stride = strides.get(dimension, plan.ep_degree if dimension == "expert_shard" else 1)
    if collective["kind"] == "all-to-all":  # no ring: each part goes to another rank, in n − 1 steps
        leaving = _parts_to_other_nodes(plan.ranks, n, stride, node_size) / n * collective["bytes"]
        return {"rank": edge, "node": leaving, "steps": n - 1}
    return {"rank": edge, "node": _leaving_edges(plan.ranks, n, stride, node_size) * edge, "steps": passes * (n - 1)}


def inter_node_bytes(traffic: list[dict], plan: Plan, node_size: int, backend: str = "ring") -> float:
    """Return the bytes that leave a node in a step (as many arrive).

    Args:
        traffic: the collectives: the plan's, or a record's.
        plan: the run's.
        node_size: ranks on each node.
        backend: "ring", or "gloo".
    """
    return fsum(c["count"] * ring_bytes(c, plan, node_size, backend)["node"] for c in traffic)


def _dimension(collective: dict, plan: Plan) -> str | None:
    """Return the mesh dimension along which a collective's ranks lie; None: all ranks take part.

    FSDP1's collectives and those of older records do not state it. Then an all-reduce is one of gradients, between the
    replicas of a shard, unless it is of the one element that FSDP1 sums among the shards to clip.
    """
    if collective.get("dimension") or not plan.shards_parameters:
        return collective.get("dimension")
    norm = plan.flat and plan.clip and collective["bytes"] == FP32
    return "replicate" if collective["kind"] == "all-reduce" and not norm else "shard"


@cache
def _leaving_edges(ranks: int, n: int, stride: int, node_size: int) -> int:
    """Return how many edges leave one node, in the rings of groups of n ranks with this stride."""
    if n == 1:
        return 0
    edges = Counter()
    for rank in range(ranks):
        position = rank // stride % n  # in its group
        following = rank + stride if position < n - 1 else rank - (n - 1) * stride
        edges[rank // node_size] += rank // node_size != following // node_size
    return max(edges.values())


@cache
def _parts_to_other_nodes(ranks: int, n: int, stride: int, node_size: int) -> int:
    """Return how many parts leave one node in an all-to-all, in the groups of n ranks with this stride."""
    parts = Counter()
    for rank in range(ranks):
        first = rank - rank // stride % n * stride  # of the rank's group
        nodes = [(first + position * stride) // node_size for position in range(n)]
        parts[rank // node_size] += sum(node != rank // node_size for node in nodes)
    return max(parts.values())


def collective_seconds(
    collective: dict, plan: Plan, node_size: int, link: Link, network: Link, backend: str = "ring"
) -> float:
    """Return the seconds of one collective of ``plan.traffic()``.

    Args:
        collective: which one.
        plan: the run's.
        node_size: ranks on each node.
        link: of a rank, within its node.
        network: of a node.
        backend: "ring", or "gloo".
    """
    sent = ring_bytes(collective, plan, node_size, backend)
    latency = network.latency if sent["node"] else link.latency
    return sent["steps"] * latency + max(sent["rank"] / link.bandwidth, sent["node"] / network.bandwidth)


def step_time(plan: Plan, node_size: int, link: Link, network: Link, flops: float, backend: str = "ring") -> dict:
    """Return the seconds of a step: {"compute", "bubble", "communication", "exposed", "serial", "overlapped"}.

    A step takes from "overlapped", where compute and each link work side by side as far as the order of the step allows
    (planner/timing/overlap.py), to "serial", where nothing is hidden. "exposed" is the communication that "overlapped"
    does not hide. Nothing hides a tensor group's communication, nor the all-to-alls of experts: the next matmul waits. Nor
    that of a context group, unless it is a ring (``ring_hidden_seconds``). "bubble" is the time that
    a pipeline stage is idle, if all stages take equally long.

    Args:
        plan: the run's.
        node_size: ranks on each node.
        link: of a rank, within its node.
        network: of a node.
        flops: operations per second that a rank attains, counted as the hardware does them (planner/models/flops.py).
        backend: "ring", or "gloo".
    """
    compute = hardware_flops(plan) / flops
    orthogonalizing = muon.step_flops(plan) / flops  # in the optimizer's step, where nothing hides what Muon exchanges
    exchanging = fsum(
        count * collective_seconds(dict(zip(muon.KEY, key, strict=True)), plan, node_size, link, network, backend)
        for key, count in muon.collectives(plan).items()
    )
    share = bubble(plan.pipeline.stages, plan.micro_batches) if plan.pipeline else 0.0
    waiting = compute * share / (1 - share)
    times = {True: [], False: []}  # of a tensor, context, or expert group, and the others: (seconds, count)
    for c in plan.traffic():
        one = collective_seconds(c, plan, node_size, link, network, backend)
        rows = c["kind"] == "all-to-all" and plan.ep_degree > 1  # of experts, which wait for them
        times[rows or c.get("dimension") in ("tensor", "context")].append((one, c["count"]))
    of_group, others = (fsum(one * count for one, count in times[which]) for which in (True, False))
    hidden = ring_hidden_seconds(plan, node_size, link, network, flops)
    busy = compute + waiting + of_group - hidden

    def timed(c: dict) -> tuple[str, float]:
        stream = "network" if ring_bytes(c, plan, node_size, backend)["node"] else "link"
        return stream, collective_seconds(c, plan, node_size, link, network, backend)

    if plan.deepspeed or plan.pipeline:
        last = others / sum(count for _, count in times[False]) if times[False] else 0.0
        shortest = max(busy, others) + min(last, compute)
    else:
        shortest = overlap.step_end(plan, timed, busy, blocking=backend == "gloo")
    shortest += orthogonalizing + exchanging
    compute += orthogonalizing
    return {
        "compute": compute,
        "bubble": waiting,
        "communication": of_group + others,
        "exposed": shortest - compute - waiting,
        "serial": busy + hidden + orthogonalizing + others,
        "overlapped": shortest,
    }


def ring_hidden_seconds(plan: Plan, node_size: int, link: Link, network: Link, flops: float) -> float:
    """Return the seconds that a ring's exchanges are hidden behind attention in a step.

    While a rank attends to one rank's keys and values, the next ones arrive: C − 1 times in forward, and in backward,
    where the gradients of those before travel next to them. The last exchange of gradients, which brings them home, waits
    for everything.

    Args:
        plan, node_size, link, network, flops: as in ``step_time``.
    """
    context = plan.blueprint.context
    if context.size == 1 or context.form != "ring":
        return 0.0
    forward, backward = (seconds / context.size / flops for seconds in attention_flops(plan))  # of one rank's keys
    sent = {"kind": "send", "ranks": context.size, "dimension": "context"}
    arriving, following = (
        collective_seconds(sent | {"bytes": size}, plan, node_size, link, network)
        for size in context.packed_bytes(plan.compute_itemsize)
    )
    times, forwards = (context.size - 1) * plan.micro_batches, context.layers + context.recomputed
    hidden = forwards * min(forward, arriving) + context.layers * min(backward, arriving + following)
    return times * hidden


def utilization(plan: Plan, seconds: float, peak: float) -> dict:
    """Return {"MFU", "HFU"}: the shares of the peak that go into the model's operations, and into all operations.

    HFU counts what is recomputed, and half of causal attention (planner/models/flops.py).

    Args:
        plan: the run's.
        seconds: of a step.
        peak: operations per second of a rank.
    """
    return {"MFU": model_flops(plan) / seconds / peak, "HFU": hardware_flops(plan) / seconds / peak}


def model_state(parameters: float, ranks: int, stage: int, sizes=(2, 2, 12)) -> float:
    """Return a rank's bytes of parameters, gradients, and optimizer state under ZeRO (arXiv:1910.02054, section 5).

    Args:
        parameters: of the model.
        ranks: how many train.
        stage: of ZeRO, 0 to 3.
        sizes: bytes per parameter of each; by default those of mixed-precision Adam, as the paper counts them.
    """
    parts = [ranks if stage >= cut else 1 for cut in (3, 2, 1)]
    return fsum(parameters * size / part for size, part in zip(sizes, parts, strict=True))
