# SPDX-License-Identifier: BSD-3-Clause
"""Attention as each of PyTorch's kernels computes it: what it allocates, saves, and does in backward. Imports no torch.

PyTorch chooses a GPU's kernel by the number format: flash for bf16 and fp16 (or cuDNN's on Hopper, whose tensors are as
large); memory-efficient for fp32, and for fp16 on a V100 or T4, which flash does not run on, with grouped heads only from PyTorch 2.15 on; otherwise math, several operators with the whole
matrix in memory. The CPU has a flash attention of its own for all formats.

Sources: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (the choice), attention.cpp (math), flash_attn/flash_api.cpp
and cuda/attention_backward.cu (workspaces), and simulated steps (labkit/measuring/gpu_operators.py). Only a GPU can show
cuDNN's workspaces, and what flash attention's forward splits where batch × heads is small.
"""

from dataclasses import dataclass
from math import ceil

from planner.ops.autograd import BF16, FP32, INT64, AbstractTensor

GROUPED_EFFICIENT = (2, 15)  # the first PyTorch whose memory-efficient attention takes grouped heads


@dataclass(frozen=True)
class Heads:
    """The shape of an attention: its heads, and the sequences they attend over.

    Attributes:
        batch_size: sequences.
        query_heads: heads of queries.
        kv_heads: heads of keys and of values.
        seq_len: tokens of a sequence.
    """

    batch_size: int
    query_heads: int
    kv_heads: int
    seq_len: int

    @property
    def rows(self) -> int:
        """Rows of all attention matrices together: batch × query heads × length."""
        return self.batch_size * self.query_heads * self.seq_len

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a head of keys and values."""
        return self.kv_heads < self.query_heads


def kernel(on_gpu: bool, itemsize: int, grouped: bool, torch: tuple[int, int], flash: bool = True) -> str:
    """Return which kernel PyTorch chooses: "cpu", "flash", "efficient", or "math".

    Args:
        on_gpu: whether the tensors are on a GPU.
        itemsize: bytes per element of queries, keys, and values.
        grouped: see ``Heads.grouped``.
        torch: PyTorch's version.
        flash: whether the GPU can run it (``gpus.GPU``).
    """
    if not on_gpu:
        return "cpu"
    if itemsize == BF16 and flash:
        return "flash"
    return "efficient" if itemsize in (FP32, BF16) and (not grouped or torch >= GROUPED_EFFICIENT) else "math"


def fused(
    tape,
    name: str,
    query: AbstractTensor,
    key: AbstractTensor,
    value: AbstractTensor,
    heads: Heads,
    mask: AbstractTensor | None = None,
) -> AbstractTensor:
    """Compute causal attention in one operator. Saves its inputs, its output, and a log-sum-exp per row.

    Args:
        tape: the ``Tape`` to record on.
        name: of the kernel, see ``kernel``.
        query: (batch, query heads, length, head dimension).
        key: (batch, kv heads, length, head dimension).
        value: as key.
        heads: these sizes.
        mask: (length, length), added to the scores; None: they are causal.

    Returns:
        The output, (batch, query heads, length, elements of a head of values).
    """
    inputs = [(tensor.node, tensor.numel, tensor.itemsize) for tensor in (query, key, value)]
    needs_gradient = any(node for node, _, _ in inputs)
    saved = tape.save(query, key, value, *([mask] if mask else [])) if needs_gradient else []
    numel, itemsize = query.numel, query.itemsize
    # A head of values may have fewer elements than one of keys.
    out_numel = heads.rows * (value.numel // (heads.batch_size * heads.kv_heads * heads.seq_len))

    def compute():
        outputs = [tape.make("attention", out_numel, itemsize)]
        extra = extra_outputs(name, itemsize, heads, needs_gradient)
        outputs += [tape.make(f"attention: {what}", *size) for what, *size in extra]
        return outputs

    out, *others = tape.maybe_saved(compute)
    saved += tape.save(out, *others) if needs_gradient else []

    def run(_):
        names = ("query", "key", "value")
        made = [tape.make(f"gradient of {of}", *size) for of, (_, *size) in zip(names, inputs, strict=True)]
        for together in workspaces(name, numel, itemsize, heads) if tape.workspaces else ():
            held = [tape.make(f"attention: {what}", *size) for what, *size in together]
            del held
        return [(node, gradient) for (node, _, _), gradient in zip(inputs, made, strict=True)]

    return tape.record(out, run, saved) if needs_gradient else out


def extra_outputs(name: str, itemsize: int, heads: Heads, needs_gradient: bool = True) -> list[tuple[str, int, int]]:
    """Return [(what, elements, bytes per element)] that a kernel returns for its backward in addition to its output."""
    if name == "efficient":
        padded = 32 * ceil(heads.seq_len / 32)
        return [("log-sum-exp", heads.rows // heads.seq_len * padded, FP32)] if needs_gradient else []
    sums = ("log-sum-exp", heads.rows, max(FP32, itemsize))
    return [sums, ("random state", 3, INT64)] if name == "flash" else [sums]


def workspaces(name: str, numel: int, itemsize: int, heads: Heads) -> list[list[tuple[str, int, int]]]:
    """Return what a GPU's kernel allocates inside its backward, and frees: lists of (what, elements, bytes per element).

    What is in one list is alive together. Flash sums the queries' gradient in fp32, padded to whole tiles.
    Memory-efficient multiplies gradient and output first. Both make a gradient of key and value for each query head if
    these are grouped.
    """
    per_head = [(f"gradient of {what}, per query head", numel, itemsize) for what in ("key", "value") if heads.grouped]
    if name == "flash":
        padded = heads.rows // heads.seq_len * 128 * ceil(heads.seq_len / 128)
        head_dim = 32 * ceil(numel // heads.rows / 32)
        sums = [("gradient of queries in fp32", padded * head_dim, FP32), ("gradient · output, summed", padded, FP32)]
        return [[*sums, *per_head]]
    if name == "efficient":
        sums = ("gradient · output, summed", heads.rows, FP32)
        return [[("gradient · output", numel, FP32), sums, sums], [sums, *per_head]]
    return []


def math(tape, query: AbstractTensor, key: AbstractTensor, value: AbstractTensor, heads: Heads) -> AbstractTensor:
    """Compute softmax(query · keyᵀ + mask) · value, the matrix in memory. Saves the three scaled inputs and the softmax.

    This is how it runs while a tracer watches: otherwise the mask is added in place, and one matrix less is alive.

    Args:
        tape: the ``Tape`` to record on.
        query: (batch, query heads, length, head dimension).
        key: (batch, kv heads, length, head dimension).
        value: as key.
        heads: these sizes.

    Returns:
        As query.
    """
    scaled_query = tape.record_unary(query, tape.like(query, "attention: query, scaled"), "gradient of query")
    mask = _mask(tape, heads.seq_len, query.itemsize)
    if heads.grouped:
        key, value = (repeat_kv(tape, x, query.numel, of) for x, of in ((key, "key"), (value, "value")))
    scaled_key = tape.record_unary(key, tape.like(key, "attention: key, scaled"), "gradient of key, per query head")
    query_rows = _contiguous(tape, scaled_query, "attention: query, scaled, contiguous")
    # A tensor that was expanded for its heads is contiguous already.
    key_rows = scaled_key if heads.grouped else _contiguous(tape, scaled_key, "attention: key, scaled, contiguous")
    matrix = heads.rows * heads.seq_len
    scores = _matmul(tape, query_rows, key_rows, matrix, "attention: scores")
    del query_rows, key_rows, scaled_key
    masked = _alias(tape, scores, tape.like(scores, "attention: scores, masked"))
    del scores
    weights = _softmax(tape, masked, heads.rows)
    del masked
    value_rows = value if heads.grouped else _contiguous(tape, value, "attention: value, contiguous")
    mixed = _matmul(tape, weights, value_rows, query.numel, "attention")
    del mask, scaled_query, key
    # In backward the gradient arrives with the heads joined.
    return tape.record_unary(mixed, tape.view(mixed), "gradient of attention, contiguous")


def _mask(tape, seq_len: int, itemsize: int):
    """The causal mask, length × length: 0 where a token may attend, −∞ where it may not."""
    ones = tape.make("attention: ones", seq_len * seq_len, 1)
    lower = tape.make("attention: ones below the diagonal", seq_len * seq_len, 1)
    del ones
    mask = tape.make("attention: mask", seq_len * seq_len, itemsize)
    del lower
    return mask


def repeat_kv(tape, x: AbstractTensor, numel: int, name: str) -> AbstractTensor:
    """Repeat keys or values for each query head; backward sums.

    Args:
        tape: the ``Tape`` to record on.
        x: (batch, kv heads, length, head dimension).
        numel: elements with all query heads.
        name: "key" or "value".
    """
    return tape.record_unary(
        x, tape.make(f"attention: {name}, per query head", numel, x.itemsize), f"gradient of {name}"
    )


def _alias(tape, x, out):
    """Record ``out`` with a backward that passes the gradient on to ``x``."""
    node = x.node
    return tape.record(out, lambda gradient: [(node, gradient)]) if node else out


def _contiguous(tape, x, name: str):
    return _alias(tape, x, tape.like(x, name))


def _matmul(tape, x, y, numel: int, name: str):
    """A matmul for each head. Saves each operand for the other's gradient; backward makes the second's first."""
    operands = [(tensor.node, tensor.numel) for tensor in (y, x)]
    saved = tape.save(*([x] if y.node else []), *([y] if x.node else []))
    itemsize = x.itemsize
    out = tape.maybe_saved(lambda: [tape.make(name, numel, itemsize)])[0]

    def run(_):
        return [(node, tape.make(f"{name}: gradient of an operand", size, itemsize)) for node, size in operands if node]

    return tape.record(out, run, saved) if any(node for node, _ in operands) else out


def _softmax(tape, x, rows: int):
    """Saves its output. On a GPU it allocates a softmax that ignores rows without a key, and where those rows are."""
    out = tape.like(x, "attention: weights")
    if tape.workspaces:
        inside = [("softmax", x.numel, x.itemsize), ("rows without a key", x.numel + rows, 1)]
        held = [tape.make(f"attention: {what}", *size, category="temporary") for what, *size in inside]
        del held
    return tape.record_unary(x, out, "attention: gradient of scores", tape.save(out) if x.node else [])


def in_steps(
    tape, query: AbstractTensor, key: AbstractTensor, value: AbstractTensor, heads: Heads, softcaps: bool
) -> AbstractTensor:
    """Compute causal attention as transformers' "eager" implementation does, with the matrix in memory.

    Args:
        tape: the ``Tape`` to record on.
        query: (batch, query heads, length, head dimension).
        key: (batch, kv heads, length, head dimension).
        value: as key.
        heads: these sizes.
        softcaps: whether the scores pass through a scaled tanh.

    Returns:
        As query.
    """
    if heads.grouped:
        key, value = (repeat_kv(tape, x, query.numel, of) for x, of in ((key, "key"), (value, "value")))
    query_rows = _contiguous(tape, query, "attention: query, contiguous")
    key_rows = key if heads.grouped else _contiguous(tape, key, "attention: key, contiguous")
    itemsize, matrix = query.itemsize, heads.rows * heads.seq_len
    scores = _matmul(tape, query_rows, key_rows, matrix, "attention: scores")
    del query_rows, key_rows
    scores = tape.divide(scores, "attention: scores, scaled")
    if softcaps:
        scores = tape.divide(scores, "attention: scores / cap")
        scores = tape.tanh(scores, "attention: tanh of scores")
        scores = tape.divide(scores, "attention: scores, capped")
    scores = _alias(tape, scores, tape.like(scores, "attention: scores, masked"))
    scores = tape.to(scores, max(FP32, itemsize), "attention: scores in fp32")
    weights = tape.like(scores, "attention: weights")
    weights = tape.record_unary(scores, weights, "attention: gradient of scores", tape.save(weights))
    del scores
    weights = tape.to(weights, itemsize, "attention: weights")
    value_rows = value if heads.grouped else _contiguous(tape, value, "attention: value, contiguous")
    mixed = _matmul(tape, weights, value_rows, query.numel, "attention")
    del value_rows
    return _alias(tape, mixed, tape.like(mixed, "attention, contiguous"))


def apply_rope(tape, x: AbstractTensor, name: str, tables: list[AbstractTensor] | None = None) -> AbstractTensor:
    """Rotate pairs of elements by their position: x · cos + cat(−second half, first half) · sin.

    Saves nothing of x, but the cosines and sines, which all blocks share. Under autocast x is in bf16; cosines and sines
    are in fp32, and so is the output.

    Args:
        tape: the ``Tape`` to record on.
        x: (batch, heads, length, head dimension).
        name: "query" or "key".
        tables: cosines and sines; by default ``tape.rope_tables``.

    Returns:
        As x, in the tables' format if that is larger.
    """
    tables = tables or tape.rope_tables
    node, numel, itemsize = x.node, x.numel, x.itemsize
    out_itemsize = max(itemsize, *(table.itemsize for table in tables))
    cosine = tape.make(f"{name} · cos", numel, out_itemsize)
    half = tape.make(f"{name}: −half", numel // 2, itemsize)
    swapped = tape.like(x, f"{name}: swapped")
    del half
    sine = tape.make(f"{name} · sin", numel, out_itemsize)
    del swapped
    out = tape.make(f"{name}, rotated", numel, out_itemsize)
    del cosine, sine

    def gradient_through(factor):
        """The gradient through a multiplication by cos or sin: in the output's format, then cast."""
        full = tape.make(f"gradient of {name} · {factor}", numel, out_itemsize)
        if out_itemsize == itemsize:
            return full
        return tape.make(f"gradient of {name} · {factor}, cast", numel, itemsize)

    if node is None:
        return out
    halves = []

    def join(_):
        swapped = tape.make(f"gradient of {name}: swapped", numel, itemsize)
        halves.clear()
        joined = tape.make(f"gradient of {name}", numel, itemsize)
        del swapped
        return [(node, joined)]

    def multiply(_):
        halves.append(gradient_through("sin"))
        halves.append(tape.make(f"gradient of {name}: −half", numel // 2, itemsize))
        return [(joined_node, gradient_through("cos"))]  # then the gradient that arrived is freed

    joined_node = tape.record(out, join).node
    return tape.record(out, multiply, tape.save(*tables))
