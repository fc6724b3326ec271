# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 11's diagram, three ways to the same number: python images/chapter_11.py"""

from drawing import COLOURS, INK, PAPER, SOFT, Drawing

TONE = COLOURS["parameters"]
COLUMNS = (170, 444, 718)  # left edges
WIDE = 250

ROWS = [
    (
        "what runs",
        [
            "a list of operators,\nwritten out by us,\non sizes",
            "PyTorch's own FSDP,\nautograd and optimizer,\non shapes",
            "everything, on numbers,\nwith every rank",
        ],
    ),
    ("what it takes", ["milliseconds,\nno torch", "seconds, one process,\nno memory for tensors", "the machine"]),
    (
        "where it may be wrong",
        [
            "if PyTorch does\nsomething else",
            "as measured may be, and\nabout kernels' needs",
            "in what the meter\ndoes not see",
        ],
    ),
]


def hatch(d: Drawing, x, y, width, height):
    """The plots' pattern for what is simulated."""
    for start in range(0, width + height, 12):
        x1, y1 = x + max(0, start - height), y + min(height, start)
        x2, y2 = x + min(width, start), y + max(0, start - width)
        d.line(x1, y1, x2, y2, TONE, 1.4)


def three_ways():
    d = Drawing(1000, 560, "Three ways to the peak memory of a rank, what each needs and how far each reaches")
    d.text(20, 36, "Three ways to one number: what each needs, and where each may be wrong", 20, bold=True)
    heads = [("predicted", PAPER, TONE), ("simulated", PAPER, TONE), ("measured", TONE, PAPER)]
    for x, (name, fill, colour) in zip(COLUMNS, heads, strict=True):
        if name == "simulated":
            d.box(x, 62, WIDE, 46, PAPER, TONE)
            hatch(d, x, 62, WIDE, 46)
            d.box(x + 62, 70, WIDE - 124, 30, PAPER, PAPER, name, 18, TONE, bold=True)
        else:
            d.box(x, 62, WIDE, 46, fill, TONE, name, 18, colour, bold=True)
    for y, (what, texts) in zip((146, 232, 300), ROWS, strict=True):
        d.line(20, y - 26, 968, y - 26, "#CCCCCC", 1)
        d.text(20, y, what.replace(" may", "\nmay"), 14, colour=SOFT)
        for x, text in zip(COLUMNS, texts, strict=True):
            d.text(x + WIDE / 2, y, text, 15, "middle")
    d.line(20, 350, 968, 350, INK, 1.2)
    d.text(20, 386, "a tiny GPT,\n4 ranks", 15, bold=True)
    d.box(
        COLUMNS[0],
        368,
        COLUMNS[2] + WIDE - COLUMNS[0],
        34,
        "#e7eef4",
        TONE,
        "all three agree: this chapter shows it on your machine",
        15,
    )
    d.text(20, 438, "8B, 8 ranks", 15, bold=True)
    d.text(20, 474, "70B, 64 ranks", 15, bold=True)
    d.text(20, 510, "405B, 512 ranks", 15, bold=True)
    d.box(
        COLUMNS[0],
        418,
        COLUMNS[1] + WIDE - COLUMNS[0],
        104,
        "#e7eef4",
        TONE,
        "two ways agree; for a GPU both rest on one reading of its operators",
        15,
    )
    d.box(COLUMNS[2], 418, WIDE, 104, "none", SOFT, "not here:\nthese machines are elsewhere", 14, SOFT, dash="5 4")
    d.text(
        20,
        546,
        "Simulated and measured share the meter. What trust there is below comes from the first row's agreement.",
        14,
        colour=SOFT,
    )
    d.save("three_ways")


if __name__ == "__main__":
    three_ways()
