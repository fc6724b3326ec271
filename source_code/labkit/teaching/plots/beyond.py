"""Figures of chapter 15: the timeline of a pipeline, its stages' memory, the ways to divide side by side, and how equal they are."""

import matplotlib.pyplot as plt
from planner.timing import cost

from labkit.measuring.pipeline_timeline import idle_share
from labkit.teaching.plots import MIB, PREDICTED, headline, show

FORWARD, BACKWARD = "#BBBBBB", "#4D4D4D"  # as in images/pipeline_schedules.svg
PIPELINE = "#666666"
ALL_OF_IT = "#B8A9D9"  # a bar that is not divided: in a figure where shades of grey have meanings
KINDS = {  # {content of the traffic: its colour, that of the category of memory}
    "parameters and gradients": "#0072B2",
    "activations of a tensor group": "#BBBBBB",
    "activations between stages": "#767676",
}


def pipeline_timeline(steps: dict[str, list], under: str, title: str):
    """Draw when each stage computes, a panel per schedule: {name: one step, as ``pipeline_timeline.record_steps`` returns it}."""
    figure, panels = plt.subplots(
        len(steps), 1, figsize=(10, 2 * len(steps) + 1.4), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (name, step) in zip(panels[:, 0], steps.items(), strict=True):
        for rank, row in enumerate(step):
            for note in row:
                forward = note["action"] == "forward"
                begin, width = 1e3 * note["begin"], 1e3 * (note["end"] - note["begin"])
                axes.barh(rank, width, left=begin, color=FORWARD if forward else BACKWARD, edgecolor="white")
                colour = "black" if forward else "white"
                middle = begin + width / 2
                axes.text(middle, rank, str(note["micro_batch"]), ha="center", va="center", color=colour, fontsize=11)
        axes.set_yticks(range(len(step)), [f"stage {rank}" for rank in range(len(step))])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        idle = f"{name}: {idle_share(step):.1%} empty"
        axes.set_title(idle, loc="right", fontsize=12, fontweight="bold")
    panels[-1, 0].set_xlim(0, 1e3 * max(note["end"] for step in steps.values() for row in step for note in row))
    panels[-1, 0].set_xlabel("time since the step's first forward began [ms]")
    headline(figure, title, f"{under}\nlight: forward of a micro-batch, dark: its backward")
    show(figure)


def stages(rows: dict[str, tuple[dict, list[int]]], title: str, guesses: dict[tuple[str, int], float] | None = None):
    """Draw the peak memory of each stage: {schedule: (record, predicted bytes by rank)}; guesses: {(schedule, stage): MiB}."""
    figure, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")
    width, colours = 0.36, ("#AAAAAA", PIPELINE)
    for number, ((name, (record, predicted)), colour) in enumerate(zip(rows.items(), colours, strict=True)):
        for rank, (measured, expected) in enumerate(zip(record["memory"]["peak_by_rank"], predicted, strict=True)):
            place = rank + (number - 0.5) * (width + 0.06)
            axes.bar(place, measured / MIB, width * 0.86, color=colour, label=name if rank == 0 else None)
            axes.bar(place, expected / MIB, width, **PREDICTED)
            axes.text(place, expected / MIB, f"{measured / MIB:.1f}", ha="center", va="bottom")
            guess = (guesses or {}).get((name, rank))
            if guess is not None:
                axes.plot(place, guess, "D", color="black", markeredgecolor="white", markersize=9, zorder=5)
    axes.set_xticks(range(len(record["memory"]["peak_by_rank"])))
    axes.set_xticklabels([f"stage {rank}" for rank in range(record["ranks"])])
    axes.set_ylabel("peak memory per rank [MiB]")
    axes.margins(y=0.12)
    axes.legend(loc="upper center", ncols=2, fontsize=11)
    marks = "solid: measured, outlined: predicted" + ", diamond: your guess" * bool(guesses)
    headline(figure, title, f"{caption_of_pipeline(record)}\n{marks}")
    show(figure)


def caption_of_pipeline(record: dict) -> str:
    config = record["config"]
    many = f"{config['accumulate']} micro-batches of {config['batch_size']} × {config['seq_len']} tokens"
    return f"{record['hardware']} · {record['ranks']} stages · {record['data']['name']} · {many}"


def what_for(entry: dict) -> str:
    """Return which of ``KINDS`` a step's collective belongs to."""
    if entry["kind"] in ("send", "receive"):
        return "activations between stages"
    return "activations of a tensor group" if entry["dimension"] == "tensor" else "parameters and gradients"


def sent_for(plan) -> dict[str, float]:
    """Return the bytes that a rank sends per step, by ``KINDS``, with ring algorithms on one node. plan: a ``predict.Plan``."""
    by_kind = dict.fromkeys(KINDS, 0.0)
    for entry in plan.traffic():
        by_kind[what_for(entry)] += entry["count"] * cost.ring_bytes(entry, plan, plan.ranks)["rank"]
    return by_kind


def ways(rows: list[tuple[str, dict, int, dict]], title: str, under: str):
    """Draw memory, traffic and time side by side: rows of (name, record, predicted peak in bytes, ``sent_for`` of a rank).

    The peak is that of the rank with the highest peak.
    """
    figure, (memory, traffic, time) = plt.subplots(
        1, 3, figsize=(13, 0.62 * len(rows) + 2.6), sharey=True, layout="constrained"
    )
    seen = set()
    for place, (_, record, peak, sent) in enumerate(rows):
        measured = max(record["memory"]["peak_by_rank"]) / MIB
        memory.barh(place, measured, 0.56, color=ALL_OF_IT)
        memory.barh(place, peak / MIB, 0.74, **PREDICTED)
        memory.text(max(measured, peak / MIB), place, f"  {measured:.1f}", va="center")
        left = 0.0
        for kind, size in sent.items():
            if size:
                label = None if kind in seen else f"sent: {kind}"
                traffic.barh(place, size / 1e6, 0.56, left=left, color=KINDS[kind], label=label)
                seen.add(kind)
                left += size / 1e6
        traffic.text(left, place, f"  {left:.1f}", va="center")
        step = record["time"]["step"]
        low, median, high = (1e3 * step[key] for key in ("p10", "median", "p90"))
        time.barh(place, median, 0.56, color=ALL_OF_IT)
        time.plot([low, high], [place, place], color="black", linewidth=1.5)
        time.text(max(median, high), place, f"  {median:.0f}", va="center")
    memory.set_yticks(range(len(rows)), [row[0] for row in rows])
    memory.invert_yaxis()
    labels = ("highest peak memory of a rank [MiB]", "sent by the busiest rank [MB per step]", "step time [ms]")
    for axes, label in zip((memory, traffic, time), labels, strict=True):
        axes.set_xlabel(label)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.2)
    marks = "left: measured, outlined predicted · middle: by the ring formula · right: measured, median, 10th to 90th percentile"
    headline(figure, title, f"{under}\n{marks}")
    figure.legend(*traffic.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=11)
    show(figure)


def loss_parity(record: dict, tolerance: dict[str, float], title: str):
    """Draw the largest relative difference of the loss from one process, per variant of ``proofs/parity.py``'s record."""
    names = [name for name in dict.fromkeys(row["way"] for row in record["rows"]) if name != "one process"]
    figure, axes = plt.subplots(figsize=(10, 0.34 * len(names) + 2.4), layout="constrained")
    colours = {"fp64": "#0072B2", "fp32": "#D55E00"}
    for precision, colour in colours.items():
        mine = [row for row in record["rows"] if row["precision"] == precision and row["way"] in names]
        for ranks, mark in ((2, "o"), (4, "s")):
            shown = [
                (row["difference"], names.index(row["way"]) + (ranks - 3) * 0.17)
                for row in mine
                if row["ranks"] == ranks
            ]
            axes.plot(*zip(*shown, strict=True), mark, color=colour, markersize=6, label=f"{precision}, {ranks} ranks")
        axes.axvline(tolerance[precision], color=colour, linestyle="--", linewidth=1)
        axes.text(tolerance[precision], -0.9, f"tolerance {precision} ", color=colour, ha="right", fontsize=11)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -1.4)
    axes.grid(axis="y", color="#EEEEEE")
    axes.set_xlabel(f"largest relative difference of a loss to one process, over {record['steps']} steps")
    under = f"recorded on {record['hardware']} · PyTorch {record['torch']} · {record['date']}"
    headline(figure, title, under)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=11)
    show(figure)
