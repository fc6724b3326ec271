# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 14: the layout of arrays over devices, memory per device."""

import matplotlib.pyplot as plt

from labkit.teaching.plots import COLOURS, MIB, PREDICTED, headline, show

TONES = ("#F2F2F2", "#DADADA", "#C2C2C2", "#AAAAAA", "#8E8E8E", "#717171", "#545454", "#363636")  # devices 0 to 7


def places(arrays: dict[str, object], title: str, under: str):
    """Draw the layout of 2-D arrays from their ``addressable_shards``, one panel each: {name: a jax.Array}."""
    figure, panels = plt.subplots(1, len(arrays), figsize=(10, 2.7), squeeze=False, layout="compressed")
    for axes, (name, array) in zip(panels[0], arrays.items(), strict=True):
        rows, columns = array.shape
        shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
        if shards[0].data.shape == array.shape:
            _part(axes, 0, 0, columns, rows, "#FFFFFF", "whole on\neach device")
            shards = shards[:1]
        else:
            for number, shard in enumerate(shards):
                (top, bottom, _), (left, right, _) = (
                    part.indices(size) for part, size in zip(shard.index, array.shape, strict=True)
                )
                _part(axes, left, top, right - left, bottom - top, TONES[number % len(TONES)], str(number))
        axes.set(xlim=(-2, columns + 2), ylim=(rows + 2, -2), aspect="equal")
        axes.set_xlabel(f"{name}\neach has {tuple(shards[0].data.shape)}", fontsize=12)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontweight="bold")
    # Not a panel's title: it is wider than a panel, which would grow
    figure.text(0.01, 0.88, under, fontsize=11, va="top").set_in_layout(False)
    show(figure, f"{title}. {under}")


def _part(axes, x, y, width, height, colour: str, text: str):
    axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor="#222222", linewidth=0.9))
    ink = "white" if colour in TONES[4:] else "#222222"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=12)


def memory(rows: list[tuple[str, dict, float | None]], title: str, under: str):
    """Draw the memory per device in a step: rows of (name, {category: bytes}, predicted total or None)."""
    figure, axes = plt.subplots(figsize=(10, 0.6 * len(rows) + 2.3), layout="constrained")
    totals = [sum(terms.values()) / MIB for _, terms, _ in rows]
    for place, (_, terms, predicted) in enumerate(rows):
        left = 0.0
        for category, size in terms.items():
            label = category if place == 0 else None
            axes.barh(place, size / MIB, 0.62, left=left, color=COLOURS[category], label=label)
            left += size / MIB
        if predicted is not None:
            axes.barh(place, predicted / MIB, 0.78, **PREDICTED)
        axes.text(max(left, (predicted or 0) / MIB) + 0.015 * max(totals), place, f"{left:.1f}", va="center")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(totals))
    axes.set_xlabel("memory per device [MiB]")
    marks = "parameters and optimizer state: measured; temporary: planned by the compiler; outline: predicted"
    headline(figure, title, f"{under}\n{marks}")
    figure.legend(loc="outside lower left", ncols=4, fontsize=11)
    show(figure)
