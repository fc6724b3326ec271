# SPDX-License-Identifier: BSD-3-Clause
"""Sizes of pinned (page-locked) CPU memory, from which copies to a GPU run while it computes. Imports no torch."""

from collections.abc import Iterable

ROUNDING = "rounding of pinned memory"


def allocated(size: int) -> int:
    """Return the bytes that PyTorch allocates for a pinned tensor: the next power of two.

    Source: ``PowerOf2Ceil`` in ATen/core/CachingHostAllocator.h. PyTorch 2.15 has a threshold above which it does not
    round (``pinned_max_round_threshold_mb`` in ``PYTORCH_ALLOC_CONF``); by default there is none.
    """
    return 1 << (size - 1).bit_length() if size else 0


def rounding(sizes: Iterable[int]) -> int:
    """Return the bytes that rounding adds to pinned tensors of these sizes, all together."""
    return sum(allocated(size) - size for size in sizes)
