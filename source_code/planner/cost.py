"""What a step costs in time, by arithmetic: the bytes of its collectives, within and across nodes, and its FLOPs. No torch.

A ring of n ranks sends (n−1)/n of a tensor over each of its edges to gather or to reduce-scatter it, and twice that
to all-reduce it (chapter 02). Of its edges, one each way crosses the boundary of each node that it touches. So

  time of a collective = steps of the ring × latency + the larger of
      bytes a rank sends / bandwidth of its link,  bytes that leave a node / bandwidth of the node's network

Bandwidths are bytes a second in one direction, latencies seconds. These are bounds: no real network does better.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

from planner.pipeline import bubble
from planner.predict import Plan


@dataclass(frozen=True)
class Link:
    """bandwidth: of a rank's link within its node, or of a whole node's network."""

    bandwidth: float
    latency: float
    source: str


# Published peaks; a measured figure (chapter 02) is better.
LINKS = {
    "nvlink": Link(450e9, 3e-6, "NVLink 4, one direction: NVIDIA H100 data sheet"),
    "pcie": Link(64e9, 5e-6, "PCI Express 5.0, 16 lanes, one direction"),
}
NETWORKS = {
    "infiniband": Link(8 * 50e9, 5e-6, "eight NDR InfiniBand adapters a node, 400 Gbit/s each"),
    "ethernet": Link(12.5e9, 30e-6, "Ethernet, 100 Gbit/s a node"),
}


# How often a backend passes all but one part in n of a tensor along its ring (a broadcast or a reduction to one rank:
# all of it along n − 1 of n edges, which is as much on average). gloo makes a reduce-scatter from an all-reduce, of
# which it keeps a part (chapter 02).
RING = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1, "reduce": 1}
PASSES = {"ring": RING, "gloo": RING | {"reduce-scatter": 2}}


def ring_bytes(collective: dict, plan: Plan, node_size: int, backend: str = "ring") -> dict:
    """Where one collective of ``plan.traffic()`` sends its bytes, with ``node_size`` ranks on each node.

    Returns {"rank": bytes that a rank sends, "node": bytes that leave a node, "steps": of the ring}; of unequal nodes,
    the one that most leave. Ranks are numbered node by node. The ranks of a tensor group are neighbours, those that
    share a model lie that many apart, and the replicas of a shard as far apart as they can. backend: "ring", as NCCL's, or
    "gloo". A record's traffic does not say how many ranks take part; the plan does, but for reshard_after_forward=N.
    """
    if collective["kind"] in ("send", "receive"):  # by a stage of a pipeline; a link carries both directions at once
        sent = collective["bytes"] if collective["kind"] == "send" else 0
        return {"rank": sent, "node": sent * (plan.ranks > node_size), "steps": bool(sent)}
    n = collective.get("ranks") or _members(collective, plan)
    passes = PASSES[backend][collective["kind"]]
    edge = passes * (n - 1) / n * collective["bytes"]
    if collective.get("dimension") == "tensor":
        apart = 1
    else:
        apart = plan.ranks // n if collective["kind"] == "all-reduce" else plan.tensor
    return {"rank": edge, "node": _leaving_edges(plan.ranks, n, apart, node_size) * edge, "steps": passes * (n - 1)}


def inter_node_bytes(traffic: list[dict], plan: Plan, node_size: int, backend: str = "ring") -> float:
    """Bytes that leave a node (as many arrive) in all the collectives of ``traffic``: the plan's, or a record's."""
    return sum(c["count"] * ring_bytes(c, plan, node_size, backend)["node"] for c in traffic)


def _members(collective: dict, plan: Plan) -> int:
    if not plan.shards_parameters:
        return plan.ranks
    if collective.get("dimension") == "tensor":
        return plan.tensor
    return plan.replicas if collective["kind"] == "all-reduce" else plan.shards


@cache
def _leaving_edges(ranks: int, n: int, apart: int, node_size: int) -> int:
    """Of the rings of groups of n ranks, ``apart`` from one another: how many edges leave one node."""
    if n == 1:
        return 0
    edges = Counter()
    for rank in range(ranks):
        place = rank // apart % n  # in its group
        following = rank + apart if place < n - 1 else rank - (n - 1) * apart
        edges[rank // node_size] += rank // node_size != following // node_size
    return max(edges.values())


def seconds(collective: dict, plan: Plan, node_size: int, link: Link, network: Link) -> float:
    """The time of one collective of ``plan.traffic()``."""
    sent = ring_bytes(collective, plan, node_size)
    latency = network.latency if sent["node"] else link.latency
    return sent["steps"] * latency + max(sent["rank"] / link.bandwidth, sent["node"] / network.bandwidth)


def step_time(plan: Plan, node_size: int, link: Link, network: Link, flops: float) -> dict:
    """{"compute", "bubble", "communication", "in turn", "overlapped"}: seconds of a step.

    flops: a second, that a rank attains. bubble: what a stage of a pipeline waits for the others, where all take
    equally long.

    Overlapped, the longer of the two hides the other, but for one collective of the average length: at a step's end
    nothing is left to compute that could hide the last reduction. Nothing hides what a tensor group sends: the product
    that comes next waits for it.
    """
    work = plan.blueprint
    compute = plan.micro_batches * work.samples * (work.flops + work.recomputed_flops) / plan.tensor / flops
    share = bubble(plan.pipeline.stages, plan.micro_batches) if plan.pipeline else 0.0
    waiting = compute * share / (1 - share)
    times = {True: [], False: []}  # of a tensor group, and the others: (seconds, count)
    for c in plan.traffic():
        times[c.get("dimension") == "tensor"].append((seconds(c, plan, node_size, link, network), c["count"]))
    exposed, hidden = (sum(one * count for one, count in times[of_group]) for of_group in (True, False))
    last = hidden / sum(count for _, count in times[False]) if times[False] else 0.0
    return {
        "compute": compute,
        "bubble": waiting,
        "communication": exposed + hidden,
        "in turn": compute + waiting + exposed + hidden,
        "overlapped": max(compute + waiting + exposed, hidden) + min(last, compute),
    }


def model_state(parameters: float, ranks: int, stage: int, sizes=(2, 2, 12)) -> float:
    """Bytes a rank of parameters, gradients and optimizer state under ZeRO stage 0 to 3 (arXiv:1910.02054, section 5).

    sizes: bytes a parameter of each, for mixed-precision Adam as the paper counts it by default.
    """
    parts = [ranks if stage >= cut else 1 for cut in (3, 2, 1)]
    return sum(parameters * size / part for size, part in zip(sizes, parts, strict=True))
