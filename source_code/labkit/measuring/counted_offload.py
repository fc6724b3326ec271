"""Offload saved tensors on a machine without a GPU: to memory that ``StepTrace`` does not see, with a count of the bytes.

On the CPU, ``torch.autograd.graph.save_on_cpu`` copies nothing, since device and host are one memory. Here the host is
stood in for by NumPy arrays: they are no tensors, so what a trace sees is the device's side alone.
"""

import numpy
import torch


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
