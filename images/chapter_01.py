# SPDX-License-Identifier: BSD-3-Clause
"""Draws the diagram of chapter 01: python images/chapter_01.py"""

from drawing import COLOURS, COMPUTE, INK, SOFT, Drawing

HELD = ("parameters", "gradients", "optimizer state")  # the buckets are left for the learner to find
FORWARD = (("conv1", 58), ("conv2", 70), ("fc1", 52), ("fc2", 46))
BACKWARD = (("fc2", 46), ("fc1", 92), ("conv2", 150), ("conv1", 62))
LEFT, BUCKET = 222, COLOURS["all-reduce buckets"]


def boxes(drawing, x, y, layers):
    """Layers side by side from x on; returns where each ends."""
    ends = {}
    for name, width in layers:
        drawing.box(x, y, width, 46, COMPUTE, text=name)
        x += width
        ends[name] = x
    return ends


def draw_rank(drawing, rank, y, band):
    """One rank: what it holds, and its step. band: where the all-reduce is, for the arrows."""
    drawing.text(24, y + 6, f"rank {rank}", 17, bold=True)
    drawing.text(24, y + 27, "its own slice of the batch,\nits own copy of everything:", 13)
    for i, name in enumerate(HELD):
        drawing.box(24, y + 54 + 22 * i, 168, 20, COLOURS[name], edge="none", text=name, size=13)
    middle = y + 50
    end = boxes(drawing, LEFT, middle, FORWARD)["fc2"]
    ends = boxes(drawing, end + 14, middle, BACKWARD)
    drawing.box(904, middle, 112, 46, COLOURS["optimizer state"], text="update")
    for x in (ends["fc1"], ends["conv1"]):
        start, stop = (middle + 46, band) if band > middle else (middle, band)
        drawing.line(x, start, x, stop, arrow=True)
    return ends


def ddp_step():
    drawing = Drawing(1040, 530, "One step of DistributedDataParallel on two ranks")
    for x, name in ((LEFT, "forward"), (LEFT + 240, "backward"), (904, "optimizer")):
        drawing.text(x, 36, name, 17, bold=True)
    drawing.line(890, 20, 890, 500, SOFT, dash="5 4")
    ends = draw_rank(drawing, 0, 50, 236)
    draw_rank(drawing, 1, 320, 292)
    first, second = ends["fc1"], ends["conv1"]
    drawing.box(first - 7, 236, 172, 56, BUCKET, text="all-reduce, bucket 1\nfc1 and fc2", size=14)
    drawing.box(second - 7, 236, 79, 56, BUCKET, text="bucket 2\nconvs", size=14)
    drawing.text(LEFT, 260, "Bucket 1 is averaged over all ranks while\nbackward still works on the convolutions.", 14)
    drawing.text(898, 248, "from this line on,\nall ranks hold the\nsame gradients", 14)
    drawing.line(LEFT, 512, 1016, 512, INK, arrow=True)
    drawing.text(LEFT - 12, 516, "time", 14, "end")
    drawing.save("ddp_step")


if __name__ == "__main__":
    ddp_step()
