"""Figures of chapter 00: the resident memory of one process compared with its tensors."""

import matplotlib.pyplot as plt

from labkit.teaching.plots import MIB, PREDICTED, headline, show

MEASURED = "#444444"
# Parts of a process' resident memory; they use other colours than categories of tensors and strategies
PARTS = {
    "Python and libraries": "#333333",
    "first step, besides its tensors (assumed)": "#999999",
    "live tensors (tracer)": "#7F4A0B",
    "scratch, and freed but kept": "#F0DDB8",
}
LIGHT = ("#999999", "#F0DDB8")  # black text is read better on these


def moments(grown: dict, predicted: dict, guesses: dict, under: str):
    """Draw the growth of resident memory: measured and predicted {moment: bytes}, guesses {moment: MiB or None}."""
    figure, axes = plt.subplots(figsize=(10, 0.62 * len(grown) + 1.7), layout="constrained")
    top = max(*grown.values(), *predicted.values()) / MIB
    for place, (moment, size) in enumerate(grown.items()):
        axes.barh(place, size / MIB, color=MEASURED, height=0.5)
        axes.barh(place, predicted[moment] / MIB, height=0.7, **PREDICTED)
        axes.text(max(size, predicted[moment]) / MIB + top * 0.02, place, f"{size / MIB:.1f}", va="center")
        if guesses[moment] is not None:
            axes.plot(guesses[moment], place + 0.35, "D", color="black", markersize=7, clip_on=False, zorder=5)
    axes.set_yticks(range(len(grown)), list(grown))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, top * 1.14)
    axes.set_xlabel("growth of resident memory [MiB]")
    headline(
        figure,
        "Resident memory is memory that was written and not returned",
        f"{under}\nsolid: measured, outlined: predicted, diamond: your guess",
    )
    show(figure)


def parts(rows: list[tuple[str, dict]], under: str):
    """Draw the components of peak resident memory: rows of (label, {part: bytes}), with the parts of ``PARTS``.

    All parts except the last are predicted and outlined together. The last is the rest of the measured peak.
    """
    figure, axes = plt.subplots(figsize=(10, 0.62 * len(rows) + 2.2), layout="constrained")
    left, widest = [0.0] * len(rows), max(sum(sizes.values()) for _, sizes in rows) / MIB
    for part, colour in PARTS.items():
        widths = [sizes[part] / MIB for _, sizes in rows]
        axes.barh(range(len(rows)), widths, left=left, color=colour, label=part, height=0.6)
        for place, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width > 0.035 * widest:  # wide enough to hold its number
                axes.text(
                    start + width / 2,
                    place,
                    f"{width:.0f}",
                    ha="center",
                    va="center",
                    color="black" if colour in LIGHT else "white",
                )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, (total, (_, sizes)) in enumerate(zip(left, rows, strict=True)):
        predicted = sum(list(sizes.values())[:-1]) / MIB
        axes.barh(place, predicted, height=0.74, **PREDICTED)
        axes.text(total + widest * 0.01, place, f"{total:.0f}", va="center")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, widest * 1.08)
    axes.set_xlabel("peak resident memory [MiB]")
    marks = "bar's end: measured, outlined: the first three parts together, predicted; the fourth is the difference"
    headline(figure, "Components of one training process", f"{under}\n{marks}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=11)
    show(figure)
