# SPDX-License-Identifier: BSD-3-Clause
"""Norms as PyTorch computes them on each device: what they allocate, save, and do in backward. Imports no torch."""

from planner.ops.autograd import FP32, AbstractParameter, AbstractTensor


def rms_norm(tape, x: AbstractTensor, weight: AbstractParameter) -> AbstractTensor:
    """Compute x · 1/rms(x) · weight.

    Args:
        tape: the ``Tape`` to record on.
        x: (…, features).
        weight: (features,).

    Returns:
        (…, features), in x's number format.
    """
    if tape.fused:
        return _rms_norm_fused(tape, x, weight)
    itemsize = x.itemsize
    x = tape.to(x, max(itemsize, FP32), "norm: input in fp32")
    normal = _normalized(tape, x, rows=x.numel // weight.numel)
    out = tape.like(x, "norm")
    del x
    out = _scaled(tape, out, normal, weight)
    del normal  # backward has it, if the weight is trained
    return tape.to(out, itemsize, "norm")


def rms_norm_in_steps(
    tape, x: AbstractTensor, weight: AbstractParameter, scales_in_fp32: bool, plus_one: bool
) -> AbstractTensor:
    """Compute x · 1/rms(x) · weight as transformers' modules do, in several operators on every device.

    Args:
        tape: the ``Tape`` to record on.
        x: (…, features).
        weight: (features,).
        scales_in_fp32: whether the cast back to x's format follows the multiplication by the weight.
        plus_one: whether to multiply by 1 + weight, as Gemma does: a new tensor, in fp32 at least.

    Returns:
        (…, features), in x's number format.
    """
    itemsize, rows = x.itemsize, x.numel // weight.numel
    x = tape.to(x, max(itemsize, FP32), "norm: input in fp32")
    normal = _normalized(tape, x, rows)
    del x
    if not scales_in_fp32:
        normal = tape.to(normal, itemsize, "norm: normalized")
    scale = tape.make("norm: 1 + weight", weight.numel, max(weight.itemsize, FP32)) if plus_one else None
    out = _scaled(tape, tape.like(normal, "norm"), normal, weight, scale)
    del normal, scale  # backward has both
    return tape.to(out, itemsize, "norm")


def l2_norm_in_steps(tape, x: AbstractTensor, rows: int) -> AbstractTensor:
    """Compute x · 1/rms(x) of x (rows, …), without a weight, as transformers' modules do."""
    itemsize = x.itemsize
    x = tape.to(x, max(itemsize, FP32), "norm: input in fp32")
    normal = _normalized(tape, x, rows)
    del x
    return tape.to(normal, itemsize, "norm: normalized")


def layer_norm_in_steps(tape, x: AbstractTensor, weight: AbstractParameter) -> AbstractTensor:
    """Compute (x − mean(x)) / std(x) · weight as Cohere's modules do, in several operators, in fp32 at least.

    Args:
        tape: the ``Tape`` to record on.
        x: (…, features).
        weight: (features,).
    """
    itemsize, rows = x.itemsize, x.numel // weight.numel
    x = tape.to(x, max(itemsize, FP32), "norm: input in fp32")
    mean = _mean(tape, x, rows)
    deviation = _minus_rows(tape, x, mean)
    square = tape.record_unary(
        deviation, tape.like(deviation, "norm: square"), "norm: gradient of deviation", tape.save(deviation)
    )
    del deviation
    variance = _mean(tape, square, rows)
    del square
    deviation = _minus_rows(tape, x, mean)
    del mean
    scale = tape.record_unary(variance, tape.like(variance, "norm: 1/std"), "norm: gradient of variance")
    del variance
    normal = _times_rows(tape, deviation, scale)
    del deviation, scale
    out = _scaled(tape, tape.like(normal, "norm"), normal, weight)
    del normal
    return tape.to(out, itemsize, "norm")


def _mean(tape, x, rows):
    return tape.record_unary(x, tape.make("norm: mean", rows, x.itemsize), "norm: gradient through the mean")


def _minus_rows(tape, x, mean):
    """x minus a number for each row. Backward negates the gradient for the numbers, and sums it."""
    node, mean_node, numel, rows, itemsize = x.node, mean.node, x.numel, mean.numel, x.itemsize
    out = tape.like(x, "norm: deviation")
    if node is None:
        return out

    def run(gradient):
        negative = tape.make("norm: gradient of the mean, unreduced", numel, itemsize)
        of_mean = tape.make("norm: gradient of the mean", rows, itemsize)
        del negative
        return [(node, gradient), (mean_node, of_mean)]

    return tape.record(out, run)


def _times_rows(tape, x, scale):
    """x times a number for each row. Saves both."""
    node, scale_node, numel, rows, itemsize = x.node, scale.node, x.numel, scale.numel, x.itemsize
    out = tape.like(x, "norm: normalized")
    if node is None:
        return out

    def run(_):
        of_x = tape.make("norm: gradient through the multiplication", numel, itemsize)
        of_scale = tape.make("norm: gradient of 1/std, unreduced", numel, itemsize)
        of_rows = tape.make("norm: gradient of 1/std", rows, itemsize)
        del of_scale
        return [(node, of_x), (scale_node, of_rows)]

    return tape.record(out, run, tape.save(x, scale))


def _rms_norm_fused(tape, x, weight):
    """A GPU's kernel: it saves its input, and 1/rms of each row, in fp32 at least."""
    rows = tape.make("norm: 1/rms", x.numel // weight.numel, max(FP32, x.itemsize))
    out = tape.like(x, "norm")
    return tape.record_layer(x, out, weight, None, tape.save(x, rows) if x.node or weight.trained else [])


def layer_norm(tape, x: AbstractTensor, weight: AbstractParameter, bias: AbstractParameter) -> AbstractTensor:
    """Compute (x − mean(x)) / std(x) · weight + bias, under autocast in fp32. Saves x, mean, and 1/std of each row.

    Args:
        tape: the ``Tape`` to record on.
        x: (…, features).
        weight: (features,).
        bias: (features,).

    Returns:
        (…, features).
    """
    x = tape.to(x, max(FP32, x.itemsize) if tape.autocast else x.itemsize)
    itemsize = max(FP32, x.itemsize) if tape.fused else x.itemsize  # the CPU keeps them in the input's format
    rows = tape.make("norm: mean and 1/std", 2 * (x.numel // weight.numel), itemsize)
    out = tape.like(x, "norm")
    return tape.record_layer(x, out, weight, bias, tape.save(x, rows) if x.node or weight.trained else [])


def _normalized(tape, x: AbstractTensor, rows: int) -> AbstractTensor:
    """x · 1/rms(x) as the CPU computes it: several operators, in fp32 at least."""
    node, numel, itemsize = x.node, x.numel, x.itemsize
    saved = tape.save(x) if node else []
    square = tape.like(x, "norm: square")
    mean = tape.make("norm: mean", rows, itemsize)
    scale = tape.make("norm: 1/rms", rows, itemsize)
    if node is None:
        del square, mean
        return tape.like(x, "norm: normalized")

    def square_backward(_):
        power, twice = (tape.make(f"norm: gradient, {name}", numel, itemsize) for name in ("x", "2x"))
        of_x = tape.make("norm: gradient through the mean", numel, itemsize)
        del power, twice
        return [(node, of_x)]

    square_node = tape.record(square, square_backward, saved).node
    del square
    mean_node = tape.record(
        mean, lambda _: [(square_node, tape.make("norm: gradient of the mean", numel, itemsize))]
    ).node
    del mean
    scale_node = tape.record(
        scale,
        lambda _: [(mean_node, tape.make("norm: gradient of the mean, per row", rows, itemsize))],
        tape.save(scale),
    ).node
    saved = tape.save(x, scale)

    def multiply_backward(_):
        of_scale = tape.make("norm: gradient of 1/rms, unreduced", numel, itemsize)
        of_x = tape.make("norm: gradient through the multiplication", numel, itemsize)
        of_rows = tape.make("norm: gradient of 1/rms", rows, itemsize)
        del of_scale
        return [(node, of_x), (scale_node, of_rows)]

    return tape.record(tape.like(x, "norm: normalized"), multiply_backward, saved)


def _scaled(tape, out: AbstractTensor, normal: AbstractTensor, weight: AbstractParameter, scale=None) -> AbstractTensor:
    """Record ``out`` as ``normal`` times a weight per column, or times ``scale``, a tensor made of the weight."""
    node, numel, itemsize = normal.node, normal.numel, normal.itemsize
    if node is None and not weight.trained:
        return out
    saved = tape.save(normal) if weight.trained else []
    saved += tape.save(scale) if scale and node else []
    if weight.trained:
        tape.count_use(weight)

    def run(_):
        of_weight = tape.make("norm: gradient of weight, unreduced", numel, itemsize) if weight.trained else None
        made: list[tuple] = [(node, tape.make("norm: gradient of normalized", numel, itemsize))] if node else []
        if weight.trained:
            gradient_itemsize = itemsize if tape.norm_gradients_in_fp32 else weight.itemsize
            made.append((weight, tape.gradient_of(weight, gradient_itemsize)))
        del of_weight
        return made

    return tape.record(out, run, saved)
