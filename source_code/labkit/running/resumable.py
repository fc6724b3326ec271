"""A lab's run as submitit queues it: one that was asked to end goes back to the queue, and on from its checkpoint.

submitit has Slurm warn the job with SIGUSR2. In the job's first task it then calls ``checkpoint()``, keeps what that
returns for the job's next life, and requeues it.
"""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

from submitit.core.utils import DelayedSubmission, FailedJobError

from labkit import UserError
from labkit.running import stopping

LIVES = 10**6  # how often submitit may requeue a job (unasked: three times); its training ends it, or MAX_IDLE does
# The command has saved, or the warning has ended it before it listened (slurm/requeue.sh has the same)
WARNED = (stopping.TRY_AGAIN, 128 + signal.SIGUSR1, 128 + signal.SIGUSR2)
MAX_IDLE = 3  # how many starts in a row may save nothing before the job ends: slurm/requeue.sh's MAX_RESTARTS


class Command:
    """Runs a command in each task of the job.

    resumes: whether, started again, it goes on where it was. idle: how many starts before this one saved nothing.
    """

    def __init__(self, words: list[str], resumes: bool, idle: int = 0):
        self.words, self.resumes, self.idle = words, resumes, idle
        self.process = None
        self.newest = None  # checkpoint, when this start began

    def __call__(self):
        self.newest = self._newest()
        self.process = subprocess.Popen(self.words).pid
        code = self._wait()
        if code in WARNED and self.resumes:
            if os.environ["SLURM_PROCID"] == "0":  # where only the command was asked to end, so is submitit now
                os.kill(os.getpid(), signal.SIGUSR2)
            while True:  # the job ends this task when it goes back to the queue
                signal.pause()
        if code:
            raise FailedJobError(f"exit code {code}")

    def checkpoint(self) -> DelayedSubmission | None:
        """Called in submitit's signal handler: what is to be run in the job's next life, once the command has saved.

        None: a user's error, as where nothing can be saved, or too many starts that saved nothing: it would begin where it
        began, again and again.
        """
        if not self.resumes:
            return None
        if self.process:  # else the warning came before anything had begun
            with contextlib.suppress(ProcessLookupError):  # Slurm may have warned submitit only
                os.kill(self.process, signal.SIGUSR2)
            if (code := self._wait()) == 0:  # it was done: submitit requeues or fails, so the next life does nothing
                return DelayedSubmission(Command(["true"], resumes=False))
            if code == 2:
                return None
        idle = self.idle + 1 if self._newest() == self.newest else 0
        return None if idle > MAX_IDLE else DelayedSubmission(Command(self.words, self.resumes, idle))

    def _newest(self) -> str | None:
        """The name of the newest checkpoint in the command's --checkpoint folder."""
        if "--checkpoint" not in self.words:
            return None
        folder = Path(self.words[self.words.index("--checkpoint") + 1])
        names = (path.name for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
        return max(names, key=lambda name: int(name.partition("-")[2]), default=None)

    def _wait(self) -> int:
        """The command's exit code. No lock is held meanwhile, and it can be asked again: the handler may come between."""
        ended = os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOWAIT)
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status


def minutes(limit: str | None) -> int | None:
    """A time limit as Slurm writes it (``90``, ``1:30:00``, ``2-12``, ``30:00``), in whole minutes. UserError."""
    if limit is None:
        return None
    days, dash, rest = limit.rpartition("-")
    try:
        parts = [int(part) for part in rest.split(":")]
        if dash:  # days-hours[:minutes[:seconds]]
            hours, mins, seconds = (parts + [0, 0])[:3]
        elif len(parts) < 3:  # minutes[:seconds]
            hours, mins, seconds = 0, *(parts + [0])[:2]
        else:
            hours, mins, seconds = parts
        return int(days or 0) * 1440 + hours * 60 + mins + (seconds > 0)
    except ValueError:
        raise UserError(f"FSDP_LABS_TIME is {limit!r}: give minutes, or hours:minutes:seconds") from None
