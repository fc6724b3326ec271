"""Show how far a run is: a bar where a person watches, a small file where another process does.

A launcher that wants to know sets FSDP_LABS_PROGRESS to a path: a rank that starts makes that file, empty, and rank 0
then keeps "step total" in it.
A file works the same for local ranks, for srun, and for a batch job on another node of a shared file system.
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
    """Counts steps. rank: a ``ranks.Rank`` (only rank 0 shows anything); done: steps of an earlier run."""

    def __init__(self, rank, total: int, done: int = 0):
        self.step, self.total = done, total
        self.path = os.environ.get(VARIABLE) if rank.rank == 0 else None
        self.bar = None
        if rank.rank == 0 and not self.path and sys.stderr.isatty():
            self.bar = tqdm(total=total, initial=done, unit="step", leave=False)
        self._written = 0.0

    def advance(self):
        self.step += 1
        if self.bar:
            self.bar.update()
        if self.path and (time.monotonic() - self._written > EVERY_SECONDS or self.step == self.total):
            _write(self.path, f"{self.step} {self.total}")
            self._written = time.monotonic()

    def close(self):
        if self.bar:
            self.bar.close()


def report():
    """Say that a rank has started: from here on a launcher counts the time, not while Slurm lets the run wait."""
    if path := os.environ.get(VARIABLE):
        _write(path, "")


def _write(path, text: str):
    # No folder: whoever wanted to know has gone, as after sbatch. No space: that is no reason to end a training.
    with contextlib.suppress(OSError):
        Path(path).write_text(text)


def read(path: str | Path) -> tuple[int, int] | None:
    """(step, total) that a run last wrote to ``path``; None before its first step."""
    try:
        step, total = Path(path).read_text().split()
        return int(step), int(total)
    except (OSError, ValueError):  # not there yet, or caught half-written
        return None
