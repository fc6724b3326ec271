# SPDX-License-Identifier: BSD-3-Clause
"""Find the least, or the most, of something that fits under a limit. Imports no torch."""

from collections.abc import Callable

# Numbers below the boundary that are tried, too. Padding makes gathered tensors larger on 7 ranks than on 6; of the small
# presets, which gain little by more ranks, 86 ranks may need less than 127.
NEIGHBORS_BELOW = 128


def least(needs: Callable[[int], float], limit: float, last: int) -> int | None:
    """Return the least number whose need is at most ``limit``, if needs fall; None if the last one needs more.

    Needs may rise now and then, as padded shards do: ``NEIGHBORS_BELOW`` numbers below the boundary are tried, too.

    Args:
        needs: needs(number) → what it needs.
        limit: in the same unit.
        last: the search goes from 1 to this number.
    """
    low, high = 0, 1
    while needs(high) > limit:
        if high >= last:
            return None
        low, high = high, min(2 * high, last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if needs(middle) <= limit else (middle, high)
    below = [number for number in range(max(1, high - NEIGHBORS_BELOW), high) if needs(number) <= limit]
    return min([*below, high])


def most(needs: Callable[[int], float], limit: float, last: int) -> int | None:
    """Return the largest number whose need is at most ``limit``, if needs rise; None if 1 needs more.

    Args:
        needs: needs(number) → what it needs.
        limit: in the same unit.
        last: the search goes from 1 to this number.
    """
    low, high = 1, last
    if needs(low) > limit:
        return None
    if needs(high) <= limit:
        return high
    guess = 2
    while high - low > 1:
        low, high = (guess, high) if needs(guess) <= limit else (low, guess)
        guess = _between(needs, limit, low, high)
    return low


def _between(needs, limit, low, high) -> int:
    """Return where a straight line meets the limit, as needs are nearly linear; but strictly between both ends."""
    if high > 4 * low:  # too far apart for a line
        return min(2 * low, high - 1)
    share = (limit - needs(low)) / (needs(high) - needs(low))
    guess = low + int(share * (high - low))
    return min(max(guess, low + 1), high - 1)
