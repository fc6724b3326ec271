# SPDX-License-Identifier: BSD-3-Clause
"""Products of bf16 and fp16 matrices on a CPU without AVX-512: computed in fp32, and rounded.

PyTorch leaves these products to oneDNN, which takes them where the CPU has AVX-512. On other x86 CPUs it computes them in a
loop of its own: on an AMD EPYC with AVX2, 5 to 80 times slower than the same product in fp32 (256×256 by 256×1024, PyTorch
2.15, one thread; https://github.com/pytorch/pytorch/issues/146508 has more machines). A lab in bf16 would spend most of its
time there.

Here the operator converts its factors to fp32, multiplies, and rounds the product: what the loop computes, but for the
order of its sums. Memory that the meters count stays the same, because they count what operators return, and the
converted copies end within the operator.
"""

import platform
import warnings

import torch

HALF = (torch.bfloat16, torch.float16)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# Operator → how many of its results have the type of its factors; the others are fp32 in any case
OPERATORS = {"mm": 1, "addmm": 1, "bmm": 1, "baddbmm": 1, ATTENTION: 1, f"{ATTENTION}_backward": 3}

_library = None  # of the operators that are replaced in this process; PyTorch takes them back when it is collected


def needed() -> bool:
    """Return whether this CPU is an x86 without AVX-512."""
    return platform.machine() in ("x86_64", "AMD64") and not torch.backends.cpu.get_cpu_capability().startswith(
        "AVX512"
    )


def compute_in_fp32():
    """Replace the operators in this process, if needed and not yet done."""
    global _library
    if _library is not None or not needed():
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.11 warns of every replaced operator
        for name, rounded in OPERATORS.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            _library.impl(name, _in_fp32(kernel, rounded), "CPU", with_keyset=True, allow_override=True)


def _in_fp32(kernel, rounded: int):
    """Return an operator that calls PyTorch's ``kernel`` in fp32 if its factors are in half precision.

    rounded: the number of results, from the first, that it rounds to the factors' type.
    """

    def operator(keys, *inputs, **options):
        dtype = inputs[0].dtype
        if dtype not in HALF:
            return kernel.call_boxed(keys, *inputs, **options)

        def widened(value):
            return value.float() if isinstance(value, torch.Tensor) and value.dtype is dtype else value

        results = kernel.call_boxed(
            keys, *map(widened, inputs), **{name: widened(value) for name, value in options.items()}
        )
        if isinstance(results, torch.Tensor):
            return results.to(dtype)
        return tuple(each.to(dtype) if place < rounded else each for place, each in enumerate(results))

    return operator
