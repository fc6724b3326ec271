"""Figures of chapter 01."""

from statistics import fmean, median

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
    axes.annotate(f"under DDP no batch gets below this: {floor / MIB:.1f}", (last, floor / MIB), **where)
    axes.set(xlim=(0, last * 1.07), xlabel="images per step and rank", ylabel="peak memory per rank [MiB]")
    axes.set_ylim(0)
    widest = max(records, key=lambda record: record["ranks"])
    under = f"{widest['hardware']} · {widest['ranks']} ranks · {widest['data']['name']}"
    headline(
        figure,
        "The batch decides how much is added, not what is always there",
        f"{under}\npoints: measured, lines: predicted",
    )
    show(figure)


def speed_up(ratios: dict[int, dict[str, list[float]]], guess: float | None, under: str):
    """Draw images per second over ranks, relative to one process: {ranks: {way: [ratio of each round]}}, from 2 ranks on.

    guess: the learner's for DDP on two ranks.
    """
    figure, axes = plt.subplots(figsize=(10, 4.8), layout="constrained")
    most = max(ratios)
    axes.plot([1, most], [1, most], color="black", linestyle="--", linewidth=1, label="as many times as ranks")
    # Labels keep clear of the dashed line, below it
    left, right = {"xytext": (8, -16), "ha": "left"}, {"xytext": (8, -20)}
    for way, colour, side in (("each for itself", "#666666", left), ("DDP", STRATEGY_COLOURS["ddp"], right)):
        middles = {ranks: median(ways[way]) for ranks, ways in ratios.items()}
        axes.plot(*zip(*middles.items(), strict=True), "o-", color=colour, markersize=9, linewidth=1.5, label=way)
        for ranks, ways in ratios.items():
            axes.plot([ranks] * 2, [min(ways[way]), max(ways[way])], color=colour, linewidth=1.5)
            place = side | {"textcoords": "offset points", "color": colour}
            axes.annotate(f"{middles[ranks]:.2f}", (ranks, middles[ranks]), **place)
    axes.plot(1, 1, "o", color="black", markersize=9)
    axes.annotate("one process", (1, 1), (0, -20), textcoords="offset points", ha="left")
    if guess is not None:
        axes.plot(2, guess, "D", color="black", markersize=7, zorder=5)
    axes.set(xlabel="ranks", ylabel="images per second,\none process's = 1", ylim=(0, 1.1 * max(most, guess or 0)))
    axes.set_xlim(0.9, most + 0.3)
    axes.set_xticks(range(1, most + 1))
    axes.legend(loc="upper left")
    marks = "measured: median, and all rounds" + "; diamond: your guess" * (guess is not None)
    headline(figure, "How much faster: what processors and averaging leave of it", f"{under}\n{marks}")
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
        "Fewer steps on the same images learn less, unless they are longer",
        f"{under}\nmeasured: rank 0's loss, the mean over an eighth of the steps",
    )
    show(figure)
