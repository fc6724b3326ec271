# SPDX-License-Identifier: BSD-3-Clause
"""Compute bf16 and fp16 matrix multiplications and convolutions in fp32 on x86 CPUs that have no instructions for them.

PyTorch leaves them to oneDNN if the CPU has AVX-512 (for bf16) or AVX512-FP16 (for fp16), and otherwise computes them in a
loop of its own: on an AMD EPYC with AVX2 5 to 80 times slower than fp32, depending on which input is transposed (256×256 by
256×1024, PyTorch 2.15, one thread; https://github.com/pytorch/pytorch/issues/146508 has other machines). A lab in bf16 would
spend most of its time there. On the same machine the MNIST labs' second convolution, with its gradients, took 7 times as long
as in fp32 (64 images, one thread); computed as below, it takes as long as in fp32.

Here the operator converts its inputs to fp32, multiplies, and rounds the output. Sums are in fp32 in both ways, except for
PyTorch's in fp16; attention rounds less on the way than PyTorch's does. The memory that the meters count stays the same:
they count what operators return, and the converted copies end within the operator. A matmul in fp32 takes 3 µs more.
Compiled code (``--compile``) calls other operators, and is as slow as before.

Private PyTorch used here, and only here: the names of attention's and convolution's operators on the CPU, and oneDNN's
two checks.
"""

import platform
import warnings

import torch

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# Operator → how many of its outputs have its inputs' dtype; the others are fp32 in any case
OPERATORS = {"mm": 1, "addmm": 1, "bmm": 1, "baddbmm": 1, ATTENTION: 1, f"{ATTENTION}_backward": 3}
OPERATORS |= {"_slow_conv2d_forward": 1, "_slow_conv2d_backward.output_mask": 3}  # convolutions, without oneDNN

_library = None  # the replaced operators of this process; PyTorch restores its own when this is deleted


def slow_dtypes() -> list[torch.dtype]:
    """Return which of bf16 and fp16 this CPU has no instructions for: none on other CPUs than x86."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    checks = {dtype: getattr(torch.ops.mkldnn, name, None) for dtype, name in names.items()}
    return [dtype for dtype, supported in checks.items() if supported and not supported()]


def compute_in_fp32():
    """Replace the operators in this process for the dtypes that are slow, if there are any and it has not been done."""
    global _library
    if _library is not None or not (dtypes := slow_dtypes()):
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.11 warns of every replaced operator
        for name, rounded in OPERATORS.items():
            # A later PyTorch may name it differently: then it stays slow.
            if hasattr(torch.ops.aten, name.partition(".")[0]):
                kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
                operator = _in_fp32(kernel, dtypes, rounded, mixed=name.startswith(ATTENTION))
                library.impl(name, operator, "CPU", with_keyset=True, allow_override=True)
    _library = library


def _in_fp32(kernel, dtypes: list, rounded: int, mixed: bool):
    """Return an operator that calls PyTorch's ``kernel`` in fp32 if its inputs have one of ``dtypes``.

    Args:
        kernel: PyTorch's.
        dtypes: those that are slow.
        rounded: the number of outputs, from the first, that it rounds to the inputs' dtype.
        mixed: whether PyTorch accepts inputs of several dtypes, such as a mask in fp32. Otherwise its kernel refuses them.
    """

    def operator(keys, *inputs, **options):
        dtype = inputs[0].dtype
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if dtype not in dtypes or not (mixed or all(tensor.dtype is dtype for tensor in tensors)):
            return kernel.call_boxed(keys, *inputs, **options)

        def widened(value):
            return value.float() if isinstance(value, torch.Tensor) and value.dtype is dtype else value

        inputs, options = map(widened, inputs), {name: widened(value) for name, value in options.items()}
        outputs = kernel.call_boxed(keys, *inputs, **options)
        if isinstance(outputs, torch.Tensor):
            return outputs.to(dtype)
        # a gradient that nobody asked for is None
        return tuple(o if o is None or index >= rounded else o.to(dtype) for index, o in enumerate(outputs))

    return operator
