# SPDX-License-Identifier: BSD-3-Clause
"""Matmuls and convolutions in bf16 and fp16, computed in fp32: they are fp32's, rounded; what PyTorch refuses is refused."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from forked import forked
from labkit.running import half_on_cpu
from labkit.running.half_on_cpu import ATTENTION

HALF = [torch.bfloat16, torch.float16]


def outputs(dtype: torch.dtype) -> dict:
    """{name: output} of every operator that is replaced, and of their gradients, for the same inputs."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*sizes):  # with the same elements in every dtype
        return torch.randn(sizes, generator=generator).bfloat16().to(dtype).requires_grad_()

    left, right, row = matrix(16, 32), matrix(32, 24), matrix(24)
    many, others, sums = matrix(3, 16, 32), matrix(3, 32, 8), matrix(3, 16, 8)
    heads = [matrix(2, 4, 32, 16) for _ in range(3)]
    images, filters, shift, more = matrix(2, 3, 8, 8), matrix(5, 3, 3, 3), matrix(5), matrix(4, 5, 3, 3)
    mask = torch.zeros(32, 32).masked_fill(torch.ones(32, 32).triu(1).bool(), -torch.inf)
    results = {
        "mm": left @ right,
        "mm, transposed": right.t() @ left.t(),
        "addmm": torch.addmm(row, left, right, beta=0.5, alpha=2),
        "linear": F.linear(many, right.t(), row),
        "bmm": many @ others,
        "baddbmm": torch.baddbmm(sums, many, others, alpha=3),
        "convolution": (convolved := F.conv2d(images, filters, shift, stride=2, padding=1)),
        "of what needs no gradient": F.conv2d(convolved.detach(), more),
        "attention": F.scaled_dot_product_attention(*heads, is_causal=True),
        "with a mask": F.scaled_dot_product_attention(*heads, attn_mask=mask.to(dtype)),
        "with a mask in fp32": F.scaled_dot_product_attention(*heads, attn_mask=mask),
    }
    for result in results.values():
        result.sum().backward()
    leaves = (left, right, row, many, others, sums, images, filters, shift, more, *heads)
    results |= {f"gradient {index}": each.grad for index, each in enumerate(leaves)}
    with torch.no_grad():  # autograd would cast these outputs
        forward, backward = (getattr(torch.ops.aten, name) for name in (ATTENTION, f"{ATTENTION}_backward"))
        output, logsumexp = forward(*heads, 0.0, True)
        for name, each in zip("qkv", backward(output, *heads, output, logsumexp, 0.0, True), strict=True):
            results[f"attention's gradient of {name}"] = each
    return {name: result.detach() for name, result in results.items()}


def before_and_after(*dtypes):
    """The outputs of PyTorch's operators, and of those that replace them, on any CPU."""
    before = [outputs(dtype) for dtype in dtypes]
    half_on_cpu.slow_dtypes = lambda: HALF
    half_on_cpu.compute_in_fp32()
    half_on_cpu.compute_in_fp32()  # a second time changes nothing
    return before, [outputs(dtype) for dtype in dtypes]


def largest(numbers: torch.Tensor) -> float:
    return numbers.abs().max().item()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_outputs_are_those_of_fp32_rounded(dtype):
    (theirs, wide), (ours, same) = forked(before_and_after, dtype, torch.float32)
    for name, result in ours.items():
        assert (result.dtype, result.stride()) == (dtype, theirs[name].stride()), name
        # a gradient is a sum of rounded terms, so it is a few roundings away from fp32's
        assert largest(result.float() - wide[name]) <= 4 * torch.finfo(dtype).eps * largest(wide[name]), name
        assert torch.equal(wide[name], same[name]), f"{name} in fp32 has changed"
    for name in ("mm", "mm, transposed", "bmm", "addmm"):
        assert torch.equal(ours[name], wide[name].to(dtype)), name


def converting() -> set[str]:
    """Return the names of the operators that convert a tensor to another dtype."""
    half_on_cpu.slow_dtypes = lambda: HALF
    half_on_cpu.compute_in_fp32()
    onednn = importlib.import_module("torch.backends.mkldnn")  # by a string: cloudpickle cannot take the module along
    # On a CPU with such instructions, convolutions would call oneDNN's operators.
    with onednn.flags(enabled=False), torch.profiler.profile() as profile:
        outputs(torch.bfloat16)
    return {event.cpu_parent.name for event in profile.events() if event.name == "aten::to" and event.cpu_parent}


def test_every_operator_of_the_list_is_replaced():
    replaced = {f"aten::{name.partition('.')[0]}" for name in half_on_cpu.OPERATORS}
    assert replaced <= forked(converting)


def refused() -> list[str]:
    """The matmuls of mixed dtypes that are not refused."""
    half_on_cpu.slow_dtypes = lambda: HALF
    half_on_cpu.compute_in_fp32()
    wide, half = torch.ones(2, 2), torch.ones(2, 2).bfloat16()
    calls = {
        "half by fp32": lambda: half @ wide,
        "fp32 by half": lambda: wide @ half,
        "a weight in fp32": lambda: F.linear(half, wide),
        "a bias in half": lambda: F.linear(wide, wide, half[0]),
        "batches": lambda: half[None] @ wide[None],
        "filters in fp32": lambda: F.conv2d(half[None, None], wide[None, None]),
    }
    accepted = []
    for name, call in calls.items():
        try:
            call()
            accepted.append(name)
        except RuntimeError as error:
            assert "dtype" in str(error) or "scalar type" in str(error), error
    return accepted


def test_a_forgotten_cast_is_refused_as_elsewhere():
    assert forked(refused) == []


def replaced_by_a_rank() -> bool:
    from labkit.running import ranks

    ranks.configure_cpu()
    return half_on_cpu._library is not None


def test_a_rank_replaces_operators_where_the_cpu_needs_it():
    assert forked(replaced_by_a_rank) == bool(half_on_cpu.slow_dtypes())
