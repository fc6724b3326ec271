# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 11: predicted, simulated and measured memory side by side; errors of estimators."""

import re
from itertools import pairwise
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb

from labkit import UserError
from labkit.measuring.differences import largest
from labkit.measuring.trace import CATEGORIES
from labkit.teaching.plots import COLOURS, category_legend, headline, show

GIB = 2**30
MOST_NAMES = 30  # most phase labels below an axis
LEAST = 0.01  # share of the peak: smaller terms are drawn as one bar
WAYS = ("measured", "simulated", "predicted")  # from top to bottom
MARKS = {"measured": "solid", "simulated": "hatched", "predicted": "outlined"}


def look(way: str, colour: str) -> dict:
    """Return the style of a bar for measured, simulated or predicted memory."""
    if way == "measured":
        return {"color": colour}
    if way == "simulated":
        return {"facecolor": "white", "edgecolor": colour, "linewidth": 2.2, "hatch": "////"}
    return {"facecolor": _mixed(colour, 1, 0.25), "edgecolor": _mixed(colour, 0, 0.8), "linewidth": 2.2}


def _mixed(colour: str, gray: float, share: float) -> tuple:
    """Return a colour mixed with black (0) or white (1), of which ``share`` is the colour: light ones need a tint to be seen."""
    return tuple(share * part + (1 - share) * gray for part in to_rgb(colour))


def ways(rows: list[tuple], title: str, under: str, unit=(2**20, "MiB"), limit=None, guesses=None):
    """Draw peak memory by category: rows of (label, {"measured" | "simulated" | "predicted": {category: bytes}}).

    limit: bytes, a dashed line. guesses: {label: number in ``unit`` or None}.
    """
    size, name = unit
    present = [way for way in WAYS if any(way in row for _, row in rows)]
    pitch = 0.8 / len(present)
    figure, axes = plt.subplots(figsize=(10, (0.3 * len(present) + 0.18) * len(rows) + 2.4), layout="constrained")
    handles, longest = {}, 0
    gap = 0.004 * max(sum(terms.values()) for _, row in rows for terms in row.values()) / size
    for place, (_, row) in enumerate(rows):
        for way, terms in row.items():
            y, left = place + pitch * (present.index(way) - (len(present) - 1) / 2), 0
            for category in [c for c in CATEGORIES if terms.get(c, 0) > 0.001 * sum(terms.values())]:
                width = terms[category] / size
                inset = 0 if way == "measured" else min(gap, width / 3)  # outlines beside each other, not on each other
                drawn = {"left": left + inset / 2, "height": 0.82 * pitch} | look(way, COLOURS[category])
                bar = axes.barh(y, width - inset, **drawn)
                handles.setdefault(category, bar) if way == present[0] else None
                left += width
            number = f"{left:,.{2 if name == 'GiB' else 1}f}"
            paper = {
                "facecolor": "white",
                "edgecolor": "none",
                "pad": 1,
            }  # the number stays legible on the limit's line
            axes.annotate(number, (left, y), (5, 0), textcoords="offset points", va="center", fontsize=11, bbox=paper)
            longest = max(longest, left)
    for label, guess in (guesses or {}).items():
        if guess is not None:
            axes.plot(guess, [row[0] for row in rows].index(label) - 0.47, "D", color="black", markersize=7, zorder=5)
    if limit:
        axes.axvline(limit / size, color="black", linestyle="--", linewidth=1)
        axes.text(
            limit / size,
            1,
            f" {limit / size:.3g} {name} for tensors",
            transform=axes.get_xaxis_transform(),
            va="bottom",
        )
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(0, max(longest, (limit or 0) / size, *[g or 0 for g in (guesses or {}).values()], 0) * 1.13)
    axes.set_xlabel(f"peak memory per rank [{name}]")
    marks = ", ".join(f"{MARKS[way]}: {way}" for way in present)
    marks += ", diamond: your guess" * any(g is not None for g in (guesses or {}).values())
    headline(figure, title, f"{under}\n{marks}")
    category_legend(figure, handles)
    show(figure)


def places(phases: dict, title: str, under: str):
    """Draw the peak of each phase of a predicted step: ``Plan.timeline()``'s dict, in order."""
    figure, axes = plt.subplots(figsize=(10, 6.4), layout="constrained")
    handles = draw_places(axes, phases)
    headline(figure, title, f"{under}; outlined: predicted")
    category_legend(figure, handles)
    show(figure)


def draw_places(axes, phases: dict, size: int = GIB, unit: str = "GiB") -> dict:
    """Draw a bar for each phase, stacked by category; return the legend's handles."""
    handles = {}
    totals = [total / size for total, _ in phases.values()]
    at = _with_breaks(list(phases))
    for x, (_, terms) in zip(at, phases.values(), strict=True):
        bottom, gap = 0, 0.005 * max(totals)
        for category in CATEGORIES:
            height = sum(bytes_ for (kind, _), bytes_ in terms.items() if kind == category) / size
            if height > 0.003 * max(totals):
                inset = min(gap, height / 3)
                drawn = {"bottom": bottom + inset / 2, "width": 0.66} | look("predicted", COLOURS[category])
                handles.setdefault(category, axes.bar(x, height - inset, **drawn))
                bottom += height
    for before, after in pairwise(at):
        if after - before > 1:  # omitted blocks: their memory is between that of their neighbors
            axes.text((before + after) / 2, 0.02 * max(totals), "⋯", ha="center", fontsize=16)
    top = max(range(len(totals)), key=lambda i: totals[i])
    names = list(phases)
    words = f"{names[top]}: {totals[top]:.2f} {unit}"
    side = "left" if at[top] < at[-1] / 3 else "right" if at[top] > at[-1] * 2 / 3 else "center"
    axes.text(at[top], totals[top], words, ha=side, va="bottom", fontweight="bold")
    shown = range(0, len(phases), len(phases) // MOST_NAMES + 1)
    where = [at[x] for x in shown]
    axes.set_xticks(where, [names[x] for x in shown], rotation=60, ha="right", rotation_mode="anchor", fontsize=11)
    axes.set(ylabel=f"peak of each phase [{unit}]", ylim=(0, 1.12 * max(totals)), xlim=(-0.6, at[-1] + 0.6))
    return handles


def _with_breaks(names: list[str]) -> list[float]:
    """Return each phase's position on the axis: at a distance of 1, or more if blocks between two phases are omitted."""
    blocks = [re.fullmatch(r"(.*block) (\d+)", name) for name in names]
    at = [0.0]
    for before, after in pairwise(blocks):
        skipped = before and after and before[1] == after[1] and abs(int(before[2]) - int(after[2])) > 1
        at.append(at[-1] + (1.9 if skipped else 1))
    return at


def step(plan, title: str):
    """Draw the memory of a planned step by phase, and below it the terms of its peak, largest first."""
    phases = plan.timeline()
    terms = plan.explain()
    peak = sum(size for _, size, _ in terms)
    large = [term for term in terms if term[1] >= LEAST * peak]
    small = peak - sum(size for _, size, _ in large)
    size, unit = (GIB, "GiB") if peak >= GIB / 10 else (2**20, "MiB")
    rows = len(large) + bool(small)
    figure, (above, below) = plt.subplots(
        2, figsize=(10, 7.2 + 0.36 * rows), height_ratios=[5, 1 + 0.36 * rows], layout="constrained"
    )
    handles = draw_places(above, phases, size, unit)
    for place, ((category, _), bytes_, _) in enumerate(large):
        below.barh(place, bytes_ / size, height=0.66, **look("predicted", COLOURS[category]))
        below.text(bytes_ / size, place, f" {bytes_ / size:.2f}", va="center", fontsize=11)
    if small:
        below.barh(len(large), small / size, height=0.66, facecolor="white", edgecolor="black")
        below.text(small / size, len(large), f" {small / size:.2f}", va="center", fontsize=11)
    names = [name for (_, name), _, _ in large] + [f"{len(terms) - len(large)} smaller terms"] * bool(small)
    below.set_yticks(range(rows), names)
    below.tick_params(axis="y", length=0)
    below.invert_yaxis()
    below.set_xlim(0, 1.1 * max(bytes_ for _, bytes_, _ in large) / size)
    below.set_xlabel(f"alive at the peak, {plan.peak()[0]} [{unit}]")
    headline(figure, fill(title, 78), "outlined: predicted; the middle ones of many equal blocks are omitted")
    category_legend(figure, handles)
    return figure


def save(figure, path: str):
    """Write a figure.

    Raises:
        UserError: if the format is unknown, or the file cannot be written.
    """
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"the figure cannot be written to {path} ({error.strerror}): name another file") from None
    except ValueError as error:
        raise UserError(
            f"the figure cannot be written to {path} ({error}): end its name in .png, .svg or .pdf"
        ) from None


def published(rows: list[tuple], factor: float, title: str, under: str):
    """Draw published runs against their plans, memory and speed: rows of (label, published / planned memory, speed).

    factor: a line over the memory. speed: (planned at least, planned at most, published) tokens per second of a GPU; the
    last is None if it was not published.
    """
    figure, panels = plt.subplots(1, 2, figsize=(10, 0.42 * len(rows) + 2.2), sharey=True, layout="constrained")
    for place, (_, share, (low, high, speed)) in enumerate(rows):
        panels[1].barh(place, high - low, left=low, height=0.6, **look("predicted", COLOURS["optimizer state"]))
        for panel, cross in zip(panels, (share, speed), strict=True):
            if cross:
                panel.plot([cross], [place], "x", color="black", markersize=9, markeredgewidth=2.2, zorder=5)
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # the number stays legible on the line
        panels[0].text(share + 0.012, place, f"{share:.3f}", va="center", fontsize=11, bbox=paper, zorder=4)
    panels[0].axvline(factor, color="black", linestyle="--", linewidth=1)
    panels[0].text(factor, 1, f"{factor}", transform=panels[0].get_xaxis_transform(), ha="center", va="bottom")
    panels[0].set_yticks(range(len(rows)), [label for label, *_ in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    labels = "memory: reserved / planned", "tokens per second of a GPU"
    most = max(factor, *(share for _, share, _ in rows))
    for panel, label, span in zip(panels, labels, ((1, most + 0.05), (0, None)), strict=True):
        panel.tick_params(axis="y", length=0)
        panel.set(xlabel=label, xlim=span)
    figure.suptitle(f"{title}\n\n", x=0.01, ha="left", fontweight="bold")
    figure.text(0.01, 0.955, under, fontsize=11, va="top")
    show(figure)


def errors(panels: dict[str, dict[str, float]], title: str, under: str):
    """Draw signed relative errors of estimators, one panel per estimated quantity: {quantity: {estimator: error}}.

    The first panel has all estimators, the planner last; estimators missing in another panel were not run there.
    """
    names = list(next(iter(panels.values())))
    figure, axes = plt.subplots(1, len(panels), figsize=(10, 0.5 * len(names) + 2.2), sharey=True, layout="constrained")
    for panel, (about, by_estimator) in zip(axes, panels.items(), strict=True):
        reach = 100 * largest(map(abs, by_estimator.values()))
        for place, name in enumerate(names):
            if name not in by_estimator:
                panel.text(0.05 * reach, place, "not asked", va="center", color="#666666")
                continue
            error = by_estimator[name] * 100
            panel.barh(place, error, color="#222222" if place == len(names) - 1 else "#999999", height=0.6)
            side, gap = ("left", 0.05 * reach) if error >= 0 else ("right", -0.05 * reach)
            panel.text(
                error + gap, place, f"{error:+.0f} %" if abs(error) >= 0.5 else f"{error:+.2f} %", ha=side, va="center"
            )
        panel.axvline(0, color="black", linewidth=1)
        low, high = min(0, *[100 * e for e in by_estimator.values()]), max(0, *[100 * e for e in by_estimator.values()])
        panel.set_xlim(low - 0.45 * reach, high + 0.45 * reach)
        panel.set_xlabel("error of the estimate [%]")
        panel.set_title(about, loc="right", fontsize=11)
        panel.set_yticks(range(len(names)), names)
        panel.tick_params(axis="y", length=0)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    figure.suptitle(f"{title}\n\n", x=0.01, ha="left", fontweight="bold")
    figure.text(0.01, 0.925, under, fontsize=11, va="top")
    show(figure)


def sliders(redraw, **controls):
    """Show ipywidgets' ``interactive``, with a text replacement for saved pages."""
    from IPython.display import display
    from ipywidgets import interactive

    widget = interactive(redraw, **controls)
    data = widget._repr_mimebundle_()
    words = "[Sliders: run this cell in JupyterLab to move them. Saved pages show the figure below instead.]"
    display(data | {"text/plain": words}, raw=True)
