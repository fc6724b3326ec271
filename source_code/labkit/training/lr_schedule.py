# SPDX-License-Identifier: BSD-3-Clause
"""Compute the learning rate of a step: linear warm-up, then constant, cosine decay, or warmup-stable-decay (WSD)."""

import math


def learning_rate(config, step: int) -> float:
    """Return the learning rate of one step, a function of the options and the step's index only.

    There is no scheduler with a state of its own, so that a resumed run continues exactly, whatever the strategy.

      warm-up    lr (s + 1) / (w + 1) for s < w, so that the first step trains, too
      cosine     min_lr + (lr - min_lr) (1 + cos(pi p)) / 2            SGDR, arXiv:1608.03983
      wsd        lr, then min_lr + (lr - min_lr) (1 - p)               MiniCPM, arXiv:2404.06395; linear: 2405.18392
      where p = (s - b) / (n - b) is the finished fraction of the decay, which begins at step b

    Args:
        config: Has ``lr``, ``min_lr``, ``lr_schedule``, ``warmup_steps`` (w), ``decay_begin`` (b) and ``max_steps`` (n).
        step: Index of the step (s), counted from 0 over the whole training.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if step <= config.decay_begin:
        return config.lr
    finished = (step - config.decay_begin) / (config.max_steps - config.decay_begin)
    remaining = (1 + math.cos(math.pi * finished)) / 2 if config.lr_schedule == "cosine" else 1 - finished
    return config.min_lr + (config.lr - config.min_lr) * remaining
