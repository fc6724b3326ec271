# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 15's diagrams, what can be cut and how pipelines are scheduled: python images/chapter_15.py"""

from drawing import INK, PAPER, SOFT, Drawing

TONES = ("#D9D9D9", "#A9A9A9", "#767676", "#3C3C3C")  # ranks 0 to 3
GRID = "#CCCCCC"
BLOCKS, WIDTH, HEIGHT = 4, 150, 120  # blocks of the model, and its size on the page; the batch is as large


def cells(d: Drawing, x, y, columns, rows, rank_of):
    """A rectangle of WIDTH by HEIGHT cut into columns and rows, each cell in the tone of its rank; None: all ranks."""
    wide, high = WIDTH / columns, HEIGHT / rows
    for row in range(rows):
        for column in range(columns):
            rank = rank_of(column, row)
            fill, text = (PAPER, "all") if rank is None else (TONES[rank], str(rank))
            d.box(x + column * wide, y + row * high, wide, high, fill, INK, text, 13)


PANELS = [  # name, what a cut means, (columns, rows, rank) of the model, and of the batch (sequences down, tokens across)
    ("data, fully sharded (FSDP)", "each rank keeps a share of every block, and\nfetches the rest to compute its own sequences",
     (4, 4, lambda column, row: column), (1, 4, lambda column, row: row)),
    ("tensor", "each rank keeps and computes a share of every\nmatrix product, for all sequences",
     (4, 4, lambda column, row: column), (1, 1, lambda column, row: None)),
    ("pipeline", "each rank keeps and computes some blocks;\nall sequences pass through, a few at a time",
     (1, 4, lambda column, row: row), (1, 1, lambda column, row: None)),
    ("context", "each rank computes some tokens of each sequence;\nattention must see the others' keys and values",
     (1, 4, lambda column, row: None), (4, 1, lambda column, row: column)),
]  # fmt: skip


def what_can_be_cut():
    d = Drawing(1000, 560, "Four ways to divide a transformer's training among four ranks")
    d.text(20, 36, "What can be divided among four ranks: the model, or the batch, or both", 20, bold=True)
    d.text(20, 60, "Each number is a rank. Left, the model: four blocks, from first to last, each as wide as it is. "
           "Right, the batch: sequences down, tokens across.", 13, colour=SOFT)  # fmt: skip
    for number, (name, meaning, model, batch) in enumerate(PANELS):
        x, y = 20 + 490 * (number % 2), 110 + 235 * (number // 2)
        d.text(x, y - 12, name, 17, bold=True)
        for place, title, about in ((x, "model", model), (x + WIDTH + 60, "batch", batch)):
            cells(d, place, y + 18, *about)
            d.text(place + WIDTH / 2, y + 11, title, 13, "middle", SOFT)
        d.text(x, y + 18 + HEIGHT + 24, meaning, 14)
    d.save("what_can_be_cut")


FORWARD, BACKWARD = "#BBBBBB", "#4D4D4D"
STAGES, MICRO, TICK = 4, 6, 32  # a forward takes one tick, a backward two


def orders(schedule: str) -> list[list[tuple[str, int]]]:
    """What each stage does, in order: [("F", micro-batch), …]."""
    if schedule == "GPipe":
        return [[("F", m) for m in range(MICRO)] + [("B", m) for m in range(MICRO)]] * STAGES
    found = []
    for stage in range(STAGES):
        ahead = min(MICRO, STAGES - stage)
        order = [("F", m) for m in range(ahead)]
        for m in range(MICRO):
            order.append(("B", m))
            order += [("F", m + ahead)] if m + ahead < MICRO else []
        found.append(order)
    return found


def placed(order: list[list[tuple[str, int]]]) -> dict[tuple[int, str, int], int]:
    """(stage, "F" or "B", micro-batch) → the tick at which it begins: each as early as what it waits for allows."""
    begins, free, left = {}, [0] * STAGES, [list(stage) for stage in order]
    while any(left):
        for stage in range(STAGES):
            if not left[stage]:
                continue
            what, m = left[stage][0]
            before = (stage - 1, "F", m) if what == "F" else (stage + 1, "B", m)
            first = (what == "F" and stage == 0) or (what == "B" and stage == STAGES - 1)
            if not first and before not in begins:
                continue
            ready = 0 if first else begins[before] + (1 if what == "F" else 2)
            begins[stage, what, m] = max(free[stage], ready)
            free[stage] = begins[stage, what, m] + (1 if what == "F" else 2)
            left[stage].pop(0)
    return begins


def lanes(d: Drawing, top: int, schedule: str, note: str):
    d.text(20, top - 14, schedule, 18, bold=True)
    d.text(110, top - 14, note, 14, colour=SOFT)
    begins = placed(orders(schedule))
    end = max(tick + (1 if what == "F" else 2) for (_, what, _), tick in begins.items())
    for stage in range(STAGES):
        y = top + 40 * stage
        d.text(20, y + 24, f"stage {stage}", 14)
        d.box(90, y, end * TICK, 34, PAPER, GRID, dash="4 4")
    for (stage, what, m), tick in begins.items():
        long, fill = (1, FORWARD) if what == "F" else (2, BACKWARD)
        d.box(90 + tick * TICK, top + 40 * stage, long * TICK, 34, fill, PAPER, str(m), 14)


def pipeline_schedules():
    d = Drawing(1000, 490, "Two schedules of a pipeline of four stages with six micro-batches")
    d.text(20, 36, "Four stages, six micro-batches: when each stage computes", 20, bold=True)
    d.box(20, 52, 30, 18, FORWARD, PAPER)
    d.text(58, 66, "forward of a micro-batch", 14)
    d.box(250, 52, 30, 18, BACKWARD, PAPER)
    d.text(288, 66, "its backward, which takes about twice as long", 14)
    d.box(610, 52, 30, 18, PAPER, GRID, dash="4 4")
    d.text(648, 66, "nothing to do: the bubble", 14)
    lanes(d, 116, "GPipe", "all forwards, then all backwards")
    lanes(
        d,
        318,
        "1F1B",
        "a backward as soon as there can be one",
    )
    d.save("pipeline_schedules")


if __name__ == "__main__":
    what_can_be_cut()
    pipeline_schedules()
