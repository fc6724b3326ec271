# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 08: effects of precision and recomputation on saved tensors, step cost, and loss."""

import matplotlib.pyplot as plt

from labkit.measuring.trace import CATEGORIES
from labkit.teaching.plots import COLOURS, MIB, PREDICTED, headline, show

TONES = ("#f2f2f2", "#d9d9d9", "#bdbdbd", "#969696", "#737373", "#525252")
PHASE_COLUMN = 1  # a snapshot of a record's timeline is [phase, bytes by category …]
LINES = {
    "fp32": ("#0072B2", "-", "fp32"),
    "bf16": ("#E69F00", "-", "bf16, fp32 master weights"),
    "bf16, bf16 moments": ("#009E73", "-", "bf16, fp32 master weights, bf16 moments"),
    "bf16 weights": ("#D55E00", "-.", "bf16 weights, rounded to nearest"),
    "bf16 weights, stochastic": ("#CC79A7", "-", "bf16 weights, rounded stochastically"),
}
SPLIT = {"none": ("#0072B2", "nothing recomputed"), "full": ("#D55E00", "full recomputation")}


def most(record: dict, category: str) -> int:
    """Return the peak bytes of a category within the step."""
    column = PHASE_COLUMN + CATEGORIES.index(category)
    return max(snapshot[column] for snapshot in record["memory"]["timeline"])


def kept(rows: list[tuple[str, dict, dict]], title: str):
    """Draw the bytes per token that a block saves for backward: rows of (label, {tensor: bytes} measured, predicted)."""
    figure, axes = plt.subplots(figsize=(10, 0.7 * len(rows) + 1.9), layout="constrained")
    widest = max(sum(parts.values()) for _, parts, _ in rows)
    for place, (_, parts, predicted) in enumerate(rows):
        left = 0
        for tone, size in zip(TONES, parts.values(), strict=False):
            axes.barh(place, size, left=left, color=tone, edgecolor="black", linewidth=0.8, height=0.62)
            dark = TONES.index(tone) > 2
            about = {"ha": "center", "va": "center", "color": "w" if dark else "k", "fontsize": 11}
            if size > 0.06 * widest:  # the others would be unreadable
                axes.text(left + size / 2, place, f"{size:,}", **about)
            left += size
        axes.barh(place, sum(predicted.values()), height=0.78, **PREDICTED)
        axes.text(left + widest * 0.01, place, f"{left:,}", va="center", fontweight="bold")
    names = list(rows[0][1])
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=tone, edgecolor="black") for tone in TONES[: len(names)]]
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlim=(0, widest * 1.12), xlabel="bytes per token that one block saves for backward")
    headline(figure, title, "one block of the preset tiny on the CPU; solid: measured, outlined: predicted")
    figure.legend(handles, names, loc="outside lower left", ncols=3, fontsize=11)
    show(figure)


def crossing(runs: list[dict], predicted, where: dict, title: str):
    """Draw activations and model state over tokens per rank, without and with full recomputation, on one scale.

    predicted(tokens, recompute): peak bytes of activations. where: the predicted crossings, {recompute: tokens}.
    """
    figure, panels = plt.subplots(1, 2, figsize=(11.5, 4.9), layout="constrained", sharey=True)
    for axes, (recompute, (_, name)) in zip(panels, SPLIT.items(), strict=True):
        mine = [run for run in runs if run["config"]["recompute"] == recompute]
        tokens = [run["config"]["batch_size"] * run["config"]["seq_len"] for run in mine]
        state = [
            (run["memory"]["start"]["parameters"] + run["memory"]["start"]["optimizer state"]) / MIB for run in mine
        ]
        measured = [most(run, "activations") / MIB for run in mine]
        axes.plot(tokens, state, "s-", color=COLOURS["optimizer state"], label="parameters and optimizer state")
        axes.plot(tokens, measured, "o-", color="#666666", label="peak of activations")
        outlined = [predicted(count, recompute) / MIB for count in tokens]
        axes.plot(tokens, outlined, "o", markersize=13, markerfacecolor="none", color="black")
        axes.axvline(where[recompute], color="black", linestyle="--", linewidth=1)
        axes.text(
            where[recompute], 0.98, f" {where[recompute]:.1f} tokens", transform=axes.get_xaxis_transform(), va="top"
        )
        axes.set(xlabel="tokens per rank", xlim=(0, None), ylim=(0, None), xticks=tokens)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_title(name, loc="right", fontsize=12, fontweight="bold")
    panels[0].set_ylabel("memory per rank [MiB]")
    about = runs[0]
    under = f"{about['hardware']} · {about['ranks']} ranks · {about['data']['name']} · 1 sequence per rank"
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontweight="bold")
    figure.text(0.01, 0.93, f"{under}; solid: measured, outlined: predicted", fontsize=11, va="top")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=2, fontsize=11)
    show(figure)


def losses(curves: dict[str, dict], title: str, under: str):
    """Draw the loss of each step (left) and the share of weights that the step changed (right).

    curves: {one of LINES: {"losses", "changed"}}.
    """
    figure, (loss, changed) = plt.subplots(1, 2, figsize=(11.5, 4.4), layout="constrained")
    for number, (name, curve) in enumerate(curves.items()):
        colour, line, label = LINES[name]
        width = {"linewidth": max(2, 11 - 3 * number)}  # curves that coincide remain visible inside each other
        steps = range(1, len(curve["losses"]) + 1)
        loss.plot(steps, curve["losses"], linestyle=line, color=colour, label=label, **width)
        changed.plot(steps, [100 * share for share in curve["changed"]], linestyle=line, color=colour, **width)
    for axes in (loss, changed):
        axes.locator_params(axis="x", integer=True)
    loss.set(xlabel="step", ylabel="loss [nats per token]")
    changed.set(xlabel="step", ylabel="weights changed [%]", ylim=(0, 104))
    headline(figure, title, under)
    figure.legend(*loss.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=11)
    show(figure)
