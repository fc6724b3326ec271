"""Context parallelism: which tokens a rank has, and what attention costs the slowest rank. Imports no torch.

The forms are described in labkit/training/context_parallel.py.
"""

FORMS = ("ring", "gather", "ulysses")
ORDERS = {"natural": 1, "head-tail": 2}  # parts of a sequence that each rank has


def order_of(form: str) -> str:
    """Return the order of tokens that the lab takes. (Ulysses has whole sequences in attention, in their order.)"""
    return "natural" if form == "ulysses" else "head-tail"


def chunks_of(rank: int, size: int, order: str) -> list[int]:
    """Return which of the ``ORDERS[order]`` × ``size`` parts of a sequence a rank has, in order."""
    return [rank] if order == "natural" else [rank, 2 * size - 1 - rank]


def slowest_share(size: int, form: str, order: str) -> float:
    """Return the attention FLOPs of the slowest rank as a multiple of the mean over the ranks.

    In natural order the last of C ranks attends to its own tokens, causally, and to those of all C − 1 others: C − 1/2
    parts, and the mean is C / 2. In head-tail order each rank attends to half of every other rank's pairs.

    Args:
        size: C, ranks that share a sequence.
        form: one of ``FORMS``.
        order: a key of ``ORDERS``.
    """
    return 2 - 1 / size if order == "natural" and form != "ulysses" else 1.0
