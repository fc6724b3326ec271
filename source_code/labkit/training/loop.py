# SPDX-License-Identifier: BSD-3-Clause
"""Run everything around the steps of a training loop: resume, learning rate, meter, progress, logs, preemption, record.

  loop = Loop(config, me, saver, last_step=config.max_steps, global_batch=32)
  while loop.step < loop.last_step:
      for inputs, targets in loop.watch(batches):      # one batch per step
          losses += [...]                              # the lab's own: forward, backward, optimizer
      if not loop.log(losses):
          break                                        # a loss is not finite
      loop.save_if_due()
  record = loop.finish()

The lab contains everything that a chapter teaches. Nothing in this file computes a gradient or updates a parameter.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from labkit.measuring import event_files, meters, records
from labkit.running import preemption, progress, ranks
from labkit.training import loss_scaling, lr_schedule
from labkit.training.shards import whole

LOG_EVERY = 50  # steps between two reductions of the losses


def keep_norm(optimizer, norm, config):
    """Store the gradient's norm on the optimizer for --log; without --log it is freed.

    Args:
        optimizer: the loop reads its attribute ``gradient_norm``.
        norm: a scalar tensor.
        config: the lab's options.
    """
    if config.log:
        optimizer.gradient_norm = norm


class Loop:
    """Resume a run, measure its steps, and report them.

    Every rank creates one and calls it at the same steps: most methods are collective.

    Attributes:
        step: Number of steps trained so far, including those of the run being resumed.
        first_step: The value of ``step`` when this run started.
        last_step: The value of ``step`` at which the run ends.
        losses: Mean loss over the ranks of each step of this run.
    """

    def __init__(
        self,
        config,
        me,
        saver,
        last_step: int,
        global_batch: int,
        *,
        learning_rate: Callable[[int], float] | None = None,
        flops_per_token: float | None = None,
    ):
        """Resume from the newest checkpoint if --resume is given, and print the first step. Collective.

        Args:
            config: The lab's options. A lab whose samples are sequences has ``seq_len``, their number of tokens.
            me: This rank, a ``ranks.Rank``.
            saver: The run's ``saving.Saver``, which holds the model and the optimizer.
            last_step: Number of steps after which the run ends, including those of the run being resumed.
            global_batch: Number of samples (images or sequences) per step, all ranks together.
            learning_rate: Maps a step's index, counted from 0, to its learning rate; by default ``--lr-schedule``'s. As it
                is a function of the step, a resumed run needs no saved state.
            flops_per_token: Model FLOPs of training on one token, for --log's MFU.

        Raises:
            UserError: There is nothing to resume or to train (``Saver.resume``).
        """
        self.config, self.me, self.saver, self.optimizer = config, me, saver, saver.optimizer
        self.last_step, self.global_batch, self.seq_len = last_step, global_batch, getattr(config, "seq_len", None)
        self.learning_rate = learning_rate or partial(lr_schedule.learning_rate, config)
        self.flops_per_token = flops_per_token
        self.step = self.first_step = saver.resume(last_step)
        self.losses = []
        begin = f"{'resumed' if self.step else 'starting'} at step {self.step} of {last_step}"
        me.say(f"{records.hardware_summary(me)}; data {saver.run['data']}\n{begin}")
        ranks.deprioritize_gloo_threads()  # model and optimizer have created their process groups
        self.meter = meters.Meter(
            saver.model,
            self.optimizer,
            me.device,
            progress=progress.Progress(me, last_step, self.step),
            profile=config.profile,
            compiled=getattr(config, "compile", False),
        )
        self.stop = preemption.Stop(config)
        self.events = event_files.EventFiles(config.log, self.step) if config.log and me.rank == 0 else None
        self.norms, self.timed, self.peaks = [], 0, None  # since the last log; steps whose time has been logged

    def next_steps(self) -> range:
        """Return the indices of the steps up to the next reduction of the losses, validation, checkpoint, or saved model."""
        others = (getattr(self.config, name, None) for name in ("validate_every", "save_every"))
        pauses = self._save_every, LOG_EVERY, *filter(None, others)
        end = min(self.last_step, *(self.step - self.step % every + every for every in pauses))
        return range(self.step, end)

    @property
    def _save_every(self) -> int:
        return self.config.checkpoint_every or self.last_step

    def save_if_due(self):
        """Save after the current step if ``--checkpoint-every`` says so, or if it is the last one. Collective."""
        if self.step % self._save_every == 0 or self.step == self.last_step:
            self.saver.save(self.step)

    def watch(self, batches: Iterable) -> Iterator:
        """Yield each batch after setting its step's learning rate, and measure the caller's step. Collective.

        Raises:
            Preempted: The run was preempted, and a checkpoint is saved.
        """
        for batch in self.meter.watch(self.stop.until_preempted(batches)):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(self.step)
            yield batch
            self.step += 1
            self.norms.append(getattr(self.optimizer, "gradient_norm", None))
        self.stop.raise_if_preempted(self.me, self.saver, self.step, self.last_step)

    def interruptible(self, batches: Iterable) -> Iterator:
        """Yield the batches of an evaluation until the run is preempted. Collective.

        Raises:
            Preempted: The run was preempted, and a checkpoint is saved; not after the last step, where it ends anyway.
        """
        yield from batches if self.step == self.last_step else self.stop.until_preempted(batches)
        self.stop.raise_if_preempted(self.me, self.saver, self.step, self.last_step)

    def log(self, local_losses: list[torch.Tensor]) -> bool:
        """Average the losses of the steps since the last call over the ranks, and write --log's scalars. Collective.

        Once every few steps: once per step, only to print, would slow down training.

        Args:
            local_losses: This rank's, scalars, one for each micro-batch of each step. The loss of a step is their sum.

        Returns:
            Whether every loss is finite. If not, ``records.report`` raises ``Diverged`` at the end of the run, and the
            newest checkpoint remains the one before.
        """
        summed = torch.stack(local_losses).view(-1, getattr(self.config, "accumulate", 1)).sum(1)
        dist.all_reduce(summed)
        losses = (summed / self.me.world_size).tolist()
        self.losses += losses
        if self.config.log:
            steps = range(self.step - len(losses) + 1, self.step + 1)
            norms = [norm if norm is None else float(whole(norm)) for norm in self.norms]
            by_step = {"loss": losses, "learning_rate": [self.learning_rate(step - 1) for step in steps]}
            by_step["gradient_norm"] = norms
            scalars = {name: list(zip(steps, values, strict=True)) for name, values in by_step.items()}
            self._write(scalars | {name: [(self.step, value)] for name, value in self._speed_and_memory().items()})
        self.norms.clear()
        return all(map(math.isfinite, losses))

    def log_scalars(self, **scalars: float):
        """Write further scalars of the current step to the event files, such as a validation loss."""
        self._write({name: [(self.step, value)] for name, value in scalars.items()})

    def _write(self, scalars: dict):
        if self.events:
            self.events.write(scalars)

    def _speed_and_memory(self) -> dict[str, float | None]:
        """Return speed and memory of the steps since the last log. Collective: the matmul ceiling is measured once."""
        memory = self.meter.peak_memory()
        seconds = self.meter.step_times(self.timed)
        self.timed += len(seconds)
        rate = self.global_batch * len(seconds) / sum(seconds) if seconds else None
        scalars = {"peak_memory_gib": memory and memory / 2**30}
        if not self.seq_len:
            return scalars | {"samples_per_second": rate}
        tokens = rate and rate * self.seq_len
        if tokens and self.flops_per_token:
            self.peaks = self.peaks or meters.measured_peaks(self.config.precision, self.me)
            shares = meters.utilization(tokens, self.flops_per_token, self.config.precision, self.me, self.peaks)
            scalars |= {name: share and share["value"] for name, share in shares.items()}
        return scalars | {"tokens_per_second": tokens}

    def finish(self) -> dict:
        """Wait for the last checkpoint, close meter and folder, and return the run's part of its record. Collective."""
        self.saver.finish(self.step)
        self.meter.finish()
        measured = self.meter.summary(self.global_batch)
        if self.seq_len:
            rate = measured["time"]["samples_per_second"]
            measured["tokens_per_second"] = rate and rate * self.seq_len
        own = {"first_step": self.first_step, "losses": self.losses, "checkpoints": self.saver.summary()}
        if scaling := loss_scaling.summary(self.optimizer):
            own["loss_scaling"] = scaling
        return own | measured
