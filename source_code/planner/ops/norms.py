"""Norms on sizes, as PyTorch computes them on each device: what they make, keep, and do in backward. Imports no torch."""

from planner.ops.autograd import FP32, SizedParameter, SizedTensor


def rms_norm(tape, x: SizedTensor, weight: SizedParameter) -> SizedTensor:
    """x (…, width) and weight (width,) → x · 1/rms(x) · weight, as x."""
    if tape.fused:
        return _rms_norm_fused(tape, x, weight)
    itemsize = x.itemsize
    x = tape.to(x, max(itemsize, FP32), "norm: input in fp32")
    normal = _normalized(tape, x, rows=x.numel // weight.numel)
    out = tape.like(x, "norm")
    del x
    out = _weigh(tape, out, normal, weight)
    del normal  # backward has it, if the weight is trained
    return tape.to(out, itemsize, "norm")


def _rms_norm_fused(tape, x, weight):
    """On a GPU: keeps its input and one number a row, in fp32 at least."""
    rows = tape.make("norm: 1/rms", x.numel // weight.numel, max(FP32, x.itemsize))
    out = tape.like(x, "norm")
    return tape.weighed(x, out, weight, None, tape.save(x, rows) if x.node or weight.trained else [])


def layer_norm(tape, x: SizedTensor, weight: SizedParameter, bias: SizedParameter) -> SizedTensor:
    """x (…, width), weight and bias (width,) → as x; under autocast in fp32. Keeps x, and a mean and 1/std for each row."""
    x = tape.to(x, max(FP32, x.itemsize) if tape.autocast else x.itemsize)
    rows = tape.make("norm: mean and 1/std", 2 * (x.numel // weight.numel), max(FP32, x.itemsize))
    out = tape.like(x, "norm")
    return tape.weighed(x, out, weight, bias, tape.save(x, rows) if x.node or weight.trained else [])


def _normalized(tape, x: SizedTensor, rows: int) -> SizedTensor:
    """On the CPU a norm is several operators, in fp32 at least: the square, its mean, 1/root, the product."""
    node, numel, wide = x.node, x.numel, x.itemsize
    saved = tape.save(x) if node else []
    square = tape.like(x, "norm: square")
    mean = tape.make("norm: mean", rows, wide)
    scale = tape.make("norm: 1/rms", rows, wide)
    if node is None:
        del square, mean
        return tape.like(x, "norm: normalized")

    def square_backward(_):
        power, twice = (tape.make(f"norm: gradient, {name}", numel, wide) for name in ("x", "2x"))
        of_x = tape.make("norm: gradient through the mean", numel, wide)
        del power, twice
        return [(node, of_x)]

    square_node = tape.record(square, square_backward, saved).node
    del square
    mean_node = tape.record(mean, lambda _: [(square_node, tape.make("norm: gradient of the mean", numel, wide))]).node
    del mean
    scale_node = tape.record(
        scale,
        lambda _: [(mean_node, tape.make("norm: gradient of the mean, a row each", rows, wide))],
        tape.save(scale),
    ).node
    saved = tape.save(x, scale)

    def product_backward(_):
        of_scale = tape.make("norm: gradient of 1/rms, whole", numel, wide)
        of_x = tape.make("norm: gradient through the product", numel, wide)
        of_rows = tape.make("norm: gradient of 1/rms", rows, wide)
        del of_scale
        return [(node, of_x), (scale_node, of_rows)]

    return tape.record(tape.like(x, "norm: normalized"), product_backward, saved)


def _weigh(tape, out: SizedTensor, normal: SizedTensor, weight: SizedParameter) -> SizedTensor:
    """The product with a weight for each column."""
    node, numel, wide = normal.node, normal.numel, normal.itemsize
    if node is None and not weight.trained:
        return out
    saved = tape.save(normal) if weight.trained else []
    if weight.trained:
        tape.use(weight)

    def run(_):
        of_weight = tape.make("norm: gradient of weight, a row each", numel, wide) if weight.trained else None
        made = [(node, tape.make("norm: gradient of normalized", numel, wide))] if node else []
        if weight.trained:
            made.append((weight, tape.gradient_of(weight, wide if tape.wide_gradients else weight.itemsize)))
        del of_weight
        return made

    return tape.record(out, run, saved)
