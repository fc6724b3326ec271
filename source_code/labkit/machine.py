"""What this machine is, what a notebook's settings would do here, and what the kernel says a process holds."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

GIB = 2**30


def about(lab) -> str:
    """A small table for people. lab: a notebook's settings (``labkit.lab.Lab``)."""
    import torch  # not above: ``resident`` measures what importing it costs
    import torch.distributed as dist

    from labkit import records

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    rows = {
        "processor": records.hardware(torch.device("cpu")),
        "memory": f"{memory() / GIB:.1f} GiB",
        "GPUs": ", ".join(gpus) or "none that PyTorch sees",
        "Slurm": _slurm(),
        "backends": ", ".join(name for name, there in backends.items() if there)
        + ("" if gpus else " (nccl needs GPUs)" if backends["nccl"] else ""),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}",
        "the labs": what_a_lab_does(lab, bool(gpus)),
    }
    return "\n".join(f"{name:10} {value}" for name, value in rows.items())


def memory() -> int:
    """Bytes of memory this process may use: the machine's, or less where a container or a job limits it."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such limit here
        pass
    return min(limits)


def _slurm() -> str:
    if not shutil.which("sinfo"):
        return "not on this machine (make slurm brings up a practice cluster)"
    asked = subprocess.run(["sinfo", "-h", "-o", "%P %D"], capture_output=True, text=True)
    if asked.returncode:
        return "installed, but no cluster answers (make slurm brings up a practice cluster)"
    partitions = [line.split() for line in asked.stdout.splitlines()]
    return "; ".join(f"partition {name.rstrip('*')}, nodes: {nodes}" for name, nodes in partitions)


def what_a_lab_does(lab, gpus: bool) -> str:
    """What ``lab.run`` and ``lab.on_ranks`` will do, in words. gpus: whether PyTorch sees any here."""
    if lab.uses_slurm():
        where = f" on partition {lab.partition}" if lab.partition else ""
        device = "the nodes' CPUs" if lab.device == "cpu" else "the nodes' GPUs"
        return f"{lab.ranks} ranks, started by srun{where}, computing on {device}"
    device = "GPUs" if lab.device == "cuda" or (lab.device == "auto" and gpus) else "CPU"
    return f"{lab.ranks} ranks on this machine, started by python, computing on its {device}"


def resident(peak: bool = False) -> int:
    """Bytes of this process that lie in physical memory (RSS) now; peak: the most there ever were.

    What ``top`` calls RES. Linux counts it in /proc/self/status; elsewhere ``ps`` and ``getrusage`` tell.
    """
    try:
        name = "VmHWM:" if peak else "VmRSS:"
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024
    except OSError:  # macOS, where getrusage counts bytes
        import resource

        if peak:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True)
        return int(said.stdout) * 1024
