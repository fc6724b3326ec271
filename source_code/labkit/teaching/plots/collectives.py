"""Figures of chapter 02: bytes sent per rank, and time per collective."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from labkit.teaching.plots import COLOURS, PREDICTED, headline, show

COLLECTIVE_COLOURS = {
    "all-reduce": COLOURS["all-reduce buckets"],
    "all-gather": COLOURS["all-gather"],
    "reduce-scatter": COLOURS["reduce-scatter"],
}


def sent_by_world(measured: dict[int, float], size: float, guess: tuple[int, float | None], title: str, under: str):
    """Draw the MB that a rank sends in an all-reduce of ``size`` MB over the world size.

    measured: {ranks: MB}. guess: (ranks, MB or None). The formula, 2 (W−1)/W × size, is drawn for 1 to 8 ranks.
    """
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    worlds = range(1, max(8, *measured) + 1)
    law = [2 * (world - 1) / world * size for world in worlds]
    axes.plot(worlds, law, "o-", color="#888888", markerfacecolor="white", markeredgecolor="black", markersize=12)
    axes.plot(*zip(*measured.items(), strict=True), "o", color=COLLECTIVE_COLOURS["all-reduce"], markersize=7)
    for world, sent in measured.items():
        axes.annotate(f"{sent:.1f}", (world, sent), (8, -16), textcoords="offset points")
    if guess[1] is not None:
        axes.plot(*guess, "D", color="black", markersize=7, zorder=5)
    axes.axhline(2 * size, color="black", linestyle="--", linewidth=1)
    axes.text(1, 2 * size, "2 × the size", va="bottom")
    axes.set(xlabel="ranks W", ylabel="sent by each rank [MB]", ylim=(0, max(2.3 * size, 1.1 * (guess[1] or 0))))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    marks = "solid: measured, outlined: predicted" + ", diamond: your guess" * (guess[1] is not None)
    headline(figure, title, f"{under}\n{marks}")
    show(figure)


def sent_bars(rows: list[tuple[str, float, float, str]], title: str, under: str):
    """Draw the MB sent per rank: rows of (label, predicted MB, measured MB, colour)."""
    figure, axes = plt.subplots(figsize=(10, 0.7 * len(rows) + 1.9), layout="constrained")
    longest = max(max(predicted, measured) for _, predicted, measured, _ in rows)
    for place, (_, predicted, measured, colour) in enumerate(rows):
        axes.barh(place, measured, color=colour, height=0.52)
        axes.barh(place, predicted, height=0.72, **PREDICTED)
        text = f"{measured:.2f}, predicted {predicted:.2f}"
        axes.text(max(predicted, measured) + 0.015 * longest, place, text, va="center")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.32 * longest), xlabel="sent by each rank [MB]")
    headline(figure, title, f"{under}\nsolid: measured, outlined: predicted")
    show(figure)


def time_against_size(sizes, timed: dict, fits: dict, title: str, under: str):
    """Draw the time of collectives over the tensor's size, with logarithmic axes.

    sizes: bytes. timed: {collective: (lower quartile, median, upper quartile), each by size, in seconds}.
    fits: {collective: (latency in seconds, seconds per byte)}.
    """
    figure, axes = plt.subplots(figsize=(10, 5.2), layout="constrained")
    fine = np.geomspace(sizes[0], sizes[-1], 200)
    for place, (name, (low, middle, high)) in enumerate(timed.items()):
        colour, kilo = COLLECTIVE_COLOURS[name], [size / 1e3 * 1.1 ** (place - 1) for size in sizes]
        latency, per_byte = fits[name]
        axes.plot(fine / 1e3, (latency + per_byte * fine) * 1e3, color=colour, linewidth=1.5)
        axes.vlines(kilo, [t * 1e3 for t in low], [t * 1e3 for t in high], color=colour, linewidth=1.5)
        axes.plot(kilo, [t * 1e3 for t in middle], "o", color=colour, markersize=7, label=name)
    axes.set(xscale="log", yscale="log", xlabel="size of the whole tensor [kB]", ylabel="time [ms]")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.legend()
    headline(
        figure,
        title,
        f"{under}\npoints: measured, median and middle half; lines: latency + size / bandwidth, fitted to the fastest quarter",
    )
    show(figure)
