# SPDX-License-Identifier: BSD-3-Clause
"""Report a run's progress and the reason of its end to the job script, in a small file.

The exit code is not enough: it is that of the rank that ends last, or that was ended because another one failed. The job
script (slurm/requeue.sh) sets FSDP_LABS_STATUS to the path of the file; a run appends lines to it:

  saved 1200           the checkpoint of that step is complete
  asked 1234           the run was preempted, and has saved that step
  failed node7 5       rank 5, on that node, was the first to fail
  refused              a user's error: the same command would fail again
  diverged             a loss or a weight is not finite: the same command would diverge again
"""

import contextlib
import os
import socket

VARIABLE = "FSDP_LABS_STATUS"


def node() -> str:
    """Return this machine's name: Slurm's name of the node in a Slurm job, else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def note(event: str, *details):
    """Append a line to the status file, if there is one. A failure to write must not end a run."""
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError), open(path, "a") as file:
            file.write(" ".join(map(str, (event, *details))) + "\n")
