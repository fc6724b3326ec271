"""Host memory, as the kernel counts it: how much this process may use, how much of that is free, how much it holds.

total()                   the machine's memory, or less where a container or a job limits it
free()                    what this process can still use
resident()                what it holds now; resident(peak=True): the most it ever held
reset_peak_resident()     count that peak anew from here on
"""

import contextlib
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def total() -> int:
    """Bytes of memory this process may use: the machine's, or less where a container or a job limits it."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in _memory_limits())])


def free() -> float:
    """Bytes of memory that this process can still use, if nobody else does; infinity where the kernel does not say."""
    left = [limit - used for limit, used in _memory_limits()]
    with contextlib.suppress(OSError):
        left.append(_numbers(ROOT / "proc/meminfo")["MemAvailable:"] * 1024)
    return max(0, min(left, default=math.inf))


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes used) of each control group that this process is in: its job's (Slurm's --mem), its container's.

    Only what the process sees of them: in a container, that is the container's group and those below.
    """
    groups = ROOT / "sys/fs/cgroup"
    with contextlib.suppress(OSError):  # not on macOS
        for line in (ROOT / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from _limits_above(groups, path, ("memory.max", "memory.current", ""))
            elif "memory" in controllers.split(","):  # version 1
                files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
                yield from _limits_above(groups / "memory", path, files)


def _limits_above(top: Path, path: str, files: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
    """The limits of the group at ``path`` and of those around it, up to ``top``: all of them hold."""
    maximum, current, prefix = files
    inner = top / path.strip("/")
    for group in (inner, *inner.parents[: len(inner.parts) - len(top.parts)]):
        with contextlib.suppress(OSError, ValueError):  # no such group here, or "max": no limit
            limit, stat = int((group / maximum).read_text()), _numbers(group / "memory.stat")
            # Files that were read are counted as used, and given up when the memory is wanted.
            cached = stat[f"{prefix}active_file"] + stat[f"{prefix}inactive_file"]
            yield limit, int((group / current).read_text()) - cached


def _numbers(file: Path) -> dict[str, int]:
    """{first word: second} of a file's lines."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}


def reset_peak_resident() -> int:
    """Bytes resident now; the peak that ``resident`` tells counts anew, on Linux. Elsewhere: the peak so far."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return resident()
    except OSError:
        return resident(peak=True)


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
