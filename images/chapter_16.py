# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 16's diagram, what ranks leave behind: python images/chapter_16.py"""

from drawing import COLOURS, INK, PAPER, SOFT, Drawing

DONE, WAITING = COLOURS["all-gather"], COLOURS["all-reduce buckets"]
LEFT, STEP, WIDTH = 110, 112, 98
CALLED = (4, 4, 3, 4)  # how many collectives each rank has called
ENDS = ("waits in number 4", "waits in number 4", "is somewhere else", "waits in number 4")


def left_behind():
    d = Drawing(1000, 400, "What the ranks of a run that hangs leave behind")
    d.text(20, 36, "A run that hangs, and what its ranks leave behind", 20, bold=True)
    d.text(20, 62, "Each box is a collective that a rank has called. The others wait; the one to find is not waiting.", 14,
           colour=SOFT)  # fmt: skip
    for number in range(1, 5):
        d.text(LEFT + (number - 0.5) * STEP - 7, 96, f"number {number}", 14, "middle", SOFT)
    for rank, (called, end) in enumerate(zip(CALLED, ENDS, strict=True)):
        y = 108 + 54 * rank
        d.text(20, y + 25, f"rank {rank}", 16, bold=True)
        for number in range(1, 5):
            x = LEFT + (number - 1) * STEP
            if number <= called:
                d.box(x, y, WIDTH, 38, WAITING if number == 4 else DONE, INK)
            else:
                d.box(x, y, WIDTH, 38, PAPER, SOFT, "?", 16, SOFT, dash="4 3")
        d.text(LEFT + 4 * STEP + 8, y + 25, end, 15)
        d.line(734, y + 19, 776, y + 19, arrow=True)
        d.box(786, y, 92, 38, PAPER, INK, f"flight_{rank}", 14)
        d.box(888, y, 92, 38, PAPER, INK, f"where_{rank}", 14)
    d.text(786, 80, "its calls and\ntheir lines", 14, colour=SOFT)
    d.text(888, 80, "its stack:\nwhere it is", 14, colour=SOFT)
    d.text(20, 350, "diagnose_hang.py", 16, bold=True)
    d.text(
        200, 350, "compares number 1 of all ranks, then number 2, and so on. Where they part, it names the ranks,", 15
    )
    d.text(
        200,
        374,
        "and the line of the program that each is at. A process that was killed has left nothing but its name.",
        15,
    )
    d.save("left_behind")


if __name__ == "__main__":
    left_behind()
