"""Attention on sizes, as each of PyTorch's kernels computes it: what it makes, keeps, and does in backward. No torch.

A GPU's kernel is chosen by the number format: flash for bf16 (or cuDNN's on Hopper, whose tensors are as large);
memory-efficient for fp32, with grouped heads only from PyTorch 2.15; math, several operators with the whole matrix in
memory, for the rest. The CPU has a flash attention of its own for all formats.

Sources: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (the choice), attention.cpp (math), flash_attn/flash_api.cpp
and cuda/attention_backward.cu (workspaces), and simulated steps (labkit/measuring/gpu_operators.py). Only a GPU can show
cuDNN's workspaces, and what flash attention's forward splits where batch × heads is small.
"""

from dataclasses import dataclass
from math import ceil

from planner.ops.autograd import BF16, FP32, INT64, SizedTensor

GROUPED_EFFICIENT = (2, 15)  # the first PyTorch whose memory-efficient attention takes grouped heads


@dataclass(frozen=True)
class Heads:
    """``queries`` heads of queries, ``keys`` of keys and values, for ``batch`` sequences of ``length`` tokens."""

    batch: int
    queries: int
    keys: int
    length: int

    @property
    def rows(self) -> int:
        """Of all heads' matrices together."""
        return self.batch * self.queries * self.length

    @property
    def grouped(self) -> bool:
        return self.keys < self.queries


def kernel(on_gpu: bool, itemsize: int, grouped: bool, torch: tuple[int, int]) -> str:
    """Which kernel PyTorch of that version takes: "cpu", "flash", "efficient" or "math"."""
    if not on_gpu:
        return "cpu"
    if itemsize == BF16:
        return "flash"
    return "efficient" if itemsize == FP32 and (not grouped or torch >= GROUPED_EFFICIENT) else "math"


def fused(tape, name: str, query, key, value, heads: Heads):
    """One operator. Keeps its inputs, its result and a number (fp32 at least) for each row of its matrix."""
    inputs = [(tensor.node, tensor.numel, tensor.itemsize) for tensor in (query, key, value)]
    wanted = any(node for node, _, _ in inputs)
    saved = tape.save(query, key, value) if wanted else []
    numel, itemsize = query.numel, query.itemsize

    def compute():
        results = [tape.make("attention", numel, itemsize)]
        results += [tape.make(f"attention: {what}", *size) for what, *size in _beside(name, itemsize, heads, wanted)]
        return results

    out, *others = tape.kept(compute)
    saved += tape.save(out, *others) if wanted else []

    def run(_):
        names = ("query", "key", "value")
        made = [tape.make(f"gradient of {of}", *size) for of, (_, *size) in zip(names, inputs, strict=True)]
        for moment in _workspaces(name, numel, itemsize, heads) if tape.workspaces else ():
            held = [tape.make(f"attention: {what}", *size) for what, *size in moment]
            del held
        return [(node, gradient) for (node, _, _), gradient in zip(inputs, made, strict=True)]

    return tape.record(out, run, saved) if wanted else out


def _beside(name: str, itemsize: int, heads: Heads, wanted: bool) -> list[tuple[str, int, int]]:
    """(what, numbers, bytes per number) of what a kernel returns for its backward beside the result."""
    if name == "efficient":
        padded = 32 * ceil(heads.length / 32)
        return [("log-sum-exp", heads.rows // heads.length * padded, FP32)] if wanted else []
    sums = ("log-sum-exp", heads.rows, max(FP32, itemsize))
    return [sums, ("random state", 3, INT64)] if name == "flash" else [sums]


def _workspaces(name: str, numel: int, itemsize: int, heads: Heads) -> list[list[tuple[str, int, int]]]:
    """What a GPU's kernel allocates inside its backward, and frees: for each moment [(what, numbers, bytes per number)].

    Flash sums the queries' gradient in fp32, padded to whole tiles. Memory-efficient multiplies gradient and result
    first. Both make a gradient of key and value for each head of queries where these are grouped.
    """
    a_head_each = [(f"gradient of {what}, a head each", numel, itemsize) for what in ("key", "value") if heads.grouped]
    if name == "flash":
        padded = heads.rows // heads.length * 128 * ceil(heads.length / 128)
        width = 32 * ceil(numel // heads.rows / 32)
        sums = [("gradient of queries in fp32", padded * width, FP32), ("gradient · result, summed", padded, FP32)]
        return [[*sums, *a_head_each]]
    if name == "efficient":
        sums = ("gradient · result, summed", heads.rows, FP32)
        return [[("gradient · result", numel, FP32), sums, sums], [sums, *a_head_each]]
    return []


def math(tape, query, key, value, heads: Heads):
    """softmax(query · keyᵀ + mask) · value, the matrix in memory. Keeps the three as it multiplies them, and the softmax.

    As it runs while a tracer watches: otherwise the mask is added in place, and one matrix less is there.
    """
    scaled_query = tape.passing_on(query, tape.like(query, "attention: query, scaled"), "gradient of query")
    mask = _mask(tape, heads.length, query.itemsize)
    if heads.grouped:
        key, value = (_a_head_each(tape, x, query.numel, of) for x, of in ((key, "key"), (value, "value")))
    scaled_key = tape.passing_on(key, tape.like(key, "attention: key, scaled"), "gradient of key, a head each")
    query_rows = _copied(tape, scaled_query, "attention: query, scaled, rows together")
    # What has been expanded for its head lies as it is multiplied.
    key_rows = scaled_key if heads.grouped else _copied(tape, scaled_key, "attention: key, scaled, rows together")
    matrix = heads.rows * heads.length
    scores = _product(tape, query_rows, key_rows, matrix, "attention: scores")
    del query_rows, key_rows, scaled_key
    masked = _viewed(tape, scores, tape.like(scores, "attention: scores, masked"))
    del scores
    weights = _softmax(tape, masked, heads.rows)
    del masked
    value_rows = value if heads.grouped else _copied(tape, value, "attention: value, rows together")
    mixed = _product(tape, weights, value_rows, query.numel, "attention")
    del mask, scaled_query, key
    # In backward the gradient comes with the heads side by side.
    return tape.passing_on(mixed, tape.view(mixed), "gradient of attention, rows together")


def _mask(tape, length: int, itemsize: int):
    """length × length numbers: 0 where a token may look, −∞ where it may not."""
    ones = tape.make("attention: ones", length * length, 1)
    lower = tape.make("attention: ones below the diagonal", length * length, 1)
    del ones
    mask = tape.make("attention: mask", length * length, itemsize)
    del lower
    return mask


def _a_head_each(tape, x, numel: int, name: str):
    """Keys or values repeated for each head of queries; backward sums."""
    return tape.passing_on(x, tape.make(f"attention: {name}, a head each", numel, x.itemsize), f"gradient of {name}")


def _viewed(tape, x, out):
    """``out`` is ``x`` as far as gradients go: backward hands on what it gets."""
    node = x.node
    return tape.record(out, lambda gradient: [(node, gradient)]) if node else out


def _copied(tape, x, name: str):
    return _viewed(tape, x, tape.like(x, name))


def _product(tape, x, y, numel: int, name: str):
    """Of a matrix for each head. Keeps each factor for the other's gradient; backward makes the second's first."""
    factors = [(tensor.node, tensor.numel) for tensor in (y, x)]
    saved = tape.save(*([x] if y.node else []), *([y] if x.node else []))
    itemsize = x.itemsize
    out = tape.kept(lambda: [tape.make(name, numel, itemsize)])[0]

    def run(_):
        return [(node, tape.make(f"{name}: gradient of a factor", size, itemsize)) for node, size in factors if node]

    return tape.record(out, run, saved) if any(node for node, _ in factors) else out


def _softmax(tape, x, rows: int):
    """Keeps its result. Inside, a softmax that knows nothing of rows without a key, and where those are."""
    out = tape.like(x, "attention: weights")
    if tape.workspaces:
        inside = [("softmax", x.numel, x.itemsize), ("rows without a key", x.numel + rows, 1)]
        held = [tape.make(f"attention: {what}", *size, category="temporary") for what, *size in inside]
        del held
    return tape.passing_on(x, out, "attention: gradient of scores", tape.save(out) if x.node else [])


def rotate(tape, x: SizedTensor, name: str) -> SizedTensor:
    """Rotary positions of x (batch, heads, length, width): x · cos + cat(−second half, first half) · sin.

    Keeps nothing of x, but the cosines and sines, which all blocks share. Under autocast x is narrow; cosines and sines are
    not, and make the result as wide as they are.
    """
    node, numel, itemsize = x.node, x.numel, x.itemsize
    wide = FP32 if tape.autocast else itemsize
    cosine = tape.make(f"{name} · cos", numel, wide)
    half = tape.make(f"{name}: −half", numel // 2, itemsize)
    swapped = tape.like(x, f"{name}: swapped")
    del half
    sine = tape.make(f"{name} · sin", numel, wide)
    del swapped
    out = tape.make(f"{name}, rotated", numel, wide)
    del cosine, sine

    def product(of):
        """A gradient through a product with a wider factor is made as wide, then cast."""
        whole = tape.make(f"gradient of {name} · {of}", numel, wide)
        return whole if wide == itemsize else tape.make(f"gradient of {name} · {of}, cast", numel, itemsize)

    if node is None:
        return out
    halves = []

    def put_together(_):
        swapped = tape.make(f"gradient of {name}: swapped", numel, itemsize)
        halves.clear()
        whole = tape.make(f"gradient of {name}", numel, itemsize)
        del swapped
        return [(node, whole)]

    def multiply(_):
        halves.append(product("sin"))
        halves.append(tape.make(f"gradient of {name}: −half", numel // 2, itemsize))
        return [(together, product("cos"))]  # then the gradient that came can go

    together = tape.record(out, put_together).node
    return tape.record(out, multiply, tape.save(*tape.tables))
