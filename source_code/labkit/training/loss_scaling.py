# SPDX-License-Identifier: BSD-3-Clause
"""Scale the loss, so that fp16 gradients neither underflow nor overflow, and skip a step that overflows on all ranks.

fp16 has 5 bits of exponent: what is below 6e-8 becomes 0, and what is above 65,504 infinite. A gradient scaler multiplies
the loss by a factor, and divides the gradients by it before they are clipped and applied. If one of them is not finite, it
skips the step and halves the factor; after 2,000 steps without that it doubles the factor.

Under FSDP each rank sees only its shard of the gradients, so the ranks have to agree on whether to skip:

  FSDP2            ``torch.amp.GradScaler``: the gradients are DTensors, whose operator all-reduces the flag ``found_inf``
  FSDP1            ``ShardedGradScaler``, which all-reduces it; the plain one would skip on some ranks only
  single, DDP      ``torch.amp.GradScaler``: every rank has all gradients

A skipped step counts as a step, as in PyTorch's recipe, where ``scheduler.step()`` follows every ``scaler.update()``: the
learning rate follows its schedule, and the next step reads the next batch. AdamW's own step counter does not advance.
"""

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


class _Counting:
    """Count the skipped steps: those after which the scale is lower.

    Attributes:
        skipped: how many steps this run has skipped.
    """

    skipped = 0

    def update(self, new_scale=None):
        """Adapt the scale after a step; see PyTorch's ``GradScaler.update``."""
        before = self.get_scale()
        super().update(new_scale)
        self.skipped += self.get_scale() < before


class Scaler(_Counting, torch.amp.GradScaler):
    """The scaler of FSDP2, DDP, and one process."""


class ShardedScaler(_Counting, ShardedGradScaler):
    """The scaler of FSDP1."""


DISABLED = Scaler("cpu", enabled=False)  # all its methods pass through


def attach(optimizer, config, device: torch.device):
    """Give an optimizer the scaler that --precision needs; training loop and checkpoints find it there.

    Args:
        optimizer: gets the attribute ``loss_scaler``.
        config: the lab's options.
        device: where the loss is.
    """
    if config.precision == "fp16":
        kind = ShardedScaler if config.strategy == "fsdp1" else Scaler
        optimizer.loss_scaler = kind(device.type)


def scaler_of(optimizer) -> Scaler | ShardedScaler:
    """Return the optimizer's scaler; one that does nothing if it needs none."""
    return getattr(optimizer, "loss_scaler", DISABLED)


def set_scale(optimizer, scale: float):
    """Set the scale of an optimizer's scaler before its first step; do nothing without one."""
    if (scaler := scaler_of(optimizer)).is_enabled():
        scaler.load_state_dict(scaler.state_dict() | {"scale": scale})


def summary(optimizer) -> dict | None:
    """Return {"skipped_steps", "scale"} for a record; None without scaling."""
    scaler = scaler_of(optimizer)
    return {"skipped_steps": scaler.skipped, "scale": scaler.get_scale()} if scaler.is_enabled() else None


def sentence(scaling: dict, steps: int) -> str:
    """Return what a run prints about its skipped steps.

    Args:
        scaling: as ``summary`` returns it.
        steps: how many steps the run has tried.
    """
    skipped = scaling["skipped_steps"]
    return (
        f"loss scaling: {skipped} of {steps} steps skipped on all ranks, as a gradient was not finite; "
        f"the scale is now {scaling['scale']:g}"
    )
