"""Draw chapter 13's diagram, the stages of ZeRO beside FSDP's settings: python images/chapter_13.py"""

from drawing import COLOURS, INK, SOFT, Drawing

PARAMETERS, GRADIENTS, STATE = (COLOURS[name] for name in ("parameters", "gradients", "optimizer state"))
GATHERED, GRID = COLOURS["all-gather"], "#CCCCCC"
LEFT, SLOT, WHOLE, BAR = 250, 250, 92, 44  # the first moment's left edge, a moment's width, a whole thing, its width
MOMENTS = ["between two steps", "at the end of forward", "at the end of backward"]
PART = 1 / 4
# What one of four ranks holds of (parameters, gathered parameters, gradients, optimizer state), moment by moment
LANES = [
    ("DDP", "stage 0", [(1, 0, 0, 1), (1, 0, 0, 1), (1, 0, 1, 1)]),
    ("ZeRO-1", "stage 1", [(1, 0, 0, PART), (1, 0, 0, PART), (1, 0, 1, PART)]),
    ("ZeRO-2", "stage 2", [(1, 0, 0, PART), (1, 0, 0, PART), (1, 0, PART, PART)]),
    ("FSDP, kept", "reshard_after_forward\n=False", [(PART, 0, 0, PART), (PART, 1, 0, PART), (PART, 0, PART, PART)]),
    ("ZeRO-3, FSDP", "stage 3,\nreshard_after_forward\n=True", [(PART, 0, 0, PART)] * 2 + [(PART, 0, PART, PART)]),
]


def bar(d: Drawing, x: float, floor: float, share: float, colour: str, below: float = 0):
    """A share of a whole thing, standing on what is ``below`` it."""
    if share:
        d.box(x, floor - (below + share) * WHOLE, BAR, share * WHOLE, colour, colour)


def moment(d: Drawing, x: float, floor: float, parameters, gathered, gradients, state):
    d.line(x, floor, x + 4 * BAR, floor, SOFT, 1)
    bar(d, x, floor, parameters, PARAMETERS)
    bar(d, x, floor, gathered, GATHERED, below=parameters)
    bar(d, x + 1.5 * BAR, floor, gradients, GRADIENTS)
    bar(d, x + 3 * BAR, floor, state, STATE)


def zero_and_fsdp():
    d = Drawing(1010, 840, "What a rank holds under the stages of ZeRO and under FSDP, at three moments of a step")
    d.text(20, 36, "What one of four ranks holds by the paper's count, at three moments of a step", 20, bold=True)
    d.text(
        20,
        60,
        "Full height: all of it. A quarter: this rank's share. Left out: activations, FSDP's root unit, and what libraries keep besides.",
        14,
        colour=SOFT,
    )
    names = [("parameters", PARAMETERS), ("gathered for computing", GATHERED), ("gradients", GRADIENTS),
             ("optimizer state", STATE)]  # fmt: skip
    for number, (name, colour) in enumerate(names):
        d.box(20 + 190 * number, 76, 16, 16, colour, colour)
        d.text(42 + 190 * number, 90, name, 14)
    for number, name in enumerate(MOMENTS):
        d.text(LEFT + SLOT * number + 2 * BAR, 128, name, 15, "middle", bold=True)
    for number, (name, note, moments) in enumerate(LANES):
        floor = 258 + 138 * number
        d.text(20, floor - 58, name, 18, colour=INK, bold=True)
        d.text(20, floor - 36, note, 13, colour=SOFT)
        for column, held in enumerate(moments):
            moment(d, LEFT + SLOT * column, floor, *held)
        d.line(20, floor + 16, 990, floor + 16, GRID, 1)
    d.save("zero_and_fsdp")


if __name__ == "__main__":
    zero_and_fsdp()
