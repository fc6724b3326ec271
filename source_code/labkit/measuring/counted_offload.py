"""Offload saved tensors on a machine without a GPU: to memory that ``StepTrace`` does not see, with a count of the bytes.

On the CPU, ``torch.autograd.graph.save_on_cpu`` copies nothing, since device and host are one memory. Here the host is
stood in for by NumPy arrays: they are no tensors, so what a trace sees is the device's side alone.
"""

import torch
from torch.autograd.graph import saved_tensors_hooks


class CountedOffload(saved_tensors_hooks):
    """A context in which tensors saved for backward are stored as NumPy arrays until backward needs them.

    Args:
        stays: stays(tensor) → whether a saved tensor is left on the device.

    Attributes:
        bytes: {"down" or "up": copied so far}.
    """

    def __init__(self, stays=lambda tensor: False):
        self.bytes = {"down": 0, "up": 0}

        def pack(tensor):
            if stays(tensor):
                return tensor
            self.bytes["down"] += tensor.nbytes
            return tensor.dtype, _array(tensor).copy()

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            dtype, array = packed
            tensor = torch.empty(array.shape, dtype=dtype)
            _array(tensor)[...] = array
            self.bytes["up"] += tensor.nbytes
            return tensor

        super().__init__(pack, unpack)


def _array(tensor):
    """Return a NumPy view of a tensor; NumPy has no bf16."""
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
