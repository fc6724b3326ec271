"""The link between the nodes of the practice cluster: its speed, and what crossed it.

  link()                        "200mbit", "none" for one that is not slowed; None where there is no such network
  change_link("100mbit")        for whatever runs from now on
  interface_bytes()             what this rank's node has sent and received over it
  bytes_per_second("200mbit")   what it carries of your bytes; planner/timing/cost.py says how many should cross it
  saved_up("200mbit")           what it carries at once after a pause

``make slurm LINK=200mbit`` makes the network (source_code/slurm/practice_network.sh says how it looks).
"""

import math
import os
import subprocess
from pathlib import Path

from labkit import UserError

SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "practice_cluster.sh"
VARIABLE = "FSDP_LABS_LINK"  # from env.sh: the file that holds the link's speed
INTERFACE = "eth0"  # the link's end on a node
PAYLOAD = 8948 / 9014  # of a frame: the rest is headers, Ethernet's, IP's and TCP's
PIECE, LATE = 66_000, 2e-3  # the token bucket's size: bytes, or seconds of the rate (practice_network.sh says why)


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


def saved_up(rate: str, pause: float = math.inf) -> float:
    """Bytes that the link lets through at once when it was silent for ``pause`` seconds: its token bucket's content."""
    if rate == "none":
        return 0.0
    return min(pause * bytes_per_second(rate), max(PIECE, LATE * bytes_per_second(rate) / PAYLOAD))


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
