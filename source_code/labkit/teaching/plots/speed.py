# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 12: the time of a step by part, and the time cost of each memory saving."""

import statistics

from matplotlib.patheffects import withStroke

from labkit.teaching.plots import COLOURS, MIB, STRATEGY_COLOURS, headline, plt, show

COMPUTE, REST = COLOURS["activations"], "#666666"
TONES = {
    "all-gather": COLOURS["all-gather"],
    "reduce-scatter": COLOURS["reduce-scatter"],
    "all-reduce": COLOURS["all-reduce buckets"],
}
SHARES = {
    "operators": COMPUTE,
    "exposed communication": "#D55E00",
    "rest": "white",
}
DOTS = {"fsdp1": {"marker": "o", "markersize": 7, "markeredgecolor": "white", "zorder": 4}}  # the others' are larger
GRID = {"color": "#DDDDDD", "linewidth": 0.6}


def lanes(runs: dict[str, list[dict]], under: str, title: str):
    """Draw two rows per rank: operators of the computing thread, and collectives in flight.

    runs: {name: [a rank's {"begin", "end", "operators": [(begin, end)], "collectives": [(kind, begin, end)]}]}, seconds.
    """
    figure, panels = plt.subplots(len(runs), 1, figsize=(11, 2.15 * len(runs) + 1.3), layout="constrained", sharex=True)
    names = {}
    for axes, (name, ranks) in zip(panels, runs.items(), strict=True):
        zero = min(rank["begin"] for rank in ranks)
        for number, rank in enumerate(ranks):
            row = 2.4 * number
            spans = [(1e3 * (begin - zero), 1e3 * (end - begin)) for begin, end in rank["operators"]]
            names["operators compute"] = axes.broken_barh(spans, (row - 0.45, 0.9), color=COMPUTE, linewidth=0)
            for kind, begin, end in rank["collectives"]:
                bar = axes.barh(row + 1, 1e3 * (end - begin), left=1e3 * (begin - zero), color=TONES[kind], height=0.9)
                names[kind] = bar
        rows = [2.4 * number + lane for number in range(len(ranks)) for lane in (0, 1)]
        labels = [f"rank {number}, {lane}" for number in range(len(ranks)) for lane in ("compute", "gloo")]
        axes.set_yticks(rows, labels, fontsize=11)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_title(name, loc="right", fontsize=12, fontweight="bold")
    longest = max(rank["end"] - min(r["begin"] for r in ranks) for ranks in runs.values() for rank in ranks)
    # With a margin, so that nobody wonders whether the last operators are cut off
    panels[-1].set(xlim=(0, 1.03e3 * longest), xlabel="milliseconds since the first rank began this step")
    headline(figure, title, under)
    figure.legend(names.values(), names, loc="outside lower left", ncols=5, fontsize=11)
    show(figure)


def parts(rows: dict, spreads: dict, under: str, title: str, label: str, guesses: dict | None = None):
    """Draw stacked bars of a step's parts, each bar's length with its spread, on an axis of ratios with 1 marked.

    Args:
        rows: {name: {part: its length}}, whose sum is the bar's length.
        spreads: {name: {"median", "p10", "p90"} of the length}.
        under, title, label: of the figure, and of the axis.
        guesses: {name: guessed length, or None}.
    """
    figure, axes = plt.subplots(figsize=(10, 0.75 * len(rows) + 2), layout="constrained")
    left = [0.0] * len(rows)
    for part, colour in SHARES.items():
        widths = [row[part] for row in rows.values()]
        axes.barh(range(len(rows)), widths, left=left, color=colour, edgecolor=REST, height=0.56, label=part)
        for place, (begin, width) in enumerate(zip(left, widths, strict=True)):
            if width > 0.065:
                axes.text(begin + width / 2, place, f"{width:.2f}", ha="center", va="center")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, name in enumerate(rows):
        spread = spreads[name]
        axes.plot([spread["p10"], spread["p90"]], [place + 0.36] * 2, color="black", linewidth=1.5)
        end = max(spread["p90"], left[place])
        axes.annotate(
            f"{spread['median']:.2f} ×",
            (end, place),
            (9, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
        )
        if (guesses or {}).get(name) is not None:
            axes.plot(guesses[name], place - 0.38, "D", color="black", markersize=7, clip_on=False, zorder=5)
    axes.axvline(1, color="black", linestyle="--", linewidth=1, zorder=0)  # behind the numbers
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    ends = [spread["p90"] for spread in spreads.values()] + [g for g in (guesses or {}).values() if g]
    axes.set(xlim=(0, 1.12 * max(ends)), xlabel=label)
    headline(figure, title, under)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=11)
    show(figure)


def ratios(rows: dict[str, dict], under: str, title: str, label: str):
    """Draw one dot with its spread per row, on a logarithmic axis with 1 marked. rows: {name: {"median", "p10", "p90"}}."""
    figure, axes = plt.subplots(figsize=(10, 0.6 * len(rows) + 1.7), layout="constrained")
    for place, ratio in enumerate(rows.values()):
        axes.plot([ratio["p10"], ratio["p90"]], [place, place], color="black", linewidth=1.5)
        axes.plot(ratio["median"], place, "o", color=STRATEGY_COLOURS["fsdp2"], markersize=9)
        axes.annotate(
            f"{ratio['median']:.3g} ×", (ratio["p90"], place), (9, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xscale("log")
    axes.set_xlim(right=3 * max(row["p90"] for row in rows.values()))
    axes.set_xlabel(label)
    headline(figure, title, under)
    show(figure)


def batch_scaling(tokens: list[int], steps: list[dict], fixed: float, each: float, under: str, title: str):
    """Draw step time and tokens/s over tokens per step: measured, and ``fixed + each × tokens`` seconds."""
    figure, (time, rate) = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    fine = [max(tokens) * n / 200 for n in range(201)]
    time.plot(fine, [1e3 * (fixed + each * n) for n in fine], "--", color="black", linewidth=1)
    time.plot(0, 1e3 * fixed, "o", markerfacecolor="none", markeredgecolor="black", markersize=10)
    time.annotate(f"a = {1e3 * fixed:.0f} ms", (0, 1e3 * fixed), (12, -6), textcoords="offset points")
    rate.plot(fine[1:], [n / (fixed + each * n) for n in fine[1:]], "--", color="black", linewidth=1)
    rate.axhline(1 / each, color="#888888", linewidth=1)
    rate.annotate(
        f"ceiling 1/b = {1 / each:,.0f}", (max(tokens), 1 / each), (0, 5), textcoords="offset points", ha="right"
    )
    for axes, of in ((time, lambda n, t: 1e3 * t), (rate, lambda n, t: n / t)):
        points = [of(n, s["median"]) for n, s in zip(tokens, steps, strict=True)]
        ends = [sorted((of(n, s["p10"]), of(n, s["p90"]))) for n, s in zip(tokens, steps, strict=True)]
        spread = [[max(0, p - e[0]) for p, e in zip(points, ends, strict=True)]]
        spread += [[max(0, e[1] - p) for p, e in zip(points, ends, strict=True)]]
        axes.errorbar(tokens, points, spread, fmt="o", color=STRATEGY_COLOURS["fsdp2"], capsize=3, markersize=8)
        axes.set(xlabel="tokens per step, all ranks", ylim=(0, None), xlim=(-0.02 * max(tokens), None))
        axes.grid(axis="y", **GRID)
    time.set_ylabel("step time [ms]")
    rate.set_ylabel("tokens/s")
    headline(figure, title, under)
    show(figure)


def efficiency(strong: dict[int, dict], weak: dict[int, dict], cores: int, under: str, title: str):
    """Draw strong and weak scaling efficiency over ranks, and the ceiling set by the number of cores.

    strong, weak: {ranks: {"median", "p10", "p90"}}, each a share of 1.
    """
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    places = range(len(strong))
    for shift, name, values, colour in (
        (-0.2, "strong: the same work, shared", strong, "#555555"),
        (0.2, "weak: the same work per rank", weak, "#bbbbbb"),
    ):
        for place, value in zip(places, values.values(), strict=True):
            low, height, high = (100 * value[name] for name in ("p10", "median", "p90"))
            spread = [[height - low], [high - height]]
            axes.bar(place + shift, height, width=0.36, color=colour, label=name if place == 0 else None)
            axes.errorbar(place + shift, height, yerr=spread, color="black", capsize=3)
            axes.text(place + shift, 2, f"{height:.0f}", ha="center", color="white" if shift < 0 else "black")
    for place, ranks in enumerate(strong):
        ceiling = 100 * min(ranks, cores) / ranks
        axes.bar(place, ceiling, width=0.86, fill=False, edgecolor="black", linewidth=1.3)
    axes.bar(0, 0, fill=False, edgecolor="black", label=f"outlined: what {cores} cores allow")
    axes.set_xticks(places, [f"{ranks} rank{'s' * (ranks > 1)}" for ranks in strong])
    highest = max(1, *(value["p90"] for value in [*strong.values(), *weak.values()]))
    axes.set(ylabel="efficiency [%]", ylim=(0, 110 * highest))
    axes.tick_params(axis="x", length=0)
    headline(figure, title, under)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=11)
    show(figure)


def _coinciding(x: list[float], y: list[float], size: tuple[float, float]) -> list[list[int]]:
    """Group the points whose rings of the given size (in x, in y) overlap; each group has one label."""
    groups = []
    for n in sorted(range(len(y)), key=y.__getitem__):
        touched = [g for g in groups if any(abs(x[m] - x[n]) < size[0] and abs(y[m] - y[n]) < size[1] for m in g)]
        groups = [g for g in groups if g not in touched] + [[n, *(m for g in touched for m in g)]]
    return [sorted(group) for group in groups]


def pareto(records: list[dict], labels: list[str], predicted: list[int], front: list[int], under: str, title: str):
    """Draw throughput over memory, one numbered point per record. front: indices of the Pareto-optimal points, in order.

    Coinciding points share a label. FSDP1's points, which may coincide with FSDP2's, are smaller and drawn last.
    """
    figure, (axes, key) = plt.subplots(1, 2, figsize=(13, 6.2), layout="constrained", width_ratios=[5, 2])
    x = [sum(record["memory"]["peak"].values()) / MIB for record in records]
    y = [record["tokens_per_second"] for record in records]
    # A step: there is nothing between two points; with more memory, the left one is still the best available.
    until = [*(x[n] for n in front), 1.04 * max(x)]
    axes.step(until, [*(y[n] for n in front), y[front[-1]]], where="post", color="#888888", linewidth=1.5, zorder=1)
    for n, record in enumerate(records):
        strategy, step = record["config"]["strategy"], record["time"]["step"]
        colour, tokens = STRATEGY_COLOURS[strategy], y[n] * step["median"]
        axes.plot([x[n]] * 2, [tokens / step["p90"], tokens / step["p10"]], color=colour, linewidth=1)
        axes.plot(predicted[n] / MIB, y[n], "o", markersize=14, markerfacecolor="none", markeredgecolor="black")
        axes.plot(x[n], y[n], color=colour, **DOTS.get(strategy, {"marker": "o", "markersize": 9}))
        key.text(0, 1 - n / len(records), f"{n + 1:2}  {labels[n]}", color="black", va="top", fontsize=11,
                 fontweight="bold" if n in front else "normal")  # fmt: skip
    for group in _coinciding(x, y, (0.02 * (max(x) - min(x)), 0.035 * max(y))):
        place = statistics.mean(x[n] for n in group), statistics.mean(y[n] for n in group)
        away, side = (9, "left") if len(group) == 1 else (-11, "right")  # a long label would reach the next point
        axes.annotate(
            ", ".join(str(n + 1) for n in group),
            place,
            (away, 9 if len(group) == 1 else 0),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=11,
            path_effects=[withStroke(linewidth=3, foreground="white")],  # above the front's line
        )
    for strategy in dict.fromkeys(record["config"]["strategy"] for record in records):
        dot = DOTS.get(strategy, {"marker": "o", "markersize": 9})
        axes.plot([], [], color=STRATEGY_COLOURS[strategy], label=strategy.upper(), linestyle="none", **dot)
    axes.set(xlabel="peak memory per rank [MiB]", ylabel="tokens/s, all ranks", ylim=(0, None))
    axes.grid(**GRID)
    key.axis("off")
    key.text(0, -0.02, "bold: on the front", va="top", fontsize=11)  # above, it would meet a long line
    headline(figure, title, under)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=11)
    show(figure)
