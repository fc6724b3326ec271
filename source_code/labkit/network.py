"""The link between the nodes of the practice cluster: its speed, what crossed it, what should have.

  link()                        "200mbit", "none" for one that is not slowed; None where there is no such network
  change_link("100mbit")        for whatever runs from now on
  interface_bytes()             what this rank's node has sent and received over it
  leaving(traffic, 4, 2)        the bytes of a step that leave each node, by arithmetic
  bytes_per_second("200mbit")   so that leaving(...) / bytes_per_second(...) is the time they take

``make slurm LINK=200mbit`` makes the network (source_code/slurm/practice_network.sh says how it looks).
"""

import math
import os
import subprocess
from pathlib import Path

from labkit import UserError

SCRIPT = Path(__file__).resolve().parents[1] / "slurm" / "practice_cluster.sh"
VARIABLE = "FSDP_LABS_LINK"  # from env.sh: the file that holds the link's speed
INTERFACE = "eth0"  # the link's end on a node
PAYLOAD = 8948 / 9014  # of a frame: the rest is headers, Ethernet's, IP's and TCP's

# What each rank of n sends its neighbour, as a multiple of the whole tensor. The rings of NCCL and gloo are alike,
# but gloo makes a reduce-scatter from an all-reduce of which it keeps a part.
RING = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
GLOO = RING | {"reduce-scatter": 2}


def link() -> str | None:
    """The link's speed: "200mbit", "1gbit", … or "none". None where no practice network is."""
    try:
        return Path(os.environ[VARIABLE]).read_text().strip()
    except (KeyError, OSError):
        return None


def change_link(rate: str):
    """Give the link of the practice cluster another speed. UserError if there is none, or it cannot be."""
    if link() is None:
        raise UserError("there is no link to change: first type make slurm LINK=200mbit, and source its env.sh")
    folder = Path(os.environ[VARIABLE]).parent
    done = subprocess.run(
        ["bash", SCRIPT, "up", "--link", rate, folder], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise UserError(done.stderr.strip())


def bytes_per_second(rate: str) -> float:
    """What a link of this speed ("200mbit") carries of your bytes, each way; infinity for "none"."""
    if rate == "none":
        return math.inf
    return float(rate[:-4]) * {"mbit": 1e6, "gbit": 1e9}[rate[-4:]] / 8 * PAYLOAD


def interface_bytes() -> dict | None:
    """{"interface", "sent", "received"}: all that has crossed the link at this node, in bytes, since it is up.

    None elsewhere than on the practice network's nodes: on other machines much else uses the same interface.
    The kernel counts headers too, once for each piece of up to 64 KB that it hands over, so that the count is
    0.3 % above what the ranks sent each other in large messages, and more in small ones.
    """
    if VARIABLE not in os.environ or os.environ.get("GLOO_SOCKET_IFNAME") != INTERFACE:
        return None
    counters = Path("/sys/class/net") / INTERFACE / "statistics"
    sent, received = (int((counters / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return {"interface": INTERFACE, "sent": sent, "received": received}


def leaving(traffic: list[dict], ranks: int, nodes: int, shards: int | None = None, factors: dict = GLOO) -> float:
    """Bytes of user data that leave each node over the link (as many arrive) in the collectives of ``traffic``.

    traffic: as ``predict.traffic`` gives it, [{"kind", "count", "bytes", "ranks"}, …]; or as in a record, without
    "ranks": then say how many ranks share a model in a hybrid mesh (shards). Ranks are numbered node by node; each
    sends to the next of its group, the last to the first. Of those messages the ones between two nodes use the link.
    """
    shards = shards or ranks
    result = 0.0
    for call in traffic:
        reduced = call["kind"] == "all-reduce"
        n = call.get("ranks") or (ranks // shards if reduced and shards < ranks else ranks if reduced else shards)
        # Ranks that share a model are neighbours, those with the same part of it lie as far apart as possible.
        step = ranks // n if reduced else 1
        firsts = range(step) if reduced else range(0, ranks, n)
        groups = [range(first, first + n * step, step) for first in firsts]
        each_sends = factors[call["kind"]] * (n - 1) / n * call["bytes"] * call["count"]
        result += each_sends * _senders(groups, ranks // nodes)
    return result


def _senders(groups, ranks_per_node: int) -> int:
    """How many ranks of the first node send to another node."""
    pairs = [(rank, group[(i + 1) % len(group)]) for group in groups for i, rank in enumerate(group)]
    return sum(rank < ranks_per_node <= neighbour for rank, neighbour in pairs)
