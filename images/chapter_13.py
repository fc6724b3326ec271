# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 13's diagram, the ZeRO paper's formula for the model state: python images/chapter_13.py"""

from drawing import COLOURS, SOFT, Drawing

RANKS = 4
PARTS = ("parameters", "gradients", "optimizer state")
SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer state": 1}  # the first stage that shards it
LEFT, BYTE, HIGH, APART = 110, 24, 26, 38  # pixels: of the bars' left edge, a byte's width, a bar's height, two bars
# Title, bytes per parameter of each part
PANELS = [
    ("Training in fp32", {"parameters": 4, "gradients": 4, "optimizer state": 8}),
    (
        "Training in bf16, with master parameters and moments in fp32",
        {"parameters": 2, "gradients": 2, "optimizer state": 12},
    ),
]


def held(stage: int, sizes: dict) -> dict:
    """Bytes per parameter that a rank holds."""
    return {part: sizes[part] / (RANKS if stage >= SHARDED_FROM[part] else 1) for part in PARTS}


def panel(d: Drawing, top: float, title: str, sizes: dict):
    d.text(20, top, title, 16, bold=True)
    for stage in range(4):
        y, x = top + 14 + APART * stage, LEFT
        d.text(20, y + 18, f"stage {stage}", 16)
        for part, size in held(stage, sizes).items():
            d.box(x, y, size * BYTE, HIGH, COLOURS[part], COLOURS[part])
            x += size * BYTE
        d.text(x + 10, y + 18, f"{sum(held(stage, sizes).values()):g}", 16, bold=True)


def zero_formula():
    d = Drawing(640, 476, "Bytes per parameter of the model state in each stage of ZeRO, by the paper's formula")
    d.text(20, 36, "Model state by the ZeRO paper's formula, 4 ranks", 20, bold=True)
    d.text(20, 60, "Bytes per parameter on each rank. To scale.", 15, colour=SOFT)
    for number, part in enumerate(PARTS):
        d.box(20 + 170 * number, 76, 16, 16, COLOURS[part], COLOURS[part])
        d.text(44 + 170 * number, 90, part, 15)
    for number, (title, sizes) in enumerate(PANELS):
        panel(d, 128 + 182 * number, title, sizes)
    d.save("zero_formula")


if __name__ == "__main__":
    zero_formula()
