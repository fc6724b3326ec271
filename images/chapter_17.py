# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 17's diagram, a model that is sharded before or after it is there: python images/chapter_17.py"""

from drawing import COLOURS, INK, PAPER, SOFT, Drawing

FULL, ROWS, EMPTY = COLOURS["all-gather"], COLOURS["parameters"], PAPER
RANKS, SIDE, GAP = 4, 46, 10


def ranks(d, x, y, shares, fill, paper=EMPTY):
    """Four ranks' boxes: what each holds of the model, in quarters."""
    for rank, share in enumerate(shares):
        left = x + rank * (SIDE + GAP)
        d.box(left, y, SIDE, 4 * 16, paper, SOFT, dash="3 3")
        if share:
            begin, end = share
            d.box(left, y + 16 * begin, SIDE, 16 * (end - begin), fill, INK)


def your_model():
    d = Drawing(1000, 452, "A model that is sharded before it has memory, and one that is sharded after")
    d.text(20, 36, "Sharded too late, and sharded in time", 20, bold=True)
    d.text(20, 60, "A box is what one of four ranks holds of the model. The file lies on a disk that all ranks see.", 14,
           colour=SOFT)  # fmt: skip
    columns = (30, 360, 690)
    whole, own = [(0, 4)] * RANKS, [(rank, rank + 1) for rank in range(RANKS)]
    for top, name, states in (
        (86, "from_pretrained in another dtype, then fully_shard", ((whole, "the whole model on every rank"), (whole, "fully_shard copies its rows out"),
                                                   (own, "at last a quarter"))),
        (266, "meta device, fully_shard, then read (DistributedConfig does this)", (([None] * 4, "shapes only: no memory at all"), ([None] * 4, "sharded: still no memory"),
                                                      (own, "each rank reads its own rows"))),
    ):  # fmt: skip
        d.text(20, top + 20, name, 17, bold=True)
        for x, (shares, said), number in zip(columns, states, (1, 2, 3), strict=True):
            fill = ROWS if shares == own else FULL
            ranks(d, x, top + 40, shares, fill)
            if shares == whole and number == 2:
                ranks(d, x, top + 40, own, ROWS, paper="none")
            d.text(x, top + 128, f"{number}. {said}", 15)
            if number < 3:
                d.line(x + 4 * (SIDE + GAP) + 8, top + 72, x + 318, top + 72, arrow=True)
    d.line(20, 244, 980, 244, SOFT, 1)
    d.text(20, 432, "Both end alike. What differs is the highest moment before, on every rank at once: it decides whether you get there.", 15)  # fmt: skip
    d.save("your_own_model")


if __name__ == "__main__":
    your_model()
