# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 10: bytes that leave a node, and steps over links of several speeds."""

import math

from matplotlib.lines import Line2D

from labkit.teaching.plots import PREDICTED, STRATEGY_COLOURS, headline, plt, show

STYLES = {  # colour, line and mark of each strategy
    "DDP": (STRATEGY_COLOURS["ddp"], "-", "o"),
    "FSDP2": (STRATEGY_COLOURS["fsdp2"], "-", "o"),
    "FSDP2, kept": (STRATEGY_COLOURS["fsdp2"], "--", "s"),
    "HSDP 2x2": ("#222222", "-", "^"),
}
MB = 1e6


def across(rows: dict[str, tuple[float, float]], guesses: dict, title: str, under: str):
    """Draw the bytes of a step that leave a node: rows {name: (measured, predicted)}, guesses {name: MB or None}."""
    figure, axes = plt.subplots(figsize=(10, 0.7 * len(rows) + 2), layout="constrained")
    longest = max(max(pair) for pair in rows.values()) / MB
    for place, (name, (measured, predicted)) in enumerate(rows.items()):
        axes.barh(place, measured / MB, color=STYLES.get(name, ("#777777",))[0], height=0.52)
        axes.barh(place, predicted / MB, height=0.72, **PREDICTED)
        axes.text(max(measured, predicted) / MB + 0.015 * longest, place, f"{measured / MB:.2f}", va="center")
        if guesses.get(name) is not None:
            axes.plot(guesses[name], place + 0.36, "D", color="black", markersize=7, clip_on=False, zorder=5)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.12 * longest), xlabel="leaves a node in a step [MB]")
    marks = "solid: measured, outlined: predicted" + ", diamond: your guess" * any(
        g is not None for g in guesses.values()
    )
    headline(figure, title, f"{under}\n{marks}")
    show(figure)


def sweep(steps: dict, predicted: dict, limit: float, guess: float | None, title: str, under: str):
    """Draw step time over the link's speed, and measured divided by predicted step time.

    The speeds lie at the time that the link needs per byte, so that a prediction is a straight line. A link that is not
    slowed is at 0; its predicted step consists of compute and latency, so it is not in the second panel.

    Args:
        steps, predicted: {name: {Mbit/s: seconds}}; infinity: not slowed.
        limit: of the verdict on the slowest link, relative.
        guess: ms of FSDP2's step on the slowest link, or None.
        title, under: of the figure.
    """
    figure, (times, ratios) = plt.subplots(1, 2, figsize=(13, 6), layout="constrained", width_ratios=[3, 2])
    speeds = sorted(next(iter(steps.values())))
    for name, (colour, line, mark) in STYLES.items():
        at = [_place(speed) for speed in speeds]
        times.plot(at, [1e3 * predicted[name][speed] for speed in speeds], line, color=colour, linewidth=1.4)
        times.plot(at, [1e3 * steps[name][speed] for speed in speeds], mark, color=colour, markersize=8)
    if guess is not None:
        times.plot(_place(speeds[0]), guess, "D", color="black", markersize=7, zorder=5)
    times.set_ylim(0, None)
    times.set_xticks([_place(s) for s in speeds], [f"{s:,}" if math.isfinite(s) else "∞" for s in speeds])
    times.set(xlabel="speed of the link [Mbit/s], placed by its time per byte", ylabel="step time [ms]")
    _ratios(ratios, steps, predicted, [speed for speed in reversed(speeds) if math.isfinite(speed)], limit)
    marks = "filled marks: measured; lines: predicted" + "; diamond: your guess" * (guess is not None)
    headline(figure, title, f"{under}\n{marks}")
    handles = [Line2D([], [], color=colour, linestyle=line, marker=mark) for colour, line, mark in STYLES.values()]
    figure.legend(handles, list(STYLES), loc="outside lower left", ncols=4, fontsize=11)
    show(figure)


def _place(speed: float) -> float:
    """Return the ms that a link of this many Mbit/s needs per megabyte."""
    return 8e3 / speed


def _ratios(axes, steps: dict, predicted: dict, speeds: list[float], limit: float):
    """Draw measured over predicted step time per speed, fastest first, and the limit around 1 on the slowest link."""
    axes.axhline(1, color="black", linewidth=1)
    slowest = len(speeds) - 1
    for bound in (1 - limit, 1 + limit):
        axes.plot([slowest - 0.4, slowest + 0.4], [bound, bound], color="black", linestyle="--", linewidth=1.2)
    words = f"limit of the verdict: ± {100 * limit:.0f} %"
    axes.text(slowest + 0.4, 1.01 + limit, words, ha="right", va="bottom", fontsize=11)
    for number, (name, (colour, _, mark)) in enumerate(STYLES.items()):
        at = [place + 0.18 * (number - 1.5) for place in range(len(speeds))]
        axes.plot(at, [steps[name][s] / predicted[name][s] for s in speeds], mark, color=colour, markersize=8)
    axes.set_xticks(range(len(speeds)), [f"{speed:,}" for speed in speeds])
    axes.set(xlabel="speed of the link [Mbit/s]", ylabel="measured step / predicted step", ylim=(0.7, 1.3))
