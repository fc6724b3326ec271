"""The text that the transformer lab reads: what Python's ``help()`` says, which comes with every Python.

Tokens are bytes, so the vocabulary is 256; a model with a larger one leaves the rest of it unused. The text
differs a little from one version of Python to the next, and so do the losses.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from labkit import UserError

NAME = "pydoc-topics"


@dataclass(frozen=True, eq=False)
class Text:
    """Two parts of one text, each a uint8 tensor of bytes; the last tenth is for validation."""

    train: torch.Tensor
    validation: torch.Tensor


def read(file: str | None = None) -> tuple[str, bytes]:
    """(name, bytes) of a file of text, or of the course's own. UserError: it cannot be read."""
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
    """Load the whole text onto the device: it is half a megabyte.

    Args:
        device: Where the tokens go.
        seq_len: Number of tokens in a sequence.

    Raises:
        UserError: This Python came without the text, or its validation part is too short for a sequence.
    """
    tokens = torch.frombuffer(bytearray(read()[1]), dtype=torch.uint8).to(device)
    cut = len(tokens) * 9 // 10
    if seq_len >= len(tokens) - cut:
        raise UserError(f"--seq-len must be less than the {len(tokens) - cut} tokens of the validation text")
    return Text(tokens[:cut], tokens[cut:])


def starts(tokens, length: int, count: int, seed: int, step: int) -> torch.Tensor:
    """Where the ``count`` sequences of a step's global batch begin: int64, (count,), on the CPU.

    The n-th is a function of seed, step and n alone, so ranks and accumulation only decide who reads which.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(len(tokens) - length, (count,), generator=generator)


def sequences(tokens, starts, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) that begin at ``starts``: int64, (*starts.shape, length); a target is the byte that follows."""
    places = starts.to(tokens.device)[..., None] + torch.arange(length, device=tokens.device)
    return tokens[places].long(), tokens[places + 1].long()
