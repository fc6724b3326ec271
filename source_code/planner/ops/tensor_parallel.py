"""Tensor parallelism with sequence parallelism, on sizes: what is gathered, what is split, what a loss of parts costs.

The ranks of a tensor group see the same sequences. Each has some columns or rows of every matrix, and between the
products some tokens of every sequence (arXiv:2205.05198). A rank's blueprint (planner/models/networks.py) has its own parts of
the parameters; what is here stands where it meets the others. No torch.

Sources: torch/distributed/tensor/parallel/style.py and loss.py, _functional_collectives.py (the copies around a
collective), and traces of real steps (labkit/measuring/trace.py).
"""

from dataclasses import dataclass

from planner.ops.autograd import INT64


@dataclass(frozen=True)
class Exchange:
    """What the ``parts`` ranks of a tensor group send one another in a micro-batch.

    ``gathers`` and ``scatters``: how many all-gathers and reduce-scatters of an activation of ``numel`` numbers. rows:
    for each token, the loss sums three numbers.
    """

    parts: int = 1
    numel: int = 0
    gathers: int = 0
    scatters: int = 0
    rows: int = 0


def exchange(parts: int, layers: int, tokens: int, width: int, recomputed: int) -> Exchange:
    """Of a GPT, of whose blocks so many are recomputed. In backward each gather becomes a scatter, and vice versa.

    A block gathers what comes into its attention and into its feed-forward part, and scatters what comes out; the
    embedding scatters, the head gathers. A recomputed block gathers twice more and scatters once: what its last product
    makes, nobody has kept.
    """
    if parts == 1:
        return Exchange()
    both = 2 * (2 * layers + 1)
    return Exchange(parts, tokens * width, both + 2 * recomputed, both + recomputed, tokens)


def gather(tape, x, parts: int, batch: int):
    """(batch, length / parts, width) → (batch, length, width). Of several sequences, what arrives is put in order."""
    if parts == 1:
        return x
    node, numel, itemsize = x.node, x.numel, x.itemsize
    out = _gathered(tape, x, parts, batch)
    return tape.record(out, lambda _: [(node, _scattered(tape, numel, itemsize, parts))])


def scatter(tape, x, parts: int, batch: int):
    """Add up the ranks' (batch, length, width) → (batch, length / parts, width)."""
    if parts == 1:
        return x
    node = x.node
    out = _scattered(tape, x.numel // parts, x.itemsize, parts)
    return tape.record(out, lambda gradient: [(node, _gathered(tape, gradient, parts, batch))])


def _gathered(tape, x, parts, batch):
    arrived = tape.make("gathered, rank by rank", parts * x.numel, x.itemsize)
    return tape.make("gathered", parts * x.numel, x.itemsize) if batch > 1 else arrived


def _scattered(tape, numel, itemsize, parts):
    """numel: of the result."""
    packed = tape.make("to be scattered, rank by rank", parts * numel, itemsize)
    out = tape.make("scattered", numel, itemsize)
    del packed
    return out


def embedding(tape, tokens, weight, parts: int):
    """Tokens (…,) and this rank's part of the vocabulary → (…, width), zeros where the token is another rank's.

    Backward makes a gradient for the whole vocabulary on each rank, which keeps its part when gradients are reduced.
    """
    if parts == 1:
        return tape.embedding(tokens, weight)
    held = [tape.make(f"embedding: {what}", tokens.numel, size) for what, size in (("mask", 1), ("rows", INT64))]
    out = tape.make("embedding", tokens.numel * weight.shape[1], weight.itemsize)
    del held
    tape.use(weight)

    def run(_):
        added = weight.uses > 1  # a copy of this rank's part, to the head's gradient, which is there in parts
        whole = tape.make(f"gradient of {weight.name}, whole", (parts + added) * weight.numel, weight.itemsize)
        if added:
            whole.numel = weight.numel
        else:
            weight.times = parts
        return [(weight, whole)]

    return tape.record(out, run, tape.save(tokens))


def cross_entropy(tape, logits, targets, parts: int):
    """Mean cross-entropy of logits (tokens, vocabulary / parts): the maximum, the sum and the target's are reduced."""
    if parts == 1:
        return tape.nll_loss(tape.log_softmax(logits), targets)
    return _nll_loss(tape, _log_softmax(tape, logits, targets.numel), targets)


def _log_softmax(tape, x, rows):
    """Keeps its result. Its backward hands on what the loss has made."""
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
    """Keeps the log-probabilities, the targets and their weight. Its backward is that of the softmax too."""
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
