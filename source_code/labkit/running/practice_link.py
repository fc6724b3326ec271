# SPDX-License-Identifier: BSD-3-Clause
"""Read and set the speed of the link between the practice cluster's nodes, and count the bytes that cross it.

  link()                        "200mbit", or "none" if it is not throttled; None without a practice network
  change_link("100mbit")        set the speed
  interface_bytes()             bytes that this rank's node has sent and received over it
  bytes_per_second("200mbit")   its payload bandwidth; planner/timing/cost.py predicts how many bytes should cross it
  burst_bytes("200mbit")        bytes that it passes at once after a pause

``make slurm LINK=200mbit`` creates the network (described in source_code/slurm/practice_network.sh).
"""

import math
import os
import subprocess
from pathlib import Path

from labkit import UserError

SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "practice_cluster.sh"
VARIABLE = "FSDP_LABS_LINK"  # from env.sh: the file that holds the link's speed
INTERFACE = "eth0"  # the link's end on a node
PAYLOAD = 8948 / 9014  # fraction of a frame: the rest is headers of Ethernet, IP and TCP
# Size of the token bucket: bytes, or seconds of the rate, whichever is more (explained in practice_network.sh)
BUCKET_BYTES, BUCKET_SECONDS = 66_000, 2e-3


def link() -> str | None:
    """Return the link's speed: "200mbit", "1gbit", …, "none" (not throttled); None without a practice network."""
    try:
        return Path(os.environ[VARIABLE]).read_text().strip()
    except (KeyError, OSError):
        return None


def change_link(rate: str):
    """Set the speed of the practice cluster's link.

    Args:
        rate: "200mbit", "1gbit", …, or "none".

    Raises:
        UserError: there is no link, or its speed cannot be set.
    """
    if link() is None:
        raise UserError("there is no link to change: first type make slurm LINK=200mbit, and source its env.sh")
    folder = Path(os.environ[VARIABLE]).parent
    done = subprocess.run(
        ["bash", SCRIPT, "up", "--link", rate, folder], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise UserError(done.stderr.strip())


def bytes_per_second(rate: str) -> float:
    """Return the payload bandwidth of a link of this speed ("200mbit"), in bytes/s each way; infinity for "none"."""
    if rate == "none":
        return math.inf
    return float(rate[:-4]) * {"mbit": 1e6, "gbit": 1e9}[rate[-4:]] / 8 * PAYLOAD


def burst_bytes(rate: str, pause: float = math.inf) -> float:
    """Return the bytes that the link passes at once after ``pause`` idle seconds: the content of its token bucket."""
    if rate == "none":
        return 0.0
    return min(pause * bytes_per_second(rate), max(BUCKET_BYTES, BUCKET_SECONDS * bytes_per_second(rate) / PAYLOAD))


def interface_bytes() -> dict | None:
    """Return {"interface", "sent", "received"}: the bytes that have crossed the link at this node since it came up.

    None outside the practice network, where other programs use the same interface. The kernel also counts headers, once
    per segment of up to 64 KB, so the count is 0.3 % above the ranks' payload for large messages, and more for small ones.
    """
    if VARIABLE not in os.environ or os.environ.get("GLOO_SOCKET_IFNAME") != INTERFACE:
        return None
    counters = Path("/sys/class/net") / INTERFACE / "statistics"
    sent, received = (int((counters / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return {"interface": INTERFACE, "sent": sent, "received": received}
