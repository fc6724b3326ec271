# SPDX-License-Identifier: BSD-3-Clause
"""Shut down gracefully on a signal: every rank stops after the same step, with its state saved.

Before Slurm preempts a job or ends it at its time limit, it sends the signal that ``sbatch --signal`` specifies. submitit
uses SIGUSR2; torchrun, other schedulers, and users send SIGTERM. The signal may reach only some ranks, or reach them in
different steps, so the ranks vote in every step.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator

from labkit.running import job_status

# torch is imported only where it is needed: a queued job imports this file (submitit_job.py), and a warning signal would
# end it instead of requeuing it as long as its signal handlers are not installed.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGTERM, *WARNINGS)
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h. The job templates in slurm/ requeue a job with this exit code

_received = 0  # the last signal that this process has received


class Preempted(Exception):
    """The run has stopped on a signal, after it saved its state."""


def install_handlers(config):
    """Install handlers that record signals. Call this early: Slurm may warn a job that has just started.

    Args:
        config: its ``checkpoint`` is a folder, or None. Without a folder nothing can be saved: SIGTERM then ends the run
            at once, and warning signals are ignored.
    """
    saves = getattr(config, "checkpoint", None)
    signal.signal(signal.SIGTERM, _note if saves else signal.SIG_DFL)
    for number in WARNINGS:
        signal.signal(number, _note if saves else signal.SIG_IGN)


def _note(number, frame):
    global _received
    _received = number


class Stop:
    """Let the ranks vote in every step on whether to stop. Every rank creates one. config: see ``install_handlers``."""

    def __init__(self, config):
        import torch.distributed as dist

        self.agreed = None  # name of the signal on which all ranks have agreed to stop
        self.vote = self.votes = None
        # A separate group on the CPU, so that a vote does not wait for the GPU.
        self.group = dist.new_group(backend="gloo") if config.checkpoint else None
        install_handlers(config)

    def until_preempted(self, batches: Iterable) -> Iterator:
        """Yield batches until the ranks have agreed to stop. Collective.

        Use it for training and for evaluation: either may take longer than the time between a warning and the end.
        """
        for batch in batches:
            if self.group and self._voted():
                return
            yield batch

    def _voted(self) -> bool:
        """Return whether any rank had received a signal at the previous call, and start the next vote.

        The vote overlaps with the step and is almost free; in return the run stops one step later.
        """
        import torch
        import torch.distributed as dist

        if self.vote:
            self.vote.wait()
            if number := int(self.votes):
                self.agreed = signal.Signals(number).name
                return True
        self.votes = torch.tensor(_received)
        self.vote = dist.all_reduce(self.votes, dist.ReduceOp.MAX, self.group, async_op=True)
        return False

    def raise_if_preempted(self, me, saver, step: int, last_step: int):
        """Save and raise if the ranks have agreed to stop. Collective.

        Args:
            me: a ``ranks.Rank``.
            saver: a ``saving.Saver``.
            step: steps trained so far.
            last_step: steps that the run should have trained.

        Raises:
            Preempted: the state is saved.
            UserError: the state could not be saved.
        """
        import torch.distributed as dist

        if not self.agreed:
            return
        saver.save(step, must=True)
        saver.finish(step, must=True)
        _report(me, self.agreed, step, last_step)
        dist.barrier(self.group)  # to the others, a rank that ends early would look like a lost connection
        raise Preempted


def stop_alone(me, save: Callable[[], None], step: int, last_step: int):
    """Save and raise if this process, which runs without other ranks, has received a signal.

    Args:
        me: a ``ranks.Rank``.
        save: saves the state.
        step, last_step: see ``Stop.raise_if_preempted``.

    Raises:
        Preempted: the state is saved.
    """
    if _received and step < last_step:  # after the last step the run ends anyway
        save()
        _report(me, signal.Signals(_received).name, step, last_step)
        raise Preempted


def _report(me, name: str, step: int, last_step: int):
    me.say(f"asked to end ({name}): saved at step {step} of {last_step}; --resume goes on from there")
    if me.rank == 0:
        job_status.note("asked", step)


def forward_signals(processes: list[int]):
    """Forward signals that this process receives, or has received already, to its ranks.

    Args:
        processes: ids of the ranks' processes.
    """

    def forward(number, frame=None):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    for number in SIGNALS:
        signal.signal(number, forward)
    if _received:
        forward(_received)
