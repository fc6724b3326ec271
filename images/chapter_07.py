# SPDX-License-Identifier: BSD-3-Clause
"""The diagram of chapter 07: python images/chapter_07.py"""

from drawing import INK, SOFT, Drawing

ROWS, LEFT, SCALE = 128, 150, 5.6  # fc1.weight's rows; pixels
SHADES = ("#0072B2", "#56B4E9", "#A9D6F2", "#DCEEFA")  # a shade for each writer


def cut(ranks):
    """[(first row, one past the last), …]: chunks of equal size, the last one smaller."""
    size = -(-ROWS // ranks)
    return [(begin, min(begin + size, ROWS)) for begin in range(0, ROWS, size)]


def checkpoint_reshard():
    """Above the writers, in the middle the files, below the readers; colours follow the rows down."""
    d = Drawing(940, 440, "Four ranks write fc1.weight into a checkpoint, three ranks read it")

    def x(row):
        return round(LEFT + SCALE * row, 1)

    d.text(24, 78, "4 ranks\nwrite", 17, bold=True)
    d.text(24, 196, "the folder\non disk", 17, bold=True)
    d.text(24, 368, "3 ranks\nread", 17, bold=True)
    for rank, (begin, end) in enumerate(cut(4)):
        width, middle = x(end) - x(begin), (x(begin) + x(end)) / 2
        d.box(x(begin) + 6, 56, width - 12, 44, SHADES[rank], INK, f"rank {rank}", 15)
        d.line(middle, 102, middle, 146, INK, arrow=True)
        d.box(x(begin), 150, width, 58, SHADES[rank], INK, f"__{rank}_0.distcp\nrows {begin} to {end - 1}", 14)
    d.text(
        x(0), 40, "fc1.weight, 128 rows; the other parameters and the optimizer state go the same way", 14, colour=SOFT
    )
    d.box(x(0), 216, x(ROWS) - x(0), 32, "#ffffff", INK, dash="4 3")
    d.text(x(ROWS / 2), 237, ".metadata: model.fc1.weight has pieces that begin at rows 0, 32, 64 and 96", 14, "middle")
    for rank, (begin, end) in enumerate(cut(3)):
        middle = (x(begin) + x(end)) / 2
        d.line(middle, 254, middle, 326, INK, arrow=True)
        for writer, (first, last) in enumerate(cut(4)):
            low, high = max(begin, first), min(end, last)
            if low < high:
                inset_low, inset_high = 6 * (low == begin), 6 * (high == end)
                left, right = x(low) + inset_low, x(high) - inset_high
                d.box(left, 330, right - left, 44, SHADES[writer], SHADES[writer])
        d.box(x(begin) + 6, 330, x(end) - x(begin) - 12, 44, edge=INK)
        d.text(middle, 396, f"rank {rank}: rows {begin} to {end - 1}", 15, "middle")
        parts = [f"file {w}" for w, (first, last) in enumerate(cut(4)) if max(begin, first) < min(end, last)]
        d.text(middle, 418, "from " + " and ".join(parts), 14, "middle", SOFT)
    d.save("checkpoint_reshard")


if __name__ == "__main__":
    checkpoint_reshard()
