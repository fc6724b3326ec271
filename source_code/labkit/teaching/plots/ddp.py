# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 01."""

import matplotlib.pyplot as plt

from labkit.teaching.plots import MIB, STRATEGY_COLOURS, headline, show


def peak_against_batch(records: list[dict], predicted: dict[str, list[tuple[int, int]]], floor: int):
    """Draw peak memory over the batch per rank: measured points, predicted lines.

    predicted: {strategy: [(images per rank, bytes), …]}. floor: lower bound of the peak for any batch, in bytes.
    """
    names = {"single": "one process", "ddp": "DDP"}
    figure, axes = plt.subplots(figsize=(10, 5.4), layout="constrained")
    for strategy, points in predicted.items():
        batches, peaks = zip(*points, strict=True)
        axes.plot(batches, [peak / MIB for peak in peaks], color=STRATEGY_COLOURS[strategy], linewidth=1.5)
        axes.text(batches[-1], peaks[-1] / MIB, f" {names[strategy]}", color=STRATEGY_COLOURS[strategy], va="center")
    for record in records:
        strategy, batch = record["config"]["strategy"], record["batch_size"]
        peak = sum(record["memory"]["peak"].values()) / MIB
        axes.plot(batch, peak, "o", color=STRATEGY_COLOURS[strategy], markersize=9)
        dx, dy, side = (12, -8, "left") if strategy == "single" else (-6, 8, "right")  # keep clear of the lines
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.annotate(f"{peak:.1f}", (batch, peak), (dx, dy), textcoords="offset points", ha=side, bbox=behind)
    last = max(batch for points in predicted.values() for batch, _ in points)
    axes.axhline(floor / MIB, color="black", linestyle="--", linewidth=1)
    where = {"xytext": (0, -5), "textcoords": "offset points", "va": "top", "ha": "right"}
    axes.annotate(f"with DDP's defaults, no batch gets below {floor / MIB:.1f}", (last, floor / MIB), **where)
    axes.set(xlim=(0, last * 1.17), xlabel="images per step and rank", ylabel="peak memory per rank [MiB]")
    axes.set_ylim(0)
    widest = max(records, key=lambda record: record["ranks"])
    under = f"{widest['hardware']} · {widest['ranks']} ranks · {widest['data']['name']}"
    headline(
        figure,
        "A smaller batch lowers the peak, but only to a floor",
        f"{under}\npoints: measured, lines: predicted",
    )
    show(figure)
