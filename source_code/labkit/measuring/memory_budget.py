"""A smaller machine: a step trace that raises as a full GPU does (chapter 16)."""

import torch

from labkit.measuring import trace


class Budget(trace.StepTrace):
    """A step trace with a limit: a rank has so many bytes for tensors, and no more. Simulated, on any device.

    Inside, what needs more raises torch.OutOfMemoryError, as on a full GPU; ``timeline()`` then shows how it came to it.
    Left out, as in every trace: what lies outside tensors, and what an allocator rounds up or reserves.
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
