# SPDX-License-Identifier: BSD-3-Clause
"""Query host memory as the kernel counts it: this process's limit, what is free, and what is resident.

total()                   the machine's memory, or less where a container or a job limits it
free()                    what this process can still allocate
resident()                the resident set size now; resident(peak=True): its maximum so far
reset_peak_resident()     reset that maximum
"""

import contextlib
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def total() -> int:
    """Return the bytes of memory that this process may use: the machine's, or the limit of its container or job."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in _memory_limits())])


def free() -> float:
    """Return the bytes that this process can still allocate; infinity where the kernel does not report it."""
    left = [limit - used for limit, used in _memory_limits()]
    with contextlib.suppress(OSError):
        left.append(_numbers(ROOT / "proc/meminfo")["MemAvailable:"] * 1024)
    return max(0, min(left, default=math.inf))


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes used) of each control group of this process: its job's (Slurm's --mem), its container's.

    In a container, a process sees only the container's group and those below it.
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
    """Yield the limits of the group at ``path`` and of the groups around it, up to ``top``: all of them apply."""
    maximum, current, prefix = files
    inner = top / path.strip("/")
    for group in (inner, *inner.parents[: len(inner.parts) - len(top.parts)]):
        with contextlib.suppress(OSError, ValueError):  # no such group here, or "max": no limit
            limit, stat = int((group / maximum).read_text()), _numbers(group / "memory.stat")
            # The page cache counts as used, but the kernel reclaims it when memory is needed.
            cached = stat[f"{prefix}active_file"] + stat[f"{prefix}inactive_file"]
            yield limit, int((group / current).read_text()) - cached


def _numbers(file: Path) -> dict[str, int]:
    """Return {first word: second word} of a file's lines."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}


def reset_peak_resident() -> int:
    """Reset the peak of ``resident`` and return the bytes resident now; on other systems than Linux, the peak so far."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return resident()
    except OSError:
        return resident(peak=True)


def resident(peak: bool = False) -> int:
    """Return this process's resident set size (RSS, the RES of ``top``) in bytes; peak: its maximum so far.

    Read from /proc/self/status on Linux, elsewhere from ``ps`` and ``getrusage``.
    """
    try:
        name = "VmHWM:" if peak else "VmRSS:"
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024
    except OSError:  # macOS, where getrusage counts bytes
        import resource

        if peak:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ps = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True)
        return int(ps.stdout) * 1024
