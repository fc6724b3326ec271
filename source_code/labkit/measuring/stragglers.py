# SPDX-License-Identifier: BSD-3-Clause
"""Find a straggler in the flight records of a run: a rank that is slower than the others, step after step.

A rank's *own time* runs from the moment its previous collectives could complete, which is when the last of their ranks
had called them, until it calls the next one. A rank that waits for a straggler has little own time, in whichever
process group it waits.

Clocks of different nodes are corrected as far as the calls prove a difference. That takes a few collectives in close
succession, as FSDP's units make them. Where much work precedes every collective, a slow rank on another node may be a
clock that is ahead, and is not named.

Call times are those of the host. On GPUs, the host runs ahead of the device: a slow loader, a slow CPU, and a rank whose
``.item()`` waits for a slow GPU show; a slow GPU that no host waits for does not.
"""

from collections import defaultdict
from dataclasses import dataclass

from labkit.measuring.flight_recorder import ROOTED, Dump, Line

PAUSES = 2  # the longest own times of a rank, which do not count: a rank that loads or saves once is no straggler
LEAST = 0.1  # of the time from the first call to the last
SPREAD = 2.0  # how much further a straggler is from the next rank than the other ranks are from each other


@dataclass(frozen=True)
class Straggler:
    """A slow rank. own: {rank: seconds between its collectives}; span: seconds; line: before which it is slowest."""

    rank: int
    own: dict[int, float]
    span: float
    line: Line | None


def find(dumps: dict[int, Dump]) -> Straggler | None:
    """Return the straggler of a run, or None if no rank is clearly slower than the others.

    Args:
        dumps: {rank: its flight record}.
    """
    times = own_times(dumps)
    if len(times) < 2:
        return None
    own = {rank: sum(sorted(time for time, _ in of)[:-PAUSES]) for rank, of in times.items()}
    first, second = sorted(own, key=own.get, reverse=True)[:2]
    last = min(own, key=own.get)
    spread = own[second] - own[last] if len(own) > 2 else own[second] / SPREAD
    excess, span = own[first] - own[second], _span(dumps)
    if excess <= max(LEAST * span, SPREAD * spread):
        return None
    by_line = defaultdict(float)
    for time, call in times[first]:
        by_line[call.line] += time
    return Straggler(first, own, span, max(by_line, key=by_line.get))


def own_times(dumps: dict[int, Dump]) -> dict[int, list]:
    """Return {rank: [(seconds of its own before a call, the call), …]}, for calls that all ranks of a group have made."""
    offsets = _clock_offsets(dumps)
    released = {}  # {(group, number): when the last rank called it}
    for group, numbers in _common(dumps).items():
        for number in numbers:
            released[group, number] = max(
                dumps[rank].calls[group][number].created - offsets[rank] for rank in group.ranks
            )
    times = defaultdict(list)
    for rank, dump in dumps.items():
        free = None
        for (group, number), call in _ordered(dump):
            if (group, number) not in released:
                continue
            if free is not None:
                times[rank].append((max(call.created - offsets[rank] - free, 0) / 1e9, call))
            mine = call.created - offsets[rank] if call.kind in ROOTED else released[group, number]
            free = mine if free is None else max(free, mine)
    return dict(times)


def _ordered(dump: Dump) -> list:
    calls = [((group, number), call) for group, of in dump.calls.items() for number, call in of.items()]
    return sorted(calls, key=lambda each: each[1].order)


def _common(dumps: dict[int, Dump]) -> dict:
    """Return {group: the numbers of the collectives that all of its ranks have in their records}."""
    groups = {group for dump in dumps.values() for group in dump.calls if len(group.ranks) > 1}
    return {
        group: sorted(set.intersection(*(set(dumps[rank].calls.get(group, {})) for rank in group.ranks)))
        for group in groups
        if set(group.ranks) <= set(dumps)
    }


def _span(dumps: dict[int, Dump]) -> float:
    """Return the seconds from the first call to the last one, by the clock of the rank with the longest record."""
    created = [[call.created for of in dump.calls.values() for call in of.values()] for dump in dumps.values()]
    return max(max(of) - min(of) for of in created if of) / 1e9


def _clock_offsets(dumps: dict[int, Dump]) -> dict[int, int]:
    """Return {rank: ns by which its node's clock is ahead of the others}, as far as the calls prove it.

    A rank cannot call a group's next collective before all of its ranks have called this one. That bounds the difference
    of two clocks from both sides. If 0 lies between the bounds, the clocks are taken to agree. If the bounds contradict
    each other, the calls did not wait for each other, and prove nothing.
    """
    ahead = defaultdict(dict)  # {rank: {another: ns by which that one's clock is ahead}}
    for group, numbers in _common(dumps).items():
        first, *others = group.ranks
        for other in others:
            a, b = dumps[first].calls[group], dumps[other].calls[group]
            pairs = [n for n in numbers if n + 1 in a and n + 1 in b and a[n].kind not in ROOTED]
            if pairs:
                lower = max(b[n].created - a[n + 1].created for n in pairs)
                upper = min(b[n + 1].created - a[n].created for n in pairs)
                proven = lower <= upper and not lower <= 0 <= upper
                ahead[first][other] = (lower + upper) // 2 if proven else 0
                ahead[other][first] = -ahead[first][other]
    offsets = {}
    for start in dumps:
        pending = [] if start in offsets else [start]
        offsets.setdefault(start, 0)
        while pending:
            rank = pending.pop()
            new = {other: offsets[rank] + by for other, by in ahead[rank].items() if other not in offsets}
            offsets |= new
            pending += new
    return offsets
