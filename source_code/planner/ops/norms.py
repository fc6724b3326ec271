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
    rows = tape.make("norm: mean and 1/std", 2 * (x.numel // weight.numel), max(FP32, x.itemsize))
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


def _scaled(tape, out: AbstractTensor, normal: AbstractTensor, weight: AbstractParameter) -> AbstractTensor:
    """Record ``out`` as ``normal`` times a weight per column."""
    node, numel, itemsize = normal.node, normal.numel, normal.itemsize
    if node is None and not weight.trained:
        return out
    saved = tape.save(normal) if weight.trained else []
    if weight.trained:
        tape.count_use(weight)

    def run(_):
        of_weight = tape.make("norm: gradient of weight, unreduced", numel, itemsize) if weight.trained else None
        made = [(node, tape.make("norm: gradient of normalized", numel, itemsize))] if node else []
        if weight.trained:
            gradient_itemsize = itemsize if tape.norm_gradients_in_fp32 else weight.itemsize
            made.append((weight, tape.gradient_of(weight, gradient_itemsize)))
        del of_weight
        return made

    return tape.record(out, run, saved)
