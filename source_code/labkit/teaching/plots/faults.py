# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 16: memory that reaches its limit, and what the drill named."""

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


def drilled(rows: list[dict], under: str, title: str):
    """Draw, per kind of fault, the share of draws in which the kind, and also the rank, were named.

    rows: of ``proofs/diagnosis.py``.
    """
    both = {row["kind"]: _share(rows, row["kind"], "kind_right", "rank_right") for row in rows}
    kinds = sorted(both, key=lambda kind: (both[kind], _share(rows, kind, "kind_right"), kind))
    figure, axes = plt.subplots(figsize=(11, 6), layout="constrained")
    axes.barh(
        kinds,
        [_share(rows, kind, "kind_right") for kind in kinds],
        color="#56B4E9",
        label="draws in which the kind was named",
    )
    axes.barh(
        kinds,
        [both[kind] for kind in kinds],
        height=0.4,
        color="#0072B2",
        label="of these, the one right rank too (percentage)",
    )
    for place, kind in enumerate(kinds):
        axes.text(101, place, f"{both[kind]:.0f} %", va="center")
    axes.set(xlim=(0, 108), xlabel="draws [%]")
    figure.legend(loc="outside lower center", ncols=2)
    headline(figure, title, under)
    show(figure)


def _share(rows: list[dict], kind: str, *columns: str) -> float:
    mine = [all(row[column] for column in columns) for row in rows if row["kind"] == kind]
    return 100 * sum(mine) / len(mine)
