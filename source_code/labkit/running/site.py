# SPDX-License-Identifier: BSD-3-Clause
"""Detect the site: its Slurm partitions, GPUs and memory, and where a notebook's labs would run."""

import contextlib
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from labkit import UserError
from labkit.measuring import host_memory

GIB = 2**30
SINFO_SECONDS = 10  # how long Slurm may take to respond
# Default paths of Slurm's configuration, and the path of the one that a controller sends to its nodes
SLURM_CONFS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")


def describe_machine(lab) -> str:
    """Describe this machine and where labs run, as a small table. lab: a notebook's settings (``labkit.running.lab.Lab``)."""
    import torch  # not above: planning and queueing need no torch
    import torch.distributed as dist

    from labkit.measuring import records

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    rows = {
        "processor": records.hardware(torch.device("cpu")),
        "memory": f"{host_memory.total() / GIB:.1f} GiB",
        "GPUs": ", ".join(gpus) or "none that PyTorch sees",
        "Slurm": _slurm(),
        "backends": ", ".join(name for name, there in backends.items() if there)
        + ("" if gpus else " (nccl needs GPUs)" if backends["nccl"] else ""),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}",
        "the labs": launch_description(lab),
    }
    return "\n".join(f"{name:10} {value}" for name, value in rows.items())


class NoSlurm(Exception):
    """This machine is not part of a cluster; the text gives the reason."""


def partitions() -> list[str]:
    """Return a description of each of Slurm's partitions.

    Raises:
        NoSlurm: Slurm is not in use here.
        UserError: Slurm does not respond.
    """
    if not shutil.which("srun"):
        raise NoSlurm("there is no srun on this machine")
    try:
        sinfo = subprocess.run(["sinfo", "-h", "-o", "%P %D"], capture_output=True, text=True, timeout=SINFO_SECONDS)
        if sinfo.returncode == 0:
            rows = [line.split() for line in sinfo.stdout.splitlines()]
            return [f"partition {name.rstrip('*')}, nodes: {nodes}" for name, nodes in rows]
        problem = (sinfo.stderr.strip().splitlines() or ["sinfo gives no reason"])[-1]
    except subprocess.TimeoutExpired:
        problem = f"sinfo did not respond within {SINFO_SECONDS} s"
    except OSError as error:
        problem = f"sinfo cannot be started: {error.strerror}"
    if not _slurm_is_in_use():
        raise NoSlurm("it is not configured on this machine")
    raise UserError(
        f"Slurm does not respond ({problem}): try again, or set FSDP_LABS_LAUNCHER=local to run on this machine"
    )


def gpus_here() -> int:
    """Return the number of GPUs that PyTorch sees on this machine."""
    import torch

    return torch.cuda.device_count()


def gpus_of_a_node(partition: str | None) -> int:
    """Return the largest number of GPUs of a node, according to Slurm.

    Args:
        partition: its name, or several separated by commas; None: the default one.
    """
    # As in "gpu gpu:4", "gpu* gpu:a100:2,gpu:v100:2" or "gpu gpu:h100:8(S:0-1),shard:16": the star marks the default
    rows = [row.split() for row in _output_of("sinfo", "-h", "-o", "%P %G").splitlines()]
    wanted = partition.split(",") if partition else [name.rstrip("*") for name, _ in rows if name.endswith("*")]
    nodes = [gres for name, gres in rows if name.rstrip("*") in wanted]
    return max((sum(map(int, re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", node))) for node in nodes), default=0)


def is_practice_cluster() -> bool:
    """Return whether the cluster is the course's practice cluster, whose GPU slots have no hardware."""
    return bool(re.search(r"^ClusterName\s*=\s*practice$", _output_of("scontrol", "show", "config"), re.M))


def _output_of(*words: str) -> str:
    """Return the output of one of Slurm's commands; "" if it fails (``partitions`` reports why)."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, text=True, timeout=SINFO_SECONDS).stdout
    return ""


def _slurm_is_in_use() -> bool:
    """Return whether this machine is configured for a cluster; installed packages alone do not count."""
    own_build = Path(shutil.which("srun")).resolve().parents[1] / "etc" / "slurm.conf"  # of a site's own build
    configured = any(Path(path).exists() for path in (own_build, *SLURM_CONFS))
    return configured or "SLURM_CONF" in os.environ or "SLURM_JOB_ID" in os.environ


def _slurm() -> str:
    try:
        return "; ".join(partitions())
    except NoSlurm as reason:
        return f"{reason} (make slurm brings up a practice cluster)"
    except UserError as error:
        return str(error)


def launch_description(lab) -> str:
    """Describe in words how ``lab.run`` and ``lab.on_ranks`` launch."""
    gpus = lab.device_of() == "cuda"
    if lab.uses_slurm():
        where = f" on partition {lab.partition}" if lab.partition else ""
        return f"{lab.ranks} ranks, started by srun{where}, computing on the nodes' {'GPUs' if gpus else 'CPUs'}"
    return f"{lab.ranks} ranks on this machine, started by python, computing on its {'GPUs' if gpus else 'CPU'}"
