# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 09's diagram, when a block's parameters are whole: python images/chapter_09.py"""

from drawing import COLOURS, GATHER, INK, REDUCE, SOFT, Drawing

SHARD, WAITING, GRID = COLOURS["parameters"], "#D6ECF8", "#CCCCCC"
LEFT, SLOT, WHOLE = 190, 104, 96  # the first column's left edge, a column's width, the height of a whole block
COLUMNS = ["before it", "block computes", "other blocks", "other blocks", "block computes", "after it"]
LANES = [  # (argument, what stays between forward and backward, as a share; the second all-gather; what it costs)
    ("True", "freed after forward", 0, "all-gather\namong 4", "2 gathers among 4 ranks,\nnothing waits"),
    ("2", "one part in 2 stays", 1 / 2, "all-gather\namong 2", "1 gather among 4 ranks,\n1 among 2; half waits"),
    ("False", "stays whole", 1, "", "1 gather among 4 ranks,\nthe whole block waits"),
]


def x_of(column: float) -> float:
    return LEFT + column * SLOT


def lane(d: Drawing, floor: int, argument: str, note: str, kept: float, again: str, cost: str):
    """A block on one rank, standing on ``floor``; on top of its shard, what it holds besides."""
    shard = WHOLE / 4
    d.text(20, floor - 62, argument, 20, bold=True)
    d.text(20, floor - 40, note, 14, colour=SOFT)
    top = floor - shard
    if kept:
        d.box(x_of(2), top - kept * WHOLE, 2 * SLOT, kept * WHOLE, WAITING, GATHER, "waits", 14)
    for column in (1, 4):
        d.box(x_of(column), top - WHOLE, SLOT, WHOLE, GATHER, GATHER, "whole", 14)
    d.box(LEFT, top, 6 * SLOT, shard, SHARD, SHARD, "shard: a quarter of the block", 13)
    for column, text in ((1, "all-gather\namong 4"), (4, again)):
        if text:
            d.text(x_of(column) - 8, top - 84, text, 13, "end")
            d.line(x_of(column) - 60, top - 58, x_of(column) - 2, top - 58, arrow=True)
    d.text(x_of(5) + 10, top - 84, "reduce-scatter\namong 4", 13)
    d.line(x_of(5) + 2, top - 58, x_of(5) + 60, top - 58, REDUCE, 3)
    d.text(x_of(6) + 20, floor - 62, cost, 14)


def when_whole():
    d = Drawing(1030, 636, "When a block's parameters are whole, for three values of reshard_after_forward")
    d.text(20, 36, "reshard_after_forward says what waits between a block's forward and its backward", 20, bold=True)
    d.text(20, 60, "Height: bytes of one block on one of four ranks. Left to right: one step.", 14, colour=SOFT)
    d.text(x_of(2), 92, "forward", 15, "middle", bold=True)
    d.text(x_of(4), 92, "backward", 15, "middle", bold=True)
    for column, name in enumerate(COLUMNS):
        d.text(x_of(column + 0.5), 116, name, 13, "middle", INK if column in (1, 4) else SOFT)
    d.line(x_of(3), 80, x_of(3), 610, GRID, 1.5, dash="6 5")
    for number, about in enumerate(LANES):
        floor = 270 + 165 * number
        d.line(20, floor + 12, 1010, floor + 12, GRID, 1)
        lane(d, floor, *about)
    d.save("when_whole")


if __name__ == "__main__":
    when_whole()
