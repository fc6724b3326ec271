# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 05: the effect of the wrapping policy on peak memory and traffic."""

import matplotlib.pyplot as plt

from labkit.teaching.plots import (
    PREDICTED,
    STRATEGY_COLOURS,
    caption,
    category_legend,
    handles_of,
    headline,
    memory_bars,
    show,
)


def traffic(record: dict) -> float:
    """Return the MB (1000² bytes) of tensors that a step gathers and reduces."""
    return sum(entry["count"] * entry["bytes"] for entry in record["traffic"]) / 1e6


def _visible(axes) -> dict:
    """Return {category: artist} of the memory bars that are wide enough to be seen."""
    least = 0.004 * axes.get_xlim()[1]
    return {label: bars for label, bars in handles_of(axes).items() if max(bar.get_width() for bar in bars) > least}


def memory_and_traffic(rows: list[tuple[str, dict, int | None]], title: str, guesses: dict[str, float] | None = None):
    """Draw stacked bars of peak memory next to the traffic of the same runs.

    rows: (label, record, predicted bytes of the peak or None). guesses: {label: MiB or None}.
    """
    figure, (memory, moved) = plt.subplots(
        1, 2, figsize=(12, 0.6 * len(rows) + 2.4), width_ratios=[3, 2], layout="constrained"
    )
    memory_bars(memory, [(label, r["memory"]["peak"], predicted) for label, r, predicted in rows], guesses)
    sizes = [traffic(r) for _, r, _ in rows]
    moved.barh(range(len(rows)), sizes, color="#666666", height=0.62)
    for place, megabytes in enumerate(sizes):
        moved.text(megabytes, place, f" {megabytes:.1f}", va="center")
    moved.set_yticks([])
    moved.invert_yaxis()
    moved.set_xlim(0, 1.2 * max(sizes))
    moved.set_xlabel("gathered + reduced per step [MB]")
    marks = "solid: measured, outlined: predicted" + ", diamond: your guess" * any(
        v is not None for v in (guesses or {}).values()
    )
    headline(figure, title, f"{caption(rows[0][1])}\n{marks}")
    category_legend(figure, _visible(memory))
    show(figure)


def more_tokens(
    rows: list[tuple[str, dict, int | None]],
    measured: dict[int, float],
    predicted: dict[int, dict[int, float]],
    title: str,
    guess: float | None,
):
    """Draw the peaks of a longer run, next to what wrapping leaves of a step's memory over the number of tokens.

    Args:
        rows: (label, record, predicted bytes of the peak or None) of the longer run.
        measured: {tokens per rank: what a step adds to persistent memory, as a share of the same in one unit}.
        predicted: {ranks: {tokens per rank: the same share}}.
        title: the figure's headline.
        guess: the share of the longer run, or None.
    """
    figure, (memory, curve) = plt.subplots(1, 2, figsize=(12, 4.2), width_ratios=[3, 2], layout="constrained")
    memory_bars(memory, [(label, r["memory"]["peak"], expected) for label, r, expected in rows])
    for number, (ranks, shares) in enumerate(predicted.items()):
        style, percent = ("--", ":", "-.")[number % 3], [100 * share for share in shares.values()]
        edge = PREDICTED["edgecolor"]
        curve.plot(list(shares), percent, style, marker="o", markersize=11, markerfacecolor="none", color=edge)
        where = {"xytext": (12, -16) if number else (0, 11), "ha": "left" if number else "center"}
        first = min(shares)
        curve.annotate(f"{ranks} ranks", (first, 100 * shares[first]), textcoords="offset points", **where)
    shares = [100 * share for share in measured.values()]
    curve.plot(list(measured), shares, "o", color=STRATEGY_COLOURS["fsdp2"], markersize=7)
    left = {"xytext": (-10, -4), "textcoords": "offset points", "ha": "right"}
    for tokens, share in measured.items():
        curve.annotate(f"{100 * share:.0f} %", (tokens, 100 * share), **left)
    if guess is not None:
        curve.plot(max(measured), 100 * guess, "D", color="black", markersize=7, clip_on=False, zorder=5)
    ticks = sorted({tokens for shares in predicted.values() for tokens in shares})
    curve.set_xscale("log", base=2)
    curve.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
    curve.minorticks_off()
    curve.set(xlim=(min(ticks) / 4, max(ticks) * 2), ylim=(0, 110), xlabel="tokens per rank")
    curve.set_ylabel("memory that a step adds,\nshare of one unit's [%]")
    marks = "solid: measured, outlined: predicted" + ", diamond: your guess" * (guess is not None)
    headline(figure, title, f"{caption(rows[0][1])}\n{marks}")
    category_legend(figure, _visible(memory))
    show(figure)
