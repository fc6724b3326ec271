"""What a step costs in time, by arithmetic: the bytes of its collectives, within and across nodes, and its FLOPs. No torch.

A ring of n ranks sends (n−1)/n of a tensor over each of its edges to gather or to reduce-scatter it, and twice that
to all-reduce it (chapter 02). Of its edges, one each way crosses the boundary of each node that it touches. So

  time of a collective = steps of the ring × latency + the larger of
      bytes a rank sends / bandwidth of its link,  bytes that leave a node / bandwidth of the node's network

Bandwidths are bytes a second in one direction, latencies seconds. These are bounds: no real network does better.
"""

from dataclasses import dataclass

from labkit.predict import Plan


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


def spread(collective: dict, plan: Plan, node_size: int) -> dict:
    """Where one collective of ``plan.traffic()`` sends its bytes, with ``node_size`` ranks on each node.

    Returns {"rank": bytes that a rank sends, "node": bytes that leave a node, "steps": of the ring}. The replicas of
    a shard are ``plan.shards`` ranks apart; all other groups are ranks in a row.
    """
    n = collective["ranks"]
    passes = 2 if collective["kind"] == "all-reduce" else 1
    edge = passes * (n - 1) / n * collective["bytes"]
    apart = plan.shards if plan.shards_parameters and collective["kind"] == "all-reduce" else 1
    here = min(n, max(1, node_size // apart))  # members of one group on one node
    rings = min(node_size, plan.ranks) / here if n > here else 0  # groups that touch this node and another
    return {"rank": edge, "node": rings * edge, "steps": passes * (n - 1)}


def seconds(collective: dict, plan: Plan, node_size: int, link: Link, network: Link) -> float:
    """The time of one collective of ``plan.traffic()``."""
    sent = spread(collective, plan, node_size)
    latency = network.latency if sent["node"] else link.latency
    return sent["steps"] * latency + max(sent["rank"] / link.bandwidth, sent["node"] / network.bandwidth)


def step_time(plan: Plan, node_size: int, link: Link, network: Link, flops: float) -> dict:
    """{"compute", "communication", "in turn", "overlapped"}: seconds of a step. flops: a second, that a rank attains.

    Overlapped, the longer of the two hides the other, but for what nothing can hide: the first gather and the last
    reduction, of the root.
    """
    network_work = plan.blueprint
    compute = plan.micro_batches * network_work.samples * (network_work.flops + network_work.recomputed_flops) / flops
    times = [(seconds(c, plan, node_size, link, network), c["count"]) for c in plan.traffic()]
    communication = sum(one * count for one, count in times)
    exposed = communication / sum(count for _, count in times) if times else 0.0
    return {
        "compute": compute,
        "communication": communication,
        "in turn": compute + communication,
        "overlapped": max(compute, communication) + min(exposed, compute),
    }


def model_state(parameters: float, ranks: int, stage: int, sizes=(2, 2, 12)) -> float:
    """Bytes a rank of parameters, gradients and optimizer state under ZeRO stage 0 to 3 (arXiv:1910.02054, section 5).

    sizes: bytes a parameter of each, for mixed-precision Adam as the paper counts it by default.
    """
    parts = [ranks if stage >= cut else 1 for cut in (3, 2, 1)]
    return sum(parameters * size / part for size, part in zip(sizes, parts, strict=True))
