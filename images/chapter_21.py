# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 21's diagram, how a sentence is judged: python images/chapter_21.py"""

from drawing import COLOURS, INK, PAPER, SOFT, Drawing

LINE, HOLDS, FAILS = COLOURS["parameters"], COLOURS["optimizer state"], COLOURS["gradients"]
VALUES = (64, 46, 25, 10, 4)  # heights of the points, of a sweep that is made up
BAND = 30  # the range in which the sentence is true ends here


def claims_on_trial():
    d = Drawing(1000, 300, "How a sentence is judged: vote, sweep, condition, verdict")
    d.text(20, 36, "A sentence on trial", 20, bold=True)
    d.text(20, 60, "Not to scale; the sweep is made up.", 14, colour=SOFT)
    d.box(20, 96, 190, 92, PAPER, INK, "a sentence,\nas people repeat it", 15)
    d.line(212, 142, 240, 142, arrow=True)
    d.box(244, 96, 130, 92, LINE, INK, "your vote", 16, bold=True)
    d.line(376, 142, 404, 142, arrow=True)
    d.box(408, 84, 270, 116, PAPER, INK)
    d.box(409, 198 - BAND, 268, BAND, "#dddddd", "none")
    d.text(420, 192, "true", 13, colour=INK)
    for number, height in enumerate(VALUES):
        inside = height <= BAND
        d.box(454 + 44 * number, 190 - height * 1.3, 12, 12, HOLDS if inside else FAILS, INK)
    d.text(543, 222, "what is varied", 14, "middle", colour=SOFT)
    d.text(543, 76, "evidence: its number, swept", 14, "middle", colour=SOFT)
    d.line(680, 142, 708, 142, arrow=True)
    d.box(712, 96, 268, 92, PAPER, INK, "holds\nholds when … (the condition)\ndoes not hold", 15)
    d.text(20, 266, "A condition must agree with each point, or the verdict is that the condition is wrong.", 15)
    d.save("claims_on_trial")


if __name__ == "__main__":
    claims_on_trial()
