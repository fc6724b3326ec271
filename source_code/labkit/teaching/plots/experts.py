# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 19: experts under FSDP and expert parallelism, and what an uneven routing costs."""

import matplotlib.pyplot as plt

from labkit.measuring.trace import CATEGORIES
from labkit.teaching.plots import COLOURS, LABELS, MIB, PREDICTED, handles_of, headline, memory_bars, show

KINDS = {"all-gather": COLOURS["all-gather"], "reduce-scatter": COLOURS["reduce-scatter"], "all-to-all": "#444444"}
MEGABYTES = (3, 10, 30, 100, 300)  # ticks
BALANCE = {"none": ("#666666", "o"), "loss": ("#0072B2", "s"), "bias": ("#D55E00", "^")}


def sent(traffic: list[dict]) -> dict[str, float]:
    """Return {kind of collective: MB of a step}, its larger buffer counted."""
    return {kind: sum(c["bytes"] * c["count"] for c in traffic if c["kind"] == kind) / 1e6 for kind in KINDS}


def traffic_and_peak(rows: list[tuple], title: str, under: str, gathered: dict, peak: dict):
    """Draw the traffic of a step and the peak of rank 0, measured and planned.

    Args:
        rows: (label, record, plan) of each run.
        title: of the figure.
        under: the line with hardware, ranks, and data.
        gathered: the learner's guesses, {label: MB all-gathered in a step, or None}.
        peak: {label: MiB at the peak, or None}.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 2 + 0.7 * len(rows)), layout="constrained", sharey=True)
    memory = [(label, record["memory"]["peak"], sum(plan.peak()[1].values())) for label, record, plan in rows]
    totals = []
    for place, (label, record, plan) in enumerate(rows):
        totals.append(0.0)
        for kind, size in sent(record["traffic"]).items():
            left.barh(place, size, left=totals[-1], color=KINDS[kind], height=0.62, label=kind if size else None)
            totals[-1] += size
        left.barh(place, sum(sent(plan.traffic()).values()), height=0.76, **PREDICTED)
        left.text(totals[-1], place, f"  {totals[-1]:.1f}", va="center")
        if gathered.get(label) is not None:
            left.plot(gathered[label], place + 0.31, "D", color="black", markersize=7)
    left.set(xlim=(0, 1.2 * max(totals)), xlabel="collectives of a step [MB]")
    memory_bars(right, memory, peak)
    found = handles_of(right, left)
    names = [*(name for name in CATEGORIES if name in found), *(name for name in KINDS if name not in CATEGORIES)]
    names = [name for name in names if name in found]
    words = [LABELS.get(name, name) for name in names]
    figure.legend([found[name] for name in names], words, loc="outside lower left", ncols=3, fontsize=11)
    headline(figure, title, f"{under}\nsolid: measured; outlined: predicted")
    show(figure)


def uneven(cases: list[dict], title: str, under: str, guess: float | None = None):
    """Draw each rank's peak, and the time of its experts, by the rows that it receives.

    Args:
        cases: {"label", "color", "ranks": [{"load": rows over the mean, "peak", "planned": bytes, "uniform": bytes of the
            plan for uniform choices, "milliseconds", "expected": of the experts' forward}]}.
        title: of the figure.
        under: the line with hardware, ranks, and data.
        guess: MiB of the rank that gets all rows.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for case in cases:
        loads = [rank["load"] for rank in case["ranks"]]
        solid = {"color": case["color"], "linestyle": "none", "marker": "o"}
        outlined = solid | {"markersize": 11, "fillstyle": "none"}
        left.plot(loads, [rank["peak"] / MIB for rank in case["ranks"]], markersize=6, **solid, label=case["label"])
        left.plot(loads, [rank["planned"] / MIB for rank in case["ranks"]], **outlined)
        right.plot(loads, [rank["milliseconds"] for rank in case["ranks"]], markersize=6, **solid)
        right.plot(loads, [rank["expected"] for rank in case["ranks"]], **outlined)
    uniform = cases[0]["ranks"][0]["uniform"] / MIB
    left.axhline(uniform, color="#888888", linestyle="--", linewidth=1)
    left.text(4.1, uniform - 1, "planned, uniform choices", color="#666666", ha="right", va="top")
    if guess is not None:
        left.plot(4, guess, "D", color="black", markersize=7, clip_on=False)
    left.set(xlabel="rows that the rank receives / mean [times]", ylabel="peak memory [MiB]", ylim=(0, None))
    right.set(xlabel="rows that the rank receives / mean [times]", ylabel="its experts' forwards [ms of CPU]")
    right.set_ylim(0, None)
    left.legend(title="tokens prefer rank 0's experts", loc="upper left")
    headline(figure, title, f"{under}\nsolid: measured; outlined: predicted")
    show(figure)


def balance(found: dict[str, list[float]], experts: int, top_k: int, title: str, under: str):
    """Draw how full the fullest expert is in each step, relative to the mean, with each way of balancing.

    Args:
        found: {"none", "loss", "bias": [times the mean, of each step]}.
        experts: their number.
        top_k: how many a token chooses.
        title: of the figure.
        under: the line with hardware, ranks, and data.
    """
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    for how, times in found.items():
        color, marker = BALANCE[how]
        axes.plot(range(1, len(times) + 1), times, color=color, marker=marker, label=how)
    for place, words in ((experts / top_k, f"all tokens choose the same {top_k} experts"), (1, "perfectly even")):
        axes.axhline(place, color="#888888", linestyle="--", linewidth=1)
        axes.text(len(times), place + 0.06, words, ha="right", color="#666666")
    axes.set(xlabel="step", ylabel="fullest expert / mean [times]", ylim=(0.7, experts / top_k + 0.5))
    axes.set_xticks(range(1, len(next(iter(found.values()))) + 1, 2))
    axes.legend(title="--balance", loc="lower left", bbox_to_anchor=(0, 0.08), ncols=3)
    headline(figure, title, under)
    show(figure)


def crossing(tokens: list[int], lines: dict[str, list[float]], points: dict[str, list[tuple]], title: str, under: str):
    """Draw the traffic of a step by the tokens of a rank.

    Args:
        tokens: of a rank.
        lines: {label: MB planned}.
        points: {label: [(tokens, MB measured)]}.
        title: of the figure.
        under: the line below it.
    """
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    for (label, sizes), color in zip(lines.items(), ("#56B4E9", "#444444"), strict=True):
        axes.plot(tokens, sizes, "o--", mfc="none", color=color, label=label)
        axes.plot(*zip(*points[label], strict=True), "o", color=color, markersize=9)
    axes.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="collectives of a step [MB]")
    axes.set_xticks(tokens, [f"{each:,}" for each in tokens])
    axes.set_yticks(MEGABYTES, MEGABYTES)
    axes.minorticks_off()
    axes.legend(loc="upper left")
    headline(figure, title, under)
    show(figure)
