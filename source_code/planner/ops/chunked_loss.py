"""The head's product and the cross-entropy for some tokens at a time, on sizes: labkit/training/chunked_loss.py. No torch."""

from planner.ops.autograd import FP32


def chunked_loss(tape, x, weight, chunks: int):
    """x (tokens, width) and weight (vocabulary, width) → a number. Keeps both gradients, which forward has made.

    Backward makes nothing: it scales them where they are.
    """
    dtype = tape.autocast or x.itemsize
    x = tape.to(x, dtype, "head's input, cast")
    parameter, weight = weight, tape.cast(weight)
    tape.casts.pop(parameter, None)  # not autocast's: it is cast by hand, and goes when forward is done
    vocabulary, width = weight.shape
    rows, wide, node = x.numel // width, max(FP32, dtype), x.node
    loss = tape.make("loss", 1, wide)
    gradients = [(node, tape.make("gradient of head's input", x.numel, dtype))]
    if weight.trained:
        receiver, make = tape.leaf(weight)
        gradients.append((receiver, make()))
    part = -(-rows // chunks)
    for begin in range(0, rows, part):
        one_chunk(tape, min(part, rows - begin), vocabulary, dtype, wide)

    def run(_):
        found = gradients[:]
        gradients.clear()
        return found

    return tape.record(loss, run)


def one_chunk(tape, rows: int, vocabulary: int, dtype: int, wide: int):
    """Logits, in fp32 at least, their log-probabilities, and of these the gradient of the logits."""
    logits = tape.make("logits, a chunk", rows * vocabulary, dtype, of_samples=False)
    if wide != dtype:
        logits = tape.make("logits, a chunk in fp32", rows * vocabulary, wide, of_samples=False)
    logarithms = tape.make("log-softmax, a chunk", rows * vocabulary, wide, of_samples=False)
    del logits
    held = [tape.make("loss: of the targets", rows, wide), tape.make("loss of a chunk", 1, wide)]
    if wide != dtype:
        held.append(tape.make("gradient of logits, a chunk", rows * vocabulary, dtype, of_samples=False))
    del held, logarithms
