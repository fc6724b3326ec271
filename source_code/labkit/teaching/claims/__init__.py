# SPDX-License-Identifier: BSD-3-Clause
"""Sentences about FSDP on trial: what each claims, its evidence, and the verdict that follows from the evidence.

A claim is about a number: it holds in a case whose value lies in the claim's range. A condition says in which cases that
is so, as text for the reader and as a function of the case's setting. The verdict is computed from the values, and a
condition that the values contradict is reported (``CONTRADICTED``), never printed as if it held.

  claims = on_trial()                                  {key: Claim}
  cases = claims["1/N"].cases()                        the planned sweep; more cases come from runs
  claims["1/N"].verdict(cases)                         HOLDS, WHEN, NEVER, CONTRADICTED, or UNKNOWN
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import NamedTuple

from labkit import UserError

HOLDS, WHEN, NEVER, CONTRADICTED = "holds", "holds when", "does not hold", "contradicts its condition"
UNKNOWN = "no verdict"  # a value is NaN, which proves nothing
VOTES = {"holds": HOLDS, "when": WHEN, "never": NEVER}  # what a learner writes: the verdict that it bets on
# What a chapter's line in the course's map (images/course.py) and a verdict here say in the same words
LAWS = {
    "04": "one unit shards what is kept between steps",
    "08": "after sharding, activations are the peak",
    "18": "Muon needs whole matrices",
}
RECORDS = Path(__file__).resolve().parents[3] / "results" / "reference"


class Case(NamedTuple):
    """One piece of evidence.

    Attributes:
        setting: what was varied, {name: value}.
        value: the number that the claim is about.
        how: "measured" in this execution, "predicted" by the planner, "calculated", "recorded", or "published".
    """

    setting: dict
    value: float
    how: str = "predicted"


@dataclass(frozen=True)
class Claim:
    """A sentence, and what decides about it.

    Attributes:
        quote: the sentence as people repeat it, in one line.
        source: the kind of source that repeats it: "documentation", "blog", "course", or "paper".
        chapter: number of the chapter that explains it.
        unit: what a case's value is.
        range: (lowest, highest) value with which the sentence is true, both included.
        value: value(**setting) → the number, from the planner or from arithmetic; None where all evidence is measured.
        settings: the sweep that the notebook shows.
        condition: in which cases it holds, as text; of a claim that holds everywhere or nowhere, what decides instead.
        when: when(**setting) → whether it holds there; None: near the boundary, nothing is stated.
        how: how ``value`` is obtained.
        measured: measured(evidence) → further cases, from runs of the notebook; {} if there were none.
    """

    quote: str
    source: str
    chapter: str
    unit: str
    range: tuple[float, float]
    condition: str
    value: Callable[..., float] | None = None
    settings: tuple[dict, ...] = ()
    when: Callable[..., bool | None] | None = None
    how: str = "predicted"
    measured: Callable[[dict], list[Case]] = lambda evidence: []

    def cases(self, evidence: dict | None = None) -> list[Case]:
        """Return the evidence: the sweep, and what runs of the notebook add.

        Args:
            evidence: {name: what was measured}, see ``trials.gather``.
        """
        planned = [Case(setting, self.value(**setting), self.how) for setting in self.settings]
        return planned + (self.measured(evidence) if evidence else [])

    def holds(self, case: Case) -> bool:
        """Return whether the sentence is true in a case."""
        lowest, highest = self.range
        return lowest <= case.value <= highest

    def stated(self, case: Case) -> bool | None:
        """Return whether the condition says that it is true there; None if it says nothing."""
        return self.when(**case.setting) if self.when else None

    def verdict(self, cases: list[Case]) -> str:
        """Judge by the evidence.

        Raises:
            UserError: there is none.
        """
        if not cases:
            raise UserError(f"no evidence about {self.quote!r}: run the cells above")
        if any(isnan(case.value) for case in cases):
            return UNKNOWN
        found = [self.holds(case) for case in cases]
        if all(found):
            return HOLDS
        if not any(found):
            return NEVER
        wrong = [case for case, true in zip(cases, found, strict=True) if self.stated(case) not in (None, true)]
        return WHEN if self.when and not wrong else CONTRADICTED

    def boundary(self, cases: list[Case]) -> tuple[Case, Case] | None:
        """Return a case in which it holds and one in which it does not; None if all are alike."""
        for_it, against = ([case for case in cases if self.holds(case) == true] for true in (True, False))
        return (for_it[0], against[0]) if for_it and against else None


def on_trial() -> dict[str, Claim]:
    """Return all claims, {key: claim}, in the order of the ballot."""
    from labkit.teaching.claims import interfaces, memory, timing, traffic

    return memory.CLAIMS | traffic.CLAIMS | timing.CLAIMS | interfaces.CLAIMS


def recorded(name: str) -> dict:
    """Return a committed record, by its file name."""
    return json.loads((RECORDS / name).read_text())
