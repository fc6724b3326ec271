# SPDX-License-Identifier: BSD-3-Clause
"""Evidence: the losses of a small data-parallel training, with a fault in it. All ranks are computed in this process.

A linear classifier of 8 classes trains with SGD on 4 ranks: each rank has a replica and a batch of its own, and all
replicas take the mean of the ranks' gradients, as under DDP. Each row of the evidence has every rank's training loss, and
the loss of its replica on one validation batch, which all ranks share.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

RANKS, STEPS, BATCH, INPUTS, CLASSES = 4, 24, 32, 32, 8
RATE, HIGH_RATE = 0.5, 400.0
AWAY = 6  # steps that the run repeats when it resumes from an older checkpoint
FLIPPED_BIT = 25  # of the exponent (fp32): 16 times as large, or as small

FAULTS = {  # {fault: (whether its rank is asked, whether its step is asked, what it is)}
    "bad sample": (True, True, "a batch of one rank has a value that is not finite"),
    "flipped bit": (True, True, "bits flip in one rank's weights, just before a step"),
    "same batches": (False, False, "all ranks read the same batches"),
    "no update": (False, False, "the optimizer has other tensors than the model"),
    "older checkpoint": (False, True, "the run is requeued, and resumes from an older checkpoint than its last"),
    "high learning rate": (False, False, "the learning rate is far too high"),
    "healthy": (False, False, "nothing is wrong"),
}


@dataclass(frozen=True)
class Fault:
    """A fault of the training: its kind, and where it is; rank and step count from 0, and are None if not asked."""

    kind: str
    rank: int | None = None
    step: int | None = None


@cache
def train(seed: int, fault: Fault) -> list[dict]:
    """Train with a fault, and return a row for each step: {"step", "training": [of each rank], "validation": [...]}.

    Args:
        seed: of the data, and of the initial weights.
        fault: what goes wrong.
    """
    draw = torch.Generator().manual_seed(seed)
    teacher = torch.randn(INPUTS, CLASSES, generator=draw)
    weights = _initial(draw).repeat(RANKS, 1, 1)
    batches = [_batch(draw, teacher, RANKS) for _ in range(STEPS)]
    validation = _batch(draw, teacher, 1)
    rate = HIGH_RATE if fault.kind == "high learning rate" else RATE
    rows, kept = [], []
    for step in range(STEPS):
        now = step
        if fault.kind == "older checkpoint" and step >= fault.step:
            now = step - AWAY
            weights = kept[now] if step == fault.step else weights
        kept.append(weights)
        inputs, classes = _spoiled(*batches[now], fault, step)
        if fault.kind == "flipped bit" and step == fault.step:
            weights = _flipped(weights, fault.rank)
        training, gradients = _losses(weights, inputs, classes)
        seen, _ = _losses(weights, *(each.expand(RANKS, *each.shape[1:]) for each in validation))
        rows.append({"step": step, "training": training.tolist(), "validation": seen.tolist()})
        if fault.kind != "no update":
            weights = weights - rate * gradients.mean(0)
    return rows


def _initial(draw) -> torch.Tensor:
    """Return one replica's weights, (INPUTS, CLASSES), all with magnitudes from 1/16 to 1/8."""
    sizes = 0.07 + 0.05 * torch.rand(INPUTS, CLASSES, generator=draw)
    return sizes * (2 * torch.randint(0, 2, sizes.shape, generator=draw) - 1)


def _batch(draw, teacher, ranks: int) -> tuple:
    """Return (inputs, classes) of some ranks: (ranks, BATCH, INPUTS), (ranks, BATCH)."""
    inputs = torch.randn(ranks, BATCH, INPUTS, generator=draw)
    return inputs, (inputs @ teacher).argmax(-1)


def _spoiled(inputs, classes, fault: Fault, step: int) -> tuple:
    """Return a step's batches with the fault, if it is one of the data."""
    if fault.kind == "same batches":
        return inputs[:1].expand_as(inputs), classes[:1].expand_as(classes)
    if fault.kind == "bad sample" and step == fault.step:
        inputs = inputs.clone()
        inputs[fault.rank, 5, 7] = torch.nan
    return inputs, classes


def _flipped(weights, rank: int) -> torch.Tensor:
    """Flip a bit of the weights of the first input on one rank, so that it shows at once."""
    flipped = weights.clone()
    flipped[rank, 0].view(torch.int32)[:] ^= 1 << FLIPPED_BIT
    return flipped


def _losses(weights, inputs, classes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the mean loss of each rank, the gradient of its weights)."""
    scores = inputs @ weights
    losses = F.cross_entropy(scores.transpose(1, 2), classes, reduction="none").mean(1)
    errors = (scores.softmax(-1) - F.one_hot(classes, CLASSES)) / BATCH
    return losses, inputs.transpose(1, 2) @ errors
