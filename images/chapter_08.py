# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 08's diagrams: what a block saves of a token, and what recomputation saves: python images/chapter_08.py"""

from drawing import COLOURS, FREE, INK, SOFT, Drawing

KEPT, GONE = COLOURS["activations"], FREE
SCALE = 0.36  # pixels per element
PITCH, BAR = 86, 46
NEXT = "the next\nblock"  # counts it as its own

# The tensors of a block of the preset tiny: (name, elements per token, which operator's backward needs it, if any)
ATTENTION = [
    ("input", 128, "norm"),
    ("1/rms", 1, "norm"),
    ("normalized", 128, "norm's\nweight"),
    ("norm", 128, "query, key,\nvalue"),
    ("query, key\nas made", 192, ""),
    ("query,\nrotated", 128, "attention"),
    ("key,\nrotated", 64, "attention"),
    ("value", 64, "attention"),
    ("attention", 128, "attention,\noutput"),
    ("log-sum-\nexp", 4, "attention"),
    ("output", 128, ""),
]
FEED_FORWARD = [
    ("after\nattention", 128, "norm"),
    ("1/rms", 1, "norm"),
    ("normalized", 128, "norm's\nweight"),
    ("norm", 128, "gate, up"),
    ("gate", 384, "silu"),
    ("silu", 384, "product"),
    ("up", 384, "product"),
    ("product", 384, "down"),
    ("down", 128, ""),
    ("output of\nthe block", 128, NEXT),
]


def row(d: Drawing, floor: int, name: str, tensors: list):
    """One half of a block, its tensors in the order in which forward makes them, standing on ``floor``."""
    d.text(20, floor - 40 - max(numbers for _, numbers, _ in tensors) * SCALE, name, 16, bold=True)
    for place, (tensor, numbers, needed) in enumerate(tensors):
        x, height, mine = 40 + place * PITCH, max(2, numbers * SCALE), needed not in ("", NEXT)
        d.box(x, floor - height, BAR, height, KEPT if mine else GONE, INK, dash="" if mine else "4 3")
        d.text(x + BAR / 2, floor - height - 7, f"{numbers}", 14, "middle")
        d.text(x + BAR / 2, floor + 19, tensor, 13, "middle", bold=mine)
        d.text(x + BAR / 2, floor + 54, needed or "nothing", 14, "middle")
    d.line(20, floor, 40 + len(tensors) * PITCH - 24, floor, INK, 1)


def block_kept():
    kept = sum(numbers for _, numbers, needed in ATTENTION + FEED_FORWARD if needed not in ("", NEXT))
    inner = sum(numbers for name, numbers, _ in FEED_FORWARD if name in ("gate", "silu", "up", "product"))
    d = Drawing(1000, 566, "What a transformer block saves of each token for backward")
    d.text(
        20,
        36,
        f"A block saves {kept:,} elements per token, {inner:,} of them between gate and down",
        20,
        bold=True,
    )
    d.text(
        20,
        62,
        "A bar is a tensor; its height is its number of elements per token (preset tiny). Left to right: forward.",
        14,
        colour=SOFT,
    )
    row(d, 205, "attention", ATTENTION)
    row(d, 478, "feed-forward", FEED_FORWARD)
    for place, (colour, dash, text) in enumerate(((KEPT, "", "saved for backward"), (GONE, "4 3", "not saved"))):
        d.box(370 + 190 * place, 83, 20, 16, colour, INK, dash=dash)
        d.text(398 + 190 * place, 96, text, 14)
    d.text(760, 96, "third line: what needs it", 14)
    d.save("block_kept")


# Recomputation: elements per token that four blocks save, in forward and in backward
BLOCK, INPUT, HEIGHT = 2694, 128, 150 / (4 * 2694)  # HEIGHT: pixels per element
COLUMNS = [f"block {i}" for i in range(4)] + [f"block {i}" for i in (3, 2, 1, 0)]


def stairs(d: Drawing, floor: int, name: str, note: str, full: bool):
    d.text(20, floor - 160, name, 16, bold=True)
    d.text(20, floor - 140, note, 13, colour=SOFT)
    for column in range(8):
        backward, block = column > 3, column if column < 4 else 7 - column
        x, top = 330 + column * 78, floor
        for lower in range(block + 1):
            whole = not full or (backward and lower == block)
            height = max(2.5, HEIGHT * (BLOCK if whole else INPUT))
            fill = "#7f7f7f" if full and whole else KEPT
            top -= height
            d.box(x, top, 60, height, fill, INK)
    d.line(320, floor, 330 + 8 * 78, floor, INK, 1)


def recompute():
    d = Drawing(990, 500, "What four blocks save for backward, without and with recomputation")
    d.text(20, 36, "Save everything, or save the input and compute the rest again", 20, bold=True)
    d.text(
        20,
        62,
        "Height: bytes saved for backward, when each block's forward ends and when its backward begins.",
        14,
        colour=SOFT,
    )
    for column, name in enumerate(COLUMNS):
        d.text(360 + column * 78, 118, name, 13, "middle")
    d.text(330 + 2 * 78 - 9, 96, "forward", 15, "middle", bold=True)
    d.text(330 + 6 * 78 - 9, 96, "backward", 15, "middle", bold=True)
    d.line(330 + 4 * 78 - 9, 84, 330 + 4 * 78 - 9, 450, "#CCCCCC", 1)
    stairs(d, 290, "nothing recomputed", "all four blocks' tensors are there\nwhen backward begins", False)
    stairs(d, 450, "full recomputation", "four inputs, and one block\nat a time recomputed", True)
    d.box(20, 468, 20, 16, KEPT, INK)
    d.text(48, 481, "saved in forward", 14)
    d.box(190, 468, 20, 16, "#7f7f7f", INK)
    d.text(218, 481, "recomputed, for its own backward", 14)
    d.save("recompute")


if __name__ == "__main__":
    block_kept()
    recompute()
