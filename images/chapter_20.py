# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 20's diagram, a sequence that four ranks share: python images/chapter_20.py"""

from drawing import COLOURS, INK, PAPER, SOFT, Drawing

RANKS, PER_RANK, TOKEN = 4, 4, 15  # tokens are drawn as squares
ROW, TOP = 66, 120
TOKENS_OF = COLOURS["parameters"]
LOCAL, TALKS = COLOURS["activations"], COLOURS["gradients"]


def tokens(d, x, y, rank):
    """The sequence, of which a rank has one part."""
    for place in range(RANKS * PER_RANK):
        mine = place // PER_RANK == rank
        d.box(x + TOKEN * place, y + 12, TOKEN, 22, TOKENS_OF if mine else PAPER, INK if mine else SOFT)


def context_parallel():
    d = Drawing(1000, 446, "Context parallelism: four ranks share a sequence, and only attention communicates")
    d.text(20, 36, "Four ranks share one sequence", 20, bold=True)
    d.text(20, 60, "Each rank has a quarter of the tokens, from the embedding to the loss.", 14, colour=SOFT)
    heads = {202: "tokens of the sequence", 446: "token by token", 641: "needs earlier tokens", 836: "token by token"}
    for x, text in heads.items():
        d.text(x, TOP - 14, text, 13.5, "middle", colour=SOFT)
    for rank in range(RANKS):
        y = TOP + ROW * rank
        d.text(20, y + 28, f"rank {rank}", 15)
        tokens(d, 82, y, rank)
        d.line(326, y + 23, 352, y + 23, arrow=True)
        d.box(356, y, 180, 46, LOCAL, INK, "embedding, norms,\nmatmuls", 14)
        d.line(540, y + 23, 562, y + 23, arrow=True)
        d.box(566, y, 150, 46, TALKS, INK, "attention", 15, bold=True)
        d.line(720, y + 23, 742, y + 23, arrow=True)
        d.box(746, y, 180, 46, LOCAL, INK, "feed-forward, head,\nloss", 14)
        if rank < RANKS - 1:
            d.line(641, y + 46, 641, y + ROW, arrow=True, width=2.5)
            d.text(652, y + 61, "keys, values", 12.5)
    d.text(20, TOP + RANKS * ROW + 20, "The last rank passes its keys and values on to the first: a ring.", 15)
    d.text(
        20,
        TOP + RANKS * ROW + 44,
        "FSDP shards parameters, gradients, and optimizer state over the same four ranks, as before.",
        15,
    )
    d.save("context_parallel")


if __name__ == "__main__":
    context_parallel()
