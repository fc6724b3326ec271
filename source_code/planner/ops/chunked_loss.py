# SPDX-License-Identifier: BSD-3-Clause
"""The head and the cross-entropy in chunks of tokens, on sizes: labkit/training/chunked_loss.py. Imports no torch."""

from planner.ops.autograd import FP32, AbstractParameter, AbstractTensor


def chunked_loss(tape, x: AbstractTensor, weight: AbstractParameter, chunks: int) -> AbstractTensor:
    """Compute the mean cross-entropy of the head's logits, a chunk of tokens at a time.

    Forward makes both gradients, and saves them. Backward makes nothing: it scales them in place.

    Args:
        tape: the ``Tape`` to record on.
        x: (tokens, hidden size).
        weight: (vocabulary, hidden size).
        chunks: how many parts the tokens are divided into.

    Returns:
        A scalar, in fp32 at least.
    """
    dtype = tape.autocast or x.itemsize
    x = tape.to(x, dtype, "head's input, cast")
    parameter, weight = weight, tape.cast(weight)
    tape.casts.pop(parameter, None)  # not autocast's: the code casts it, and it is freed when forward is done
    vocab_size, hidden_size = weight.shape
    rows, loss_dtype, node = x.numel // hidden_size, max(FP32, dtype), x.node
    loss = tape.make("loss", 1, loss_dtype)
    gradients = [(node, tape.make("gradient of head's input", x.numel, dtype))]
    if weight.trained:
        receiver, make = tape.gradient_target(weight)
        gradients.append((receiver, make()))
    chunk = -(-rows // chunks)
    for begin in range(0, rows, chunk):
        one_chunk(tape, min(chunk, rows - begin), vocab_size, dtype, loss_dtype)

    def run(_):
        made = gradients[:]
        gradients.clear()
        return made

    return tape.record(loss, run)


def one_chunk(tape, rows: int, vocab_size: int, dtype: int, loss_dtype: int):
    """Allocate what one chunk needs: logits, their log-probabilities, and the gradient of the logits.

    Args:
        tape: the ``Tape`` that counts.
        rows: tokens in the chunk.
        vocab_size: logits per token.
        dtype: bytes per element of the logits as they are computed.
        loss_dtype: bytes per element of the logits as the loss takes them.
    """
    logits = tape.make("logits, a chunk", rows * vocab_size, dtype, per_sample=False)
    if loss_dtype != dtype:
        logits = tape.make("logits, a chunk in fp32", rows * vocab_size, loss_dtype, per_sample=False)
    logarithms = tape.make("log-softmax, a chunk", rows * vocab_size, loss_dtype, per_sample=False)
    del logits
    held = [tape.make("loss: of the targets", rows, loss_dtype), tape.make("loss of a chunk", 1, loss_dtype)]
    if loss_dtype != dtype:
        held.append(tape.make("gradient of logits, a chunk", rows * vocab_size, dtype, per_sample=False))
    del held, logarithms
