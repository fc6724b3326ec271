"""Figures of chapter 05: the effect of the wrapping policy on peak memory and traffic."""

import matplotlib.pyplot as plt

from labkit.teaching.plots import caption, headline, memory_bars, show


def traffic(record: dict) -> float:
    """Return the MB (1000² bytes) of tensors that a step gathers and reduces."""
    return sum(entry["count"] * entry["bytes"] for entry in record["traffic"]) / 1e6


def memory_and_traffic(rows: list[tuple[str, dict, int | None]], title: str, guesses: dict[str, float] | None = None):
    """Draw stacked bars of peak memory next to the traffic of the same runs.

    rows: (label, record, predicted bytes of the peak or None). guesses: {label: MiB}.
    """
    figure, (memory, moved) = plt.subplots(
        1, 2, figsize=(12, 0.6 * len(rows) + 2.4), width_ratios=[3, 2], layout="constrained"
    )
    memory_bars(memory, [(label, r["memory"]["peak"], predicted) for label, r, predicted in rows], guesses)
    sent = [traffic(r) for _, r, _ in rows]
    moved.barh(range(len(rows)), sent, color="#666666", height=0.62)
    for place, megabytes in enumerate(sent):
        moved.text(megabytes, place, f" {megabytes:.1f}", va="center")
    moved.set_yticks([])
    moved.invert_yaxis()
    moved.set_xlim(0, 1.2 * max(sent))
    moved.set_xlabel("gathered + reduced per step [MB]")
    marks = "solid: measured, outlined: predicted" + ", diamond: your guess" * any(
        v is not None for v in (guesses or {}).values()
    )
    headline(figure, title, f"{caption(rows[0][1])}\n{marks}")
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=11)
    show(figure)
