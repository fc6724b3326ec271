"""Figures of chapter 18: Muon in three ways."""

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

from labkit.teaching.plots import headline, show

COLORS = {"muon": "#0072B2", "muon-gather": "#D55E00", "muon-dtensor": "#009E73"}


def muon_link(rows: list[dict], title: str):
    """Draw how many times as long gathering takes as owner-computes, recorded and predicted.

    Args:
        rows: of proofs/muon_link.py.
        title: of the figure.
    """
    counts = sorted({row["ranks"] for row in rows})
    figure, panels = plt.subplots(1, len(counts), figsize=(10, 3.6), sharey=True, layout="constrained")
    cases = sorted({(row["side"], row["rate"]) for row in rows})
    for axes, ranks in zip(panels, counts, strict=True):
        for case, color in zip(cases, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=False):
            mine = [row for row in rows if row["ranks"] == ranks and (row["side"], row["rate"]) == case]
            matrices = [row["matrices"] for row in mine]
            for which, marks in (("measured", {"mfc": color}), ("planned", {"mfc": "none", "linestyle": "--"})):
                ratios = [row["muon-gather"][which] / row["muon"][which] for row in mine]
                label = f"{case[0]} × {case[0]}, {case[1].replace('mbit', ' Mbit/s')}" if which == "measured" else None
                axes.plot(matrices, ratios, marker="o", color=color, label=label, **marks)
        axes.axhline(1, color="#888888", linewidth=0.8)
        axes.set(xscale="log", xlabel=f"matrices, on {ranks} ranks", xticks=matrices, xticklabels=matrices)
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("gathering / owner-computes")
    panels[0].legend(fontsize=11)
    headline(figure, title, "recorded on 2 nodes with CPUs, gloo; solid: measured, outlined and dashed: predicted")
    show(figure)
