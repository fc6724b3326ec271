"""Draw chapter 05's diagrams, one unit's step against that of several: python images/chapter_05.py"""

from drawing import COLOURS, COMPUTE, FREE, GATHER, INK, PAPER, REDUCE, SOFT, Drawing

SHARD, WAITING, GRID = COLOURS["parameters"], "#D6ECF8", "#CCCCCC"
LEFT, TOP, SLOT = 170, 140, 76  # the first column's left edge, the lanes' upper edge, a column's width
FORWARD = ["conv1", "conv2", "fc1", "fc2"]
COLUMNS = ["start", *FORWARD, *reversed(FORWARD), "optimizer"]


def x_of(column: float) -> float:
    return LEFT + column * SLOT


def lane(d: Drawing, floor: int, name: str, note: str, shard: int, gathered: int, runs: list, gathers: list):
    """One unit, standing on ``floor``; shard, gathered: heights.

    runs: (first column, past the last, colour, text) while it is whole; gathers: before which columns it is gathered.
    """
    d.text(20, floor - 34, name, 18, bold=True)
    d.text(20, floor - 12, note, 13, colour=SOFT)
    for first, end, colour, text in runs:
        d.box(x_of(first), floor - shard - gathered, (end - first) * SLOT, gathered, colour, GATHER, text, 13)
    d.box(LEFT, floor - shard, SLOT * len(COLUMNS), shard, SHARD, SHARD)
    if shard > 20:
        d.text(LEFT + 12, floor - shard / 2 + 5, "shard", 13, colour=PAPER)
    for column in gathers:
        top = floor - shard - gathered
        d.line(x_of(column), top - 24, x_of(column), top - 3, arrow=True)
        d.text(x_of(column), top - 30, "all-gather", 13, "middle")


def frame(d: Drawing):
    """The columns: what computes when."""
    for column, layer in enumerate(COLUMNS):
        d.text(x_of(column + 0.5), TOP - 16, layer, 14, "middle", INK if 0 < column < 9 else SOFT)
    d.text(x_of(3), TOP - 42, "forward", 15, "middle", bold=True)
    d.text(x_of(7), TOP - 42, "backward", 15, "middle", bold=True)
    for column in (1, 5, 9):
        d.line(x_of(column), TOP - 34, x_of(column), 750, GRID, 1)
    d.line(20, 456, x_of(10), 456, GRID, 1)
    d.line(x_of(7), TOP - 6, x_of(7), 764, INK, 1.8, dash="6 5")
    d.text(x_of(7), 784, "backward of relu2: activations and their gradients at their most", 14, "middle")


def legend(d: Drawing):
    marks = [(SHARD, "shard"), (GATHER, "whole: fc1 computes"), (WAITING, "whole: waits"), (REDUCE, "gradient, whole")]
    for place, (colour, text) in enumerate(marks):
        x = 20 + (0, 110, 310, 460)[place]
        d.box(x, 812, 20, 16, colour, GATHER if colour != REDUCE else REDUCE)
        d.text(x + 28, 825, text, 14)


def units_in_a_step():
    d = Drawing(980, 846, "A unit's life through a step, for one unit and for two")
    d.text(20, 36, "A unit is whole from its gather to the turn of its last layer", 20, bold=True)
    d.text(
        20, 62, "Height: bytes of a unit that one rank holds. Left to right: one step, layer by layer.", 14, colour=SOFT
    )
    frame(d)
    turns = [
        (1, 3, WAITING, ""),
        (3, 4, GATHER, "fc1"),
        (4, 6, WAITING, ""),
        (6, 7, GATHER, "fc1"),
        (7, 9, WAITING, ""),
    ]
    lane(d, 440, "one unit", "all four layers", 30, 84, turns, [1])
    d.box(x_of(6.5), 242, 2.5 * SLOT, 84, REDUCE, REDUCE)
    d.box(x_of(8.6), 158, 0.4 * SLOT, 84, REDUCE, PAPER)
    d.text(x_of(9) + 8, 190, "reduce-scatter:", 13)
    d.text(x_of(9) + 8, 207, "packed, it is", 13)
    d.text(x_of(9) + 8, 224, "there twice", 13)
    lane(d, 666, "unit fc1", "98.3 % of it all", 29, 82, [(3, 4, GATHER, "fc1"), (6, 7, GATHER, "fc1")], [3, 6])
    d.box(x_of(6.5), 473, 0.5 * SLOT, 82, REDUCE, REDUCE)
    d.box(x_of(7), 473, 2 * SLOT, 82, FREE, REDUCE, dash="5 4")
    d.text(x_of(8), 502, "reduce-scatter,", 13, "middle")
    d.text(x_of(8), 519, "then free; FSDP2", 13, "middle", SOFT)
    d.text(x_of(8), 536, "keeps it a unit longer", 13, "middle", SOFT)
    lane(d, 740, "root", "conv1, conv2, fc2", 3, 5, [(1, 9, WAITING, "")], [1])
    legend(d)
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
    """What a GPU gathers, computes and reduces when, for one unit and for a unit per block."""
    turn, left = 40, 150
    d = Drawing(980, 400, "A step in one unit, and with a unit for each block: what runs side by side")
    for top, name, bars in ((46, "one unit", ONE_UNIT), (220, "a unit for each block", BY_BLOCK)):
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
        left, 372, "time →   A number is a block's. Forward, then backward, which takes twice as long.", 14, colour=SOFT
    )
    d.save("units_side_by_side")


if __name__ == "__main__":
    units_in_a_step()
    side_by_side()
