# SPDX-License-Identifier: BSD-3-Clause
"""A mixture of experts as transformers' grouped matmuls compute it: what it allocates, saves, and does in backward. No torch.

Source: transformers/integrations/moe.py, grouped_mm_experts_forward. Every size follows from tokens × experts per token,
whichever experts the router chooses.
"""

from planner.ops.autograd import FP32, INT64, AbstractTensor

INT32 = 4


def choose(tape, logits: AbstractTensor, settings) -> tuple[AbstractTensor, AbstractTensor]:
    """Choose experts by the router's logits, through a softmax or a sigmoid.

    Args:
        tape: the ``Tape`` to record on.
        logits: (tokens, experts).
        settings: ``shapes.Experts``.

    Returns:
        (the weights of the chosen, (tokens, top_k); their indices).
    """
    chosen, itemsize = logits.numel // settings.count * settings.top_k, logits.itemsize
    scores = tape.to(logits, max(FP32, itemsize), "router: logits in fp32")
    probabilities = tape.like(scores, "router: probabilities")
    probabilities = tape.record_unary(scores, probabilities, "gradient of logits", tape.save(probabilities))
    del scores
    weights = tape.make("router: weights", chosen, probabilities.itemsize)
    indices = tape.make("router: chosen experts", chosen, INT64)
    weights = tape.record_unary(probabilities, weights, "gradient of probabilities", tape.save(indices))
    del probabilities
    if settings.normalizes:
        sums = tape.make("router: sums of weights", chosen // settings.top_k, weights.itemsize)
        original = tape.like(weights, "router: weights before normalization")
        weights = tape.record_unary(weights, tape.view(weights), "gradient of weights", tape.save(original, sums))
        del sums, original
    if settings.router == "sigmoid":
        weights = tape.divide(weights, "router: weights, scaled")
    return (weights if settings.weighs_in_fp32 else tape.to(weights, itemsize, "router: weights")), indices


def compute(tape, x: AbstractTensor, weights: AbstractTensor, indices, gate_up, down, hidden_size: int):
    """Compute the chosen experts of each token, weigh, and sum them.

    Args:
        tape: the ``Tape`` to record on.
        x: (tokens, hidden size).
        weights: (tokens, top_k).
        indices: as weights, the chosen experts.
        gate_up: the experts' first weight, (experts, 2 × intermediate size, hidden size).
        down: the second, (experts, hidden size, intermediate size).
        hidden_size: elements of a token.

    Returns:
        As x.
    """
    chosen, count, itemsize = weights.numel, gate_up.shape[0], x.itemsize
    inner = down.numel // (count * hidden_size)
    ids = tape.make("experts: sorted", chosen, INT64)
    order = tape.make("experts: order", chosen, INT64)
    of_token = tape.make("experts: token of each row", chosen, INT64)
    rows = gathered(tape, x, chosen * hidden_size, of_token, "experts: rows")
    sorted_weights = gathered(tape, weights, chosen, order, "experts: weights of rows")
    held = tape.make("experts: sorted, as numbers", chosen, FP32)
    ends = tape.make("experts: last row of each", count, INT32)
    both = grouped(tape, rows, gate_up, chosen * 2 * inner, ends, "experts: gate and up")
    del rows
    gate, up = tape.split(both, [chosen * inner] * 2, "gate, up")
    product = tape.multiply(tape.silu(gate, "experts: silu"), up, "experts: product")
    del gate, up
    both = grouped(tape, product, down, chosen * hidden_size, ends, "experts: outputs")
    del product
    both = weighed(tape, both, sorted_weights)
    inverse = tape.make("experts: inverse order", chosen, INT64)
    both = gathered(tape, both, chosen * hidden_size, inverse, "experts: outputs in order")
    del ids, held
    out = tape.record_unary(both, tape.make("experts: sum", x.numel, both.itemsize), "gradient of outputs")
    del both
    return tape.to(out, itemsize, "experts: sum")


def gathered(tape, x, numel: int, indices, name: str):
    """Index rows of x; backward adds the gradients of rows to zeros, out of place."""
    node, size, itemsize = x.node, x.numel, x.itemsize
    saved = tape.save(indices) if node else []
    out = tape.make(name, numel, itemsize)
    if node is None:
        return out

    def run(_):
        zeros = tape.make(f"gradient of {name}: zeros", size, itemsize)
        added = tape.make(f"gradient of {name}", size, itemsize)
        del zeros
        return [(node, added)]

    return tape.record(out, run, saved)


def grouped(tape, x, weight, numel: int, ends, name: str):
    """Multiply each expert's rows by its weight, in the weight's format: autocast casts neither. Saves rows and their ends."""
    x = tape.to(x, weight.itemsize)
    node, size, itemsize = x.node, x.numel, x.itemsize
    saved = tape.save(*([x] if weight.trained else []), ends)
    out = tape.make(name, numel, itemsize)
    receiver, gradient_of = tape.gradient_target(weight)

    def run(_):
        made = [(receiver, gradient_of())]
        return [*made, (node, tape.make(f"gradient of {name}'s rows", size, itemsize))]

    return tape.record(out, run, saved)


def weighed(tape, x, weights):
    """Multiply rows by their weights, in the larger of their formats. Saves both."""
    nodes, numel, itemsize = (x.node, weights.node), x.numel, x.itemsize
    rows, rows_itemsize = weights.numel, weights.itemsize
    out_itemsize = max(itemsize, rows_itemsize)
    saved = tape.save(x, weights)
    out = tape.make("experts: outputs, weighed", numel, out_itemsize)

    def run(_):
        of_x = tape.make("gradient of outputs, unweighed", numel, out_itemsize)
        if out_itemsize > itemsize:
            of_x = tape.make("gradient of outputs, unweighed, cast", numel, itemsize)
        of_rows = tape.make("gradient of weights, unreduced", numel, out_itemsize)
        del of_rows  # in place of out's gradient, which autograd frees before it reduces this one
        of_weights = tape.make("gradient of weights of rows", rows, rows_itemsize)
        return [(nodes[0], of_x), (nodes[1], of_weights)]

    return tape.record(out, run, saved)
