# SPDX-License-Identifier: BSD-3-Clause
"""Judge a claim in one line: PASS or FAIL, the measured and the predicted number, their difference, and its limit.

  verdict("peak memory per rank", 26_629_288, predicted=26_629_288, unit="bytes", limit=0.01)
  verdict("largest difference of the losses", largest_difference(run["losses"], reference), at_most=1e-10)

Print two numbers next to each other, neither of them measured here:

  comparison("torchtitan #822, optimizer state", 7.52, 7.48, unit="GiB", how="published", reference="planned")

Report how far off the learner's guess was:

  about_guess(25, record["memory"]["peak"])
"""

import math
from itertools import combinations

MIB = 2**20


def verdict(
    claim: str,
    measured,
    *,
    predicted=None,
    at_most=None,
    at_least=None,
    limit=0.0,
    unit="",
    otherwise="",
    how="measured",
):
    """Print PASS or FAIL for a claim about a number that this execution measured.

    Use ``comparison`` for numbers from a plan, a file or a paper: they are not measurements.

    Args:
        claim: name of the number.
        measured: the number. NaN and infinity never pass, no matter what they are compared with.
        predicted, at_most, at_least: the reference value; pass exactly one of them.
        limit: largest accepted difference between measured and predicted, relative to predicted (0: must be equal).
        unit: printed after each number.
        otherwise: the usual cause of a FAIL, printed below it.
        how: how the number was obtained, if not by a meter: "counted", "by the law" (bytes computed from counted
            collectives), "by the rule" (measured bytes, assigned to a device by a rule), "simulated" (PyTorch's own
            code, run here on tensors without memory).

    Raises:
        TypeError: if not exactly one of predicted, at_most and at_least is passed.
    """
    if [predicted, at_most, at_least].count(None) != 2:
        raise TypeError("a verdict needs exactly one of predicted, at_most and at_least")
    if predicted is not None:
        passed = abs(measured - predicted) <= limit * abs(predicted)
        allowed = f"limit {limit:.2%}" if limit else "must be equal"
        against = f"predicted {_number(predicted, unit)} ({_apart(measured, predicted)}; {allowed})"
    else:
        passed = measured <= at_most if at_least is None else measured >= at_least
        against = f"at most {_number(at_most, unit)}" if at_least is None else f"at least {_number(at_least, unit)}"
    # With an infinite bound, everything would pass.
    passed = passed and all(
        math.isfinite(each) for each in (measured, predicted, at_most, at_least) if each is not None
    )
    print(f"{'PASS' if passed else 'FAIL'}  {claim}: {how} {_number(measured, unit)}, {against}")
    if not passed and otherwise:
        print(f"      {otherwise}")


def comparison(claim: str, value, expected, *, how: str, reference: str, unit: str = ""):
    """Print two numbers next to each other, without PASS or FAIL, because this execution measured neither.

    Args:
        claim: name of the numbers.
        value, expected: the numbers.
        how, reference: source of each number: "planned", "published", "recorded", "simulated".
        unit: printed after each number.
    """
    print(
        f"----  {claim}: {how} {_number(value, unit)}, {reference} {_number(expected, unit)} ({_apart(value, expected)})"
    )


def _apart(value, expected) -> str:
    """Format the signed difference, relative to the expected value unless that is 0."""
    difference = value - expected
    return f"{difference / expected:+.2%}" if expected else f"{difference:+,}"


def _number(value, unit) -> str:
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def about_guess(guess: float | None, terms: dict[str, float], unit: float = MIB, name: str = "MiB", sure: tuple = ()):
    """Print how far a guess is from the sum of the terms, and which term would explain the difference.

    Args:
        guess: the guess, in units of ``unit`` bytes; None if there is none yet.
        terms: {name: bytes}.
        unit, name: bytes per unit, and the unit's name.
        sure: terms that nobody forgets, never reported as the explanation.
    """
    total = sum(terms.values())
    if guess is None:
        print(f"No guess yet. It was {total / unit:,.1f} {name}.")
        return
    gap = guess * unit - total
    line = f"Your guess is {guess:,.1f} {name}; it was {total / unit:,.1f} {name} ({gap / total:+.0%})"
    print(line + (f": {_explained(gap, terms, total, sure)}" if abs(gap) > 0.02 * total else ": that is it"))


def _explained(gap: float, terms: dict, total: float, sure: tuple) -> str:
    """Name the one or two terms whose sum is closest to the gap, or three if two are not close enough."""
    named = [(name, size) for name, size in terms.items() if size > 0.03 * total and name not in sure]

    def off(some) -> float:
        return abs(sum(size for _, size in some) - abs(gap)) / abs(gap)

    def nearest(most: int) -> tuple:
        return min((some for many in range(most) for some in combinations(named, many + 1)), key=off, default=())

    some = nearest(2) if off(nearest(2)) < 0.1 else nearest(3)
    if off(some) > 0.25:
        return "the terms are " + ", ".join(f"{n} {s / total:.0%}" for n, s in named)
    *others, last = [name for name, _ in reversed(some)]
    name = f"{', '.join(others)} and {last}" if others else last
    return f"the gap is about the size of {name}: " + ("left out?" if gap < 0 else "counted twice?")
