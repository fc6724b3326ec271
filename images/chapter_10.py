# SPDX-License-Identifier: BSD-3-Clause
"""Draw chapter 10's diagram, four ranks on two nodes as a ring and as a mesh: python images/chapter_10.py"""

from drawing import GATHER, INK, PAPER, REDUCE, SOFT, Drawing

NODE, RANK = "#EFEFEA", 74  # a node's background; the side of a rank


def nodes(d: Drawing, x: int, y: int, order):
    """Two nodes, with four ranks in them, upper and lower of the left and of the right; returns {rank: its centre}."""
    places = {}
    for node in (0, 1):
        left = x + node * 250
        d.box(left, y, 190, 250, NODE, SOFT)
        d.text(left + 95, y + 238, f"node {node}", 14, "middle", SOFT)
        for local in (0, 1):
            rank_x, rank_y = left + 58, y + 24 + local * 112
            d.box(rank_x, rank_y, RANK, RANK, PAPER, INK, f"rank {order[2 * node + local]}", 15)
            places[order[2 * node + local]] = (rank_x + RANK / 2, rank_y + RANK / 2)
    d.line(x + 220, y - 8, x + 220, y + 262, INK, 1.4, dash="6 5")
    return places


def many_nodes():
    d = Drawing(1000, 480, "Four ranks on two nodes, sharded among all four, and among the two of each node")
    d.text(20, 36, "What crosses the dashed line is what the network between the nodes must carry", 20, bold=True)

    d.text(20, 78, "Mesh 1 × 4: one ring of all ranks", 16, bold=True)
    d.text(20, 100, "Every all-gather and every reduction crosses the line, once each way.", 14, colour=SOFT)
    p = nodes(d, 20, 130, (0, 1, 3, 2))  # so that the ring is drawn as one
    half = RANK / 2
    d.line(p[0][0], p[0][1] + half, p[1][0], p[1][1] - half - 2, GATHER, 3, arrow=True)
    d.line(p[1][0] + half, p[1][1], p[2][0] - half - 2, p[2][1], GATHER, 3, arrow=True)
    d.line(p[2][0], p[2][1] - half, p[3][0], p[3][1] + half + 2, GATHER, 3, arrow=True)
    d.line(p[3][0] - half, p[3][1], p[0][0] + half + 2, p[0][1], GATHER, 3, arrow=True)

    x = 530
    d.text(x, 78, "Mesh 2 × 2: a ring in each node, and rings across", 16, bold=True)
    d.text(x, 100, "Only the all-reduce of sharded gradients crosses it.", 14, colour=SOFT)
    p = nodes(d, x, 130, range(4))
    for first in (0, 2):
        (left, top), (_, bottom) = p[first], p[first + 1]
        d.line(left - 12, top + half, left - 12, bottom - half - 2, GATHER, 3, arrow=True)
        d.line(left + 12, bottom - half, left + 12, top + half + 2, GATHER, 3, arrow=True)
    for first in (0, 1):
        (left, height), (right, _) = p[first], p[first + 2]
        d.line(left + half, height - 8, right - half - 2, height - 8, REDUCE, 3, arrow=True)
        d.line(right - half, height + 12, left + half + 2, height + 12, REDUCE, 3, arrow=True)

    d.line(20, 432, 60, 432, GATHER, 3)
    d.text(70, 437, "ring of ranks that share one model: all-gather, reduce-scatter", 14)
    d.line(530, 432, 570, 432, REDUCE, 3)
    d.text(580, 437, "ring of ranks that hold the same shard: all-reduce", 14)
    d.save("many_nodes")


if __name__ == "__main__":
    many_nodes()
