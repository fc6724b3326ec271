"""Figure of memory over the number of ranks."""

from labkit.teaching.plots import MIB, STRATEGY_COLOURS, caption, headline, plt, show


def against_ranks(measured: dict[int, dict], predicted: dict[int, tuple[dict, dict]], floor: int, title: str):
    """Draw peak and persistent memory of a rank over the world size.

    measured: {world size: record}; predicted: {world size: (persistent terms, peak terms)}, terms in bytes.
    floor: bytes below which the peak cannot fall.
    """
    figure, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")
    colour = STRATEGY_COLOURS["fsdp2"]  # both series are of one strategy: their marks differ
    for place, (name, mark) in enumerate((("between steps", "s"), ("peak", "o"))):
        heights = [sum(terms[place].values()) / MIB for terms in predicted.values()]
        axes.annotate(
            name, (max(predicted), heights[-1]), (0, 12), textcoords="offset points", ha="right", color=colour
        )
        key = ("start", "peak")[place]
        points = [sum(record["memory"][key].values()) / MIB for record in measured.values()]
        axes.plot(list(measured), points, mark, color=colour, markersize=8)
        axes.plot(list(predicted), heights, mark, markerfacecolor="none", color="black", markersize=13)
        for world_size, point in zip(measured, points, strict=True):
            axes.annotate(f"{point:.1f}", (world_size, point), (5, 6), textcoords="offset points", fontsize=11)
    axes.axhline(floor / MIB, color="black", linestyle="--", linewidth=1)
    axes.annotate("floor", (2, floor / MIB), (0, -16), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(predicted), [str(world_size) for world_size in predicted])
    axes.minorticks_off()
    axes.set(ylim=(0, None), xlabel="ranks", ylabel="memory per rank [MiB]")
    record = next(iter(measured.values()))
    under = caption(record).replace(f"{record['ranks']} ranks", f"{min(measured)} to {max(measured)} ranks")
    marks = "filled: measured, with two batches of images between steps; hollow: predicted, without them"
    headline(figure, title, f"{under}\n{marks}")
    show(figure)
