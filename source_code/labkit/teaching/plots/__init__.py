# SPDX-License-Identifier: BSD-3-Clause
"""Draw the course's figures from records, in one visual style.

Solid is measured, outlined is predicted, hatched is simulated; the learner's guess is a small diamond.
A category of memory has the same colour in every figure. The colours are Okabe and Ito's, those of strategies Paul
Tol's: colour-blind readers can distinguish them. Figures of a single chapter have their own files in this folder.

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
STRATEGY_COLOURS = {  # from Paul Tol's palette "muted", so that none is a category's
    "single": "#666666",
    "ddp": "#882255",
    "fsdp1": "#44AA99",
    "fsdp2": "#332288",
    "zero1": "#999933",
    "zero2": "#117733",
    "zero3": "#AA4499",
}
# Two categories are named after the collective that needs them; a legend also names their contents.
LABELS = {"all-gather": "whole parameters (all-gather)", "reduce-scatter": "whole gradients (reduce-scatter)"}
# How a predicted bar is drawn: its outline, around the measured one
PREDICTED = {"fill": False, "edgecolor": "black", "linewidth": 1.3}
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
    """Return the line that every figure shows: hardware, ranks, data."""
    ranks = f"{record['ranks']} rank" + ("s" if record["ranks"] > 1 else "")
    return f"{record['hardware']} · {ranks} · {record['data']['name']} · batch {record['batch_size']} per rank"


def headline(figure, title: str, under: str):
    """Add a bold title, and below it the line with hardware, ranks and data."""
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.axes[0].set_title(under, fontsize=11)


def show(figure, alt: str | None = None):
    """Show the figure below the cell of a notebook. alt: text alternative (default: its headline)."""
    if not matplotlib.get_backend().endswith("inline"):
        return
    from IPython.display import display

    words = [figure.get_suptitle(), *(axes.get_title("left") for axes in figure.axes)]
    headlines = ". ".join(" ".join(text.split()) for text in words if text)
    display(figure, metadata={"image/png": {"alt": alt or headlines}})
    plt.close(figure)


def handles_of(*panels) -> dict:
    """Return {label: artist} of what is drawn in these axes."""
    return {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}


def category_legend(figure, handles: dict, names: dict | None = None):
    """Put the legend of the memory categories below a figure.

    handles: {category: artist}. names: {category: a more specific name}.
    """
    ordered = [category for category in CATEGORIES if category in handles]
    words = [(LABELS | (names or {})).get(category, category) for category in ordered]
    figure.legend([handles[c] for c in ordered], words, loc="outside lower left", ncols=3, fontsize=11)


def memory_bars(axes, rows: list[tuple[str, dict, int | None]], guesses: dict[str, float] | None = None):
    """Draw stacked horizontal bars of peak memory: rows of (label, {category: bytes} measured, predicted bytes or None).

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
            axes.barh(place, predicted / MIB, height=0.76, **PREDICTED)
        axes.text(total + max(left) * 0.015, place, f"{total:.1f}", va="center")
    for label, guess in (guesses or {}).items():
        if guess is not None:
            place = [row[0] for row in rows].index(label)
            axes.plot(guess, place + 0.31, "D", color="black", markersize=7, clip_on=False, zorder=5)
    axes.set_yticks(places, [label for label, _, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.12)
    axes.set_xlabel("peak memory per rank [MiB]")


def time_bars(axes, rows: list[tuple[str, dict | None]]):
    """Draw horizontal bars of the median step time, with the range from the 10th to the 90th percentile."""
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
    """Draw a figure of peak memory: rows of (label, record, predicted {category: bytes} or None); guesses: {label: MiB}."""
    figure, axes = plt.subplots(figsize=(10, 0.6 * len(rows) + 2.2), layout="constrained")
    bars = [(label, record["memory"]["peak"], terms and sum(terms.values())) for label, record, terms in rows]
    memory_bars(axes, bars, guesses)
    marks = "solid: measured" + ", outlined: predicted" * any(row[2] for row in bars)
    marks += ", diamond: your guess" * any(guess is not None for guess in (guesses or {}).values())
    least, most = (end((record for _, record, _ in rows), key=lambda record: record["ranks"]) for end in (min, max))
    under = caption(most)
    if least["ranks"] < most["ranks"] and all(
        str(r["ranks"]) in label for label, r, _ in rows
    ):  # the rows are about it
        under = under.replace(f"{most['ranks']} ranks", f"{least['ranks']} to {most['ranks']} ranks")
    sizes = sorted(record["batch_size"] for _, record, _ in rows)
    if sizes[0] < sizes[-1]:
        under = under.replace(f"batch {most['batch_size']} per", f"batch {sizes[0]} to {sizes[-1]} per")
    headline(figure, title, f"{under}\n{marks}")
    category_legend(figure, handles_of(axes))
    show(figure)


def timeline(axes, record: dict, height: float | None = None):
    """Draw the live bytes of one step by category, with the peak marked.

    The horizontal axis counts changes of memory, not seconds. height: upper end of the vertical axis in MiB (default:
    the peak of this step).
    """
    snapshots = record["memory"]["timeline"]
    levels = [[snapshot[1 + i] / MIB for snapshot in snapshots] for i in range(len(CATEGORIES))]
    used = [i for i in range(len(CATEGORIES)) if max(levels[i]) > 0.005]
    totals = [sum(level) for level in zip(*levels, strict=True)]
    top = max(totals)
    height = height or top
    # The legend lists only visible areas: tall enough for long enough
    wide = [sum(size > 0.01 * height for size in level) > 0.002 * len(totals) for level in levels]
    axes.stackplot(
        range(len(snapshots)),
        [levels[i] for i in used],
        labels=[CATEGORIES[i] if wide[i] else "" for i in used],
        colors=[COLOURS[CATEGORIES[i]] for i in used],
        step="post",
        linewidth=0,
    )
    where = len(totals) - 1 - totals[::-1].index(top)
    axes.axhline(top, color="black", linestyle="--", linewidth=1)
    clear = len(totals) if where < 0.84 * len(totals) else where - 0.015 * len(totals)  # of the mark
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0}  # of a phase's line
    axes.text(clear, top * 1.02, f"peak {top:.1f} MiB ", ha="right", va="bottom", bbox=behind)
    axes.plot(where, top, "v", color="black", markersize=8, clip_on=False)
    name_phases(axes, [snapshot[0] for snapshot in snapshots], height * 1.2)
    axes.set(xlim=(0, len(totals)), ylim=(0, height * 1.27), ylabel="live tensors [MiB]")
    axes.set_xticks([])


def name_phases(axes, phases: list[str], height: float):
    """Label forward, backward and optimizer above the timeline, separated by thin lines."""
    # A fused optimizer allocates nothing, so it has no snapshots.
    named = [phase for phase in ("forward", "backward", "optimizer") if phase in phases]
    starts = [0, *(phases.index(phase) for phase in named[1:]), len(phases)]
    for phase, start, end in zip(named, starts[:-1], starts[1:], strict=True):
        if start and end - start < 0.1 * len(phases):  # too narrow for the word: it points there
            axes.text(start, height, f"{phase} →", ha="right", va="center", color="#444444")
        else:
            axes.text((start + end) / 2, height, phase, ha="center", va="center", color="#444444")
        axes.axvline(end, color="#888888", linewidth=0.8)


def timelines(rows: list[tuple[str, dict]], title: str, called: dict[str, str] | None = None):
    """Draw one step's memory, one panel per run on a common scale: rows of (label, record).

    called: {category: a more specific name for the legend}.
    """
    figure, panels = plt.subplots(
        len(rows), 1, figsize=(10, 2.6 * len(rows) + 1.6), squeeze=False, layout="constrained"
    )
    height = max(sum(record["memory"]["peak"].values()) for _, record in rows) / MIB
    for axes, (label, record) in zip(panels[:, 0], rows, strict=True):
        timeline(axes, record, height)
        axes.set_title(label, loc="right", fontsize=12, fontweight="bold")
    panels[-1, 0].set_xlabel("one step, left to right: every change of memory")
    widest = max((record for _, record in rows), key=lambda record: record["ranks"])
    under, (*others, most) = caption(widest), sorted({record["ranks"] for _, record in rows})
    if others:  # say that the panels differ
        under = under.replace(f"{most} ranks", f"{', '.join(map(str, others))} and {most} ranks")
    headline(figure, title, f"{under}\nmeasured")
    category_legend(figure, handles_of(*panels[:, 0]), called)
    show(figure)


def ladder(runs: list[dict], path: Path | None = None, title: str | None = None, guesses: dict | None = None):
    """Draw memory and step time of every rung, side by side.

    Args:
        runs: [{"label", "record", "predicted": bytes or None}, …], in order.
        path: file to write (PNG or SVG).
        title: default: how many rungs there are.
        guesses: {label: guessed peak in MiB, or None}; those of other rungs are not drawn.
    """
    figure, (memory, time) = plt.subplots(
        1, 2, figsize=(13, 0.55 * len(runs) + 2.4), width_ratios=[3, 2], sharey=False, layout="constrained"
    )
    guesses = {r["label"]: guesses[r["label"]] for r in runs if r["label"] in (guesses or {})}
    memory_bars(memory, [(r["label"], r["record"]["memory"]["peak"], r["predicted"]) for r in runs], guesses)
    time_bars(time, [(r["label"], r["record"]["time"]["step"]) for r in runs])
    time.set_yticklabels([])
    widest = max((r["record"] for r in runs), key=lambda record: record["ranks"])
    marks = "; solid: measured, outlined: predicted" if any(r["predicted"] for r in runs) else ""
    marks += ", diamond: the guess" if any(guess is not None for guess in guesses.values()) else ""
    title = title or f"The ladder: one network, {len(runs)} ways to train it"
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontweight="bold")
    memory.set_title(caption(widest) + marks, fontsize=11)
    category_legend(figure, handles_of(memory))
    if path:
        figure.savefig(path, dpi=120)
    show(figure, alt=f"{title}: peak memory and step time of {', '.join(r['label'] for r in runs)}")
    plt.close(figure)
