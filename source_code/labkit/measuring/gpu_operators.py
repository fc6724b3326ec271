"""A GPU's operators on tensors without memory: what a simulation on the CPU runs instead of the CPU's own.

  operators = GpuOperators()
  with operators: …                          PyTorch chooses as it would for CUDA tensors
  GpuTrace(operators, model, optimizer, …)   counts what a GPU's memory would hold

Tensors without memory that claim to lie on a GPU run forward only: autograd's engine asks the device. So they stay on
the CPU, and where PyTorch's choice depends on the device, it is made here as on a GPU. All else is PyTorch's own code.
What is chosen, and where PyTorch says so (C++ below aten/src/ATen and aten/src/ATen/native):

  attention            transformers/cuda/sdp_utils.cpp: fp64 math; fp32 memory-efficient, with grouped heads only from
                       PyTorch 2.15 (pytorch#191085), math before; bf16 flash, or on Hopper cuDNN's, whose tensors have
                       the same sizes. Not here: masks, dropout, heads of no multiple of 8 numbers (which it pads)
  rms_norm             layer_norm.cpp: one operator where weight and input have one number format
  dropout              Dropout.cpp: native_dropout, whose mask has a byte a number
  autocast             autocast_mode.h: also rms_norm and log_softmax are computed in fp32
  optimizers           torch/optim/optimizer.py: foreach is the default for CUDA tensors; for DTensors too, which
                       torch/distributed/tensor/__init__.py adds to the types that have it
  their step counters  torch/optim/adam.py, adadelta.py: made without a device, so in the CPU's memory, unless fused

What operators allocate inside them no tracer sees, on a GPU neither, but the allocator does: ``workspace`` knows it
from reading their source. Not known without a GPU: cuDNN's workspaces (convolutions, attention), cuBLAS's (32 MiB on
Hopper), what flash attention's forward splits where batch × heads is small, sorting in the embedding's backward,
streams, and the allocator's rounding and reserve.

Private PyTorch used here, and only here: the operators named above, and where optimizers look up which tensors foreach takes.
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
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


class GpuOperators(contextlib.ExitStack):
    """A context in which PyTorch chooses as for CUDA tensors, and that knows which tensors lie in the CPU's memory.

    version: the PyTorch whose choice of attention it is. cudnn: attention in bf16 by cuDNN, as on Hopper.
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
        at_once = {"_foreach_supported_types": types, "_get_foreach_kernels_supported_devices": lambda: ["cpu"]}
        self.enter_context(replaced(optimizers, **at_once))
        return super().__enter__()

    def track_device(self, make):
        """Wrap torch.tensor or torch.zeros: called without a device (or with "cpu", spelled out), they use the CPU's memory."""

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
        storage = tensor.untyped_storage()
        self.on_cpu[storage._cdata] = storage

    def is_on_cpu(self, storage) -> bool:
        return self.making_on_cpu or self.on_cpu.get(storage._cdata) is storage

    def attention(self, query, key, value, *, is_causal=False, enable_gqa=False):
        """Compute attention of query (batch, heads, length, head_dim), key and value (batch, kv heads, length, head_dim)."""
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        if query.dtype == torch.bfloat16 and self.cudnn:
            return aten._scaled_dot_product_cudnn_attention(query, key, value, None, wanted, 0.0, is_causal)[0]
        if query.dtype == torch.bfloat16:
            return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]
        grouped = query.shape[1] != key.shape[1]
        if query.dtype == torch.float32 and (self.version >= GROUPED_EFFICIENT or not grouped):
            return aten._scaled_dot_product_efficient_attention(query, key, value, None, wanted, 0.0, is_causal)[0]
        return aten._scaled_dot_product_attention_math(query, key, value, None, 0.0, is_causal, enable_gqa=enable_gqa)[
            0
        ]


def _autocast(tensor, dtype: torch.dtype | None = None):
    """The tensor as autocast gives it to an operator: in its own format, or in ``dtype``."""
    if not torch.is_autocast_enabled("cpu"):
        return tensor
    return tensor.to(dtype or torch.get_autocast_dtype("cpu"))


def rms_norm(x, shape, weight=None, eps=None, composite=F.rms_norm):
    """x (…, width) and weight (width,) → as x. Under autocast in fp32."""
    x, weight = (tensor if tensor is None else _autocast(tensor, torch.float32) for tensor in (x, weight))
    if weight is None or weight.dtype != x.dtype:
        return composite(x, shape, weight, eps)
    return FusedRMSNorm.apply(x, tuple(shape), weight)


class FusedRMSNorm(torch.autograd.Function):
    """aten::_fused_rms_norm as CUDA has it: out as the input, 1/rms in fp32 at least; keeps input, weight and 1/rms.

    Called on CPU tensors, the operator would fall apart into those that it replaces.
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
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_x, of_weight = aten._fused_rms_norm_backward(gradient, x, ctx.shape, scale, weight, wanted)
        return of_x, None, of_weight


def dropout(x, p=0.5, training=True, inplace=False, on_cpu=F.dropout):
    """Elementwise. Where nothing is dropped, no operator runs."""
    if not training or not 0 < p < 1:
        return on_cpu(x, p, training, inplace)
    return aten.native_dropout(x, p, True)[0]


def log_softmax(x, dim=None, _stacklevel=3, dtype=None, on_cpu=F.log_softmax):
    """(rows, classes) → the same. Under autocast in fp32."""
    return on_cpu(_autocast(x, torch.float32), dim, _stacklevel, dtype)


class GpuTrace(StepTrace):
    """A ``StepTrace`` of a GPU's memory: without what lies in the CPU's.

    workspaces: count what operators allocate inside them, too, as the allocator does and a tracer cannot.
    """

    def __init__(self, operators: GpuOperators, workspaces: bool, *about):
        super().__init__(*about)
        self.operators, self.workspaces = operators, workspaces

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if self.workspaces and result is not NotImplemented:
            self._see_workspace(workspace(operator._schema.name, args))
        return result

    def _see_workspace(self, size: int):
        """For a moment it is there beside the operator's results."""
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
    """Bytes that an operator's CUDA kernels allocate inside it, and free: at their most, beside its results."""
    name = operator.removeprefix("aten::")
    return WORKSPACES[name](*args) if name in WORKSPACES else 0


def _flash_backward(gradient, query, key, *_) -> int:
    """flash_attn/flash_api.cpp, mha_bwd: the gradient of queries and a sum a row, both in fp32 and padded.

    With grouped heads also a gradient of key and value for each head of queries.
    """
    batch, heads, length, width = query.shape
    padded_length, padded_width = 128 * math.ceil(length / 128), 32 * math.ceil(width / 32)
    sums = 4 * batch * heads * padded_length * (padded_width + 1)
    return sums + _a_head_each(query, key)


def _efficient_backward(gradient, query, key, value, bias, out, *_) -> int:
    """transformers/cuda/attention_backward.cu, in fp32: gradient · result and its sums by row, in two layouts.

    Then, with grouped heads, the sums and a gradient of key and value for each head of queries, as pytorch#191085
    describes it: its source could not be read.
    """
    product, sums = 4 * out.numel(), 4 * out.numel() // out.shape[-1]
    return sums + max(product + sums, _a_head_each(query, key))


def _a_head_each(query, key) -> int:
    """Bytes of keys' and values' gradients with as many heads as queries have, where they have fewer."""
    if query.shape[1] == key.shape[1]:
        return 0
    return 2 * query.element_size() * key.numel() // key.shape[1] * query.shape[1]


def _safe_softmax(x, *_) -> int:
    """transformers/attention.cpp: the softmax before rows without a key are made zero, and where they are."""
    return x.nbytes + x.numel() + x.numel() // x.shape[-1]


WORKSPACES = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_safe_softmax": _safe_softmax,
}
