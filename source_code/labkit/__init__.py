"""labkit: what the labs share and no chapter is about, in four rooms. Each file has one job; see its first line.

running      ranks, on this machine or by Slurm; preflight checks; a notebook's settings; command lines
measuring    peak memory, time, collectives; the host's memory; one rank of a simulated world
training     the models, the data, checkpoints
teaching     verdicts, exercises, figures
"""

from planner import UserError as UserError


class Diverged(UserError):
    """A loss, a parameter or the optimizer's state is NaN or infinite: training on would be of no use.

    Its exit code is no other error's, and no job template starts such a job again: it would come to the same end.
    """

    exit_code = 65  # EX_DATAERR of sysexits.h


def holds(check) -> bool:
    """Whether ``check()`` finds nothing wrong: it raises no UserError."""
    try:
        check()
    except UserError:
        return False
    return True
