"""Figures of chapter 01."""

from statistics import fmean

import matplotlib.pyplot as plt

from labkit.teaching.plots import MIB, STRATEGY_COLOURS, headline, show


def peak_against_batch(records: list[dict], predicted: dict[str, list[tuple[int, int]]], floor: int):
    """Draw peak memory over the batch per rank: measured points, predicted lines.

    predicted: {strategy: [(images per rank, bytes), …]}. floor: lower bound of the peak for any batch, in bytes.
    """
    figure, axes = plt.subplots(figsize=(10, 5.4), layout="constrained")
    for strategy, points in predicted.items():
        batches, peaks = zip(*points, strict=True)
        axes.plot(batches, [peak / MIB for peak in peaks], color=STRATEGY_COLOURS[strategy], linewidth=1.5)
        axes.text(batches[-1], peaks[-1] / MIB, f" {strategy}", color=STRATEGY_COLOURS[strategy], va="center")
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
    axes.annotate(f"under DDP, no batch gets below {floor / MIB:.1f}", (last, floor / MIB), **where)
    axes.set(xlim=(0, last * 1.07), xlabel="images per step and rank", ylabel="peak memory per rank [MiB]")
    axes.set_ylim(0)
    widest = max(records, key=lambda record: record["ranks"])
    under = f"{widest['hardware']} · {widest['ranks']} ranks · {widest['data']['name']}"
    headline(
        figure,
        "A smaller batch lowers the peak, but only to a floor",
        f"{under}\npoints: measured, lines: predicted",
    )
    show(figure)


def loss_by_images(runs: dict[str, list[float]], images: int, under: str, points: int = 8):
    """Draw the training loss over the images that all ranks have seen: {name: [loss of each step]}, averaged over steps.

    images: number of images in a run.
    """
    figure, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")
    looks = zip(("#666666", STRATEGY_COLOURS["ddp"], STRATEGY_COLOURS["ddp"]), ("o", "o", "^"), strict=True)
    for (name, losses), (colour, marker) in zip(runs.items(), looks, strict=True):
        size = len(losses) // points
        means = [fmean(losses[i * size : (i + 1) * size]) for i in range(points)]
        seen = [images * (i + 0.5) / points for i in range(points)]
        axes.plot(seen, means, marker=marker, color=colour, markersize=8, linewidth=1.5, label=name)
    axes.set(xlabel="images that all ranks together have seen", ylabel="training loss", xlim=(0, images))
    axes.set_ylim(0)
    axes.legend(loc="lower left")
    headline(
        figure,
        "Same images, fewer steps: you learn less unless each step is larger",
        f"{under}\nmeasured: rank 0's loss, the mean over an eighth of the steps",
    )
    show(figure)
