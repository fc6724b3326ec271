# SPDX-License-Identifier: BSD-3-Clause
"""Attention of ranks that share each sequence, on sizes: labkit/training/context_parallel.py. Imports no torch."""

from planner.ops import attention
from planner.ops.attention import Heads
from planner.ops.autograd import FP32, AbstractTensor
from planner.ops.context import Context


def attend(
    tape, query: AbstractTensor, key: AbstractTensor, value: AbstractTensor, heads: Heads, context: Context
) -> AbstractTensor:
    """Compute causal attention over whole sequences, of which each rank has a part.

    Args:
        tape: the ``Tape`` to record on.
        query: (batch, query heads, this rank's tokens, head dimension).
        key: (batch, kv heads, this rank's tokens, head dimension).
        value: as key.
        heads: these sizes.
        context: the context group.

    Returns:
        As query.
    """
    if context.form == "ulysses":
        return _ulysses(tape, query, key, value, heads, context)
    return _merged(tape, query, key, value, heads, context)


def _ulysses(tape, query, key, value, heads, context):
    """Exchange tokens for heads, attend, and exchange back."""
    size = context.size
    query, key, value = (_all_to_all(tape, x, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    mine = Heads(heads.batch_size, heads.query_heads // size, heads.kv_heads // size, heads.seq_len * size)
    mixed = tape.attention(query, key, value, mine)
    return _all_to_all(tape, mixed, "attention")


def _all_to_all(tape, x, name):
    """Pack, send, and join: three tensors of x's size, of which the last one stays. Backward does the same."""
    node, numel, itemsize = x.node, x.numel, x.itemsize

    def exchanged(what):
        held = [tape.make(f"{what}: {how}", numel, itemsize) for how in ("packed", "received")]
        out = tape.make(f"{what}, exchanged", numel, itemsize)
        del held
        return out

    out = exchanged(name)
    return tape.record(out, lambda _: [(node, exchanged(f"gradient of {name}"))]) if node else out


def _merged(tape, query, key, value, heads, context):
    """Attend to the keys and values of one rank after another, and merge: the ring, and the all-gather."""
    inputs = [(tensor.node, tensor.numel) for tensor in (query, key, value)]
    itemsize = query.itemsize
    parts = [part for part in context.parts() if part]
    out, sums = _forward(tape, query.numel, key.numel, itemsize, heads, context, parts)
    saved = tape.save(query, key, value, out, sums)

    def run(_):
        (_, query_numel), (_, key_numel), _ = inputs
        of_query, of_keys_and_values = _backward(tape, query_numel, key_numel, itemsize, heads, context, parts)
        views = [tape.view(of_keys_and_values, numel) for _, numel in inputs[1:]]
        return [(node, made) for (node, _), made in zip(inputs, [of_query, *views], strict=True)]

    return tape.record(out, run, saved) if any(node for node, _ in inputs) else out


def _arrived(tape, numel, itemsize, context):
    """Return what holds keys and values: two buffers of a rank's, or one of all ranks'."""
    packed = tape.make("keys and values", 2 * numel, itemsize)
    if context.form == "ring":
        return [packed, tape.make("keys and values, arriving", 2 * numel, itemsize)]
    return [tape.make("keys and values, gathered", context.size * 2 * numel, itemsize)]


def _forward(tape, numel, kv_numel, itemsize, heads, context, parts):
    """Return (output, its log-sum-exp). numel: elements of the queries; kv_numel: of the keys."""
    summed = max(FP32, itemsize)
    held = _arrived(tape, kv_numel, itemsize, context)
    out, sums = _kernel(tape, numel, itemsize, heads)
    if summed != itemsize:
        out = tape.make("attention, merged", numel, summed)
    for share, _ in parts[1:]:
        mine = round(numel * share)
        other = _kernel(tape, mine, itemsize, heads, share)
        weights = tape.make("attention: shares", other[1].numel, summed)
        cast = tape.make("attention of a part, cast", mine, summed) if summed != itemsize else None
        del other, weights, cast
    if summed != itemsize:
        merged, out = out, tape.make("attention", numel, itemsize)
        del merged
    del held
    return out, sums


def _kernel(tape, numel, itemsize, heads, share=1.0):
    """Return (output, log-sum-exp) of attention of a share of the queries."""
    name = attention.kernel(tape.fused, itemsize, heads.grouped, tape.torch, tape.flash)
    mine = Heads(heads.batch_size, heads.query_heads, heads.kv_heads, round(heads.seq_len * share))
    out = tape.make("attention", numel, itemsize)
    extra = [tape.make(f"attention: {what}", *size) for what, *size in attention.extra_outputs(name, itemsize, mine)]
    return out, extra[0]


def _backward(tape, numel, kv_numel, itemsize, heads, context, parts):
    """Return the gradients of the queries, and of this rank's keys and values in one tensor."""
    summed, ring = max(FP32, itemsize), context.form == "ring"
    held = _arrived(tape, kv_numel, itemsize, context)
    many = 1 if ring else context.size
    gradients = [tape.make("gradients of keys and values", many * 2 * kv_numel, summed)]
    if ring:
        gradients.append(tape.make("gradients of keys and values, arriving", 2 * kv_numel, summed))
    of_query = tape.make("gradient of query", numel, summed)
    for queries, keys in parts:
        _kernel_backward(tape, round(numel * queries), round(kv_numel * keys), itemsize, heads, queries)
    mine = gradients[0]
    if not ring:
        held.clear()
        mine = tape.make("gradients of this rank's keys and values", 2 * kv_numel, summed)
    if summed != itemsize:
        summed_query, of_query = of_query, tape.make("gradient of query", numel, itemsize)
        mine = tape.make("gradients of this rank's keys and values", 2 * kv_numel, itemsize)
        del summed_query
    return of_query, mine


def _kernel_backward(tape, numel, kv_numel, itemsize, heads, share):
    name = attention.kernel(tape.fused, itemsize, heads.grouped, tape.torch, tape.flash)
    sizes = {"query": numel, "key": kv_numel, "value": kv_numel}
    made = [tape.make(f"gradient of {of}, of a part", size, itemsize) for of, size in sizes.items()]
    mine = Heads(heads.batch_size, heads.query_heads, heads.kv_heads, round(heads.seq_len * share))
    for together in attention.workspaces(name, numel, itemsize, mine) if tape.workspaces else ():
        inside = [tape.make(f"attention: {what}", *size) for what, *size in together]
        del inside
    del made
