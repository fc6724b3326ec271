# SPDX-License-Identifier: BSD-3-Clause
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
    figure, panels = plt.subplots(1, len(counts), figsize=(10, 4.2), sharey=True, layout="constrained")
    cases = sorted({(row["side"], row["rate"]) for row in rows})
    for axes, ranks in zip(panels, counts, strict=True):
        for case, color in zip(cases, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=False):
            mine = [row for row in rows if row["ranks"] == ranks and (row["side"], row["rate"]) == case]
            measured, planned = (
                [row["muon-gather"][which] / row["muon"][which] for row in mine] for which in ("measured", "planned")
            )
            places = [2**place for place in range(len(mine))]
            label = f"{case[0]} × {case[0]}, {case[1].replace('mbit', ' Mbit/s')}"
            axes.plot(places, measured, "o", color=color, markersize=9, label=label)
            axes.plot([place * 1.12 for place in places], planned, "o", color=color, markersize=9, mfc="none")
        axes.axhline(1, color="#888888", linewidth=1, linestyle="--")
        axes.set(xscale="log", xlabel=f"matrices, on {ranks} ranks", ylim=(0, None))
        axes.set_xticks(places, [row["matrices"] for row in mine])
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("gathering / owner-computes [times]")
    panels[0].text(1, 0.9, "below: gathering is faster", va="top", color="#666666")
    panels[0].legend(loc="upper left", ncols=2, columnspacing=0.8, handletextpad=0.1)
    panels[0].set_ylim(0, 5.4)
    headline(
        figure,
        title,
        "recorded on two practice nodes, which share two cores; gloo\nsolid: measured; outlined: predicted",
    )
    show(figure)
