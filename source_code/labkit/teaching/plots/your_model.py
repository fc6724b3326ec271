# SPDX-License-Identifier: BSD-3-Clause
"""Figure of chapter 17: the memory needed to load a model."""

import matplotlib.pyplot as plt

from labkit.teaching.plots import headline, show

MIB = 2**20
DARK, LIGHT = "#555555", "#bbbbbb"  # resident memory has no categories


def loading(rows: list[tuple[str, int, int, float]], guess: float | None, where: str):
    """Draw the growth of a rank's memory: (label, peak bytes, bytes after loading, bytes of its tensors).

    guess: MiB after loading, for the last row.
    """
    figure, axes = plt.subplots(figsize=(11, 0.9 * len(rows) + 2.2), layout="constrained")
    most = max(max(high, tensors) for _, high, _, tensors in rows) / MIB
    for place, (_, high, stays, tensors) in enumerate(rows):
        first = place == 0
        axes.barh(place, high / MIB, height=0.62, color=LIGHT, label="at most, while loading" * first)
        axes.barh(place, stays / MIB, height=0.62, color=DARK, label="afterwards" * first)
        mark = "its tensors, by arithmetic"
        axes.plot([tensors / MIB] * 2, [place - 0.42, place + 0.42], color="#222222", lw=2, ls="--", label=mark * first)
        label = f"{stays / MIB:.0f}, at most {high / MIB:.0f}"
        on_white = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # it may cross the dashed line
        axes.text(high / MIB + 0.01 * most, place, label, va="center", bbox=on_white)
    if guess is not None:
        look = {"color": "#222222", "markeredgecolor": "#ffffff", "markersize": 9}
        axes.plot(guess, len(rows) - 1, "D", label="your guess", **look)
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * most)
    axes.set_xlabel("resident memory per rank, growth by loading [MiB]")
    marks = "solid: measured, dashed: the bytes of its tensors" + ", diamond: your guess" * (guess is not None)
    headline(figure, "What loading costs a rank", f"{where}\n{marks}")
    figure.legend(loc="outside lower left", ncols=4, fontsize=11)
    show(figure)
