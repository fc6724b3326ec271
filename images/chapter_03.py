# SPDX-License-Identifier: BSD-3-Clause
"""Draw the diagrams of 03_sharding_from_scratch.ipynb: python images/chapter_03.py"""

from drawing import COLOURS, COMPUTE, FREE, GATHER, INK, REDUCE, SOFT, Drawing

KINDS = (("parameters", 72), ("gradients", 72), ("optimizer state", 144))  # Adam: two elements per parameter


def adam_elementwise():
    """Adam computes each new parameter from four elements, so the vectors may be cut anywhere."""
    drawing = Drawing(1080, 356, "Adam updates each parameter from its own four elements")
    left, top, width, height, chosen = 240, 64, 96, 36, 5
    rows = (
        ("parameter", "p", "parameters"),
        ("gradient", "g", "gradients"),
        ("first moment", "m", "optimizer state"),
        ("second moment", "v", "optimizer state"),
    )
    for row, (name, letter, kind) in enumerate(rows):
        y = top + row * (height + 8)
        drawing.text(left - 16, y + 24, name, 16, "end")
        for element in range(8):
            edge = INK if element == chosen else "#ffffff"
            drawing.box(left + element * width + 4, y, width - 8, height, COLOURS[kind], edge, f"{letter}{element}", 15)
    bottom, x = top + 4 * (height + 8) - 8, left + chosen * width
    drawing.box(x + 1, top - 6, width - 2, bottom - top + 12, "none", INK)
    drawing.line(x + width / 2, bottom + 8, x + width / 2, bottom + 46, INK, 2, arrow=True)
    drawing.text(x + width / 2 - 12, bottom + 34, "Adam needs these four, and the step count", 15, "end")
    drawing.text(left - 16, bottom + 74, "new parameter", 16, "end")
    drawing.box(x + 4, bottom + 50, width - 8, height, COLOURS["parameters"], INK, f"p{chosen}", 15)
    for rank in range(4):
        drawing.text(left + (2 * rank + 1) * width, 36, f"rank {rank} may update", 14, "middle", SOFT)
        if rank:
            drawing.line(left + 2 * rank * width, 46, left + 2 * rank * width, bottom + 12, SOFT, 1.5, dash="6 4")
    drawing.save("adam_elementwise")


def zero_stages():
    """What each of four ranks holds under DDP, ZeRO-1, ZeRO-2 and ZeRO-3."""
    drawing = Drawing(1080, 440, "What each rank holds under DDP, ZeRO-1, ZeRO-2 and ZeRO-3")
    top = 92
    panels = ("DDP\nnothing sharded", "ZeRO-1\noptimizer state", "ZeRO-2\n+ gradients", "ZeRO-3 = FSDP\n+ parameters")
    y = top
    for kind, height in KINDS:
        words = kind.replace(" ", "\n")
        drawing.text(126, y + height / 2 + (5 if " " not in kind else -4), words, 15, "end")
        y += height + 8
    for stage, name in enumerate(panels):
        left = 150 + 234 * stage
        title, under = name.split("\n")
        drawing.text(left + 98, 32, title, 18, "middle", bold=True)
        drawing.text(left + 98, 52, under, 14, "middle", SOFT)
        for rank in range(4):
            column(drawing, left + 50 * rank, top, rank, stage)
    drawing.text(540, 426, "filled: this rank holds it · outlined: another rank does", 14, "middle", SOFT)
    drawing.save("zero_stages")


def column(drawing, x, y, rank, stage):
    drawing.text(x + 23, y - 10, f"rank {rank}", 12, "middle", SOFT)
    for (kind, height), sharded_from in zip(KINDS, (3, 2, 1), strict=True):
        for part in range(4):
            if stage < sharded_from or part == rank:
                drawing.box(x, y + part * height / 4, 46, height / 4, COLOURS[kind], "#ffffff")
            else:
                drawing.box(x, y + part * height / 4, 46, height / 4, "none", "#bbbbbb", dash="3 3")
        y += height + 8


def unit_life():
    """A unit through a step: what happens above, what one rank holds of it below."""
    drawing = Drawing(1080, 404, "The life of a unit through one step, on one of four ranks")
    floor, quarter = 352, 24  # a quarter of the unit's parameters is so high
    phases = (  # what happens, its tone, its width
        ("all-gather", GATHER, 110),
        ("forward", COMPUTE, 140),
        ("free;\nother units", FREE, 120),
        ("all-gather", GATHER, 110),
        ("backward", COMPUTE, 180),
        ("reduce-\nscatter", REDUCE, 100),
        ("free;\nother units", FREE, 120),
        ("optimizer", COMPUTE, 90),
    )
    drawing.text(55, 34, "what happens", 15, bold=True)
    drawing.text(55, 116, "what one rank of four holds of the unit", 15, bold=True)
    starts = [55]
    for name, tone, width in phases:
        drawing.box(starts[-1], 46, width - 4, 42, tone, INK, name, 14, INK)
        starts.append(starts[-1] + width)

    def block(first, last, below, height, kind, text):
        """Held from the start of one phase to the end of another, on top of ``below`` quarters."""
        x, width = starts[first], starts[last + 1] - starts[first] - 4
        y = floor - (below + height) * quarter
        drawing.box(x, y, width, height * quarter - 1, COLOURS[kind], "none", text, 14)

    block(0, 7, 0, 1, "parameters", "its shard of the parameters, always there")
    block(0, 1, 1, 4, "all-gather", "whole parameters")
    block(3, 4, 1, 4, "all-gather", "whole parameters, again")
    block(4, 4, 5, 4, "reduce-scatter", "whole gradient")
    block(5, 5, 2, 4, "reduce-scatter", "whole\ngradient")
    block(5, 7, 1, 1, "gradients", "its shard of the gradient")
    drawing.line(starts[0], floor, starts[-1], floor, INK, 1.5)
    drawing.line(starts[0], 374, starts[-1] - 4, 374, SOFT, 1.5, arrow=True)
    drawing.text(starts[-1] - 4, 392, "one step", 14, "end", SOFT)
    drawing.save("unit_life")


if __name__ == "__main__":
    adam_elementwise()
    zero_stages()
    unit_life()
