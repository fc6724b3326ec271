# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 06: one step's memory on device and host, and the memory offload saves by batch size."""

import matplotlib.pyplot as plt

from labkit.measuring.trace import CATEGORIES
from labkit.teaching import plots

MIB = 2**20


def _places(snapshots: list, on_host: tuple) -> tuple[dict, dict]:
    """Return {category: MiB in each snapshot} on the device, and on the host.

    on_host: the categories that offload moves. The optimizer's temporary tensors are on the host, too.
    """
    device, host = {}, {}
    for i, category in enumerate(CATEGORIES):
        levels = [snapshot[1 + i] / MIB for snapshot in snapshots]
        here = [
            category in on_host or (snapshot[0] == "optimizer" and category == "temporary") for snapshot in snapshots
        ]
        host[category] = [level if moved else 0 for level, moved in zip(levels, here, strict=True)]
        device[category] = [0 if moved else level for level, moved in zip(levels, here, strict=True)]
    return device, host


def two_sides(record: dict, on_host: tuple):
    """Draw one step of a record: the device's memory above the axis, the host's below it."""
    snapshots = record["memory"]["timeline"]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(10, 6.2), sharex=True, height_ratios=[5, 3], layout="constrained"
    )
    tops, names = [], {}
    for axes, side in zip((above, below), _places(snapshots, on_host), strict=True):
        used = [c for c in CATEGORIES if max(side[c]) > 0.005]
        areas = axes.stackplot(
            range(len(snapshots)),
            [side[c] for c in used],
            colors=[plots.COLOURS[c] for c in used],
            step="post",
            linewidth=0,
        )
        names |= dict(zip(used, areas, strict=True))
        totals = [sum(levels) for levels in zip(*side.values(), strict=True)]
        tops.append(max(totals))
        where = len(totals) - 1 - totals[::-1].index(tops[-1])
        axes.axhline(tops[-1], color="black", linestyle="--", linewidth=1)
        axes.plot(where, tops[-1], "v" if axes is above else "^", color="black", markersize=8, clip_on=False)
    above.text(len(snapshots), tops[0], f"device side's peak {tops[0]:.1f} MiB ", ha="right", va="bottom")
    below.text(0, tops[1] * 1.04, f" host side's peak {tops[1]:.1f} MiB", ha="left", va="top")
    plots.name_phases(above, [snapshot[0] for snapshot in snapshots], tops[0] * 1.22)
    above.set(xlim=(0, len(snapshots)), ylim=(0, tops[0] * 1.3), ylabel="device side [MiB]")
    below.set(
        ylim=(tops[1] * 1.35, 0), ylabel="host side [MiB]", xlabel="one step, left to right: every change of memory"
    )
    below.set_xticks([])
    plots.headline(
        figure,
        "Offload removes the base, not the mountain",
        f"{plots.caption(record)}\nmeasured by category on a CPU, sides assigned by the rule; no GPU was there",
    )
    plots.category_legend(figure, names)
    plots.show(figure)


def side_bars(record: dict, on_host: tuple, predicted: dict[str, int], guess: float | None):
    """Draw three bars: the peak in one memory, and the peaks of the device side and the host side.

    predicted: {"one memory", "device side", "host side"} in bytes. guess: MiB, of the device's side.
    """
    rows = [("one memory", record["memory"]["peak"])]
    for name, side in zip(("device side", "host side"), _places(record["memory"]["timeline"], on_host), strict=True):
        highest = max(zip(*side.values(), strict=True), key=sum)
        rows.append((name, {c: level * MIB for c, level in zip(CATEGORIES, highest, strict=True)}))
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    plots.memory_bars(axes, [(name, terms, predicted[name]) for name, terms in rows], {"device side": guess})
    plots.headline(
        figure,
        "What would be left on the device",
        f"{plots.caption(record)}\nsolid: measured by category on a CPU, outlined: predicted{', diamond: your guess' if guess else ''}",
    )
    plots.category_legend(figure, plots.handles_of(axes))
    plots.show(figure)


def against_batch(points: dict, lines: dict, record: dict):
    """Draw peaks over the batch size (left) and the share of the peak that offload saves (right).

    points, lines: {ranks: [(batch, peak bytes, device side's peak bytes)]}, measured and predicted. The left
    panel shows the ranks that were measured. record: names the hardware and the data.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    tones = {ranks: plt.cm.viridis(0.05 + 0.6 * i / (len(lines) - 1)) for i, ranks in enumerate(lines)}
    for ranks, curve in lines.items():
        batches, whole, device = zip(*curve, strict=True)
        share = [100 * (1 - d / w) for _, w, d in curve]
        right.plot(batches, share, color=tones[ranks], linewidth=1.2)
        right.text(batches[0] * 0.93, share[0], _ranks(ranks), color=tones[ranks], ha="right", va="center")
        if ranks in points:
            seen = sum(batch <= 1.1 * max(b for b, _, _ in points[ranks]) for batch in batches)
            batches, whole, device = batches[:seen], whole[:seen], device[:seen]
            left.plot(batches, [w / MIB for w in whole], color=tones[ranks], linewidth=1.2)
            left.plot(batches, [d / MIB for d in device], color=tones[ranks], linewidth=1.2, linestyle=":")
            left.fill_between(
                batches,
                [d / MIB for d in device],
                [w / MIB for w in whole],
                color=tones[ranks],
                alpha=0.12,
                linewidth=0,
            )
    for ranks, measured in points.items():
        batches, whole, device = zip(*measured, strict=True)
        left.plot(batches, [w / MIB for w in whole], "o", color=tones[ranks])
        size = 11 if ranks == 1 else 6  # they nearly coincide
        left.plot(batches, [d / MIB for d in device], "v", color=tones[ranks], markersize=size)
        right.plot(batches, [100 * (1 - d / w) for _, w, d in measured], "s", color=tones[ranks])
    left.set(xlabel="batch per rank [images]", ylabel="peak memory per rank [MiB]")
    widest = 1.1 * max(batch for measured in points.values() for batch, _, _ in measured)
    ends = {ranks: [point for point in lines[ranks] if point[0] <= widest][-1] for ranks in points}
    for ranks, (batch, whole, _) in ends.items():
        left.text(batch * 1.03, whole / MIB, f"{_ranks(ranks)},\nno offload", color=tones[ranks], va="bottom")
    batch, _, lowest = min(ends.values(), key=lambda end: end[2])
    left.text(batch * 1.03, lowest / MIB, "device side,\nboth", va="top")
    highest = max(whole for _, whole, _ in ends.values())
    left.set(xlim=(0, 1.45 * widest), ylim=(0, 1.2 * highest / MIB))
    left.set_xticks([batch for batch, _, _ in next(iter(points.values()))])
    right.set_xscale("log", base=2)
    first, last = lines[max(lines)][0][0], lines[max(lines)][-1][0]
    right.set(xlabel="batch per rank [images]", ylabel="share of the peak that offload saves [%]", ylim=(0, None))
    right.set_xlim(first / 3.4, last * 1.1)
    right.set_xticks([2**k for k in range(first.bit_length() - 1, last.bit_length())])
    right.xaxis.set_major_formatter("{x:.0f}")
    plots.headline(
        figure,
        "Sixteen times the batch, but offload saves only a little more",
        f"{record['hardware']} · {record['data']['name']}\nmarks: measured by category, sides assigned; lines: predicted, dotted with offload",
    )
    plots.show(figure)


def _ranks(ranks: int) -> str:
    return f"{ranks} rank" + "s" * (ranks > 1)
