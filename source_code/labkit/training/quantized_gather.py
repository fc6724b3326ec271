# SPDX-License-Identifier: BSD-3-Clause
"""Gather weights in one byte per element, with FSDP2's all-gather extension: a quarter of fp32's traffic.

A weight whose shard is one of the tensor subclasses of this file is stored, trained, and reduced in fp32 as usual. Only
what the all-gather sends is quantized: FSDP2 calls ``fsdp_pre_all_gather`` on the shard, gathers what it returns, and
makes the unsharded weight with ``fsdp_post_all_gather``. The gradient is that of the quantized weight, which is applied to
the fp32 shard.

  Int8Gathered    int8 with a scale for each row, which is gathered too: 4 bytes per row
  Float8Gathered  float8_e4m3fn with a scale for each matrix, for which the ranks all-reduce its largest element: 4 bytes

  quantize_gathers(model.blocks, Int8Gathered)     # before fully_shard
  quantize_gathers(model.blocks, Float8Gathered)
  block.set_custom_all_gather(ByteAllGather())     # only if a unit's weights are all in float8, and the backend is gloo

ZeRO++ gathers int8 in blocks (arXiv:2306.10209). torchao's ``enable_fsdp_float8_all_gather`` gathers float8 with one scale
per matrix (torchao/float8/fsdp_utils.py), and its layers multiply in float8 too; here the matmuls stay in the format of the
computation. NCCL all-gathers float8; gloo does not ("Invalid scalar type"), hence ``ByteAllGather``.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn

aten = torch.ops.aten
# Operators by which FSDP2 shards, moves, and copies a weight: of these the result is quantized when it is gathered, too.
KEPT = {
    aten.as_strided.default,
    aten.clone.default,
    aten.detach.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten._pin_memory.default,
    aten._to_copy.default,
}


class _Gathered(torch.Tensor):
    """A weight in fp32, or a shard of it, which is gathered in another format. Other operators see the plain tensor."""

    @staticmethod
    def __new__(cls, data: torch.Tensor):
        sizes = {"dtype": data.dtype, "device": data.device, "requires_grad": data.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, data.size(), strides=data.stride(), **sizes)

    def __init__(self, data: torch.Tensor):
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        inner = pytree.tree_map_only(_Gathered, lambda tensor: tensor._data, (args, kwargs or {}))
        result = operator(*inner[0], **inner[1])
        if operator is aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, result) if operator in KEPT else result

    def __tensor_flatten__(self):
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, metadata, size, stride):
        return cls(inner["_data"])

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        """Return (the unsharded weight, the tensors that FSDP frees after use), or write it to ``out``."""
        *gathered, scale = *outputs, *metadata
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                torch.mul(gathered[0].to(out.dtype), scale.to(out.dtype), out=out)
            return None
        weight = gathered[0].to(param_dtype) * scale.to(param_dtype)
        return weight, (weight,)


class Int8Gathered(_Gathered):
    """A weight that is gathered in int8, with a scale for each row: (rows, columns) int8 and (rows, 1) fp32."""

    def fsdp_pre_all_gather(self, mesh):
        """Return (the tensors to gather, metadata) of this rank's shard, whose rows must be as many as on other ranks."""
        scale = self._data.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return ((self._data / scale).round().to(torch.int8), scale), ()


class Float8Gathered(_Gathered):
    """A weight that is gathered in float8_e4m3fn, with one scale: the largest element of all shards becomes 448."""

    def fsdp_pre_all_gather(self, mesh):
        """Return (the tensor to gather, (scale,)) of this rank's shard. Collective."""
        largest = self._data.abs().max().clamp(min=1e-12)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest / torch.finfo(torch.float8_e4m3fn).max
        return ((self._data / scale).to(torch.float8_e4m3fn),), (scale,)


def quantize_gathers(modules: Iterable[nn.Module], kind: type[_Gathered]):
    """Make FSDP2 gather the matrices of some modules in one byte per element. To be called before ``fully_shard``.

    Args:
        modules: their parameters must be in fp32, on their device, and each matrix's rows divisible by the shards.
        kind: ``Int8Gathered`` or ``Float8Gathered``.
    """
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(kind(layer.weight.detach()), layer.weight.requires_grad)


class ByteAllGather:
    """All-gather the bytes of tensors in a format that the backend does not know: see ``set_custom_all_gather``."""

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the buffer to gather into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op: bool = False):
        """Gather ``input_tensor`` of every rank into ``output_tensor``."""
        gathered, mine = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        return dist.all_gather_into_tensor(gathered, mine, group=group, async_op=async_op)
