"""End a run in good order when it is asked to: every rank after the same step, with its state saved.

Slurm warns a job before its time is up or it is preempted, with the signal that ``sbatch --signal`` names; submitit
asks for SIGUSR2; torchrun, other schedulers and people send SIGTERM. The warning may reach the ranks one by one, in
different steps, or only some of them: they vote.
"""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator

from labkit.running import job_status

# torch is imported where it is needed: a queued job imports this file (resumable.py), and until it has done so, and only
# then listens, the warning that is to requeue it would end it.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGTERM, *WARNINGS)
TRY_AGAIN = 75  # the exit code: EX_TEMPFAIL of sysexits.h. The job templates in slurm/ requeue a job that ends so


_asked = 0  # the signal that has reached this process


class Stopped(Exception):
    """This run was asked to end, and has saved where it is."""


def listen(config):
    """From now on, note the signals instead of ending by them. As soon as possible: Slurm may warn a job that begins.

    config.checkpoint: a folder, or None: then there is nowhere to save. SIGTERM ends the run at once, and to what is
    only a warning it pays no heed.
    """
    saves = getattr(config, "checkpoint", None)
    signal.signal(signal.SIGTERM, _note if saves else signal.SIG_DFL)
    for number in WARNINGS:
        signal.signal(number, _note if saves else signal.SIG_IGN)


def _note(number, frame):
    global _asked
    _asked = number


class Stop:
    """Whether the run has been asked to end. Every rank makes one. config: see ``listen``."""

    def __init__(self, config):
        import torch.distributed as dist

        self.agreed = None  # the name of the signal for which all ranks end
        self.vote = self.votes = None
        # Messages of its own, in the CPU's memory: a GPU need not be waited for.
        self.group = dist.new_group(backend="gloo") if config.checkpoint else None
        listen(config)

    def unless_asked(self, batches: Iterable) -> Iterator:
        """The batches, as long as the ranks have not agreed to end. Collective.

        Around the batches of training and of an evaluation: both take longer than a warning may leave.
        """
        for batch in batches:
            if self.group and self._voted():
                return
            yield batch

    def _voted(self) -> bool:
        """Whether a rank had been asked when this was last called. The next votes are counted meanwhile.

        That goes on during the step, so that it costs next to nothing; the run ends a step later for it.
        """
        import torch
        import torch.distributed as dist

        if self.vote:
            self.vote.wait()
            if number := int(self.votes):
                self.agreed = signal.Signals(number).name
                return True
        self.votes = torch.tensor(_asked)
        self.vote = dist.all_reduce(self.votes, dist.ReduceOp.MAX, self.group, async_op=True)
        return False

    def leave_if_agreed(self, me, saver, step: int, last_step: int):
        """Save and end this rank if the ranks have agreed to end. Collective.

        Args:
            me: a ``ranks.Rank``.
            saver: a ``saving.Saver``.
            step: how many steps the state has behind it.
            last_step: how many the run was to have.

        Raises:
            Stopped: the state is saved.
            UserError: it could not be.
        """
        import torch.distributed as dist

        if not self.agreed:
            return
        saver.save(step, must=True)
        saver.finish(step, must=True)
        me.say(f"asked to end ({self.agreed}): saved at step {step} of {last_step}; --resume goes on from there")
        if me.rank == 0:
            job_status.note("asked", step)
        dist.barrier(self.group)  # nobody's end shall be the others' lost contact
        raise Stopped


def pass_on(processes: list[int]):
    """Hand the signals that this process gets, or has got already, to the ranks that it has started."""

    def pass_on(number, frame=None):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    if _asked:
        pass_on(_asked)
