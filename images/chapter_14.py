# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 14's diagram, FSDP by a wrapper and by a compiler: python images/chapter_14.py"""

from drawing import COMPUTE, GATHER, INK, PAPER, REDUCE, SOFT, Drawing

TONES = ("#D9D9D9", "#A9A9A9", "#767676", "#3C3C3C")  # ranks, or devices, 0 to 3
LEFT, RIGHT, WIDTH = 20, 515, 465
STEP = [("all-gather", GATHER), ("compute", COMPUTE), ("reduce-scatter", REDUCE)]


def steps(d: Drawing, x, y, number: int, known: bool):
    """What one rank or device runs, in a row, its number in front. known: else it is still to be seen."""
    d.box(x, y, 28, 30, TONES[number], INK, str(number), 14)
    left = x + 36
    for (name, colour), width in zip(STEP, (118, 106, 150), strict=True):
        asked = not known and name != "compute"
        d.box(left, y, width, 30, PAPER if asked else colour, INK, name + "?" * asked, 14, dash="4 3" if asked else "")
        left += width + 6


def column(d: Drawing, x, title, you, note, between, below, known):
    d.text(x, 92, title, 18, bold=True)
    d.box(x, 108, WIDTH, 66, PAPER, INK, you, 15)
    d.text(x, 196, note, 14, colour=SOFT)
    d.line(x + WIDTH / 2, 226, x + WIDTH / 2, 282, arrow=True)
    d.text(x + WIDTH / 2 + 14, 250, between, 14)
    for number in range(4):
        steps(d, x, 294 + 38 * number, number, known)
    d.text(x, 470, below, 14)


def fsdp_in_jax():
    d = Drawing(1000, 530, "FSDP by a wrapper in PyTorch, and by a compiler in JAX")
    d.text(20, 36, "The same step, told twice", 20, bold=True)
    d.text(
        20,
        60,
        "Below the arrows: four of the eight ranks or devices, and what each runs for one part of the model.",
        14,
        colour=SOFT,
    )
    column(d, LEFT, "PyTorch", "a script that each of eight processes runs\nfully_shard(block)",
           "Each process sees its own share of every parameter.", "hooks call collectives\nwhile the step runs",
           "To know the traffic, you watch a step:\nthat is what this course's meters do.", True)  # fmt: skip
    column(d, RIGHT, "JAX", 'one process, one program about whole arrays\nweight is sharded along "fsdp"',
           "The program never mentions a device.", "the compiler writes collectives\ninto one program for all devices",
           "To know the traffic, you read the program,\nbefore it has run once.", False)  # fmt: skip
    d.save("fsdp_in_jax")


if __name__ == "__main__":
    fsdp_in_jax()
