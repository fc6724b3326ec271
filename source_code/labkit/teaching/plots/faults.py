"""Figures of chapter 16: memory that reaches its limit, and the samples a rank gets."""

import matplotlib.pyplot as plt

from labkit.measuring.trace import CATEGORIES
from labkit.teaching.plots import COLOURS, category_legend, handles_of, headline, show

KIB = 1024


def memory(runs: dict[str, tuple[list[dict], int]], limit: int, under: str, title: str):
    """Draw the live bytes of one rank by category, one panel per run.

    runs: {name: (``StepTrace.timeline()``, number of its snapshots in training)}. limit: bytes.
    """
    figure, panels = plt.subplots(1, len(runs), figsize=(11, 4.4), sharey=True, squeeze=False, layout="constrained")
    for axes, (name, (snapshots, trained)) in zip(panels[0], runs.items(), strict=True):
        used = [c for c in CATEGORIES if max(snapshot[c] for snapshot in snapshots) > 0]
        levels = [[snapshot[c] / KIB for snapshot in snapshots] for c in used]
        axes.stackplot(range(len(snapshots)), levels, labels=used, colors=[COLOURS[c] for c in used], step="post", lw=0)
        axes.axhline(limit / KIB, color="black", linestyle="--", linewidth=1.2)
        axes.text(0, limit / KIB, f" limit {limit / KIB:,.0f} KiB", va="bottom")
        axes.axvline(trained, color="black", linestyle=":", linewidth=1.2)
        for words, place, side in (("training ", trained, "right"), (" validation", trained, "left")):
            axes.text(place, 0.88 * limit / KIB, words, ha=side)
        axes.set(xlim=(0, len(snapshots)), ylim=(0, 1.12 * limit / KIB), xlabel="every change of memory, left to right")
        axes.set_title(name, loc="right", fontsize=12, fontweight="bold")
        axes.set_xticks([])
    panels[0, 0].set_ylabel("live tensors of rank 0 [KiB]")
    headline(figure, title, under + "\n" * (len(runs) > 1))  # room for the panels' names
    category_legend(figure, handles_of(panels[0, 0]))
    show(figure)


def dealt(runs: dict[str, list[set[int]]], samples: int, under: str, title: str):
    """Draw which samples one rank got, one row per epoch and one panel per run: {name: [the epoch's samples, …]}."""
    figure, panels = plt.subplots(len(runs), 1, figsize=(11, 4.4), sharex=True, squeeze=False, layout="constrained")
    for axes, (name, epochs) in zip(panels[:, 0], runs.items(), strict=True):
        axes.eventplot(
            [sorted(of_one) for of_one in epochs], lineoffsets=range(1, len(epochs) + 1), linelengths=0.8, color="black"
        )
        axes.set(xlim=(-1, samples), ylabel="epoch", yticks=range(1, len(epochs) + 1), ylim=(len(epochs) + 0.6, 0.4))
        axes.set_title(name, loc="right", fontsize=12, fontweight="bold")
    panels[-1, 0].set_xlabel(f"number of the sample, 0 to {samples - 1}")
    headline(figure, title, under)
    show(figure)
