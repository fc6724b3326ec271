# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 18's diagram, three ways to run Muon on sharded matrices: python images/chapter_18.py"""

from drawing import COLOURS, INK, PAPER, SOFT, Drawing

# Four matrices, each with a color; a rank has one of four rows of each
MATRICES = [COLOURS[name] for name in ("parameters", "gradients", "optimizer state", "activations")]
RANKS, SIDE, ROW = 4, 40, 10
LANES = [
    ("gathered on every rank", ["all-gather"] * 4, [range(4)] * 4, "computes all 4", "4 all-gathers"),
    ("owner-computes", ["all-to-all"], [[rank] for rank in range(4)], "computes 1 of 4", "1 all-to-all there, 1 back"),
]


def shards(d, x, y, rank):
    """A rank's row of each of the four matrices."""
    for matrix, colour in enumerate(MATRICES):
        left = x + matrix * 22
        d.box(left, y, 18, 4 * ROW, PAPER, SOFT, dash="2 2")
        d.box(left, y + rank * ROW, 18, ROW, colour, INK)


def whole(d, x, y, matrices):
    for place, matrix in enumerate(matrices):
        d.box(x + 22 * (place if len(matrices) > 1 else matrix), y, 18, 4 * ROW, MATRICES[matrix], INK)


def muon_ways():
    d = Drawing(1000, 486, "Muon needs whole matrices: gathered on every rank, or each on its owner")
    d.text(20, 36, "Four matrices on four ranks: who gets which of them whole", 20, bold=True)
    d.text(
        20,
        60,
        "A color is a matrix. Between steps, each rank has a quarter of the rows of each (left).",
        14,
        colour=SOFT,
    )
    for lane, (name, _, owned, computes, sent) in enumerate(LANES):
        top = 88 + 190 * lane
        d.text(20, top + 20, name, 17, bold=True)
        for rank in range(RANKS):
            x = 30 + 240 * rank
            d.text(x, top + 50, f"rank {rank}", 14, colour=SOFT)
            shards(d, x, top + 58, rank)
            d.line(x + 92, top + 78, x + 114, top + 78, arrow=True)
            whole(d, x + 120, top + 58, list(owned[rank]))
            d.text(x + 120, top + 118, computes, 13)
        d.text(30, top + 146, f"In a step: {sent}.", 15)
        d.line(20, top + 164, 980, top + 164, SOFT, 1)
    d.text(20, 470, "AdamW would need no arrow: it updates each element by that element's own gradient.", 15)
    d.save("muon_ways")


if __name__ == "__main__":
    muon_ways()
