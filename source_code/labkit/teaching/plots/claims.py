# SPDX-License-Identifier: BSD-3-Clause
"""Figures of chapter 21: for each claim, its value over what was varied, and the range in which it is true."""

import math

import matplotlib.pyplot as plt

from labkit.teaching.claims import Case, Claim
from labkit.teaching.plots import headline, show

COLOURS = ("#332288", "#AA4499", "#117733", "#882255")  # one per line, as strategies have
# {key: (what varies along the axis, its label, what the lines differ in, (lowest, highest) of the axis)}
PANELS = {
    "1/N": ("ranks", "ranks", "part", (0.5, 40)),
    "one unit": ("tokens", "tokens per rank", "model", (0, 0.5)),
    "more units": ("tokens", "tokens per rank (images)", "model", (0, 1.2)),
    "FSDP1 = FSDP2": ("batch", "tokens or images per rank", ("model", "lora"), (0.8, 1.5)),
    "bf16": ("tokens", "tokens per rank", ("weights", "model"), (0.4, 0.8)),
    "50 to 80 %": ("layers", "blocks", "recompute", (0, 1)),
    "1.5x": ("micro_batches", "micro-batches per step", ("precision", "reshard"), (0, 4.5)),
    "twice": ("micro_batches", "micro-batches per step", ("precision", "backend"), (0, 4.5)),
    "4x against 2x": ("ranks", "ranks", "backend", (0, 0.7)),
    "SHARD_GRAD_OP": ("micro_batches", "micro-batches per step", "what", (0, 2)),
    "ZeRO-1": ("library", "", "weights", (0.8, 1.7)),
    "HYBRID_SHARD": ("nodes", "nodes of 8 ranks", "precision", (0.4, 1.5)),
    "30 %": ("gigabytes", "GB/s that leave a node", "recompute", (-0.05, 0.45)),
    "offload": ("tokens", "tokens per rank, 8 ranks", None, (0, 10)),
    "larger batches": ("strategy", "", None, (0, 6.5)),
    "100 GB/s": ("tokens", "tokens per GPU and micro-batch", None, (5, 1000)),
    "90 against 80": ("gigabytes", "GB/s that leave a node", "precision", (-0.1, 1.1)),
    "DDP when it fits": ("gigabytes", "GB/s that leave a node", ("formats", "reshard"), (0.8, 1.4)),
}
LOGARITHMIC = ("1/N", "100 GB/s")  # of the value


def boundaries(claims: dict[str, Claim], cases: dict[str, list[Case]] | None, keys: tuple, title: str, under: str):
    """Draw where claims hold: the grey band is the range in which the sentence is true.

    Args:
        claims: all claims.
        cases: what ``ballot.judge`` returns; None draws nothing.
        keys: of the claims to draw, keys of ``PANELS``, six at most.
        title, under: the figure's title, and the line below it.
    """
    if cases is None:
        print("The boundaries are drawn when all votes are cast.")
        return
    columns = min(3, len(keys))
    rows = math.ceil(len(keys) / columns)
    figure, panels = plt.subplots(rows, columns, figsize=(14, 4.1 * rows), layout="constrained", squeeze=False)
    for axes, key in zip(panels.flat, keys, strict=False):
        draw(axes, key, claims[key], cases[key])
    for axes in list(panels.flat)[len(keys) :]:
        axes.set_visible(False)
    first = panels[0][0].get_title("left")
    headline(figure, title, first)
    figure.axes[0].title.set_fontsize(12)
    figure.supxlabel(under, fontsize=11, x=0.01, ha="left")
    show(figure)


def draw(axes, key: str, claim: Claim, cases: list[Case]):
    """Draw one claim's cases: measured ones are solid, the others outlined."""
    along, label, apart, limits = PANELS[key]
    names = (apart,) if isinstance(apart, str) else apart or ()
    # A line is of rings, and of parameters that are freed, unless it says otherwise
    for name, other in (("backend", "gloo"), ("reshard", "false")):
        cases = [case for case in cases if name in names or case.setting.get(name) != other]
    lowest, highest = (min(max(each, limits[0]), limits[1]) for each in claim.range)
    thin = (limits[1] - limits[0]) / 150 * (highest == lowest)  # so that a range of one value can be seen
    axes.axhspan(lowest - thin, highest + thin, color="#CCCCCC", zorder=0)
    numbers = all(isinstance(case.setting[along], (int, float)) for case in cases)
    for colour, (name, line) in zip(COLOURS, _lines(cases, apart), strict=False):
        for how, style in (("solid", {"color": colour}), ("outlined", {"mfc": "white", "mec": colour, "mew": 1.5})):
            found = [case for case in line if (case.how in ("measured", "counted")) == (how == "solid")]
            points = [(case.setting[along], case.value) for case in found]
            if points:
                axes.plot(*zip(*points, strict=True), "o", label=name if how == "outlined" else None, **style)
        points = [(case.setting[along], case.value) for case in line if case.how not in ("measured", "counted")]
        if points and numbers:
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1)
    if numbers:
        axes.set_xscale("log")
        places = sorted({case.setting[along] for case in cases})
        axes.set_xticks(places, [f"{place:,}" for place in places], fontsize=11, rotation=45, ha="right")
        axes.minorticks_off()
    else:
        axes.margins(x=0.15)
        plt.setp(axes.get_xticklabels(), rotation=20, ha="right")
    if key in LOGARITHMIC:
        axes.set_yscale("log")
    axes.set(ylim=limits, xlabel=label, ylabel="\n".join(_wrapped(claim.unit)))
    axes.set_title(f"“{key}”", fontsize=12)
    if apart:
        axes.legend(fontsize=11)


def _wrapped(text: str) -> list[str]:
    from textwrap import wrap

    return wrap(text, 32)


def _lines(cases: list[Case], apart) -> list[tuple[str, list[Case]]]:
    """Return the cases that a line joins, by what they differ in: [(name, cases), …]."""
    names = (apart,) if isinstance(apart, str) else apart or ()
    lines = {}
    for case in cases:
        name = ", ".join(_word(name, case.setting[name]) for name in names if name in case.setting)
        lines.setdefault(name, []).append(case)
    return list(lines.items())


def _word(name: str, value) -> str:
    if name == "reshard":
        return "freed" if value == "true" else "kept"
    return {"weights": f"weights {value}", "lora": "LoRA"}.get(name, str(value))
