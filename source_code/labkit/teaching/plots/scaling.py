# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 04: peak and step time by strategy, and memory over the number of ranks."""

import matplotlib.pyplot as plt

from labkit.measuring.trace import CATEGORIES
from labkit.teaching.plots import (
    COLOURS,
    MIB,
    STRATEGY_COLOURS,
    caption,
    category_legend,
    handles_of,
    headline,
    memory_bars,
    show,
    time_bars,
)

DARK = [COLOURS[category] for category in ("parameters", "gradients", "optimizer state")]


def peak_and_time(rows: list[tuple[str, dict, dict]], title: str, guesses: dict[str, float | None], tempting: float):
    """Draw the peak of each run by category, and below it the step time of the same runs.

    Args:
        rows: (label, record, predicted {category: bytes} of the peak).
        title: the figure's headline.
        guesses: {label: guessed peak in MiB, or None}.
        tempting: an estimate in MiB that leaves something out, drawn as a dotted line.
    """
    figure, (memory, time) = plt.subplots(2, 1, figsize=(10, 6.4), height_ratios=[4, 3], layout="constrained")
    bars = [(label, record["memory"]["peak"], sum(terms.values())) for label, record, terms in rows]
    memory_bars(memory, bars, guesses)
    for bar in [bar for bar in memory.containers if bar.get_label() in CATEGORIES]:
        sizes = [patch.get_width() for patch in bar]
        words = [f"{size:.1f}" if size > 0.04 * memory.get_xlim()[1] else "" for size in sizes]
        colour = "white" if COLOURS[bar.get_label()] in DARK else "black"
        memory.bar_label(bar, words, label_type="center", color=colour, fontsize=11)
    memory.set_ylim(len(rows) - 0.5, -0.85)
    memory.axvline(tempting, color="black", linestyle=":", linewidth=1.5)
    record = rows[0][1]
    memory.text(tempting, -0.5, f"  DDP / {record['ranks']}", va="bottom")

    time_bars(time, [(label, record["time"]["step"]) for label, record, _ in rows])
    steps = record["time"]["step"]["steps"] if record["time"]["step"] else 0
    links = "gloo, between processes on CPU cores" if record["device"] == "cpu" else "NCCL"
    time.set_title(f"{links}; one run each, {steps} steps after the first seven", fontsize=11)

    marks = "solid: measured, outlined: predicted, dotted: an estimate"
    marks += ", diamond: your guess" * any(guess is not None for guess in guesses.values())
    headline(figure, title, f"{caption(record)}\n{marks}")
    category_legend(figure, handles_of(memory))
    show(figure)


def against_ranks(
    measured: dict[int, dict],
    predicted: dict[int, tuple[dict, dict]],
    floor: int,
    title: str,
    guesses: dict[int, float | None],
):
    """Draw peak and persistent memory of a rank over the world size.

    Args:
        measured: {world size: record}.
        predicted: {world size: (persistent terms, peak terms)}, terms in bytes.
        floor: bytes below which the peak cannot fall.
        title: the figure's headline.
        guesses: {world size: guessed peak in MiB, or None}.
    """
    figure, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")
    colour = STRATEGY_COLOURS["fsdp2"]  # both series are of one strategy: their marks differ
    above = {"xytext": (0, 11), "textcoords": "offset points", "ha": "center", "fontsize": 11}
    for place, (name, mark) in enumerate((("between\nsteps", "s"), ("peak", "o"))):
        heights = {ranks: sum(terms[place].values()) / MIB for ranks, terms in predicted.items()}
        last = max(heights)
        axes.annotate(name, (last, heights[last]), (18, 4), textcoords="offset points", va="bottom", color=colour)
        key = ("start", "peak")[place]
        points = {ranks: sum(record["memory"][key].values()) / MIB for ranks, record in measured.items()}
        axes.plot(list(points), list(points.values()), mark, color=colour, markersize=8)
        axes.plot(list(heights), list(heights.values()), mark, markerfacecolor="none", color="black", markersize=13)
        for ranks, point in heights.items():
            axes.annotate(f"{point:.1f}", (ranks, point), **above)
    for ranks, guess in guesses.items():
        if guess is not None:
            axes.plot(ranks, guess, "D", color="black", markersize=7, clip_on=False, zorder=5)
    axes.axhline(floor / MIB, color="black", linestyle="--", linewidth=1)
    axes.annotate("floor", (2, floor / MIB), (0, -16), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(predicted), [str(ranks) for ranks in predicted])
    axes.minorticks_off()
    top = max(sum(record["memory"]["peak"].values()) for record in measured.values()) / MIB
    axes.set(xlim=(1.8, 2 * max(predicted)), ylim=(0, 1.2 * top), xlabel="ranks", ylabel="memory per rank [MiB]")
    record = next(iter(measured.values()))
    under = caption(record).replace(f"{record['ranks']} ranks", f"{min(measured)} to {max(measured)} ranks")
    marks = "filled: measured, with two batches of images between steps; hollow: predicted, without them"
    marks += "; diamond: your guess" * any(guess is not None for guess in guesses.values())
    headline(figure, title, f"{under}\n{marks}")
    show(figure)
