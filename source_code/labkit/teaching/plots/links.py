"""Figures of chapter 10: bytes that leave a node, and steps over links of several speeds."""

from labkit.teaching.plots import STRATEGY_COLOURS, headline, plt, show

STYLES = {  # colour, line and mark of each strategy
    "DDP": (STRATEGY_COLOURS["ddp"], "-", "o"),
    "FSDP2": (STRATEGY_COLOURS["fsdp2"], "-", "o"),
    "FSDP2, kept": (STRATEGY_COLOURS["fsdp2"], ":", "s"),
    "HSDP 2x2": ("#222222", "-", "^"),
}
MB = 1e6


def across(rows: dict[str, tuple[float, float]], guesses: dict, title: str, under: str):
    """Bytes of a step that leave a node: rows {name: (measured, predicted)}, guesses {name: MB or None}."""
    figure, axes = plt.subplots(figsize=(10, 0.7 * len(rows) + 2), layout="constrained")
    longest = max(max(pair) for pair in rows.values()) / MB
    for place, (name, (measured, predicted)) in enumerate(rows.items()):
        axes.barh(place, measured / MB, color=STYLES.get(name, ("#777777",))[0], height=0.52)
        axes.barh(place, predicted / MB, fill=False, edgecolor="black", linewidth=1.3, height=0.72)
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


def sweep(steps: dict, predicted: dict, ratios: dict, title: str, under: str):
    """Step time against the time that the link needs for a megabyte, and the communication time measured over predicted.

    steps, predicted: {name: {Mbit/s: seconds}}; ratios: {name: {Mbit/s: measured / predicted}}.
    """
    figure, (time, ratio) = plt.subplots(1, 2, figsize=(12.5, 5.2), layout="constrained", width_ratios=[3, 2])
    speeds = list(next(iter(steps.values())))
    place = {speed: 8e3 / speed for speed in speeds}  # ms a megabyte: a straight line
    for name, (colour, line, mark) in STYLES.items():
        time.plot([place[s] for s in speeds], [1e3 * steps[name][s] for s in speeds], mark, color=colour, label=name)
        law = [1e3 * predicted[name][s] for s in speeds]
        time.plot([place[s] for s in speeds], law, line, color=colour, linewidth=1.3)
        outline = {"markersize": 12, "markerfacecolor": "none", "markeredgecolor": "black", "markeredgewidth": 0.9}
        time.plot([place[s] for s in speeds], law, mark, **outline)
        shaped = [speed for speed in speeds if speed in ratios[name]]
        ratio.plot(
            [place[s] for s in shaped], [ratios[name][s] for s in shaped], mark + line, color=colour, linewidth=1
        )
    for axes, shown in ((time, speeds), (ratio, shaped)):
        named = [f"{place[s]:.0f}\n({f'{s} Mbit/s' if s == min(speeds) else s if place[s] else '∞'})" for s in shown]
        axes.set_xticks([place[s] for s in shown], named)
        axes.set_xlabel("time the link needs for a megabyte [ms] (its speed)")
    time.set(ylabel="step time [ms]", ylim=(0, None))
    ratio.axhline(1, color="black", linestyle="--", linewidth=1)
    ratio.axhspan(0.85, 1.15, color="#EEEEEE", zorder=0)
    ratio.set(xlim=time.get_xlim(), ylim=(0.5, 1.5), ylabel="communication: measured / predicted")
    headline(figure, title, f"{under}\nsolid marks: measured; outlined, and lines: predicted; grey band: ± 15 %")
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=11)
    show(figure)
