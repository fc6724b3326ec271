# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 05's diagrams, one unit against several: python images/chapter_05.py"""

from drawing import COLOURS, COMPUTE, GATHER, INK, PAPER, REDUCE, SOFT, Drawing

SHARD, GRADIENT, WAITING, GRID = COLOURS["parameters"], COLOURS["gradients"], "#D6ECF8", "#CCCCCC"
LEFT, TOP, SLOT = 150, 140, 80  # the first column's left edge, the lanes' upper edge, a column's width
WHOLE, PART = 56, 14  # height of the parameters or of fc1's gradient, whole and as a rank's shard of four
FORWARD = ["conv1", "conv2", "fc1", "fc2"]
COLUMNS = ["start", *FORWARD, *reversed(FORWARD), "optimizer"]


def x_of(column: float) -> float:
    return LEFT + column * SLOT


def stack(d: Drawing, floor: int, begin: float, end: float, *pieces):
    """Draw (height, fill, edge, text) on one another, upwards from ``floor``, over these columns."""
    for height, fill, edge, text in pieces:
        floor -= height
        dash = "5 3" if text == "packed" else ""
        d.box(x_of(begin), floor, (end - begin) * SLOT, height, fill, edge, text, 12, INK, dash)


def frame(d: Drawing, bottom: int):
    """Draw the columns: which layer computes."""
    for column, layer in enumerate(COLUMNS):
        d.text(x_of(column + 0.5), TOP - 16, layer, 14, "middle", INK if 0 < column < 9 else SOFT)
    d.text(x_of(3), TOP - 42, "forward", 15, "middle", bold=True)
    d.text(x_of(7), TOP - 42, "backward", 15, "middle", bold=True)
    for column in (1, 5, 9):
        d.line(x_of(column), TOP - 34, x_of(column), bottom, GRID, 1)
    d.line(x_of(7), TOP - 6, x_of(7), bottom + 14, INK, 1.8, dash="6 5")
    d.text(x_of(7), bottom + 32, "backward of relu2: activations and their gradients are largest", 14, "middle")


def lane(d: Drawing, floor: int, name: str, note: str):
    d.text(20, floor - 60, name, 18, bold=True)
    d.text(20, floor - 38, note, 13, colour=SOFT)
    d.box(x_of(0), floor - PART, SLOT * len(COLUMNS), PART, SHARD, SHARD)


def units_in_a_step():
    d = Drawing(980, 826, "One step of one unit, and of fc1 as a unit under FSDP2 and under FSDP1")
    d.text(20, 36, "One rank's share of the parameters, and of fc1's gradient, through a step", 20, bold=True)
    d.text(
        20,
        62,
        "Height: bytes, to scale for four ranks. Left to right: one step, layer by layer. The small root unit is left out.",
        14,
        colour=SOFT,
    )
    frame(d, 716)
    gathered, waiting = (WHOLE, GATHER, GATHER, "gathered"), (WHOLE, WAITING, GATHER, "")
    gradient, packed = (WHOLE, REDUCE, PAPER, "gradient"), (WHOLE, REDUCE, INK, "packed")
    shard = (PART, GRADIENT, PAPER, "")

    floor = 300
    lane(d, floor, "one unit", "FSDP1 or FSDP2")
    for begin, end, piece in ((1, 3, waiting), (3, 4, gathered), (4, 6, waiting), (6, 7, gathered), (7, 9, waiting)):
        stack(d, floor - PART, begin, end, piece)
    stack(d, floor - PART - WHOLE, 6.6, 9, gradient)
    stack(d, floor - PART, 9, 10, shard)
    d.text(x_of(9) + 6, floor - 70, "packed and", 13)
    d.text(x_of(9) + 6, floor - 54, "reduced", 13)

    floor = 480
    lane(d, floor, "FSDP2", "fc1 as a unit")
    stack(d, floor - PART, 3, 4, gathered)
    stack(d, floor - PART, 6, 6.6, (WHOLE, GATHER, GATHER, ""))
    stack(d, floor - PART, 6.6, 6.8, (WHOLE, GATHER, GATHER, ""), (WHOLE, REDUCE, PAPER, ""))
    stack(d, floor - PART, 6.8, 7, (WHOLE, REDUCE, PAPER, ""), (WHOLE, REDUCE, INK, ""))
    stack(d, floor - PART, 7, 9, shard, packed)
    stack(d, floor - PART, 9, 10, shard)
    d.text(x_of(6) - 8, floor - 142, "parameters freed,", 13, "end")
    d.text(x_of(6) - 8, floor - 125, "then gradient packed", 13, "end")
    d.line(x_of(6) - 2, floor - 142, x_of(6.9), floor - 129, arrow=True)
    d.text(x_of(7) + 10, floor - 108, "packed copy stays until the", 13, colour=SOFT)
    d.text(x_of(7) + 10, floor - 92, "root's gradients are reduced", 13, colour=SOFT)

    floor = 716
    lane(d, floor, "FSDP1", "fc1 as a unit")
    stack(d, floor - PART, 3, 4, gathered)
    stack(d, floor - PART, 6, 6.6, (WHOLE, GATHER, GATHER, ""))
    stack(d, floor - PART, 6.6, 6.8, (WHOLE, GATHER, GATHER, ""), (WHOLE, REDUCE, PAPER, ""))
    three = (WHOLE, GATHER, GATHER, ""), (WHOLE, REDUCE, PAPER, ""), (WHOLE, REDUCE, INK, "")
    stack(d, floor - PART, 6.8, 7, *three)
    stack(d, floor - PART, 7, 10, shard)
    d.text(x_of(6) - 8, floor - 168, "FSDP1's peak: gradient packed", 13, "end", bold=True)
    d.text(x_of(6) - 8, floor - 151, "before parameters are freed", 13, "end", bold=True)
    d.line(x_of(6) - 4, floor - 160, x_of(6.78), floor - 160, arrow=True)

    marks = [
        (SHARD, "parameter shard"),
        (GATHER, "gathered, fc1 computes"),
        (WAITING, "gathered, waits"),
        (REDUCE, "fc1's gradient, whole or packed"),
        (GRADIENT, "its shard"),
    ]
    for (colour, text), x in zip(marks, (20, 174, 376, 524, 784), strict=True):
        d.box(x, 784, 20, 16, colour, GATHER if colour in (WAITING, GATHER) else colour)
        d.text(x + 28, 797, text, 14)
    d.save("units_in_a_step")


# By block, in a turn's length of a block: (lane, text, begins, ends). A block's backward takes twice its forward.
BLOCKS = 4
ONE_UNIT = [
    ("all-gather", "all four blocks", 0, 4),
    *(("compute", str(i + 1), 4 + i, 5 + i) for i in range(BLOCKS)),
    *(("compute", str(BLOCKS - i), 8 + 2 * i, 10 + 2 * i) for i in range(BLOCKS)),
    ("reduce-scatter", "all four blocks", 16, 20),
]
BY_BLOCK = [
    *(("all-gather", str(i + 1), i, i + 1) for i in range(BLOCKS)),
    *(("compute", str(i + 1), i + 1, i + 2) for i in range(BLOCKS)),
    *(("all-gather", str(BLOCKS - i), at, at + 1) for i, at in enumerate((5, 6, 8, 10))),
    *(("compute", str(BLOCKS - i), 6 + 2 * i, 8 + 2 * i) for i in range(BLOCKS)),
    *(("reduce-scatter", str(BLOCKS - i), 8 + 2 * i, 9 + 2 * i) for i in range(BLOCKS)),
]
LANES = {"all-gather": GATHER, "compute": COMPUTE, "reduce-scatter": REDUCE}


def side_by_side():
    """Draw when a GPU gathers, computes and reduces, with one unit and with one block per unit."""
    turn, left = 40, 150
    d = Drawing(980, 400, "A step in one unit, and with one block per unit: which operations overlap")
    for top, name, bars in ((46, "one unit", ONE_UNIT), (220, "one block per unit", BY_BLOCK)):
        d.text(20, top - 12, name, 18, bold=True)
        for place, (lane, colour) in enumerate(LANES.items()):
            y = top + 38 * place
            d.text(20, y + 22, lane, 14)
            d.line(left, y + 34, left + 20 * turn, y + 34, GRID, 1)
            for which, text, begin, end in bars:
                if which == lane:
                    d.box(left + begin * turn, y + 2, (end - begin) * turn, 30, colour, PAPER, text, 14, INK)
        end = left + turn * max(end for *_, end in bars)
        d.line(end, top - 4, end, top + 112, INK, 1.8, dash="6 5")
        d.text(end - 8, top - 12, "gradients reduced", 13, "end", SOFT)
    d.text(
        left,
        372,
        "time →   Numbers name the blocks. Forward, then backward, which takes twice as long.",
        14,
        colour=SOFT,
    )
    d.save("units_side_by_side")


if __name__ == "__main__":
    units_in_a_step()
    side_by_side()
