"""Figures of chapter 16: memory on the way to its limit, and epochs over each other."""

import matplotlib.pyplot as plt

from labkit.measuring.trace import CATEGORIES
from labkit.teaching.plots import COLOURS, headline, show

KIB = 1024
STYLES = ("-", "--", "-.", ":", (0, (6, 2, 1, 2, 1, 2)), (0, (1, 3)))  # of epochs: readable without colour


def memory(found: dict[str, list[dict]], limit: int, under: str, title: str):
    """The live bytes of one rank by category, a panel per run: {name: ``StepTrace.timeline()``}. limit: bytes."""
    figure, panels = plt.subplots(1, len(found), figsize=(11, 4.4), sharey=True, squeeze=False, layout="constrained")
    for axes, (name, moments) in zip(panels[0], found.items(), strict=True):
        used = [c for c in CATEGORIES if max(moment[c] for moment in moments) > 0]
        levels = [[moment[c] / KIB for moment in moments] for c in used]
        axes.stackplot(range(len(moments)), levels, labels=used, colors=[COLOURS[c] for c in used], step="post", lw=0)
        axes.axhline(limit / KIB, color="black", linestyle="--", linewidth=1.2)
        axes.text(0, limit / KIB, f" limit {limit / KIB:,.0f} KiB", va="bottom")
        axes.set(xlim=(0, len(moments)), ylim=(0, 1.12 * limit / KIB), xlabel="every change of memory, left to right")
        axes.set_title(name, loc="right", fontsize=12, fontweight="bold")
        axes.set_xticks([])
    panels[0, 0].set_ylabel("live tensors of rank 0 [KiB]")
    headline(figure, title, under + "\n" * (len(found) > 1))  # room for the panels' names
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=11)
    show(figure)


def epochs(runs: dict[str, list[float]], steps: int, under: str, title: str):
    """The loss of each step, epoch laid over epoch, a panel per run: {name: losses}. steps: in an epoch."""
    figure, panels = plt.subplots(1, len(runs), figsize=(11, 4.2), sharey=True, squeeze=False, layout="constrained")
    for axes, (name, losses) in zip(panels[0], runs.items(), strict=True):
        for epoch, style in zip(range(len(losses) // steps), STYLES, strict=False):
            of_one = losses[epoch * steps : (epoch + 1) * steps]
            tone = str(0.65 - 0.12 * epoch)
            axes.plot(
                range(1, steps + 1), of_one, linestyle=style, color=tone, marker="o", ms=4, label=f"epoch {epoch + 1}"
            )
        axes.set_title(name, loc="right", fontsize=12, fontweight="bold")
        axes.set_xlabel("step of the epoch")
    panels[0, 0].set_ylabel("loss of rank 0's batch")
    headline(figure, title, under + "\n" * (len(runs) > 1))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=6, fontsize=11)
    show(figure)
