# SPDX-License-Identifier: BSD-3-Clause
"""Simulate a GPU with less memory: a step trace that runs out of memory (chapter 16)."""

import torch

from labkit.measuring import trace


class Budget(trace.StepTrace):
    """Limit a rank's tensors to ``size`` bytes within this context, on any device.

    An allocation beyond the limit raises torch.OutOfMemoryError, as on a full GPU; ``timeline()`` then shows what led to
    it. As in every trace, memory outside tensors and an allocator's rounding and reserve are not counted.
    """

    def __init__(self, model, optimizer, device: torch.device, size: int):
        super().__init__(model, optimizer, device)
        self.limit, self._live = size, 0

    def _change(self, number, size):
        more = size - self._size[number]
        if more > 0 and self._live + more > self.limit:
            used, limit = self._live / 1024, self.limit / 1024
            raise torch.OutOfMemoryError(
                f"out of memory (simulated). Tried to allocate {more / 1024:.1f} KiB; {used:.1f} of {limit:.1f} KiB are in use"
            )
        self._live += more
        super()._change(number, size)
