"""Tell the job script that started a run how far it came and why it ended, in a small file.

An exit code alone does not tell: the rank that ends last, or that is ended because another did, decides it. The job
script (slurm/requeue.sh) names the file in FSDP_LABS_STATUS; a run adds lines to it:

  saved 1200           a checkpoint of that step is whole
  asked 1234           the run was asked to end, and has saved
  failed node7 5       rank 5, on that node, was the first to fail
  refused              a user's error: the same command would end the same way
  diverged             a loss or a weight is not finite: so would this one
"""

import contextlib
import os
import socket

VARIABLE = "FSDP_LABS_STATUS"


def node() -> str:
    """This machine's name, as Slurm calls it where Slurm has started this process."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def note(event: str, *about):
    """Add a line, where somebody wants to know. Its loss is no reason to end a run."""
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError), open(path, "a") as file:
            file.write(" ".join(map(str, (event, *about))) + "\n")
