# SPDX-License-Identifier: BSD-3-Clause
"""Draw the diagram of chapter 00: python images/chapter_00.py (the map of the course: images/course.py)"""

from drawing import COLOURS, INK, PAPER, SOFT, Drawing

LINE = COLOURS["parameters"]


def meters():
    """Boxes in boxes: each meter counts what the one inside it counts, and something more."""
    drawing = Drawing(1000, 470, "What each meter counts, on the CPU and on a GPU")
    columns = [
        (
            20,
            "on the CPU",
            [
                ("all processes of the machine", "free"),
                ("the process: + Python, libraries, scratch space", "top: RES · VmRSS"),
                ("malloc: + freed and kept, whole pages", "no meter"),
            ],
        ),
        (
            510,
            "on a GPU",
            [
                ("the whole GPU: + the CUDA context, NCCL, other processes", "nvidia-smi"),
                ("allocator: + freed and kept", "memory_reserved"),
                ("allocator: + rounding up, workspaces", "memory_allocated"),
            ],
        ),
    ]
    for x, title, boxes in columns:
        drawing.text(x + 235, 34, title, 18, "middle", bold=True)
        for depth, ((what, meter), tone) in enumerate(zip(boxes, ("#f1f0ea", "#e4e2d8", "#d3d0c2"), strict=True)):
            y, inset = 52 + 76 * depth, 16 * depth
            drawing.box(x + inset, y, 470 - 2 * inset, 400 - 92 * depth, tone, SOFT)
            drawing.text(x + inset + 14, y + 28, meter, 16, bold=True)
            drawing.text(x + inset + 14, y + 52, what, 14)
        drawing.box(x + 48, 280, 374, 108, LINE, INK)
        drawing.text(x + 62, 308, "the tracer · arithmetic", 16, colour=PAPER, bold=True)
        drawing.text(x + 62, 334, "live tensors: elements × bytes per element,\neach storage once", 14, colour=PAPER)
    drawing.save("meters")


if __name__ == "__main__":
    meters()
