# SPDX-License-Identifier: BSD-3-Clause
"""Report the progress of a run: as a bar in a terminal, or in a small file for another process.

A launcher sets FSDP_LABS_PROGRESS to a path. The first rank to start creates that file, empty, and rank 0 then writes
"step total" to it. A file works for local ranks, for srun, and for a batch job on another node of a shared file system.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

VARIABLE = "FSDP_LABS_PROGRESS"
EVERY_SECONDS = 0.2


class Progress:
    """Count steps and show them on rank 0.

    Args:
        rank: a ``ranks.Rank``.
        total: number of steps, including earlier runs'.
        done: steps of earlier runs.
    """

    def __init__(self, rank, total: int, done: int = 0):
        self.step, self.total = done, total
        self.path = os.environ.get(VARIABLE) if rank.rank == 0 else None
        self.bar = None
        if rank.rank == 0 and not self.path and sys.stderr.isatty():
            self.bar = tqdm(total=total, initial=done, unit="step", leave=False)
        self._written = 0.0

    def advance(self):
        """Count one more step."""
        self.step += 1
        if self.bar:
            self.bar.update()
        if self.path and (time.monotonic() - self._written > EVERY_SECONDS or self.step == self.total):
            _write(self.path, f"{self.step} {self.total}")
            self._written = time.monotonic()

    def close(self):
        """Close the bar."""
        if self.bar:
            self.bar.close()


def report():
    """Report that a rank has started: a launcher's timeout counts from here on, without the time in Slurm's queue."""
    if path := os.environ.get(VARIABLE):
        _write(path, "")


def _write(path, text: str):
    # No folder: the launcher has ended, as after sbatch. No space: that must not end training.
    with contextlib.suppress(OSError):
        Path(path).write_text(text)


def read(path: str | Path) -> tuple[int, int] | None:
    """Return (step, total) as a run last wrote it to ``path``; None before its first step."""
    try:
        step, total = Path(path).read_text().split()
        return int(step), int(total)
    except (OSError, ValueError):  # it does not exist yet, or is being written
        return None
