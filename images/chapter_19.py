# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 19's diagrams: two ways to bring tokens and experts together, and two meshes: python images/chapter_19.py"""

from drawing import COLOURS, INK, PAPER, SOFT, Drawing

# Each rank's experts and tokens have its color
OWNER = [COLOURS[name] for name in ("parameters", "gradients", "optimizer state", "all-gather")]
RANKS, OWN, TOKENS = 4, 2, 4
CHOSEN = [(0, 3, 5, 6), (1, 2, 4, 7), (0, 2, 5, 7), (1, 3, 4, 6)]  # the expert of each token of a rank


def experts_of(d, x, y, experts, home):
    """Squares of experts; those that the rank does not keep are dashed."""
    for place, expert in enumerate(experts):
        dash = "" if expert // OWN == home else "3 2"
        d.box(
            x + 26 * (place % 4), y + 26 * (place // 4), 22, 22, OWNER[expert // OWN], INK, str(expert), 13, dash=dash
        )


def tokens_of(d, x, y, tokens):
    """Small squares of tokens, in the color of the rank that they are from, with the number of their expert."""
    for place, (rank, expert) in enumerate(tokens):
        d.box(x + 24 * place, y, 20, 16, PAPER, OWNER[rank], str(expert), 12)


def experts_ways():
    d = Drawing(1000, 560, "Experts come to the tokens under FSDP; tokens go to the experts under expert parallelism")
    d.text(20, 36, "8 experts on 4 ranks; each token has chosen one", 20, bold=True)
    d.text(
        20, 60, "Squares are experts, in the color of the rank that keeps them. Small boxes are tokens, with the", 14
    )
    d.text(20, 79, "number of their expert, in the color of the rank that they are from.", 14)
    lanes = ("FSDP alone: experts come to the tokens", "expert parallelism: tokens go to the experts, and back")
    for lane, name in enumerate(lanes):
        top = 98 + 230 * lane
        d.text(20, top + 20, name, 17, bold=True)
        for rank in range(RANKS):
            x = 30 + 242 * rank
            d.text(x, top + 48, f"rank {rank}", 14, colour=SOFT)
            own = [(rank, expert) for expert in CHOSEN[rank]]
            if lane == 0:
                experts_of(d, x, top + 58, range(OWN * RANKS), rank)
                tokens_of(d, x, top + 118, own)
                d.text(x, top + 156, "all experts, own tokens", 13)
            else:
                experts_of(d, x, top + 58, range(OWN * rank, OWN * (rank + 1)), rank)
                here = [(source, e) for e in (OWN * rank, OWN * rank + 1) for source in range(4) if e in CHOSEN[source]]
                tokens_of(d, x, top + 92, here)
                d.text(x, top + 130, "own experts, their tokens", 13)
        words = "dashed: gathered before use, and freed after it", "colors differ: tokens of other ranks"
        d.text(20, top + (184 if lane == 0 else 158), words[lane], 14, colour=SOFT)
        if lane == 0:
            d.line(20, top + 204, 980, top + 204, SOFT, 1)
    d.text(20, 536, "Everything else in a block, such as attention, is under FSDP in both.", 15)
    d.save("experts_ways")


def expert_meshes():
    d = Drawing(1000, 330, "The same four ranks in two device meshes: one for dense parameters, one for experts")
    d.text(20, 36, "--mesh shard=4,expert=2: the same four ranks in two device meshes", 20, bold=True)
    d.text(40, 78, "dense parameters: shard = 4", 16, bold=True)
    for rank in range(RANKS):
        d.box(40 + 96 * rank, 96, 86, 60, COLOURS["parameters"], INK, f"rank {rank}", 15)
        d.text(83 + 96 * rank, 176, f"quarter {rank}", 13, "middle")
    d.text(40, 208, "Each parameter of attention, router, and norms is cut", 14)
    d.text(40, 227, "into four quarters along its first dimension.", 14)
    d.text(540, 78, "experts: expert_shard = 2 × expert = 2", 16, bold=True)
    for rank in range(RANKS):
        row, column = divmod(rank, 2)
        x, y = 640 + 170 * column, 96 + 74 * row
        d.box(x, y, 160, 64, OWNER[column], INK)
        d.text(x + 80, y + 27, f"rank {rank}", 15, "middle", colour=PAPER if column == 0 else INK)
        halves = "first half" if row == 0 else "second half"
        d.text(x + 80, y + 48, halves + " of them", 13, "middle", colour=PAPER if column == 0 else INK)
    d.text(720, 262, "experts 0 to 7", 14, "middle")
    d.text(890, 262, "experts 8 to 15", 14, "middle")
    d.text(540, 136, "tokens go", 13, colour=SOFT)
    d.text(540, 153, "along a row,", 13, colour=SOFT)
    d.text(540, 206, "gathers along", 13, colour=SOFT)
    d.text(540, 223, "a column", 13, colour=SOFT)
    d.text(40, 306, "Between two steps, each rank keeps a quarter of every kind of parameter in both meshes.", 15)
    d.save("expert_meshes")


if __name__ == "__main__":
    experts_ways()
    expert_meshes()
