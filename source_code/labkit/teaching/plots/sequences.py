# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 20: who computes how much of attention, and what the forms of context parallelism send and hide."""

import matplotlib.pyplot as plt

from labkit.teaching.plots import PREDICTED, headline, show

COLORS = {"ring": "#0072B2", "gather": "#D55E00", "ulysses": "#009E73"}
ORDER_COLORS = {"natural": "#CC79A7", "head-tail": "#0072B2"}


def attention_times(measured: dict, predicted: dict, guess: float | None, under: str, title: str):
    """Draw the CPU time of each rank's attention, a panel per order of the tokens.

    Args:
        measured: {order: seconds of each rank}.
        predicted: the same.
        guess: seconds of the slowest rank in the natural order.
        under: the line below the title.
        title: of the figure.
    """
    figure, panels = plt.subplots(1, len(measured), figsize=(10, 4), sharey=True, layout="constrained")
    for axes, (order, seconds) in zip(panels, measured.items(), strict=True):
        ranks = range(len(seconds))
        axes.bar(ranks, [1e3 * each for each in seconds], 0.6, color=ORDER_COLORS[order])
        axes.bar(ranks, [1e3 * each for each in predicted[order]], 0.76, **PREDICTED)
        for rank, pair in enumerate(zip(seconds, predicted[order], strict=True)):
            axes.text(rank, 1e3 * max(pair), f"{1e3 * pair[0]:.0f}", ha="center", va="bottom")
        axes.set_xticks(ranks, [f"rank {rank}" for rank in ranks])
        axes.tick_params(axis="x", length=0)
        axes.set_xlabel(f"{order} order")
    if guess is not None:
        panels[0].plot(len(measured["natural"]) - 1, 1e3 * guess, "D", color="black", markersize=7)
    panels[0].set_ylabel("CPU time of attention [ms]")
    panels[0].margins(y=0.12)
    headline(figure, title, under)
    show(figure)


def forms(sent: dict, waiting: dict, under: str, title: str):
    """Draw what a rank sends, by the size of the context group, and how long it waits for it, by the length.

    Args:
        sent: {form: {ranks of a context group: bytes of a layer}}.
        waiting: {form: {tokens of a rank: time, in units of what its attention takes to compute}}.
        under: the line below the title.
        title: of the figure.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for form, color in COLORS.items():
        style = {"mfc": "none", "color": color, "label": form, "markersize": 7}
        left.plot([*sent[form]], [size / 1e6 for size in sent[form].values()], "o--", **style)
        right.plot([*waiting[form]], [*waiting[form].values()], "o--", **style)
    ranks, tokens = ([*max(found.values(), key=len)] for found in (sent, waiting))
    left.set(xscale="log", ylim=(0, None), xlabel="ranks that share the sequence")
    left.set(xticks=ranks, xticklabels=ranks, ylabel="sent by a rank for one layer [MB]")
    right.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="waiting / computing attention")
    right.set(xticks=tokens, xticklabels=[f"{each:,}" for each in tokens])
    right.set(yticks=(0.01, 0.1, 1, 10), yticklabels=("1 %", "10 %", "100 %", "1,000 %"))
    for axes in (left, right):
        axes.minorticks_off()
    left.legend(loc="center right")
    headline(figure, title, under)
    left.title.set_ha("left"), left.title.set_x(0)
    show(figure)
