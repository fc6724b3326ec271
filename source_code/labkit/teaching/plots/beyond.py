# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 15: the timeline of a pipeline, and its stages' memory."""

import matplotlib.pyplot as plt

from labkit.measuring.pipeline_timeline import idle_share
from labkit.teaching.plots import MIB, PREDICTED, headline, show

COLORS = {
    "forward": "#BBBBBB",
    "backward": "#4D4D4D",
    "weights": "#808080",
}  # the first two as in images/pipeline_schedules.svg
PIPELINE = "#666666"


def pipeline_timeline(steps: dict[str, list], under: str, title: str):
    """Draw when each stage computes, a panel per schedule: {name: one step, as ``pipeline_timeline.record_steps`` returns it}."""
    figure, panels = plt.subplots(
        len(steps), 1, figsize=(10, 2 * len(steps) + 1.4), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (name, step) in zip(panels[:, 0], steps.items(), strict=True):
        for rank, row in enumerate(step):
            for note in row:
                begin, width = 1e3 * note["begin"], 1e3 * (note["end"] - note["begin"])
                axes.barh(rank, width, left=begin, color=COLORS[note["action"]], edgecolor="white")
                colour = "black" if note["action"] == "forward" else "white"
                middle = begin + width / 2
                axes.text(middle, rank, str(note["micro_batch"]), ha="center", va="center", color=colour, fontsize=11)
        axes.set_yticks(range(len(step)), [f"rank {rank}" for rank in range(len(step))])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        idle = f"{name}: {idle_share(step):.1%} empty"
        axes.set_title(idle, loc="right", fontsize=12, fontweight="bold")
    panels[-1, 0].set_xlim(0, 1e3 * max(note["end"] for step in steps.values() for row in step for note in row))
    panels[-1, 0].set_xlabel("time since the step's first forward began [ms]")
    headline(
        figure,
        title,
        f"{under}\nlight: forward, dark: backward, or its part for inputs, medium: for weights",
    )
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
