"""Figures of chapter 05: what the choice of units does to peak memory, traffic and step time."""

import matplotlib.pyplot as plt

from labkit.teaching.plots import MIB, STRATEGY_COLOURS, caption, headline, memory_bars, show

LINES = {  # (strategy, sharding): (name, marker)
    ("fsdp1", "full"): ("FSDP1", "s"),
    ("fsdp2", "full"): ("FSDP2", "o"),
    ("fsdp2", "grad-op"): ("FSDP2, parameters kept after forward", "^"),
}


def traffic(record: dict) -> float:
    """MB of tensors that a step gathers and reduces (1000² bytes)."""
    return sum(entry["count"] * entry["bytes"] for entry in record["traffic"]) / 1e6


def sweep(records: list[dict], predicted: list[int], title: str):
    """Units, peak memory, traffic and step time against min_num_params. predicted: the peaks in bytes, in order."""
    figure, panels = plt.subplots(2, 2, figsize=(11, 8), layout="constrained", sharex=True)
    (units, peak), (moved, time) = panels
    for key, (name, marker) in LINES.items():
        mine = [(r, p) for r, p in zip(records, predicted, strict=True) if _key(r) == key]
        x = [r["config"]["min_num_params"] for r, _ in mine]
        style = {"marker": marker, "color": STRATEGY_COLOURS[key[0]], "linestyle": "--" if key[1] == "grad-op" else "-"}
        units.plot(x, [r["units"] for r, _ in mine], label=name, **style)
        peak.plot(x, [sum(r["memory"]["peak"].values()) / MIB for r, _ in mine], **style)
        peak.plot(x, [p / MIB for _, p in mine], marker, markersize=12, markerfacecolor="none", color="black")
        moved.plot(x, [traffic(r) for r, _ in mine], **style)
        step = [r["time"]["step"] for r, _ in mine]
        spread = [[s["median"] - s["p10"] for s in step], [s["p90"] - s["median"] for s in step]]
        spread = [[seconds * 1e3 for seconds in side] for side in spread]
        time.errorbar(x, [s["median"] * 1e3 for s in step], spread, capsize=3, elinewidth=1, **style)
    _label(panels)
    headline(figure, title, f"{caption(records[0])}\nsolid: measured, outlined: predicted (peaks)")
    figure.legend(*units.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=11)
    show(figure)


def _key(record):
    return record["config"]["strategy"], record["config"]["sharding"]


def _label(panels):
    names = ("units, the root included", "peak memory a rank [MiB]", "gathered + reduced a step [MB]", "step time [ms]")
    for axes, name in zip(panels.flat, names, strict=True):
        axes.set(ylabel=name, xscale="log")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    for axes in panels[1]:
        axes.set_xlabel("min_num_params")


def memory_and_traffic(rows: list[tuple[str, dict]], title: str):
    """Stacked bars of peak memory, and the traffic of the same runs beside them: rows of (label, record)."""
    figure, (memory, moved) = plt.subplots(
        1, 2, figsize=(12, 0.6 * len(rows) + 2.2), width_ratios=[3, 2], layout="constrained"
    )
    memory_bars(memory, [(label, r["memory"]["peak"], None) for label, r in rows])
    sent = [traffic(r) for _, r in rows]
    moved.barh(range(len(rows)), sent, color="#666666", height=0.62)
    for place, megabytes in enumerate(sent):
        moved.text(megabytes, place, f" {megabytes:.1f}", va="center")
    moved.set_yticks([])
    moved.invert_yaxis()
    moved.set_xlim(0, 1.15 * max(sent))
    moved.set_xlabel("gathered + reduced a step [MB]")
    headline(figure, title, f"{caption(rows[0][1])}; measured")
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=11)
    show(figure)
