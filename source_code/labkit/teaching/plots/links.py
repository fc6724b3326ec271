"""Figures of chapter 10: bytes that leave a node, and steps over links of several speeds."""

from labkit.teaching.plots import PREDICTED, STRATEGY_COLOURS, headline, plt, show

STYLES = {  # colour, line and mark of each strategy
    "DDP": (STRATEGY_COLOURS["ddp"], "-", "o"),
    "FSDP2": (STRATEGY_COLOURS["fsdp2"], "-", "o"),
    "FSDP2, kept": (STRATEGY_COLOURS["fsdp2"], ":", "s"),
    "HSDP 2x2": ("#222222", "-", "^"),
}
MB = 1e6


def across(rows: dict[str, tuple[float, float]], guesses: dict, title: str, under: str):
    """Draw the bytes of a step that leave a node: rows {name: (measured, predicted)}, guesses {name: MB or None}."""
    figure, axes = plt.subplots(figsize=(10, 0.7 * len(rows) + 2), layout="constrained")
    longest = max(max(pair) for pair in rows.values()) / MB
    for place, (name, (measured, predicted)) in enumerate(rows.items()):
        axes.barh(place, measured / MB, color=STYLES.get(name, ("#777777",))[0], height=0.52)
        axes.barh(place, predicted / MB, height=0.72, **PREDICTED)
        axes.text(max(measured, predicted) / MB + 0.015 * longest, place, f"{measured / MB:.2f}", va="center")
        if guesses.get(name) is not None:
            axes.plot(guesses[name], place + 0.36, "D", color="black", markersize=7, clip_on=False, zorder=5)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.12 * longest), xlabel="leaves a node in a step [MB]")
    marks = "solid: measured, outlined: predicted" + ", diamond: your guess" * any(
        g is not None for g in guesses.values()
    )
    headline(figure, title, f"{under}\n{marks}")
    show(figure)


def sweep(steps: dict, predicted: dict, spans: dict, title: str, under: str):
    """Draw step time over the time the link needs per megabyte, an enlarged part near the crossing, and communication time.

    An unthrottled link counts as infinitely fast: at that point the predicted line consists of compute and latency.

    steps, predicted: {name: {Mbit/s: seconds}}. spans: {name: {Mbit/s: (measured, least) communication time, divided by
    the formula's}}.
    """
    figure, panels = plt.subplot_mosaic(
        [["all", "zoom"], ["all", "ratio"]], figsize=(13, 7.6), layout="constrained", width_ratios=[3, 2.6]
    )
    speeds = list(next(iter(steps.values())))
    for axes in (panels["all"], panels["zoom"]):
        for name, (colour, line, mark) in STYLES.items():
            _steps(axes, steps[name], predicted[name], line, {"marker": mark, "color": colour, "label": name})
        axes.set_ylabel("step time [ms]")
    panels["all"].set_ylim(0, None)
    _name_speeds(panels["all"], speeds)
    fast = sorted(speeds)[1:]  # without the slowest, which is far from where lines cross
    _name_speeds(panels["zoom"], fast)
    here = [1e3 * times[speed] for times in (*steps.values(), *predicted.values()) for speed in fast]
    panels["zoom"].set(
        xlim=(-2, 1.08 * _place(fast[0])), ylim=(0, 0.62 * max(here)), title="enlarged: where lines cross"
    )
    _shares(panels["ratio"], spans)
    headline(figure, title, f"{under}\nsolid marks: measured; lines and outlined: predicted")
    figure.legend(*panels["all"].get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=11)
    show(figure)


def _place(speed: float) -> float:
    """Convert Mbit/s to ms per megabyte: on this axis, step time is a straight line."""
    return 8e3 / speed


def _steps(axes, measured: dict, predicted: dict, line: str, style: dict):
    places = [_place(speed) for speed in measured]
    axes.plot(places, [1e3 * seconds for seconds in measured.values()], linestyle="none", markersize=7, **style)
    axes.plot(places, [1e3 * predicted[speed] for speed in measured], line, color=style["color"], linewidth=1.3)
    foretold = [speed for speed in measured if _place(speed)]
    outline = {"markersize": 12, "markerfacecolor": "none", "markeredgecolor": "black", "markeredgewidth": 0.9}
    at = [_place(speed) for speed in foretold]
    axes.plot(at, [1e3 * predicted[s] for s in foretold], linestyle="none", marker=style["marker"], **outline)


def _name_speeds(axes, speeds: list[float]):
    named = [f"{_place(s):.0f}\n({f'{s} Mbit/s' if s == min(speeds) else s if _place(s) else '∞'})" for s in speeds]
    axes.set_xticks([_place(s) for s in speeds], named)
    axes.set_xlabel("time the link needs for a megabyte [ms] (its speed)")


def _shares(axes, spans: dict):
    """Draw the predicted range and the measured communication time for each speed, fastest first, and strategy."""
    speeds = sorted(next(iter(spans.values())), reverse=True)
    for number, (name, (colour, _, mark)) in enumerate(STYLES.items()):
        for place, speed in enumerate(speeds):
            measured, least = spans[name][speed]
            x = place + 0.18 * (number - 1.5)
            axes.bar(x, 1 - least, bottom=least, width=0.15, fill=False, edgecolor="black", linewidth=0.9)
            axes.plot(x, measured, mark, color=colour, markersize=7)
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(speeds)), [str(speed) for speed in speeds])
    axes.set(
        xlabel="speed of the link [Mbit/s]", ylabel="communication, over\nlatency + bytes / speed", ylim=(0.5, 1.15)
    )
