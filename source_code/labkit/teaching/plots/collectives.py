# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 02: bytes sent per rank."""

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from labkit.teaching.plots import COLOURS, PREDICTED, headline, show

COLLECTIVE_COLOURS = {
    "all-reduce": COLOURS["all-reduce buckets"],
    "all-gather": COLOURS["all-gather"],
    "reduce-scatter": COLOURS["reduce-scatter"],
}


def sent_by_world(counted: dict[int, float], size: float, guess: tuple[int, float | None], title: str, under: str):
    """Draw the MB that a rank sends in an all-reduce of ``size`` MB over the world size.

    The formula, 2 (W−1)/W × size, is drawn for 1 to 8 ranks.

    Args:
        counted: {ranks: MB}, as the ring's own code counts them.
        size: of the vector, in MB (1000² bytes).
        guess: (ranks, MB or None).
        title, under: the headline and the line below it.
    """
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    worlds = range(1, max(8, *counted) + 1)
    law = [2 * (world - 1) / world * size for world in worlds]
    axes.plot(worlds, law, "o-", color="#888888", markerfacecolor="white", markeredgecolor="black", markersize=12)
    axes.plot(*zip(*counted.items(), strict=True), "o", color=COLLECTIVE_COLOURS["all-reduce"], markersize=7)
    for world, sent in counted.items():
        axes.annotate(f"{sent:.1f}", (world, sent), (8, -16), textcoords="offset points")
    if guess[1] is not None:
        axes.plot(*guess, "D", color="black", markersize=7, zorder=5)
    axes.axhline(2 * size, color="black", linestyle="--", linewidth=1)
    axes.text(1, 2 * size, "2 × the size", va="bottom")
    axes.set(xlabel="ranks W", ylabel="sent by each rank [MB]", ylim=(0, max(2.3 * size, 1.1 * (guess[1] or 0))))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    marks = "filled: counted by our ring, outlined: predicted" + ", diamond: your guess" * (guess[1] is not None)
    headline(figure, title, f"{under}\n{marks}")
    show(figure)


def sent_bars(rows: list[tuple[str, float, float, str]], title: str, under: str, guesses: dict[str, float | None]):
    """Draw the MB sent per rank: rows of (label, predicted MB, counted MB, color), guesses {label: MB or None}."""
    figure, axes = plt.subplots(figsize=(10, 0.7 * len(rows) + 1.9), layout="constrained")
    guesses = {label: guess for label, guess in guesses.items() if guess is not None}
    longest = max([*guesses.values(), *(size for _, *sizes, _ in rows for size in sizes)])
    for place, (label, predicted, measured, color) in enumerate(rows):
        axes.barh(place, measured, color=color, height=0.52)
        axes.barh(place, predicted, height=0.72, **PREDICTED)
        text = f"{measured:.2f}, in rings {predicted:.2f}"
        axes.text(max(predicted, measured) + 0.015 * longest, place, text, va="center")
        if label in guesses:
            axes.plot(guesses[label], place + 0.36, "D", color="black", markersize=7, clip_on=False, zorder=5)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.32 * longest), xlabel="sent by each rank [MB]")
    marks = "solid: measured, outlined: predicted" + ", diamond: your guess" * bool(guesses)
    headline(figure, title, f"{under}\n{marks}")
    show(figure)
