# SPDX-License-Identifier: BSD-3-Clause
"""Extend what was traced of models with few blocks to a model with more blocks of the same kind.

  extended([traced(4), traced(5), traced(6)], 120)      the step of 126 blocks; None: these three do not say

A step of equal blocks repeats itself: each further block inserts the same events at the same places, for instance one
run of them into forward, one into backward, and one into each foreach operator of the optimizer. Comparing the
first two traces shows the places, which must predict the third trace to the byte. What grows in any other way is not
extended.

tests/test_equal_blocks.py compares extended steps with whole ones, over what the labs can set.
"""

from collections import Counter
from difflib import SequenceMatcher
from itertools import groupby
from operator import itemgetter

Traced = tuple[dict, list[tuple], Counter]  # bytes by category at the start, events, collectives: see ``StepTrace``


def extended(traces: list[Traced], more: int) -> Traced | None:
    """Return the trace of a step with ``more`` periods of blocks than the last of three traces.

    Args:
        traces: of three steps, each with one period of equal blocks more than the one before.
        more: periods to add.

    Returns:
        As a trace of that step would be; None unless the third trace is what the first two predict.
    """
    starts, (few, some, many), collectives = zip(*traces, strict=True)
    inserted, start, collective = _insertions(few, some), _line(starts, more), _line(collectives, more)
    if None in (inserted, start, collective):
        return None
    for insertions in (inserted, _split(inserted)):
        if _grown(few, insertions, 2) == many:
            return start, _grown(few, insertions, 2 + more), Counter(collective)
    return None


def _insertions(few: list, many: list) -> list[tuple[int, list]] | None:
    """Return what was inserted into ``few`` to make ``many``, [(position, events), …]; None if anything else was changed."""
    insertions = []
    for what, begin, _, other_begin, other_end in SequenceMatcher(None, few, many, autojunk=False).get_opcodes():
        if what == "insert":
            insertions.append((begin, many[other_begin:other_end]))
        elif what != "equal":
            return None
    return insertions


def _split(insertions: list[tuple[int, list]]) -> list[tuple[int, list]]:
    """Split insertions that end one operator's events and begin the next one's: each of both grows by itself."""
    split = []
    for position, events in insertions:
        runs = [list(run) for _, run in groupby(events, itemgetter(1))]
        split += [(position, run) for run in runs] if len(runs) == 2 else [(position, events)]
    return split


def _grown(events: list, insertions: list[tuple[int, list]], times: int) -> list:
    """Return the events with each insertion made ``times`` times."""
    grown, done = [], 0
    for position, inserted in insertions:
        grown += events[done:position] + times * inserted
        done = position
    return grown + events[done:]


def _line(points: tuple[dict, dict, dict], more: int) -> dict | None:
    """Continue three dictionaries of numbers by ``more`` equal steps; None if their steps or their keys differ."""
    first, second, third = points
    if not first.keys() == second.keys() == third.keys():
        return None
    if any(third[key] - second[key] != second[key] - first[key] for key in third):
        return None
    return {key: value + more * (value - second[key]) for key, value in third.items()}
