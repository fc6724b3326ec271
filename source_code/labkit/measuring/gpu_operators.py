# SPDX-License-Identifier: BSD-3-Clause
"""Select a GPU's operators for fake tensors, so that a simulation on the CPU traces the memory of a GPU.

  operators = GpuOperators()
  with operators: …                          PyTorch selects operators as it would for CUDA tensors
  GpuTrace(operators, model, optimizer, …)   counts what a GPU's memory would hold

Fake tensors on a "cuda" device can only run forward on a machine without a GPU: autograd's engine queries the device.
They therefore stay on the CPU, and this module makes the choices that depend on the device as PyTorch makes them on a
GPU. Everything else is PyTorch's own code. The choices and their sources (C++ below aten/src/ATen and
aten/src/ATen/native):

  attention            transformers/cuda/sdp_utils.cpp: fp64 math; fp32 memory-efficient, with grouped heads only from
                       PyTorch 2.15 (pytorch#191085), math before; bf16 flash, or on Hopper cuDNN's, whose tensors have
                       the same sizes. With a mask, or heads above 256 or of two sizes: memory-efficient, and math where
                       it has no kernel. Not covered: flash with a head_dim that is no multiple of 8 (PyTorch pads it)
  rms_norm             layer_norm.cpp: one operator if weight and input have the same dtype
  dropout              Dropout.cpp: native_dropout, whose mask takes one byte per element
  autocast             autocast_mode.h: rms_norm and log_softmax are computed in fp32, too
  optimizers           torch/optim/optimizer.py: foreach is the default for CUDA tensors, and for DTensors, which
                       torch/distributed/tensor/__init__.py adds to the supported types
  their step counters  torch/optim/adam.py, adadelta.py: made without a device, so in the CPU's memory, unless fused

No tracer sees what kernels allocate internally, but a GPU's allocator does: ``workspace`` computes it from their
source. Unknown without a GPU: workspaces of cuDNN (convolutions, attention) and cuBLAS (32 MiB on Hopper), flash
attention's split-KV buffers in forward if batch × heads is small, sorting in the embedding's backward, streams, and the
allocator's rounding and reserve.

Private PyTorch used here, and only here: the operators named above, and the optimizers' lists of types and devices that
foreach supports.
"""

import contextlib
import math
import weakref

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizers

from labkit.measuring.replaced import replaced
from labkit.measuring.trace import StepTrace

aten = torch.ops.aten
GROUPED_EFFICIENT = (2, 15)  # the first PyTorch whose memory-efficient attention takes grouped heads
LARGEST_FLASH_HEAD = 256  # elements
ALIGNMENT, ALIGNED_ROW = 16, 16  # of memory-efficient attention: bytes of a head, elements of a mask's row
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


class GpuOperators(contextlib.ExitStack):
    """Make PyTorch select operators as for CUDA tensors within this context, and track which tensors are on the CPU.

    Args:
        version: (major, minor) of the PyTorch whose choice of attention to follow.
        cudnn: use cuDNN's attention in bf16, as on Hopper.
    """

    def __init__(self, version: tuple[int, int] = VERSION, cudnn: bool = False):
        super().__init__()
        self.version, self.cudnn = version, cudnn
        self.making_on_cpu = False
        self.on_cpu = weakref.WeakValueDictionary()  # address → storage in the CPU's memory

    def __enter__(self):
        instead = {"rms_norm": rms_norm, "dropout": dropout, "log_softmax": log_softmax}
        instead["scaled_dot_product_attention"] = self.attention
        self.enter_context(replaced(F, **instead))
        makers = {name: self.track_device(getattr(torch, name)) for name in ("tensor", "zeros")}
        self.enter_context(replaced(torch, **makers))
        types = [*optimizers._foreach_supported_types, FakeTensor]
        foreach = {"_foreach_supported_types": types, "_get_foreach_kernels_supported_devices": lambda: ["cpu"]}
        self.enter_context(replaced(optimizers, **foreach))
        return super().__enter__()

    def track_device(self, make):
        """Wrap torch.tensor or torch.zeros so that tensors made without a device, or on "cpu", are marked as on the CPU."""

        def made(*args, **kwargs):
            if isinstance(kwargs.get("device"), torch.device):
                return make(*args, **kwargs)
            self.making_on_cpu = True
            tensor = make(*args, **kwargs)
            self.making_on_cpu = False
            self.mark_on_cpu(tensor)
            return tensor

        return made

    def mark_on_cpu(self, tensor):
        """Mark a tensor's storage as in the CPU's memory, so that ``GpuTrace`` does not count it."""
        storage = tensor.untyped_storage()
        self.on_cpu[storage._cdata] = storage

    def is_on_cpu(self, storage) -> bool:
        """Return whether a storage would be in the CPU's memory."""
        return self.making_on_cpu or self.on_cpu.get(storage._cdata) is storage

    def attention(
        self,
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        """Run the attention operator that a GPU would run.

        Args:
            query: (batch, heads, length, head_dim).
            key, value: (batch, kv_heads, length, head_dim); their heads may have different sizes.
            attn_mask: of attended positions, or to be added: broadcast to (batch, heads, length, length).
            dropout_p: probability that an attention weight is dropped.
            is_causal: mask later positions.
            scale: factor on query · key.
            enable_gqa: allow kv_heads < heads (grouped-query attention).

        Returns:
            As query, with the head_dim of value.
        """
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        grouped, half = query.shape[1] != key.shape[1], query.dtype in (torch.bfloat16, torch.float16)
        same_size = query.shape[-1] == value.shape[-1] <= LARGEST_FLASH_HEAD
        if half and attn_mask is None and same_size and self.cudnn:
            attend = aten._scaled_dot_product_cudnn_attention
            return attend(query, key, value, None, needs_grad, dropout_p, is_causal, scale=scale)[0]
        if half and attn_mask is None and same_size:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        aligned = not any(tensor.shape[-1] * tensor.element_size() % ALIGNMENT for tensor in (query, value))
        ungrouped = not grouped or (self.version >= GROUPED_EFFICIENT and attn_mask is None)
        needs_bias_gradient = attn_mask is not None and attn_mask.requires_grad
        if query.dtype != torch.float64 and aligned and ungrouped and not needs_bias_gradient:
            bias = _bias(attn_mask, query, key)
            attend = aten._scaled_dot_product_efficient_attention
            return attend(query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale)[0]
        attend = aten._scaled_dot_product_attention_math
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _bias(mask, query, key):
    """Return a mask as memory-efficient attention takes it: added in the query's dtype, each row aligned, and expanded."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, mask.new_full((), -math.inf, dtype=query.dtype))
    length = mask.shape[-1]
    if length % ALIGNED_ROW:  # padded, of which the first elements are taken
        mask = F.pad(mask, (0, -length % ALIGNED_ROW))[..., :length]
    return mask.expand(*query.shape[:3], key.shape[2])


def _autocast(tensor, dtype: torch.dtype | None = None):
    """Cast a tensor as autocast would for an operator: to autocast's dtype, or to ``dtype``."""
    if not torch.is_autocast_enabled("cpu"):
        return tensor
    return tensor.to(dtype or torch.get_autocast_dtype("cpu"))


def rms_norm(x, shape, weight=None, eps=None, composite=F.rms_norm):
    """Normalize x (…, hidden_size) by its root mean square, with weight (hidden_size,); under autocast in fp32."""
    x, weight = (tensor if tensor is None else _autocast(tensor, torch.float32) for tensor in (x, weight))
    if weight is None or weight.dtype != x.dtype:
        return composite(x, shape, weight, eps)
    return FusedRMSNorm.apply(x, tuple(shape), weight)


class FusedRMSNorm(torch.autograd.Function):
    """Allocate as aten::_fused_rms_norm does on CUDA; input, weight, and 1/rms (in at least fp32) are saved for backward.

    On CPU tensors the operator itself would be decomposed into the operators that it fuses.
    """

    @staticmethod
    def forward(ctx, x, shape, weight):
        ctx.shape, rows = shape, x.shape[: x.dim() - len(shape)]
        scale = x.new_empty((*rows, *(1 for _ in shape)), dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, scale = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        x_grad, weight_grad = aten._fused_rms_norm_backward(gradient, x, ctx.shape, scale, weight, mask)
        return x_grad, None, weight_grad


def dropout(x, p=0.5, training=True, inplace=False, on_cpu=F.dropout):
    """Apply dropout to x of any shape. No operator runs if nothing can be dropped."""
    if not training or not 0 < p < 1:
        return on_cpu(x, p, training, inplace)
    return aten.native_dropout(x, p, True)[0]


def log_softmax(x, dim=None, _stacklevel=3, dtype=None, on_cpu=F.log_softmax):
    """Return log-probabilities of x (rows, classes), in the same shape; under autocast in fp32."""
    return on_cpu(_autocast(x, torch.float32), dim, _stacklevel, dtype)


class GpuTrace(StepTrace):
    """Trace a step's GPU memory only: a ``StepTrace`` without the storages in the CPU's memory.

    Args:
        operators: the context in which the step runs.
        workspaces: also count kernel workspaces, which an allocator sees and a tracer does not.
        args: the arguments of ``StepTrace``.
    """

    def __init__(self, operators: GpuOperators, workspaces: bool, *args):
        super().__init__(*args)
        self.operators, self.workspaces = operators, workspaces

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if self.workspaces and result is not NotImplemented:
            self._see_workspace(workspace(operator._schema.name, args))
        return result

    def _see_workspace(self, size: int):
        """Count a workspace of ``size`` bytes as allocated and freed, in addition to the operator's results."""
        self._category.append("temporary")
        self._size.append(0)
        for now in (size, 0):
            self._change(len(self._size) - 1, now)

    def _see(self, tensor, category=None):
        if self._operator == "aten::_scaled_dot_product_efficient_attention" and not tensor.dim():
            self.operators.mark_on_cpu(tensor)  # the random generator's state, which is not used
        super()._see(tensor, category)

    def _see_storage(self, storage, category):
        if not self.operators.is_on_cpu(storage):
            super()._see_storage(storage, category)


def workspace(operator: str, args: tuple) -> int:
    """Return the bytes of an operator's CUDA workspace: allocated and freed inside it, at the peak, without its results."""
    name = operator.removeprefix("aten::")
    return WORKSPACES[name](*args) if name in WORKSPACES else 0


def _flash_backward(gradient, query, key, *_) -> int:
    """Return the workspace of flash_attn/flash_api.cpp, mha_bwd: dq_accum and softmax_d, both in fp32 and padded.

    With grouped heads, key and value also get one gradient per query head.
    """
    batch, heads, length, head_dim = query.shape
    padded_length, padded_head_dim = 128 * math.ceil(length / 128), 32 * math.ceil(head_dim / 32)
    sums = 4 * batch * heads * padded_length * (padded_head_dim + 1)
    return sums + _expanded_kv_gradients(query, key)


def _efficient_backward(gradient, query, key, value, bias, out, *_) -> int:
    """Return the workspace of transformers/cuda/attention_backward.cu: gradient · output and its row sums (twice), in fp32.

    With grouped heads, the row sums and one gradient of key and value per query head follow, as described in
    pytorch#191085, whose source was not available.
    """
    elementwise, sums = 4 * out.numel(), 4 * out.numel() // out.shape[-1]
    return sums + max(elementwise + sums, _expanded_kv_gradients(query, key))


def _expanded_kv_gradients(query, key) -> int:
    """Return the bytes of the gradients of key and value with one head per query head; 0 without grouped heads."""
    if query.shape[1] == key.shape[1]:
        return 0
    return 2 * query.element_size() * key.numel() // key.shape[1] * query.shape[1]


def _safe_softmax(x, *_) -> int:
    """Return the workspace of transformers/attention.cpp: the softmax, and masks of masked elements and rows."""
    return x.nbytes + x.numel() + x.numel() // x.shape[-1]


WORKSPACES = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_safe_softmax": _safe_softmax,
}
