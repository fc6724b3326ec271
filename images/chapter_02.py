# SPDX-License-Identifier: BSD-3-Clause
"""Draw the diagrams of chapter 02: all_reduce.svg and ring.svg. Run: python images/chapter_02.py"""

from drawing import INK, PAPER, SOFT, Drawing

RANKS = 4
COMPLETE, PARTIAL = "#455a64", "#e1e8ec"  # a chunk's sum; gray, because a color stands for a category of memory


def all_reduce():
    drawing = Drawing(1080, 385, "An all-reduce taken apart: a reduce-scatter, then an all-gather")
    box, height, top = 68, 46, 92
    lefts = [86, 442, 798]
    titles = [
        ("1 · before", "every rank has its own elements"),
        ("2 · after the reduce-scatter", "rank r has the sum of chunk r"),
        ("3 · after the all-gather", "every rank has every sum"),
    ]
    for panel, (left, (title, under)) in enumerate(zip(lefts, titles, strict=True)):
        drawing.text(left, 36, title, 18, bold=True)
        drawing.text(left, 58, under, 15, colour=SOFT)
        for chunk in range(RANKS):
            drawing.text(left + chunk * box + box / 2, 84, f"chunk {chunk}", 13, "middle", COMPLETE, bold=True)
            for rank in range(RANKS):
                x, y = left + chunk * box, top + rank * (height + 6)
                if panel == 0:
                    drawing.box(x, y, box - 5, height, PARTIAL, COMPLETE, str((chunk + 1) * 10**rank), 16)
                elif panel == 2 or rank == chunk:
                    total = str((chunk + 1) * 1111)
                    drawing.box(x, y, box - 5, height, COMPLETE, COMPLETE, total, 16, PAPER, bold=True)
                else:
                    drawing.box(x, y, box - 5, height, edge="#bbbbbb", dash="4 4")
    for rank in range(RANKS):
        drawing.text(18, top + rank * (height + 6) + height / 2 + 5, f"rank {rank}", 15)
    middle = top + 2 * (height + 6) - 3
    for left in lefts[:2]:
        drawing.line(left + RANKS * box + 8, middle, left + RANKS * box + 72, middle, width=2.5, arrow=True)
    line = top + RANKS * (height + 6) + 18
    for first, second, name in ((0, 1, "reduce-scatter"), (1, 2, "all-gather")):
        start, end = (lefts[i] + 2 * box for i in (first, second))
        drawing.line(start, line, end - 8, line, INK, 1.5, arrow=True)
        drawing.text((start + end) / 2, line + 24, name, 15, "middle")
    drawing.text(540, line + 52, "both together: all-reduce", 17, "middle", bold=True)
    drawing.save("all_reduce")


def ring():
    drawing = Drawing(1080, 330, "Chunk 0 travels around a ring of 4 ranks, in 2 × 3 steps")
    box, gap, left, top = 100, 54, 28, 96
    stops = [(1, "10"), (2, "110"), (3, "1110"), (0, "1111"), (1, "1111"), (2, "1111"), (3, "1111")]
    drawing.text(left, 36, "Chunk 0 travels around the ring 0 → 1 → 2 → 3 → 0", 18, bold=True)
    drawing.text(left, 60, "each arrow: one chunk, from a rank to its right neighbor", 15, colour=SOFT)
    for number, (rank, value) in enumerate(stops):
        x, done = left + number * (box + gap), number >= 3
        drawing.text(x + box / 2, top + 4, f"rank {rank}", 15, "middle")
        fill = COMPLETE if done else PARTIAL
        drawing.box(x, top + 14, box, 54, fill, COMPLETE, value, 18, PAPER if done else INK, bold=done)
        if number:
            drawing.line(x - gap + 4, top + 41, x - 4, top + 41, width=2.5, arrow=True)
            drawing.text(x - gap / 2, top + 30, f"{number}", 13, "middle", SOFT)
    below = [(1, "+ 100"), (2, "+ 1000"), (3, "+ 1")]
    for number, text in below:
        drawing.text(left + number * (box + gap) + box / 2, top + 90, text, 14, "middle", SOFT)
    line = top + 116
    halves = [(0, 3, "reduce-scatter: 3 steps, each adds"), (3, 6, "all-gather: 3 steps, each copies")]
    for first, last, text in halves:
        x1, x2 = (left + i * (box + gap) + box / 2 for i in (first, last))
        drawing.line(x1 + 6, line, x2 - 6, line, width=1.5, arrow=True)
        drawing.text((x1 + x2) / 2, line + 24, text, 15, "middle")
    drawing.text(
        540,
        line + 72,
        "The other three chunks travel at the same time, each one rank further along:\n"
        "in every step, every rank sends one chunk and receives one, and no link is idle.",
        16,
        "middle",
    )
    drawing.save("ring")


if __name__ == "__main__":
    all_reduce()
    ring()
