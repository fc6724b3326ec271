"""Every figure of the course, from records only, in one visual language.

Solid is measured, outlined is predicted, hatched is simulated; the learner's guess is a small diamond.
A category of memory has the same colour in every figure. The colours are Okabe and Ito's, which colour-blind
readers can tell apart.
"""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from labkit.trace import CATEGORIES

MIB = 2**20

COLOURS = dict(
    zip(
        CATEGORIES,
        ("#0072B2", "#D55E00", "#009E73", "#BBBBBB", "#56B4E9", "#E69F00", "#CC79A7", "#F0E442"),
        strict=True,
    )
)
STYLE = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "figure.facecolor": "white",  # figures stay readable in a dark theme: they bring their own background
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
}
matplotlib.rcParams.update(STYLE)


def caption(record: dict) -> str:
    """What a figure must always say: hardware, ranks, data."""
    ranks = f"{record['ranks']} rank" + ("s" if record["ranks"] > 1 else "")
    return f"{record['hardware']} · {ranks} · {record['data']['name']} · batch {record['batch_size']} a rank"


def memory_bars(axes, rows: list[tuple[str, dict, int | None]]):
    """Stacked horizontal bars of peak memory: rows of (label, {category: bytes} measured, predicted bytes or None).

    The first row is drawn on top. A predicted total is an outline around the bar.
    """
    places = range(len(rows))
    left = [0.0] * len(rows)
    for category in CATEGORIES:
        widths = [measured[category] / MIB for _, measured, _ in rows]
        if any(width > 0.005 for width in widths):
            axes.barh(places, widths, left=left, color=COLOURS[category], label=category, height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, (_, _, predicted), total in zip(places, rows, left, strict=True):
        if predicted is not None:
            axes.barh(place, predicted / MIB, fill=False, edgecolor="black", linewidth=1.3, height=0.76)
        axes.text(total + max(left) * 0.015, place, f"{total:.1f}", va="center")
    axes.set_yticks(places, [label for label, _, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.12)
    axes.set_xlabel("peak memory a rank [MiB]")


def time_bars(axes, rows: list[tuple[str, dict | None]]):
    """Horizontal bars of the median step time, with the spread from the 10th to the 90th percentile."""
    for place, (_, step) in enumerate(rows):
        if step is None:
            continue
        median, low, high = (step[k] * 1e3 for k in ("median", "p10", "p90"))
        axes.barh(place, median, color="#666666", height=0.62)
        axes.plot([low, high], [place, place], color="black", linewidth=1.5)
        axes.text(high, place, f"  {median:.0f}", va="center")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max((step["p90"] * 1e3 for _, step in rows if step), default=1))
    axes.set_xlabel("step time [ms]: median, 10th to 90th percentile")


def ladder(runs: list[dict], path: Path):
    """Memory and step time of every rung, side by side.

    runs: [{"label", "record", "predicted": bytes or None}, …], in order. Writes ``path`` (PNG or SVG).
    """
    figure, (memory, time) = plt.subplots(
        1, 2, figsize=(13, 0.55 * len(runs) + 2.4), width_ratios=[3, 2], sharey=False, layout="constrained"
    )
    memory_bars(memory, [(r["label"], r["record"]["memory"]["peak"], r["predicted"]) for r in runs])
    time_bars(time, [(r["label"], r["record"]["time"]["step"]) for r in runs])
    time.set_yticklabels([])
    widest = max((r["record"] for r in runs), key=lambda record: record["ranks"])
    predicted = "; solid: measured, outlined: predicted" if any(r["predicted"] for r in runs) else ""
    figure.suptitle(f"The ladder: one network, {len(runs)} ways to train it\n", x=0.01, ha="left", fontweight="bold")
    memory.set_title(caption(widest) + predicted, fontsize=11)
    handles, labels = memory.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)
