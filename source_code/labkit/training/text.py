# SPDX-License-Identifier: BSD-3-Clause
"""Load the training text of the transformer labs: the topics of ``help()``, which are part of every Python.

Tokens are bytes, so the vocabulary has 256 tokens; a model with a larger vocabulary does not use the rest. The text
differs slightly between versions of Python, and so do the losses.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from labkit import UserError

NAME = "pydoc-topics"


@dataclass(frozen=True, eq=False)
class Text:
    """Training and validation text, each a uint8 tensor of bytes; the last tenth is for validation."""

    train: torch.Tensor
    validation: torch.Tensor


def read(file: str | None = None) -> tuple[str, bytes]:
    """Read a text file, or the course's own text, and return (name, bytes).

    Raises:
        UserError: it cannot be read.
    """
    if file:
        try:
            return Path(file).name, Path(file).read_bytes()
        except OSError as error:
            raise UserError(f"--data {file} cannot be read ({error.strerror}): name a file of text") from None
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "this Python has no pydoc_data, the text to train on: install your system's whole python3 package"
        ) from None
    return NAME, "".join(topics[name] for name in sorted(topics)).encode()


def load(device: torch.device, seq_len: int = 1) -> Text:
    """Load the whole text, half a megabyte, onto a device.

    Args:
        device: Where the tokens go.
        seq_len: Number of tokens in a sequence.

    Raises:
        UserError: This Python lacks the text, or the validation text is shorter than a sequence.
    """
    tokens = torch.frombuffer(bytearray(read()[1]), dtype=torch.uint8).to(device)
    cut = len(tokens) * 9 // 10
    if seq_len >= len(tokens) - cut:
        raise UserError(f"--seq-len must be less than the {len(tokens) - cut} tokens of the validation text")
    return Text(tokens[:cut], tokens[cut:])


def starts(tokens, length: int, count: int, seed: int, step: int) -> torch.Tensor:
    """Draw the start positions of the sequences of a step's global batch.

    The n-th position depends only on seed, step, and n, and not on the number of ranks or micro-batches.

    Args:
        tokens: the text, (tokens,).
        length: tokens in a sequence.
        count: number of sequences.
        seed, step: of the run, and of its step.

    Returns:
        int64, (count,), on the CPU.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(len(tokens) - length, (count,), generator=generator)


def sequences(tokens, starts, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets that begin at ``starts``; each target is the next token.

    Args:
        tokens: the text, (tokens,).
        starts: start positions, any shape.
        length: tokens in a sequence.

    Returns:
        (inputs, targets), each int64, (*starts.shape, length), on the text's device.
    """
    positions = starts.to(tokens.device)[..., None] + torch.arange(length, device=tokens.device)
    return tokens[positions].long(), tokens[positions + 1].long()
