"""Declare the options of the learning rate's schedule and of weight decay, for every lab that trains with AdamW.

It imports no torch. The schedule itself is in training/lr_schedule.py, the parameter groups in training/weight_decay.py.
"""

import math
from dataclasses import dataclass
from typing import Literal

from labkit import UserError
from labkit.running.options import Training, option

WEIGHT_DECAY = 0.01  # torch.optim.AdamW's default


@dataclass(frozen=True)
class OptimizerOptions(Training):
    """Add a learning-rate schedule and weight decay to the options of a lab that has ``lr`` and ``max_steps``."""

    warmup_steps: int = option(
        0, "raise the learning rate linearly to --lr over the first N steps", least=0, resumed="print"
    )
    lr_schedule: Literal["constant", "cosine", "wsd"] = option(
        "constant",
        "learning rate after the warm-up: constant, cosine decay, or warmup-stable-decay (constant, then linear decay)",
        resumed="print",
    )
    decay_steps: int | None = option(
        None,
        "--lr-schedule wsd: decay over the last N steps (default: a tenth of --max-steps)",
        least=1,
        resumed="print",
    )
    min_lr: float = option(0.0, "learning rate at which the decay ends", least=0, resumed="print")
    weight_decay: float = option(WEIGHT_DECAY, "AdamW's weight decay", least=0, resumed="print")
    decay_1d: bool = option(
        True, "AdamW: apply weight decay to norms and biases, too; --no-decay-1d: to matrices only", resumed="print"
    )

    @property
    def decay_begin(self) -> int:
        """Index of the step at which the learning rate begins to fall; ``max_steps`` if it never does."""
        decay_steps = self.decay_steps or math.ceil(self.max_steps / 10)
        begin = {"cosine": self.warmup_steps, "wsd": self.max_steps - decay_steps}
        return begin.get(self.lr_schedule, self.max_steps)

    def __post_init__(self):
        super().__post_init__()
        decays = self.lr_schedule != "constant"
        adamw = getattr(self, "optimizer", "adamw").startswith("adamw")
        changed = self.weight_decay != WEIGHT_DECAY or not self.decay_1d
        conflicts = {
            "--min-lr is where a decay ends: give --lr-schedule cosine or wsd, too": self.min_lr and not decays,
            "--decay-steps goes with --lr-schedule wsd: leave it out": self.decay_steps and self.lr_schedule != "wsd",
            f"--min-lr {self.min_lr:g} is above --lr {self.lr:g}: give a lower one": self.min_lr > self.lr,
            f"warm-up and decay do not fit into --max-steps {self.max_steps}: give a smaller --warmup-steps or "
            "--decay-steps": decays and not self.warmup_steps <= self.decay_begin < self.max_steps,
            "--weight-decay and --no-decay-1d are AdamW's: leave them out with other optimizers": changed and not adamw,
            "--no-decay-1d tells norms and biases by their shape, which FSDP1 flattens: use --strategy fsdp2 or ddp": (
                self.strategy == "fsdp1" and not self.decay_1d
            ),
        }
        for sentence, found in conflicts.items():
            if found:
                raise UserError(sentence)
