# SPDX-License-Identifier: BSD-3-Clause
"""labkit: shared code of the labs that no chapter teaches, in four packages. Each file has one job; see its first line.

running      ranks, on this machine or by Slurm; preflight checks; a notebook's settings; command lines
measuring    peak memory, time, collectives; the host's memory; one rank of a simulated world
training     the models, the data, checkpoints
teaching     verdicts, exercises, figures
"""

from planner import UserError as UserError


class Diverged(UserError):
    """A loss, a parameter, or the optimizer's state is NaN or infinite: continuing to train would be useless.

    The exit code is unique to this error: job templates do not requeue such a job, which would diverge again.
    """

    exit_code = 65  # EX_DATAERR of sysexits.h


def succeeds(check) -> bool:
    """Return whether ``check()`` raises no UserError."""
    try:
        check()
    except UserError:
        return False
    return True
