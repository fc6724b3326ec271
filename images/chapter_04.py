# SPDX-License-Identifier: BSD-3-Clause
"""The diagrams of chapter 04: python images/chapter_04.py"""

from drawing import COLOURS, COMPUTE, FREE, GATHER, INK, REDUCE, SOFT, Drawing

RANKS = 4


# What a rank holds: (category, parts, between steps, at the peak); None: nothing, and else which share of it
DDP = [
    ("parameters", 1, 1, 1),
    ("gradients", 1, None, 1),
    ("optimizer state", 2, 1, 1),
    ("all-reduce buckets", 1, 1, 1),
]
FSDP = [
    ("parameters", 1, 1 / RANKS, 1 / RANKS),
    ("reduce-scatter", 1, None, 1),
    ("optimizer state", 2, 1 / RANKS, 1 / RANKS),
    ("all-gather", 1, None, 1),
]
LEGEND = {"reduce-scatter": "reduce-scatter: whole gradients", "all-gather": "all-gather: whole parameters"}


def ddp_against_fsdp():
    """What each rank holds between steps and at the peak, but for activations: whole blocks under DDP, slices under FSDP."""
    d = Drawing(940, 492, "Memory of four ranks: DDP against FSDP in one unit, between steps and at the peak")
    for column, (name, kinds) in enumerate((("DDP", DDP), ("FSDP, one unit", FSDP))):
        left = 150 + 400 * column
        d.text(left, 34, name, 20, bold=True)
        for moment, (label, top) in enumerate((("between\nsteps", 56), ("at the\npeak", 246))):
            if column == 0:
                d.text(28, top + 70, label, 16)
            for rank in range(RANKS):
                x, y = left + 88 * rank, top
                for kind, parts, *shares in kinds:
                    height, share = 30 * parts, shares[moment]
                    d.box(x, y, 72, height, edge=SOFT, dash="" if share == 1 else "3 3")
                    if share:
                        offset = 0 if share == 1 else rank * height / RANKS
                        d.box(x, y + offset, 72, share * height, COLOURS[kind], COLOURS[kind])
                    y += height
                d.text(x + 36, top + 168, f"rank {rank}", 14, "middle", SOFT)
    shown = [kind for kind, *_ in DDP] + ["all-gather", "reduce-scatter"]
    for number, kind in enumerate(shown):
        x, y = 150 + 250 * (number % 3), 436 + 26 * (number // 3)
        d.box(x, y, 16, 14, COLOURS[kind], COLOURS[kind])
        d.text(x + 22, y + 13, LEGEND.get(kind, kind), 15)
    d.text(28, 443, "activations and\ntemporaries\nnot drawn", 14, colour=SOFT)
    d.save("ddp_against_fsdp")


def fsdp_step():
    """One step, a lane per rank: the three collectives are the only moments at which the lanes touch."""
    d = Drawing(940, 330, "One step of FSDP in one unit: a lane for each of four ranks")
    phases = [
        ("all-gather", 130, 120, GATHER, "gather"),
        ("forward", 250, 190, COMPUTE, "compute"),
        ("backward", 440, 220, COMPUTE, "compute"),
        ("free", 660, 55, FREE, "free"),
        ("reduce-scatter", 715, 125, REDUCE, "reduce"),
        ("optimizer", 840, 80, COMPUTE, "step"),
    ]
    for name, x, width, _, _ in phases:
        d.text(x + width / 2, 40, name, 14, "middle", bold=True)
    for x in (190, 777):
        d.line(x, 60, x, 240, INK, 3)  # seen between the lanes only: here the ranks exchange data
    for rank in range(RANKS):
        y = 60 + 50 * rank
        d.text(24, y + 24, f"rank {rank}", 16)
        for name, x, width, fill, word in phases:
            words = {"forward": f"batch {rank}", "backward": f"batch {rank}", "optimizer": f"shard {rank}"}
            d.box(x, y, width, 36, fill, INK, words.get(name, word), 14)
    d.text(130, 285, "rank to rank: every shard\ngoes to every rank", 14, colour=SOFT)
    d.text(350, 285, "no communication: each rank has\nthe whole model and its own images", 14, colour=SOFT)
    d.text(640, 285, "rank to rank: gradients are averaged,\neach rank keeps its own slice", 14, colour=SOFT)
    d.save("fsdp_step")


def flat_against_per_parameter():
    """FSDP1 cuts one long tensor, wherever the cuts fall; FSDP2 cuts each parameter by rows."""
    d = Drawing(940, 380, "FSDP1's flat parameter against FSDP2's per-parameter sharding, on four ranks")
    tones = ["#efe6f5", "#d9c3e6", "#bb99d1", "#8f6bb0"]  # no category's: these are ranks
    names = [("conv1", 56), ("conv2", 76), ("fc1", 572), ("fc2", 56)]
    d.text(24, 36, "FSDP1: all parameters end to end in one flat tensor, cut into four equal parts", 17, bold=True)
    x = 90
    for name, width in names:
        d.box(x, 52, width, 34, "#ffffff", INK, name, 14)
        x += width
    total = sum(width for _, width in names)
    for rank in range(RANKS):
        left = 90 + rank * total / RANKS
        d.line(left, 86, left, 104, SOFT)
        d.box(left, 104, total / RANKS, 34, tones[rank], INK, f"rank {rank}", 14)
    scale = "not to scale: fc1 has 98 % of the elements, and all three cuts fall inside it; the last part is padded"
    d.text(90, 160, scale, 14, colour=SOFT)
    d.text(24, 208, "FSDP2: each parameter is cut by rows, and stays a tensor of its own (a DTensor)", 17, bold=True)
    shapes = [("conv1.weight\n32 rows", 90, [8, 8, 8, 8]), ("conv2.weight\n64 rows", 300, [16] * 4)]
    shapes += [("fc1.weight\n128 rows", 510, [32] * 4), ("fc2.weight\n10 rows", 720, [3, 3, 3, 1])]
    for name, left, rows in shapes:
        y = 226
        for rank, count in enumerate(rows):
            height = 96 * count / sum(rows)
            d.box(left, y, 120, height, tones[rank], INK, f"rank {rank}: {count}" if height > 14 else "", 14)
            y += height
        d.text(left + 60, 344, name, 14, "middle")
    d.text(846, 320, "rank 3: 1", 14)
    d.save("flat_against_per_parameter")


if __name__ == "__main__":
    ddp_against_fsdp()
    fsdp_step()
    flat_against_per_parameter()
