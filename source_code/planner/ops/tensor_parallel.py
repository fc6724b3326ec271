# SPDX-License-Identifier: BSD-3-Clause
"""Tensor parallelism with sequence parallelism: its gathers and scatters, and its loss of a sharded vocabulary.

The ranks of a tensor group see the same sequences. Each has some columns or rows of every weight, and between the linear
layers some tokens of every sequence (arXiv:2205.05198). A rank's blueprint (planner/models/networks.py) has its own parts
of the parameters; the functions here stand where it meets the other ranks. Imports no torch.

Sources: torch/distributed/tensor/parallel/style.py and loss.py, _functional_collectives.py (the copies around a
collective), and traces of real steps (labkit/measuring/trace.py).
"""

from dataclasses import dataclass

from planner.ops.autograd import INT64, AbstractParameter, AbstractTensor


@dataclass(frozen=True)
class Exchange:
    """The traffic of a tensor group in a micro-batch.

    Attributes:
        tp_degree: ranks of the group.
        numel: elements of the activation that is gathered or scattered, (batch, length, hidden size).
        gathers: all-gathers of it.
        scatters: reduce-scatters of it.
        rows: tokens; for each of them the loss all-reduces three elements.
        matmul_sums: all-reduces of it as the output of a matmul, in the matmul's number format.
        sums: other all-reduces of it, and of its gradient.
        logits: elements of the logits, if these are all-gathered.
        routing_weights: elements of the weights of chosen experts, whose gradient is all-reduced.
        routing_in_fp32: whether these are in fp32 at least.
        routing_sums: all-reduces of them.
    """

    tp_degree: int = 1
    numel: int = 0
    gathers: int = 0
    scatters: int = 0
    rows: int = 0
    matmul_sums: int = 0
    sums: int = 0
    logits: int = 0
    routing_weights: int = 0
    routing_in_fp32: bool = False
    routing_sums: int = 0

    def reduces_gradient_of(self, parameter: AbstractParameter) -> bool:
        """Return whether each rank has a part of a replicated parameter's gradient, so that they are summed.

        With sequence parallelism this is so for all; without it, for the norms of queries and keys alone.
        """
        return not self.logits or parameter.name in ("query_norm.weight", "key_norm.weight")


def exchange(tp_degree: int, layers: int, tokens: int, hidden_size: int, recomputed: int) -> Exchange:
    """Return what a tensor group exchanges for a GPT.

    A block gathers the input of its attention and of its feed-forward layer, and scatters their outputs; the embedding
    scatters, the head gathers. In backward each gather becomes a scatter, and vice versa. A recomputed block gathers
    twice more and scatters once: its last output is not recomputed.

    Args:
        tp_degree: ranks of the group.
        layers: blocks of the model.
        tokens: of a micro-batch.
        hidden_size: elements of a token between blocks.
        recomputed: blocks that are recomputed.
    """
    if tp_degree == 1:
        return Exchange()
    both = 2 * (2 * layers + 1)
    return Exchange(
        tp_degree,
        numel=tokens * hidden_size,
        gathers=both + 2 * recomputed,
        scatters=both + recomputed,
        rows=tokens,
    )


def gather(tape, x: AbstractTensor, tp_degree: int, batch_size: int) -> AbstractTensor:
    """All-gather tokens: (batch, length / tp_degree, hidden size) → (batch, length, hidden size).

    Args:
        tape: the ``Tape`` to record on.
        x: this rank's tokens.
        tp_degree: ranks of the group; x itself is returned if it is 1.
        batch_size: sequences; with more than one, the gathered tensor is copied into order.
    """
    if tp_degree == 1:
        return x
    node, numel, itemsize = x.node, x.numel, x.itemsize
    out = _gathered(tape, x, tp_degree, batch_size)
    return tape.record(out, lambda _: [(node, _scattered(tape, numel, itemsize, tp_degree))])


def scatter(tape, x: AbstractTensor, tp_degree: int, batch_size: int) -> AbstractTensor:
    """Reduce-scatter tokens: sum the ranks' (batch, length, hidden size) → (batch, length / tp_degree, hidden size).

    Args:
        tape: the ``Tape`` to record on.
        x: this rank's summand.
        tp_degree: ranks of the group; x itself is returned if it is 1.
        batch_size: sequences.
    """
    if tp_degree == 1:
        return x
    node = x.node
    out = _scattered(tape, x.numel // tp_degree, x.itemsize, tp_degree)
    return tape.record(out, lambda gradient: [(node, _gathered(tape, gradient, tp_degree, batch_size))])


def replicated(tape, x: AbstractTensor, tp_degree: int) -> AbstractTensor:
    """View the input of a layer that is split by columns; backward all-reduces its gradient, into a new tensor.

    Args:
        tape: the ``Tape`` to record on.
        x: the input, which every rank of the group has whole.
        tp_degree: ranks of the group; x itself is returned if it is 1.
    """
    if tp_degree == 1 or x.node is None:
        return x
    return tape.record_unary(x, tape.view(x), "gradient, summed over ranks")


def summed(tape, x: AbstractTensor, tp_degree: int) -> AbstractTensor:
    """All-reduce the output of a layer that is split by rows, into a new tensor; backward passes the gradient on.

    Args:
        tape: the ``Tape`` to record on.
        x: this rank's summand.
        tp_degree: ranks of the group; x itself is returned if it is 1.
    """
    return x if tp_degree == 1 else tape.pass_on(x, "summed over ranks")


def gather_columns(tape, x: AbstractTensor, tp_degree: int) -> AbstractTensor:
    """All-gather the columns of a layer's output: (…, features / tp_degree) → (…, features).

    Args:
        tape: the ``Tape`` to record on.
        x: this rank's columns.
        tp_degree: ranks of the group; x itself is returned if it is 1.
    """
    if tp_degree == 1:
        return x
    received = tape.make("columns, rank by rank", tp_degree * x.numel, x.itemsize)
    out = tape.make("columns, gathered", tp_degree * x.numel, x.itemsize)
    del received
    node, numel, itemsize = x.node, x.numel, x.itemsize
    return tape.record(out, lambda _: [(node, tape.make("gradient of columns", numel, itemsize))])


def _gathered(tape, x, tp_degree, batch_size):
    received = tape.make("gathered, rank by rank", tp_degree * x.numel, x.itemsize)
    return tape.make("gathered", tp_degree * x.numel, x.itemsize) if batch_size > 1 else received


def _scattered(tape, numel, itemsize, tp_degree):
    """numel: elements of the output."""
    packed = tape.make("to be scattered, rank by rank", tp_degree * numel, itemsize)
    out = tape.make("scattered", numel, itemsize)
    del packed
    return out


def embedding(tape, tokens: AbstractTensor, weight: AbstractParameter, tp_degree: int) -> AbstractTensor:
    """Look up tokens (…,) in this rank's rows of the vocabulary → (…, hidden size), zeros for other ranks' tokens.

    Backward makes a gradient for the whole vocabulary on each rank, which keeps its part when gradients are reduced.

    Args:
        tape: the ``Tape`` to record on.
        tokens: (batch, length).
        weight: (vocabulary / tp_degree, hidden size).
        tp_degree: ranks of the group.
    """
    if tp_degree == 1:
        return tape.embedding(tokens, weight)
    held = [tape.make(f"embedding: {what}", tokens.numel, size) for what, size in (("mask", 1), ("rows", INT64))]
    out = tape.make("embedding", tokens.numel * weight.shape[1], weight.itemsize)
    del held
    tape.count_use(weight)

    def run(_):
        tied = weight.uses > 1  # then a copy of this rank's part is added to the head's gradient, which is sharded
        name, copies = f"gradient of {weight.name}, unsharded", tp_degree + tied
        kept = "gradients" if tape.gradient_category == "gradients" else None  # without FSDP it stays as it is
        full = tape.make(name, copies * weight.numel, weight.itemsize, kept, per_sample=False)
        if tied:
            full.numel = weight.numel
        else:
            weight.gradient_copies = tp_degree
        return [(weight, full)]

    return tape.record(out, run, tape.save(tokens))


def cross_entropy(tape, logits: AbstractTensor, targets: AbstractTensor, tp_degree: int) -> AbstractTensor:
    """Compute the mean cross-entropy of logits (tokens, vocabulary / tp_degree), without gathering them.

    For each token, the maximum, the sum of exponentials, and the target's logit are all-reduced.

    Args:
        tape: the ``Tape`` to record on.
        logits: this rank's columns.
        targets: (tokens,).
        tp_degree: ranks of the group.
    """
    if tp_degree == 1:
        return tape.nll_loss(tape.log_softmax(logits), targets)
    return _nll_loss(tape, _log_softmax(tape, logits, targets.numel), targets)


def _log_softmax(tape, x, rows):
    """Saves its output. Its backward passes the loss's gradient on."""
    highest = tape.make("loss: maxima", rows, x.itemsize)
    shifted = tape.like(x, "logits, shifted")
    powers = tape.like(x, "logits, exponential")
    sums = tape.make("loss: sums", rows, x.itemsize)
    del powers
    logarithms = tape.make("loss: logarithms", rows, x.itemsize)
    out = tape.like(x, "log-softmax")
    del highest, shifted, sums, logarithms
    node = x.node
    return tape.record(out, lambda gradient: [(node, gradient)], tape.save(out))


def _nll_loss(tape, x, targets):
    """Saves the log-probabilities, the targets, and their weight. Its backward includes that of the softmax."""
    node, rows, numel, itemsize = x.node, targets.numel, x.numel, x.itemsize
    out, weight = tape.make("loss", 1, x.itemsize), tape.make("loss: weight", 1, x.itemsize)

    def run(_):
        targeted = tape.make("log-softmax: where the targets are", numel, itemsize)
        positions = tape.make("loss: positions of the targets", 3 * rows, INT64)
        masks = tape.make("loss: mask", rows, 1), tape.make("loss: of the targets", 2 * rows, itemsize)
        powers = tape.make("softmax", numel, itemsize)
        summed = tape.make("softmax, targets subtracted", numel, itemsize)
        del powers
        gradient = tape.make("gradient of logits", numel, itemsize)
        del targeted, positions, masks, summed
        return [(node, gradient)]

    return tape.record(out, run, tape.save(x, targets, weight))
