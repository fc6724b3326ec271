"""Draw the diagrams of chapter 00: python images/chapter_00.py"""

from itertools import pairwise

from drawing import COLOURS, INK, PAPER, SOFT, Drawing

LINE = COLOURS["parameters"]
STATIONS = [
    ("00", "Start here", "meters agree once you\nknow what each counts"),
    ("01", "DDP", "every rank holds\neverything"),
    ("02", "Collectives", "all-reduce = reduce-\nscatter + all-gather"),
    ("03", "Sharding from scratch", "ZeRO is three small\nchanges to DDP"),
    ("04", "FSDP, one unit", "shards what persists,\ngathers all at the peak"),
    ("05", "Auto wrap", "what is gathered together\ndecides the peak"),
    ("06", "CPU offload", "helps only where the\nmodel's states are the peak"),
    ("07", "Checkpoints", "4 ranks save,\n2 or 3 go on"),
]
TRANSFORMER = [
    ("08", "precision,\nrecomputation"),
    ("09", "FSDP2"),
    ("10", "many nodes"),
    ("11", "the planner"),
    ("12", "speed"),
    ("13", "ZeRO"),
    ("14", "JAX"),
    ("15", "beyond\nFSDP"),
    ("16", "break it"),
]


def course_map():
    drawing = Drawing(1000, 460, "The map of the course: chapters 00 to 07 as stations of one line, 08 to 16 below")
    left, step, rows = 125, 250, (95, 250)
    last = left + 3 * step
    # The line: along the first row, back between the rows, along the second
    corners = [(left, rows[0]), (978, rows[0]), (978, 182), (22, 182), (22, rows[1])]
    corners.append((last, rows[1]))
    for (x1, y1), (x2, y2) in pairwise(corners):
        drawing.line(x1, y1, x2, y2, LINE, 7)
    drawing.text(left, 36, "one process", 15, "middle", LINE, True)
    for place, (number, name, law) in enumerate(STATIONS):
        x, y = left + step * (place % 4), rows[place // 4]
        drawing.box(x - 21, y - 17, 42, 34, PAPER, LINE, number, 16, bold=True)
        drawing.text(x, y - 26, name, 16, "middle", bold=True)
        drawing.text(x, y + 38, law, 14, "middle")
    drawing.text(last, rows[1] + 82, "a sharded run, resumed", 15, "middle", LINE, True)
    y = 430
    drawing.line(left, 385, last, 385, LINE, 4)
    drawing.text(left - 19, 356, "then the same with a transformer", 15, colour=LINE, bold=True)
    for place, (number, name) in enumerate(TRANSFORMER):
        x = left + place * (last - left) / (len(TRANSFORMER) - 1)
        drawing.box(x - 19, y - 60, 38, 30, PAPER, LINE, number, 15)
        drawing.text(x, y - 8, name, 14, "middle")
    drawing.save("course_map")


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
                ("allocator: + rounding to 512 bytes, workspaces", "memory_allocated"),
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
        drawing.text(x + 62, 308, "the tracer · pen and paper", 16, colour=PAPER, bold=True)
        drawing.text(x + 62, 334, "live tensors: numbers × bytes a number,\neach storage once", 14, colour=PAPER)
    drawing.save("meters")


if __name__ == "__main__":
    course_map()
    meters()
