# SPDX-License-Identifier: BSD-3-Clause
"""Figure of chapter 09: each setting of FSDP2 as a point, peak memory over traffic."""

import matplotlib.pyplot as plt

from labkit.teaching.plots import MIB, STRATEGY_COLOURS, caption, headline, show

GAP = 0.052  # the least distance between two labels, as a share of the axis


def micro_batches(record: dict) -> int:
    return record["config"].get("accumulate") or 1


def traffic(entries: list[dict], among: int | None = None) -> int:
    """Return the bytes that a step's collectives gather and reduce. among: count only collectives of that many ranks."""
    return sum(e["count"] * e["bytes"] for e in entries if among in (None, e.get("ranks")))


def plane(points: list[tuple], title: str, guesses: dict[str, float] | None = None, arrow: str = ""):
    """Draw peak memory over traffic, one point per run: the record's values solid, the plan's outlined.

    points: (label, record, planner.predict.Plan or None). guesses: {label: MiB or None}, drawn at the predicted traffic.
    arrow: text of an arrow to the planned traffic among all ranks, where other collectives run in smaller groups.
    """
    figure, axes = plt.subplots(figsize=(10, 6.2), layout="constrained")
    places = []
    for label, record, plan in points:
        times = 1e6 * micro_batches(record)
        x, y = traffic(record["traffic"]) / times, sum(record["memory"]["peak"].values()) / MIB
        places.append((label, x, y))
        axes.plot(x, y, "o", color=STRATEGY_COLOURS["fsdp2"], markersize=8)
        if plan is None:
            continue
        expected, terms = traffic(plan.traffic()) / times, plan.peak()[1]
        axes.plot(expected, sum(terms.values()) / MIB, "o", color="black", markersize=14, markerfacecolor="none")
        shared = traffic(plan.traffic(), among=plan.ranks) / times
        if arrow and shared < expected:
            axes.annotate("", (shared, y), (x, y), arrowprops={"arrowstyle": "->", "shrinkA": 9, "linestyle": "--"})
            axes.annotate(arrow, (x, y), (-14, 5), textcoords="offset points", ha="right", fontsize=11)
        guess = (guesses or {}).get(label)
        if guess is not None:
            axes.plot(expected, guess, "D", color="black", markersize=7)
    guessed = [guess for guess in (guesses or {}).values() if guess is not None]
    heights = [y for _, _, y in places] + guessed
    low, high = min(heights), max(heights)
    axes.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    right = max(x for _, x, _ in places)
    axes.set_xlim(0, right * 1.42)
    _name(axes, places, right)
    axes.set(xlabel="gathered + reduced per micro-batch [MB]", ylabel="peak memory per rank [MiB]")
    axes.grid(color="#DDDDDD", linewidth=0.6)
    marks = "solid: measured, outlined: predicted" + ", diamond: your guess" * bool(guessed)
    marks += "; the vertical axis does not start at zero"
    headline(figure, title, f"{caption(points[0][1])}\n{marks}")
    show(figure)


def _name(axes, places: list[tuple[str, float, float]], right: float):
    """Write each label to the right of its point; spread the labels of close points vertically."""
    low, high = axes.get_ylim()
    columns = {}  # x of labels → their points
    for label, x, y in sorted(places, key=lambda place: place[2]):
        columns.setdefault(right if x > 0.85 * right else x, []).append((label, x, y))
    for column, points in columns.items():
        for (label, x, y), height in zip(points, _apart([y for _, _, y in points], GAP * (high - low)), strict=True):
            axes.annotate(
                label,
                (x, y),
                (column + 0.045 * right, height),
                va="center",
                arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.7, "shrinkB": 8},
            )


def _apart(heights: list[float], gap: float) -> list[float]:
    """Rising ``heights``, moved until they are ``gap`` apart, as much up as down."""
    up, down = list(heights), list(heights)
    for i in range(1, len(heights)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[-1 - i] = min(down[-1 - i], down[-i] - gap)
    return [(a + b) / 2 for a, b in zip(up, down, strict=True)]
