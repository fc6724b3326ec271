# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 06's diagram: what lives on which side of the bus under CPU offload, and what crosses it when."""

from drawing import COLOURS, GATHER, PAPER, REDUCE, SOFT, Drawing

ACTIVATIONS, PARAMETERS = COLOURS["activations"], COLOURS["parameters"]
FORWARD, BACKWARD, OPTIMIZER, END = 130, 430, 745, 985


def offload():
    drawing = Drawing(1000, 560, "One training step with CPU offload: device above, host memory below, the bus between")
    for start, end, phase in (
        (FORWARD, BACKWARD, "forward"),
        (BACKWARD, OPTIMIZER, "backward"),
        (OPTIMIZER, END, "optimizer"),
    ):
        drawing.text((start + end) / 2, 40, phase, 17, "middle", bold=True)
        for top, bottom in ((55, 256), (355, 500)):
            drawing.line(end, top, end, bottom, SOFT, 1, dash="3 4")
    device(drawing)
    host(drawing)
    bus(drawing)
    drawing.save("offload")


def device(drawing):
    drawing.text(20, 160, "device", 18, bold=True)
    drawing.text(20, 184, "stays", 14, colour=SOFT)
    drawing.line(FORWARD, 256, END, 256)
    # Activations grow through forward and shrink through backward.
    stairs = ((135, 30), (232, 60), (329, 95), (436, 95), (537, 60), (638, 30))
    for x, height in stairs:
        drawing.box(x, 255 - height, 95 if x < BACKWARD else 99, height, ACTIVATIONS, ACTIVATIONS)
    drawing.text(432, 215, "activations", 16, "middle")
    drawing.box(235, 80, 185, 46, GATHER, text="whole parameters\nof a unit", size=14)
    drawing.box(440, 80, 145, 46, GATHER, text="whole parameters\nagain", size=14)
    drawing.box(595, 80, 140, 46, REDUCE, text="whole gradient,\ntemporaries", size=14)
    drawing.box(755, 80, 220, 165, PAPER, SOFT, "none of the\nmodel's state\nis here", 15, SOFT, dash="6 5")


def host(drawing):
    drawing.text(20, 420, "host", 18, bold=True)
    drawing.text(20, 444, "moved", 14, colour=SOFT)
    drawing.line(FORWARD, 355, END, 355)
    drawing.box(640, 364, 335, 36, COLOURS["gradients"], text="gradients (shards)")
    drawing.box(135, 408, 840, 36, PARAMETERS, text="parameters (shards)", colour="#ffffff")
    drawing.box(135, 452, 840, 36, COLOURS["optimizer state"], text="optimizer state (shards)", colour="#ffffff")
    drawing.text(865, 512, "the optimizer computes here,", 14, "middle")
    drawing.text(865, 530, "on CPU cores", 14, "middle")


def bus(drawing):
    drawing.text(20, 300, "bus", 18, bold=True)
    drawing.text(20, 324, "crosses", 14, colour=SOFT)
    drawing.line(245, 408, 245, 260, PARAMETERS, 2.5, arrow=True)
    drawing.text(258, 296, "shard up, before\nthe all-gather", 14)
    drawing.line(455, 408, 455, 260, PARAMETERS, 2.5, arrow=True)
    drawing.text(468, 287, "shard up again,\nif the unit was freed\nafter forward", 14)
    drawing.line(690, 256, 690, 360, COLOURS["gradients"], 2.5, arrow=True)
    drawing.text(703, 296, "gradient shard down,\nafter the reduce-scatter", 14)
    drawing.text(135, 525, "Height is not to scale. A unit: what is gathered together.", 13, colour=SOFT)


if __name__ == "__main__":
    offload()
