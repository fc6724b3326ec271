"""labkit: what the labs share and no chapter is about, in four rooms. Each file has one job; see its first line.

running      ranks, on this machine or by Slurm; a notebook's settings; command lines
measuring    peak memory, time, collectives; what this machine is; a rank that is not there
training     the models, the data, checkpoints
teaching     verdicts, exercises, figures
"""

from planner import UserError as UserError


def holds(check) -> bool:
    """Whether ``check()`` finds nothing wrong: it raises no UserError."""
    try:
        check()
    except UserError:
        return False
    return True
