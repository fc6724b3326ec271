"""Judge a claim: one line, PASS or FAIL, what was measured, what was predicted, how far apart, how far they may be.

  verdict("peak memory per rank", 26_629_288, predicted=26_629_288, unit="bytes", limit=0.01)
  verdict("largest difference of the losses", 2e-16, at_most=1e-10)

and tell a learner how far off their own guess was:

  about_guess(25, record["memory"]["peak"])
"""

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
    """Print whether the claim held; exactly one of predicted, at_most and at_least is given.

    how: what was done to come by the number, if it was not measured here: "planned", "published", "simulated"; or
    "by the law", for bytes that follow from the collectives counted.
    limit: how far measured may lie from predicted, as a share of it (0: not at all). otherwise: what usually
    causes a FAIL, printed below it. Something that is not a number, or NaN, never passes.
    """
    if [predicted, at_most, at_least].count(None) != 2:
        raise TypeError("a verdict needs exactly one of predicted, at_most and at_least")
    if predicted is not None:
        difference = measured - predicted
        passed = abs(difference) <= limit * abs(predicted)
        share = f"{difference / predicted:+.2%}" if predicted else f"{difference:+,}"
        allowed = f"limit {limit:.2%}" if limit else "must be equal"
        said = f"predicted {_number(predicted, unit)} ({share}; {allowed})"
    else:
        passed = measured <= at_most if at_least is None else measured >= at_least
        said = f"at most {_number(at_most, unit)}" if at_least is None else f"at least {_number(at_least, unit)}"
    print(f"{'PASS' if passed else 'FAIL'}  {claim}: {how} {_number(measured, unit)}, {said}")
    if not passed and otherwise:
        print(f"      {otherwise}")


def _number(value, unit) -> str:
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def about_guess(guess: float | None, terms: dict[str, float], unit: float = MIB, name: str = "MiB", sure: tuple = ()):
    """Print how far a guess is from the sum of the terms, and which term would explain the gap.

    guess: in ``unit`` bytes, None if there is none yet. terms: {name: bytes}. sure: names of those that nobody leaves
    out, so that they explain no gap, whatever their size.
    """
    total = sum(terms.values())
    if guess is None:
        print(f"No guess yet. It was {total / unit:,.1f} {name}.")
        return
    gap = guess * unit - total
    line = f"Your guess is {guess:,.1f} {name}; it was {total / unit:,.1f} {name} ({gap / total:+.0%})"
    print(line + (f": {_explained(gap, terms, total, sure)}" if abs(gap) > 0.02 * total else ": that is it"))


def _explained(gap: float, terms: dict, total: float, sure: tuple) -> str:
    """The one or two terms whose sum is nearest to the gap, or three where that is not near; if any comes near at all."""
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
