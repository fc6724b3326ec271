"""Find the least, or the most, of something that fits under a limit. Imports no torch."""

from collections.abc import Callable

FEW = 8  # numbers below the boundary that are looked at too: padding makes a shard of 7 ranks larger than one of 6


def least(needs: Callable[[int], float], limit: float, last: int) -> int | None:
    """The least number, from 1 to ``last``, whose need is at most ``limit``, where needs fall; None if ``last``'s is more.

    Where they rise now and then, as shards padded to whole numbers do, ``FEW`` numbers below are looked at as well.
    """
    low, high = 0, 1
    while needs(high) > limit:
        if high >= last:
            return None
        low, high = high, min(2 * high, last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if needs(middle) <= limit else (middle, high)
    below = [number for number in range(max(1, high - FEW), high) if needs(number) <= limit]
    return min([*below, high])


def most(needs: Callable[[int], float], limit: float, last: int) -> int | None:
    """The largest number, from 1 to ``last``, whose need is at most ``limit``, where needs rise; None if 1's is more."""
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
    """Where a straight line meets the limit, as needs are nearly straight; but so that either end comes nearer."""
    if high > 4 * low:  # so far away that it would mislead
        return min(2 * low, high - 1)
    share = (limit - needs(low)) / (needs(high) - needs(low))
    guess = low + int(share * (high - low))
    return min(max(guess, low + 1), high - 1)
