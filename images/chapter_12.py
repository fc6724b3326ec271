# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 12's diagram, what is hidden and what is exposed in a step: python images/chapter_12.py"""

from drawing import COMPUTE, GATHER, INK, REDUCE, SOFT, Drawing

LEFT, UNIT = 150, 52  # where time begins, and how long a block computes
EXPOSED = "#D55E00"


def lane(d: Drawing, y: int, name: str, boxes: list):
    """One lane: boxes of (begin, length, colour, text), in units of a block's computing."""
    d.text(24, y + 22, name, 14, colour=SOFT)
    for begin, length, colour, text in boxes:
        d.box(LEFT + begin * UNIT, y, length * UNIT, 34, colour, INK, text, 13)


def exposed(d: Drawing, y: int, spans: list):
    """Mark under the lanes when the compute lane waits."""
    for begin, length in spans:
        d.box(LEFT + begin * UNIT, y, length * UNIT, 10, EXPOSED, EXPOSED)


def end(d: Drawing, top: int, bottom: int, at: float):
    d.line(LEFT + at * UNIT, top, LEFT + at * UNIT, bottom, INK, 1.8, dash="6 5")
    d.text(LEFT + at * UNIT + 8, top + 16, "step's end", 13)


def step_lanes():
    d = Drawing(980, 470, "One step as two lanes: communication that is waited for, and communication that is hidden")
    d.text(24, 36, "The same work, the same bytes: what differs is who waits", 20, bold=True)
    d.text(
        24,
        60,
        "Three blocks, forward and backward. g: gather a block's parameters, r: reduce its gradients.",
        14,
        colour=SOFT,
    )

    d.text(24, 100, "Each collective is waited for where it is called", 16, bold=True)
    compute = [(begin, 1, COMPUTE, name) for begin, name in ((0.6, "f0"), (2.2, "f1"), (3.8, "f2"))]
    compute += [(4.8, 0.8, COMPUTE, "head")]
    compute += [(begin, 1.6, COMPUTE, name) for begin, name in ((6.2, "b2"), (9.0, "b1"), (11.8, "b0"))]
    wire = [(0, 0.6, GATHER, "g0"), (1.6, 0.6, GATHER, "g1"), (3.2, 0.6, GATHER, "g2"), (5.6, 0.6, GATHER, "g2")]
    wire += [(7.8, 0.6, REDUCE, "r2"), (8.4, 0.6, GATHER, "g1"), (10.6, 0.6, REDUCE, "r1"), (11.2, 0.6, GATHER, "g0")]
    wire += [(13.4, 0.6, REDUCE, "r0")]
    lane(d, 116, "compute", compute)
    lane(d, 156, "communication", wire)
    exposed(d, 198, [(b, length) for b, length, *_ in wire])
    end(d, 88, 216, 14)

    d.text(24, 270, "Each is called early, and waited for where its result is needed", 16, bold=True)
    compute = [(0.6 + n, 1, COMPUTE, f"f{n}") for n in range(3)] + [(3.6, 0.8, COMPUTE, "head")]
    compute += [(4.4 + 1.6 * i, 1.6, COMPUTE, f"b{n}") for i, n in enumerate((2, 1, 0))]
    wire = [(0, 0.6, GATHER, "g0"), (0.7, 0.6, GATHER, "g1"), (1.7, 0.6, GATHER, "g2"), (3.7, 0.6, GATHER, "g2")]
    wire += [(4.5, 0.6, GATHER, "g1"), (6.05, 0.6, REDUCE, "r2"), (6.75, 0.6, GATHER, "g0")]
    wire += [(7.65, 0.6, REDUCE, "r1"), (9.2, 0.6, REDUCE, "r0")]
    lane(d, 286, "compute", compute)
    lane(d, 326, "communication", wire)
    exposed(d, 368, [(0, 0.6), (9.2, 0.6)])
    end(d, 258, 386, 9.8)

    d.box(24, 412, 26, 10, EXPOSED, EXPOSED)
    d.text(58, 422, "exposed: the compute lane waits. It is what a step pays for its communication.", 14)
    d.text(58, 446, "The first gather and the last reduction have nothing to hide behind.", 14, colour=SOFT)
    d.save("step_lanes")


if __name__ == "__main__":
    step_lanes()
