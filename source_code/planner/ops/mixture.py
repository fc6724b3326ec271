# SPDX-License-Identifier: BSD-3-Clause
"""The course's mixture of experts on sizes: what it allocates, saves, and does in backward. Imports no torch.

It states what labkit/training/experts.py computes, line for line, except intermediate results of a few elements per token.
"""

from planner.ops import experts
from planner.ops.autograd import FP64, INT64, AbstractTensor


def mixture(tape, x: AbstractTensor, p: dict, block: int, spread, shared) -> AbstractTensor:
    """Compute the chosen experts of each token, weigh, and sum them.

    Args:
        tape: the ``Tape`` to record on.
        x: (tokens, hidden size).
        p: {name: parameter}.
        block: which one of those with experts, counted from 0.
        spread: ``routing.Spread``.
        shared: computes the shared expert; None: there is none.

    Returns:
        As x.
    """
    settings, size, itemsize = spread.experts, spread.hidden_size, x.itemsize
    sent, received = spread.routing.rows(tape.micro_batch, block)
    weights, chosen = router(tape, x, p, settings, spread.batch_size)  # both are alive until the end
    order = tape.make("experts: order", sent, INT64)
    token = tape.make("experts: token of each row", sent, INT64)
    rows = experts.gathered(tape, x, sent * size, token, "experts: rows")
    counts = None
    if spread.ep_degree == 1:
        rows = compute(tape, rows, p, size)
    else:
        counts = tape.make("experts: rows of each", settings.count // spread.ep_degree, INT64)
        arrived = exchanged(tape, rows, received * size, "experts: rows received")
        expert = tape.make("experts: expert of each row", received, INT64)
        by_expert = tape.make("experts: order of rows received", received, INT64)
        arrived_sorted = experts.gathered(
            tape, arrived, received * size, by_expert, "experts: rows received, by expert"
        )
        del rows, arrived, expert
        outputs = tape.experts_unit(lambda rows: compute(tape, rows, p, size), arrived_sorted)
        inverse = tape.make("experts: inverse order", received, INT64)
        back = experts.gathered(tape, outputs, received * size, inverse, "experts: outputs, by rank")
        rows = exchanged(tape, back, sent * size, "experts: outputs returned")
        del back, outputs, inverse, arrived_sorted, by_expert
    own_weights = experts.gathered(tape, weights, sent, order, "experts: weights of rows")
    rows = experts.weighed(tape, rows, own_weights)
    del own_weights
    out = summed(tape, rows, x.numel, token, itemsize)
    out = tape.add(out, shared(x), "experts and shared expert") if shared else out
    del chosen, counts
    return out


def router(tape, x, p, settings, batch_size: int) -> tuple[AbstractTensor, AbstractTensor]:
    """Return (weights, experts) of each token, both (tokens, top_k)."""
    logits = tape.linear(x, p["router.weight"])
    weights, chosen = experts.choose(tape, logits, settings)
    if settings.balance == "loss":  # which saves each expert's share of a sequence
        share = tape.make("router: shares", batch_size * settings.count, weights.itemsize)
        weights = tape.record_unary(weights, tape.view(weights), "gradient of weights, passed on", tape.save(share))
    return weights, chosen


def compute(tape, rows, p, hidden_size: int) -> AbstractTensor:
    """Compute each expert's outputs of its rows (rows, hidden size)."""
    gate_up, down = p["experts.gate_up.weight"], p["experts.down.weight"]
    count = rows.numel // hidden_size
    inner = down.numel // (down.shape[0] * hidden_size)
    both = grouped(tape, rows, gate_up, count * 2 * inner, "experts: gate and up")
    gate, up = tape.split(both, [count * inner] * 2, "gate, up")
    del both
    product = tape.multiply(tape.silu(gate, "experts: silu"), up, "experts: product")
    return grouped(tape, product, down, count * hidden_size, "experts: outputs")


def grouped(tape, x, weight, numel: int, name: str) -> AbstractTensor:
    """Multiply each expert's rows by its weight; in fp64 expert by expert, else in one kernel, which takes rows' ends."""
    ends = tape.make("experts: last row of each", 0 if x.itemsize == FP64 else weight.shape[0], experts.INT32)
    return experts.grouped(tape, x, weight, numel, ends, name)


def exchanged(tape, x, numel: int, name: str) -> AbstractTensor:
    """Exchange rows among ranks: as many elements as are received; backward exchanges their gradients."""
    node, size, itemsize = x.node, x.numel, x.itemsize
    return tape.record(
        tape.make(name, numel, itemsize), lambda _: [(node, tape.make(f"gradient of {name}", size, itemsize))]
    )


def summed(tape, rows, numel: int, token, itemsize: int) -> AbstractTensor:
    """Add each token's rows to zeros, out of place. Saves the token of each row."""
    zeros = tape.make("experts: zeros", numel, itemsize)
    out = tape.make("experts: sum", numel, itemsize)
    del zeros
    return tape.record_unary(rows, out, "gradient of weighed outputs", tape.save(token))
