# SPDX-License-Identifier: BSD-3-Clause
"""Offload saved tensors on a machine without a GPU: to memory that ``StepTrace`` does not see, with a count of the bytes.

On the CPU, ``torch.autograd.graph.save_on_cpu`` copies nothing, since device and host are one memory. Here the host is
stood in for by NumPy arrays: they are no tensors, so what a trace sees is the device's side alone.
"""

import numpy
import torch
import torch.nn.functional as F

from labkit.measuring.trace import StepTrace


class CountedBus:
    """Copy tensors to NumPy arrays and back, and count the bytes: ``saved_tensors_hooks(bus.down, bus.up)``.

    Attributes:
        bytes: {"down" or "up": copied so far}.
    """

    def __init__(self):
        self.bytes = {"down": 0, "up": 0}

    def down(self, tensor):
        """Return a copy on the host, which is no tensor."""
        self.bytes["down"] += tensor.nbytes
        array = numpy.empty(tensor.nbytes, numpy.uint8)
        _as_tensor(array, tensor).copy_(tensor)
        return array, torch.empty_like(tensor, device="meta")

    def up(self, on_host):
        """Return a new tensor with what ``down`` copied."""
        array, like = on_host
        self.bytes["up"] += array.nbytes
        return torch.empty(like.shape, dtype=like.dtype).copy_(_as_tensor(array, like))


def _as_tensor(array, like):
    """Return a tensor that shares an array's bytes, with the dtype (NumPy has no bf16) and shape of another tensor."""
    return torch.from_numpy(array).view(like.dtype).view(like.shape)


def watch_the_bus() -> list[tuple[str, int]]:
    """Return a list that grows by ("up" or "down", bytes) with each copy that FSDP2's offload requests in this process.

    With ``pin_memory=False`` FSDP2 calls ``tensor.to(device, non_blocking=True)`` on the way up (``all_gather_inputs``) and
    ``non_blocking=False`` on the way down (``foreach_reduce``); without a GPU, ``to`` then copies nothing.
    """
    asked, original = [], torch.Tensor.to

    def to(tensor, *args, **options):
        if "non_blocking" in options:
            asked.append(("up" if options["non_blocking"] else "down", tensor.nbytes))
        return original(tensor, *args, **options)

    torch.Tensor.to = to
    return asked


def traced_steps(me, model, optimizer, inputs, targets, counted=(), steps: int = 3) -> tuple[list, list[dict]]:
    """Train a language model for a few steps; return its losses, and the last step's ``StepTrace.timeline``.

    Args:
        me: this rank.
        model, optimizer: what is trained.
        inputs, targets: token ids, (batch, length) each.
        counted: lists and dicts of counts that begin anew in each step.
        steps: how many.
    """
    step, losses = StepTrace(model, optimizer, me.device), []
    step.batch = inputs, targets
    for _ in range(steps):
        for counts in counted:
            counts.update(up=0, down=0) if isinstance(counts, dict) else counts.clear()
        with step:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        previous = loss.detach()  # one loss stays alive, as in the labs
        losses.append(previous.item())
    return losses, step.timeline()
