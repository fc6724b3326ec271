# SPDX-License-Identifier: BSD-3-Clause
"""Run a lab as a submitit job that is requeued on preemption or at its time limit, and resumes from its checkpoint.

submitit configures Slurm to warn the job with SIGUSR2. Its handler in the job's first task then calls ``checkpoint()``,
stores the returned command for the job's next start, and requeues the job. (Job templates do the same with
slurm/requeue.sh.)
"""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

from submitit.core.utils import DelayedSubmission, FailedJobError

from labkit import UserError
from labkit.running import preemption

MAX_REQUEUES = 10**6  # submitit's default is 3; here the end of training ends the job, or MAX_IDLE does
# The command has saved, or the warning has ended it before it listened (slurm/requeue.sh has the same)
WARNED = (preemption.EXIT_REQUEUE, 128 + signal.SIGUSR1, 128 + signal.SIGUSR2)
MAX_IDLE = 3  # consecutive starts that may save nothing before the job ends: slurm/requeue.sh's MAX_RESTARTS


class Command:
    """A command that runs in each task of the job.

    Attributes:
        words: the command.
        resumes: whether it resumes from its checkpoint after a restart.
        idle: number of consecutive earlier starts that saved nothing.
    """

    def __init__(self, words: list[str], resumes: bool, idle: int = 0):
        self.words, self.resumes, self.idle = words, resumes, idle
        self.process = None
        self.newest = None  # the newest checkpoint at the beginning of this start

    def __call__(self):
        self.newest = self._newest()
        self.process = subprocess.Popen(self.words)  # kept: a Popen that nobody holds reaps a command that has ended
        code = self._wait()
        if code in WARNED and self.resumes:
            if os.environ["SLURM_PROCID"] == "0":  # in case only the command got the signal
                os.kill(os.getpid(), signal.SIGUSR2)
            while True:  # requeuing the job ends this task
                signal.pause()
        if code:
            raise FailedJobError(f"exit code {code}")

    def checkpoint(self) -> DelayedSubmission | None:
        """Wait until the command has saved, and return the command of the job's next start.

        submitit's signal handler calls this method.

        Returns:
            None if the job should end: after a user's error, or after too many starts that saved nothing.
        """
        if not self.resumes:
            return None
        if self.process:  # else the warning came before the command had started
            with contextlib.suppress(ProcessLookupError):  # Slurm may have warned submitit only
                os.kill(self.process.pid, signal.SIGUSR2)
            if (
                code := self._wait()
            ) == 0:  # training is complete: submitit can only requeue or fail, so the next start does nothing
                return DelayedSubmission(Command(["true"], resumes=False))
            if code == 2:
                return None
        idle = self.idle + 1 if self._newest() == self.newest else 0
        return None if idle > MAX_IDLE else DelayedSubmission(Command(self.words, self.resumes, idle))

    def _newest(self) -> str | None:
        """Return the name of the newest checkpoint in the command's --checkpoint folder."""
        if "--checkpoint" not in self.words:
            return None
        folder = Path(self.words[self.words.index("--checkpoint") + 1])
        names = (path.name for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
        return max(names, key=lambda name: int(name.partition("-")[2]), default=None)

    def _wait(self) -> int:
        """Wait for the command and return its exit code. Reentrant, since the signal handler may interrupt a call."""
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status


def minutes(limit: str | None) -> int | None:
    """Convert a time limit in Slurm's notation (``90``, ``1:30:00``, ``2-12``, ``30:00``) to whole minutes.

    Raises:
        UserError: it is not a time limit.
    """
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
