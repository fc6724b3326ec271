"""What a step costs in time, by arithmetic: its collectives within and across nodes, what hides behind what. No torch.

A ring of n ranks sends (n−1)/n of a tensor over each of its edges to gather or to reduce-scatter it, and twice that
to all-reduce it (chapter 02). Of its edges, one each way crosses the boundary of each node that it touches. So

  time of a collective = steps of the ring × latency + the larger of
      bytes a rank sends / bandwidth of its link,  bytes that leave a node / bandwidth of the node's network

Bandwidths are bytes per second in one direction, latencies seconds: of one step of a ring, over the slowest link that it
crosses. These are bounds for rings: no real network does better. Not modelled: NCCL's trees, and all-gathers in two
levels, first among nodes and then within, which take fewer steps where there are many ranks.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

from planner.models.flops import of_hardware, of_model
from planner.ops.autograd import FP32
from planner.parallel.pipeline import bubble
from planner.predict import Plan
from planner.timing import overlap


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
    "ethernet": Link(12.5e9, 30e-6, "Ethernet, 100 Gbit/s per node"),
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
    dimension = _dimension(collective, plan)
    sizes = {"tensor": plan.tensor, "shard": plan.shards, "replicate": plan.replicas}
    n = collective.get("ranks") or sizes.get(dimension, plan.ranks)
    passes = PASSES[backend][collective["kind"]]
    edge = passes * (n - 1) / n * collective["bytes"]
    apart = {"shard": plan.tensor, "replicate": plan.ranks // n}.get(dimension, 1)
    return {"rank": edge, "node": _leaving_edges(plan.ranks, n, apart, node_size) * edge, "steps": passes * (n - 1)}


def inter_node_bytes(traffic: list[dict], plan: Plan, node_size: int, backend: str = "ring") -> float:
    """Bytes that leave a node (as many arrive) in all the collectives of ``traffic``: the plan's, or a record's."""
    return sum(c["count"] * ring_bytes(c, plan, node_size, backend)["node"] for c in traffic)


def _dimension(collective: dict, plan: Plan) -> str | None:
    """Return the mesh dimension along which a collective's ranks lie; None: all ranks take part.

    FSDP1's collectives and those of older records do not say it. Then an all-reduce is one of gradients, between the
    replicas of a shard, unless it is of the one number that FSDP1 sums among the shards to clip.
    """
    if collective.get("dimension") or not plan.shards_parameters:
        return collective.get("dimension")
    norm = plan.flat and plan.clip and collective["bytes"] == FP32
    return "replicate" if collective["kind"] == "all-reduce" and not norm else "shard"


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


def seconds(collective: dict, plan: Plan, node_size: int, link: Link, network: Link, backend: str = "ring") -> float:
    """The time of one collective of ``plan.traffic()``."""
    sent = ring_bytes(collective, plan, node_size, backend)
    latency = network.latency if sent["node"] else link.latency
    return sent["steps"] * latency + max(sent["rank"] / link.bandwidth, sent["node"] / network.bandwidth)


def step_time(plan: Plan, node_size: int, link: Link, network: Link, flops: float, backend: str = "ring") -> dict:
    """Seconds of a step: {"compute", "bubble", "communication", "exposed", "in turn", "overlapped"}.

    flops: a second, that a rank attains, counted as the hardware does them (planner/models/flops.py). bubble: what a stage of
    a pipeline waits for the others, where all take equally long. A step takes from "overlapped", where compute and
    each link work side by side as far as the order of the step lets them (planner/timing/overlap.py), to "in turn", where
    nothing hides. exposed: of communication, what is not hidden in "overlapped".

    Nothing hides what a tensor group sends: the product that comes next waits for it.
    """
    compute = of_hardware(plan) / flops
    share = bubble(plan.pipeline.stages, plan.micro_batches) if plan.pipeline else 0.0
    waiting = compute * share / (1 - share)
    times = {True: [], False: []}  # of a tensor group, and the others: (seconds, count)
    for c in plan.traffic():
        one = seconds(c, plan, node_size, link, network, backend)
        times[c.get("dimension") == "tensor"].append((one, c["count"]))
    of_group, others = (sum(one * count for one, count in times[which]) for which in (True, False))
    busy = compute + waiting + of_group

    def timed(c: dict) -> tuple[str, float]:
        lane = "network" if ring_bytes(c, plan, node_size, backend)["node"] else "link"
        return lane, seconds(c, plan, node_size, link, network, backend)

    if plan.deepspeed or plan.pipeline:
        last = others / sum(count for _, count in times[False]) if times[False] else 0.0
        shortest = max(busy, others) + min(last, compute)
    else:
        shortest = overlap.step_end(plan, timed, busy, blocking=backend == "gloo")
    return {
        "compute": compute,
        "bubble": waiting,
        "communication": of_group + others,
        "exposed": shortest - compute - waiting,
        "in turn": busy + others,
        "overlapped": shortest,
    }


def utilisation(plan: Plan, seconds: float, peak: float) -> dict:
    """{"MFU", "HFU"}: the shares of ``peak`` operations per second that go into the model, and that a rank does at all,
    where a step takes so many seconds. HFU counts what is computed again, and of causal attention half (planner/models/flops.py).
    """
    return {"MFU": of_model(plan) / seconds / peak, "HFU": of_hardware(plan) / seconds / peak}


def model_state(parameters: float, ranks: int, stage: int, sizes=(2, 2, 12)) -> float:
    """Bytes a rank of parameters, gradients and optimizer state under ZeRO stage 0 to 3 (arXiv:1910.02054, section 5).

    sizes: bytes per parameter of each, for mixed-precision Adam as the paper counts it by default.
    """
    parts = [ranks if stage >= cut else 1 for cut in (3, 2, 1)]
    return sum(parameters * size / part for size, part in zip(sizes, parts, strict=True))
