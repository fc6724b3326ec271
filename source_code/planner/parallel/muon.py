# SPDX-License-Identifier: BSD-3-Clause
"""Plan Muon under FSDP2: which rank computes what, its memory, its collectives, its operations. Imports no torch.

Muon replaces the update of a matrix by the nearest (semi-)orthogonal matrix, by five Newton–Schulz iterations
(torch/optim/_muon.py). They need the whole matrix, of which FSDP2 leaves each rank only some rows. Three ways:

  muon          owner-computes. Each matrix has an owner. In a round, as many matrices as there are shards are exchanged: an
                all-to-all brings each owner all rows of its matrix, and another one brings the result back.
  muon-gather   Each matrix is all-gathered, and every rank computes all of them.
  muon-dtensor  torch.optim.Muon itself, on DTensors, each operator of which redistributes its arguments as it needs.

AdamW updates the other parameters: embedding, head, and norms. With HSDP the replicas have equal gradients after their
all-reduce, and each computes the same: nothing is exchanged between them, as under DDP.

Sources: labkit/training/muon.py; for muon-dtensor, traces of real steps (PyTorch 2.15).
"""

from collections import Counter
from math import ceil, prod

from planner import UserError

WAYS = ("muon", "muon-gather", "muon-dtensor")  # values of --optimizer
ITERATIONS = 5
BF16 = 2  # bytes
KEY = ("kind", "bytes", "ranks", "dimension")  # of a collective
COUNTER = 4  # bytes of AdamW's step counter of a tensor


def is_matrix(module, shape: tuple) -> bool:
    """Return whether Muon updates a parameter of this shape, of a module of a blueprint: the matrices of blocks."""
    return module.kind == "block" and len(shape) == 2


def rounds(shapes: list[tuple[int, int]], ranks: int) -> list[list[int]]:
    """Return the matrices of each round of owner-computes, by index. The n-th one of a round belongs to rank n.

    The costliest come first. So the matrices of a round take about equally long, and rank 0 never has less to do, or to
    store, than another rank.

    Args:
        shapes: of all matrices.
        ranks: among which a matrix is sharded.
    """
    order = sorted(range(len(shapes)), key=lambda index: (newton_schulz_flops(shapes[index]), shapes[index]))
    order.reverse()
    return [order[begin : begin + ranks] for begin in range(0, len(order), ranks)]


def shard_rows(rows: int, ranks: int) -> list[int]:
    """Return the rows of a matrix that FSDP2 gives each rank: ``torch.chunk``'s, so the last ranks may have none."""
    most = ceil(rows / ranks)
    return [max(0, min(most, rows - rank * most)) for rank in range(ranks)]


def newton_schulz_flops(shape: tuple[int, int]) -> int:
    """Return the operations of Newton–Schulz on a matrix: in each iteration A = X Xᵀ, A A, and a product with X."""
    short, long = sorted(shape)
    return ITERATIONS * 2 * (2 * short**2 * long + short**3)


def itemsize(plan) -> int:
    """Return the bytes per element in which Newton–Schulz computes, and in which matrices are exchanged."""
    return 8 if plan.precision == "fp64" else BF16


def matrices(plan) -> list[tuple[int, int]]:
    """Return the shapes of the matrices that Muon updates, unsharded."""
    return [parameter.shape for parameter in _updated(plan, by_muon=True)]


def _updated(plan, by_muon: bool) -> list:
    return [
        parameter
        for unit in plan.unit_sizes
        for (module, _), parameter in unit.parameters.items()
        if parameter.trained and is_matrix(module, parameter.shape) == by_muon
    ]


def shard_numel(plan, shape: tuple) -> int:
    """Return the elements that rank 0 holds of a parameter."""
    return ceil(shape[0] / plan.shards) * prod(shape[1:])


def adamw_numels(plan) -> list[int]:
    """Return the elements that rank 0 holds of each parameter that AdamW updates."""
    return [shard_numel(plan, parameter.shape) for parameter in _updated(plan, by_muon=False)]


def states(plan) -> dict[str, int]:
    """Return {name: bytes} of a rank's optimizer state: momentum of matrices, AdamW's of the other parameters."""
    others = adamw_numels(plan)
    found = {"momentum": plan.itemsize * sum(shard_numel(plan, shape) for shape in matrices(plan))}
    found |= dict.fromkeys(("first moments", "second moments"), plan.itemsize * sum(others))
    # On a GPU, the counters of AdamW's foreach implementation stay in the CPU's memory.
    return found if plan.on_gpu else {"step counters": COUNTER * len(others)} | found


def check(plan):
    """Check that a plan with one of ``WAYS`` is covered.

    Raises:
        UserError: it is not.
    """
    if plan.strategy not in ("single", "ddp", "fsdp2"):
        raise UserError(f"Muon is not predicted for {plan.strategy}: take fsdp2, ddp, or single")
    if plan.tp_degree > 1 or plan.offload or any(module.frozen for module in plan.blueprint.modules):
        raise UserError("Muon is not predicted with tensor parallelism, offload, or frozen parameters: take adamw")
    blocks = [module for module in plan.blueprint.modules if module.kind == "block"]
    if any(len(shape) > 2 for module in blocks for shape in module.parameters.values()):
        raise UserError("Muon is not predicted for experts, which are stacked in one parameter: take adamw")
    if plan.optimizer == "muon-dtensor":
        if plan.replicas > 1:
            raise UserError("muon-dtensor on a mesh with replicas is not predicted: take muon, or muon-gather")
        check_dtensor(matrices(plan), plan.shards)


def check_dtensor(shapes: list[tuple[int, int]], ranks: int):
    """Check that torch.optim.Muon can update DTensors of these shapes, sharded by rows.

    It fails on a matrix with fewer rows than ranks, which DTensor replicates to multiply it (PyTorch 2.15).

    Raises:
        UserError: it cannot.
    """
    for rows, columns in shapes:
        if rows < ranks:
            raise UserError(
                f"torch.optim.Muon fails on a {rows}x{columns} matrix that {ranks} ranks shard, as it has fewer rows: "
                "use --optimizer muon"
            )


# Collectives


def collectives(plan) -> Counter:
    """Count the collectives of the optimizer's step: {(kind, bytes, ranks, mesh dimension): how many}.

    The bytes of an all-to-all are those of rank 0's larger buffer, as a trace has them; of an all-gather, those of the
    result. In a round with fewer matrices than ranks, rank 0 receives more than it sends, and then sends more than it
    receives: the larger buffer decides how long an all-to-all takes, and ``sent_bytes`` what is sent.
    """
    counts = Counter()
    if plan.optimizer not in WAYS or plan.shards == 1:
        return counts
    ranks, bytes_each, shapes = plan.shards, itemsize(plan), matrices(plan)
    group = (ranks, "shard")
    if plan.optimizer == "muon":
        for members in rounds(shapes, ranks):
            owned, sent = (sum(sizes) for sizes in _round_numels(plan, [shapes[index] for index in members]))
            counts["all-to-all", bytes_each * max(owned, sent), *group] += 2
    for rows, columns in shapes if plan.optimizer == "muon-gather" else ():
        counts["all-gather", bytes_each * ceil(rows / ranks) * ranks * columns, *group] += 1
    for rows, columns in shapes if plan.optimizer == "muon-dtensor" else ():
        counts["all-reduce", bytes_each, *group] += 1  # of the norm
        if rows > columns:
            # A = X Xᵀ is a sum over ranks. Its product with itself first adds it up, and leaves another sum, the polynomial,
            # which the product with X adds up.
            counts["all-reduce", bytes_each * columns**2, *group] += 2 * ITERATIONS
        else:
            padded = ceil(rows / ranks) * ranks
            for numel in (columns * padded, padded * rows, padded * columns):  # Xᵀ, A, X
                counts["all-gather", bytes_each * numel, *group] += ITERATIONS
    return counts


def sent_bytes(plan) -> float:
    """Return the bytes that a rank sends in the optimizer's step, on average over the ranks, with ring algorithms.

    With owner-computes a rank sends its rows of the others' matrices, and the others' rows of its own. In a round with
    fewer matrices than ranks, some ranks own none, and send less than the others. With the other two ways all send alike.
    """
    ranks = plan.shards
    if plan.optimizer == "muon" and ranks > 1:
        sent = 0
        for members in rounds(matrices(plan), ranks):
            for owner, (rows, columns) in enumerate(matrices(plan)[index] for index in members):
                sent += 2 * (rows - shard_rows(rows, ranks)[owner]) * columns
        return itemsize(plan) * sent / ranks
    passes = {"all-gather": 1, "all-reduce": 2}
    counts = collectives(plan).items()
    return sum(passes[kind] * size * count for (kind, size, *_), count in counts) * (ranks - 1) / ranks


def _round_numels(plan, shapes: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return rank 0's elements in a round: ([of its own matrix], [of its shard of each matrix])."""
    return [prod(shapes[0])], [shard_numel(plan, shape) for shape in shapes]


# Memory and operations


def temporary(plan) -> dict[tuple[str, str], int]:
    """Return rank 0's intermediate results at their peak in the optimizer's step: {(category, name): bytes}."""
    adamw = {("temporary", "intermediate results"): sum(adamw_numels(plan)) * plan.itemsize}
    return max([adamw, *_snapshots(plan)], key=lambda terms: sum(terms.values()))


def _snapshots(plan):
    """Yield what is alive when Newton–Schulz needs most, for each matrix that rank 0 computes."""
    shapes = matrices(plan)
    bytes_each, ranks = itemsize(plan), plan.shards
    if plan.optimizer == "muon-dtensor":
        for shape in shapes:
            yield _dtensor_snapshot(plan, shape)
        return
    exchanged = plan.optimizer == "muon" and ranks > 1
    for members in rounds(shapes, ranks) if exchanged else [[index] for index in range(len(shapes))]:
        shape = shapes[members[0]]
        padded = shape if exchanged else (ceil(shape[0] / ranks) * ranks, shape[1])
        category = "temporary" if exchanged or ranks == 1 else "all-gather"
        yield {
            (category, "Muon: matrix"): bytes_each * prod(padded),
            ("temporary", "Muon: X before and after an iteration"): 2 * bytes_each * prod(shape),
            ("temporary", "Muon: A and its polynomial"): 2 * bytes_each * min(shape) ** 2,
        }
        if exchanged:
            shards = sum(shard_numel(plan, shapes[index]) for index in members)
            yield {
                ("temporary", "Muon: matrix"): bytes_each * prod(shape),
                ("temporary", "Muon: shards of a round"): bytes_each * shards,
            }


def _dtensor_snapshot(plan, shape: tuple[int, int]) -> dict:
    """Return what is alive on rank 0 when torch.optim.Muon needs most for a matrix.

    A tall matrix's A is summed twice: as A, and as it is multiplied. Of another matrix, Xᵀ is gathered by columns, which
    are then rearranged into rows.
    """
    rows, columns = shape
    each = itemsize(plan)
    shard, padded = shard_numel(plan, shape), ceil(rows / plan.shards) * plan.shards * columns
    terms = {("temporary", "Muon: update"): shard * plan.itemsize}
    if plan.shards == 1:
        terms["temporary", "Muon: X before and after an iteration"] = 2 * each * shard
        terms["temporary", "Muon: A and its polynomial"] = 2 * each * min(shape) ** 2
    elif rows > columns:
        terms["temporary", "Muon: shards of X"] = each * shard
        terms["temporary", "Muon: A, summed, and its polynomial"] = 3 * each * columns**2
        terms["temporary", "Muon: X, or the polynomial, before"] = each * max(shard, columns**2)
    else:
        terms["temporary", "Muon: shards of X and its transpose"] = 2 * each * shard
        terms["temporary", "Muon: shards of A and its polynomial"] = 2 * each * shard // columns * rows
        terms["temporary", "Muon: transpose, gathered and rearranged"] = 2 * each * padded
    return terms


def step_flops(plan) -> int:
    """Return the operations of Newton–Schulz on rank 0 in a step."""
    if plan.optimizer not in WAYS:
        return 0
    shapes = matrices(plan)
    if plan.optimizer == "muon" and plan.shards > 1:
        return sum(newton_schulz_flops(shapes[members[0]]) for members in rounds(shapes, plan.shards))
    if plan.optimizer == "muon-dtensor" and plan.shards > 1:
        return sum(_dtensor_flops(shape, plan.shards) for shape in shapes)
    return sum(map(newton_schulz_flops, shapes))


def _dtensor_flops(shape: tuple[int, int], ranks: int) -> int:
    """Return rank 0's operations: its rows' share, except that of a tall matrix every rank computes A A."""
    rows, columns = shape
    mine = ceil(rows / ranks)
    if rows > columns:
        return ITERATIONS * 2 * (2 * columns**2 * mine + columns**3)
    return ITERATIONS * 2 * (2 * mine * rows * columns + mine * rows**2)
