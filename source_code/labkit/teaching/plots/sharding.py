# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 03: model state by stage and by number of ranks."""

import matplotlib.pyplot as plt

from labkit.measuring.trace import CATEGORIES
from labkit.teaching.plots import (
    MIB,
    STRATEGY_COLOURS,
    category_legend,
    handles_of,
    headline,
    memory_bars,
    show,
    timelines,
)

STAGE_COLOURS = [STRATEGY_COLOURS[name] for name in ("ddp", "zero1", "zero2", "zero3")]


def stages(rows: list[tuple[str, dict, dict]], title: str, under: str, guesses: dict[str, float] | None = None):
    """Draw bars of model state: rows of (label, {category: bytes} measured, {category: bytes} predicted)."""
    figure, axes = plt.subplots(figsize=(10, 0.7 * len(rows) + 2.2), layout="constrained")
    empty = dict.fromkeys(CATEGORIES, 0)
    memory_bars(axes, [(label, empty | held, sum(predicted.values())) for label, held, predicted in rows], guesses)
    axes.set_xlabel("parameters, gradients, optimizer state per rank [MiB]")
    diamond = ", diamond: your guess" if any(guess is not None for guess in (guesses or {}).values()) else ""
    headline(figure, title, f"{under}\nsolid: measured, outlined: predicted{diamond}")
    category_legend(figure, handles_of(axes))
    show(figure)


def steps(rows: list[tuple[str, dict]], title: str):
    """Draw one step's memory per run with ``timelines``, with this chapter's names for the categories."""
    words = {
        "parameters": "parameters: this rank's shard",
        "gradients": "gradients: this rank's shard",
        "optimizer state": "optimizer state of the shard",
        "all-gather": "whole parameters, gathered",
        "reduce-scatter": "whole gradients, before the reduce-scatter",
    }
    timelines(rows, title, words)


def by_ranks(predicted: dict, measured: dict, title: str, under: str):
    """Draw model state over the number of ranks: {stage: [(ranks, bytes), …]}, one colour per stage."""
    figure, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")
    for (stage, points), colour in zip(predicted.items(), STAGE_COLOURS, strict=True):
        ranks, sizes = zip(*((w, size / MIB) for w, size in points), strict=True)
        axes.plot(ranks, sizes, "o-", color=colour, markerfacecolor="none", markersize=10, linewidth=1.5)
        axes.plot(*zip(*((w, size / MIB) for w, size in measured[stage]), strict=True), "o", color=colour, markersize=5)
        axes.annotate(
            f"{stage}: {sizes[-1]:.1f}", (ranks[-1], sizes[-1]), (12, 0), textcoords="offset points", va="center"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(w) for w in ranks])
    axes.minorticks_off()
    axes.set(xlim=(1.8, ranks[-1] * 1.9), xlabel="ranks", ylabel="model state per rank [MiB]")
    axes.set_ylim(bottom=0)
    axes.spines["bottom"].set_bounds(1.8, ranks[-1])
    headline(figure, title, f"{under}\nfilled dots: measured; circles and lines: predicted")
    show(figure)
