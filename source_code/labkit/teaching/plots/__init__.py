"""Every figure of the course, from records only, in one visual language.

Solid is measured, outlined is predicted, hatched is simulated; the learner's guess is a small diamond.
A category of memory has the same colour in every figure. The colours are Okabe and Ito's, which colour-blind
readers can tell apart. Figures that only one chapter draws are in files of their own beside this one.

The functions that make whole figures end with ``show``, which puts them under a notebook's cell.
"""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from labkit.measuring.trace import CATEGORIES

MIB = 2**20

COLOURS = dict(
    zip(
        CATEGORIES,
        ("#0072B2", "#D55E00", "#009E73", "#BBBBBB", "#56B4E9", "#E69F00", "#CC79A7", "#F0E442"),
        strict=True,
    )
)
STRATEGY_COLOURS = {
    "single": "#666666",
    "ddp": "#D55E00",
    "fsdp1": "#56B4E9",
    "fsdp2": "#0072B2",
    "zero1": "#E69F00",
    "zero2": "#009E73",
    "zero3": "#CC79A7",
}
STYLE = {
    "font.size": 12,
    "figure.dpi": 100,
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


def headline(figure, title: str, under: str):
    """A bold title, and the line under it that names hardware, ranks and data."""
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.axes[0].set_title(under, fontsize=11)


def show(figure, alt: str | None = None):
    """In a notebook, put the figure under the cell. alt: the picture in words (default: its headline)."""
    if not matplotlib.get_backend().endswith("inline"):
        return
    from IPython.display import display

    words = [figure.get_suptitle(), *(axes.get_title("left") for axes in figure.axes)]
    headlines = ". ".join(" ".join(text.split()) for text in words if text)
    display(figure, metadata={"image/png": {"alt": alt or headlines}})
    plt.close(figure)


def memory_bars(axes, rows: list[tuple[str, dict, int | None]], guesses: dict[str, float] | None = None):
    """Stacked horizontal bars of peak memory: rows of (label, {category: bytes} measured, predicted bytes or None).

    The first row is drawn on top. A predicted total is an outline around the bar. guesses: {label: MiB or None}.
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
    for label, guess in (guesses or {}).items():
        if guess is not None:
            place = [row[0] for row in rows].index(label)
            axes.plot(guess, place + 0.31, "D", color="black", markersize=7, clip_on=False, zorder=5)
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


def memory(rows: list[tuple[str, dict, dict | None]], title: str, guesses: dict[str, float] | None = None):
    """A figure of peak memory: rows of (label, record, predicted {category: bytes} or None); guesses: {label: MiB}."""
    figure, axes = plt.subplots(figsize=(10, 0.6 * len(rows) + 2.2), layout="constrained")
    bars = [(label, record["memory"]["peak"], terms and sum(terms.values())) for label, record, terms in rows]
    memory_bars(axes, bars, guesses)
    marks = "solid: measured" + ", outlined: predicted" * any(row[2] for row in bars)
    marks += ", diamond: your guess" * any(guess is not None for guess in (guesses or {}).values())
    widest = max((record for _, record, _ in rows), key=lambda record: record["ranks"])
    headline(figure, title, f"{caption(widest)}\n{marks}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=11)
    show(figure)


def timeline(axes, record: dict, height: float | None = None):
    """The live bytes of one step by category, from its first tensor to its last, the highest moment marked.

    height: MiB the vertical axis has room for (default: this step's peak). The horizontal axis counts changes of memory, not seconds: what is quick and what is slow look alike.
    """
    moments = record["memory"]["timeline"]
    levels = [[moment[1 + i] / MIB for moment in moments] for i in range(len(CATEGORIES))]
    used = [i for i in range(len(CATEGORIES)) if max(levels[i]) > 0.005]
    axes.stackplot(
        range(len(moments)),
        [levels[i] for i in used],
        labels=[CATEGORIES[i] for i in used],
        colors=[COLOURS[CATEGORIES[i]] for i in used],
        step="post",
        linewidth=0,
    )
    totals = [sum(level) for level in zip(*levels, strict=True)]
    top = max(totals)
    height = height or top
    where = len(totals) - 1 - totals[::-1].index(top)
    axes.axhline(top, color="black", linestyle="--", linewidth=1)
    axes.text(len(totals), top, f"peak {top:.1f} MiB ", ha="right", va="bottom")
    axes.plot(where, top, "v", color="black", markersize=8, clip_on=False)
    name_phases(axes, [moment[0] for moment in moments], height * 1.2)
    axes.set(xlim=(0, len(totals)), ylim=(0, height * 1.27), ylabel="live tensors [MiB]")
    axes.set_xticks([])


def name_phases(axes, phases: list[str], height: float):
    """Name forward, backward and optimizer above the timeline, a thin line between them."""
    starts = [0, phases.index("backward"), phases.index("optimizer"), len(phases)]
    for phase, start, end in zip(("forward", "backward", "optimizer"), starts[:-1], starts[1:], strict=True):
        narrow = end - start < 0.12 * len(phases)
        place, side = (end, "right") if narrow else ((start + end) / 2, "center")
        axes.text(place, height, phase, ha=side, va="center", color="#444444")
        axes.axvline(end, color="#888888", linewidth=0.8)


def timelines(rows: list[tuple[str, dict]], title: str):
    """A figure of one step's memory, a panel a run, one scale for all: rows of (label, record)."""
    figure, panels = plt.subplots(
        len(rows), 1, figsize=(10, 2.6 * len(rows) + 1.6), squeeze=False, layout="constrained"
    )
    height = max(sum(record["memory"]["peak"].values()) for _, record in rows) / MIB
    names = {}
    for axes, (label, record) in zip(panels[:, 0], rows, strict=True):
        timeline(axes, record, height)
        axes.set_title(label, loc="right", fontsize=12, fontweight="bold")
        names |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    panels[-1, 0].set_xlabel("one step, left to right: every change of memory")
    widest = max((record for _, record in rows), key=lambda record: record["ranks"])
    headline(figure, title, f"{caption(widest)}; measured")
    ordered = [c for c in CATEGORIES if c in names]
    figure.legend([names[c] for c in ordered], ordered, loc="outside lower left", ncols=4, fontsize=11)
    show(figure)


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
