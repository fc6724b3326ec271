# SPDX-License-Identifier: BSD-3-Clause
"""The figure of chapter 07: a run resumed from a checkpoint."""

import matplotlib.pyplot as plt

from labkit.teaching.plots import caption, headline, show

# One style per resumed run, larger marks first so that the smaller ones on top leave them visible
MARKS = ({"marker": "s", "markersize": 12, "color": "#56B4E9"}, {"marker": "o", "markersize": 6, "color": "#0072B2"})
ODD = {"marker": "X", "markersize": 8, "color": "#D55E00"}  # a run that is meant to go wrong
LIMIT = 1e-10
FLOOR = 1e-17  # where two losses that are equal to the last bit are drawn


def seam(whole: dict, resumed: dict[str, list[float]], saved_at: int, killed_at: int | None, title: str):
    """Draw the losses of a run and of its resumed runs, and their relative differences.

    whole: record of the uninterrupted run. resumed: {label: losses after the checkpoint}; a label "without …" marks a run
    that should diverge. killed_at: the last step whose work was lost, if any.
    """
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(10, 6.4), height_ratios=[3, 2], sharex=True, layout="constrained"
    )
    losses = whole["losses"]
    above.plot(range(1, len(losses) + 1), losses, color="#666666", linewidth=2, label="not interrupted, 4 ranks")
    for (label, continued), mark in zip(resumed.items(), MARKS, strict=False):
        look = (ODD if label.startswith("without") else mark) | {"linestyle": "none", "label": label}
        steps = range(saved_at + 1, saved_at + 1 + len(continued))
        above.plot(steps, continued, **look)
        differences = [abs(a - b) / b for a, b in zip(continued, losses[saved_at:], strict=False)]
        below.plot(steps, [max(d, FLOOR) for d in differences], **look)
    for axes in (above, below):
        axes.axvline(saved_at + 0.5, color="black", linewidth=1)
        if killed_at:
            axes.axvspan(saved_at + 0.5, killed_at + 0.5, color="#dddddd", alpha=0.6, linewidth=0)
    above.text(saved_at + 0.4, above.get_ylim()[1], "saved", ha="right", va="top")
    if killed_at:
        above.text((saved_at + killed_at + 1) / 2, above.get_ylim()[1], "lost, computed again", ha="center", va="top")
    below.axhline(LIMIT, color="black", linestyle="--", linewidth=1)
    below.text(1, LIMIT * 1.6, "limit of the verdict", va="bottom")
    below.set(yscale="log", ylim=(FLOOR / 30, 1), xlabel="step")
    below.set_yticks([FLOOR, 1e-13, 1e-9, 1e-5, 1e-1], ["equal", "1e-13", "1e-9", "1e-5", "0.1"])
    below.minorticks_off()
    above.set_ylabel("loss of the global batch")
    below.set_ylabel("relative difference")
    below.set_xticks(range(2, len(losses) + 1, 2))
    headline(figure, title, f"{_about(whole)}; measured")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=11)
    show(figure)


def _about(record: dict) -> str:
    """Return hardware and data, without the number of ranks, which differs between runs."""
    hardware, _, *rest = caption(record).split(" · ")
    batch = f"global batch {record['config']['global_batch_size']}"
    return " · ".join([hardware, *rest[:-1], batch, record["config"]["precision"]])
