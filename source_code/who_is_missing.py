"""Why does it hang? Compare what the ranks of a run have left, and name the one that the others wait for.

  python who_is_missing.py --folder flight                                what labkit/measuring/flight.py has written
  python who_is_missing.py --folder . --prefix nccl_trace_rank_           what NCCL has, when it timed out

It names a rank that did not arrive at a collective, or that called another one, with other shapes or of another type
(dtype) than the rest; a rank that is dead; and the line of the program where each is. It needs no rank to be alive.
"""

import linecache
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten

from labkit import UserError
from labkit.measuring import flight
from labkit.running import options, ranks

UNEVEN = ("all_to_all", "all_to_all_single", "alltoall_base", "gather", "scatter")  # ranks may give different sizes
LOST_CONTACT = re.compile(f"{ranks.LOST_CONTACT.pattern}|NCCL|DistBackendError", re.IGNORECASE)
WORDS = {"kind": "what they called", "dtypes": "the type of the numbers", "sizes": "the shape of the tensors"}


@dataclass(frozen=True)
class Options(options.Options):
    folder: str = options.option(".", "where the ranks' dumps are")
    prefix: str = options.option(flight.FLIGHT, "how the dumps' names begin; the rest is the rank")


def report(folder: str | Path, prefix: str = flight.FLIGHT) -> str:
    """What the dumps in a folder say, in lines. UserError if they cannot be read."""
    groups, places, told = flight.read(folder, prefix)
    silent = sorted(({rank for _, members in groups for rank in members} | set(places)) - told)
    lines = _of_failures(places, told)
    alone = bool(lines)
    lines += _of_silent_ranks(silent, places)
    troubles = [found for (name, members), calls in groups.items() if (found := _trouble(name, members, calls, places))]
    for _, said in sorted(troubles):  # what began first is the cause, or near it
        lines += said
    if silent and not troubles and not alone:
        lines += _last_calls(groups)
    return "\n".join(lines or _of_no_trouble(groups, places))


def _of_failures(places: dict, told: set) -> list[str]:
    """Of ranks that did not fail because of another one."""
    alike = defaultdict(list)
    for rank, place in sorted(places.items()):
        aborted = rank in told and place.left == "Aborted"  # as NCCL's watchdog does with ranks that wait
        if place.left not in (None, "finished") and not LOST_CONTACT.search(place.left) and not aborted:
            alike[shorten(place.left, 160, placeholder=" …"), place.line].append(rank)
    return [_row(f"{_ranks(some)} failed:", left, line).strip() for (left, line), some in alike.items()]


def _of_silent_ranks(silent: list, places: dict) -> list[str]:
    """What can be known of ranks without a flight record."""
    said, ended = [], defaultdict(list)
    for rank in silent:
        place = places.get(rank)
        if place is None:
            said.append(f"rank {rank} is dead, or has not begun, or writes elsewhere: there is nothing of it here")
        elif place.line:  # a C thread or a signal's handler wrote that; a record needs the interpreter
            ended[place.line].append(rank)
        elif not place.left:
            said.append(
                f"rank {rank} is dead: {place.process} ended without a word; see the launcher's output, or dmesg"
            )
    if ended:
        said.append("these were ended from outside, or are stuck outside of Python, and left no flight record:")
    return said + [_row(f"{_ranks(some)}", "", line) for line, some in ended.items()]


def _trouble(name: str, members: tuple, calls: dict, places: dict) -> tuple[int, list[str]] | None:
    """(when it began, what to say) of the first collective at which the ranks of a group part; None if they do not.

    calls: {rank: {number: flight.Call}} of those ranks that have told.
    """
    oldest = max((min(of) for of in calls.values() if of), default=0)  # ranks keep the last ones
    numbers = sorted({number for of in calls.values() for number in of if number >= oldest})
    for number in numbers:
        arrived = {rank: of[number] for rank, of in calls.items() if number in of}
        absent = sorted(set(calls) - set(arrived))
        alike = _alike(arrived)
        done = all(call.state == "completed" for call in arrived.values())
        mixed = len({call.kind for call in arrived.values()}) > 1  # wrong even if it went on, as NCCL sometimes can
        if mixed or (not done and (absent or len(alike) > 1)):
            title = f"collective {number} of group {name} (ranks {_list(members)})"
            said = _told(title, alike, absent, calls, places)
            before = {rank: of[number - 1] for rank, of in calls.items() if number - 1 in of}
            if len({call.line for call in before.values()}) > 1:
                said.append(f"they were apart before: number {number - 1} fits, but comes from different lines")
                said += _called(before)
            return min(call.created for call in arrived.values()), said
    return None


def _alike(arrived: dict) -> list[dict]:
    """[{rank: its call}] of the ranks whose calls fit together, most ranks first."""
    same = defaultdict(dict)
    for rank, call in sorted(arrived.items()):
        same[call.kind, call.dtypes, None if call.kind in UNEVEN else call.sizes][rank] = call
    return sorted(same.values(), key=lambda calls: -len(calls))


def _told(title: str, alike: list, absent: list, calls: dict, places: dict) -> list[str]:
    usual, *others = alike
    said = [f"{_ranks(absent)} did not arrive at {title}"] if absent else []
    for odd in others:
        pair = [next(iter(some.values())) for some in (odd, usual)]
        what = next(what for what in WORDS if getattr(pair[0], what) != getattr(pair[1], what))
        said.append(f"{_ranks(odd)} and {_ranks(usual)} differ in {WORDS[what]} at {title}")
    for some in alike:
        said += _called(some)
    for rank in absent:
        place, last = places.get(rank), max(calls.get(rank, ()), default=None)
        if place and place.left:
            said.append(_row(f"rank {rank} had left", f"({place.left})", place.line))
        elif place and place.line:
            said.append(_row(f"rank {rank} is at", "", place.line))
        elif last is not None:
            call = calls[rank][last]
            said.append(_row(f"rank {rank} last called", f"number {last}, {_shown(call)}", call.line))
    return said


def _called(calls: dict) -> list[str]:
    """What ranks called, and where in the program. calls: {rank: Call}, which fit together."""
    by_line = defaultdict(list)
    for rank, call in calls.items():
        by_line[call.line].append(rank)
    return [_row(f"{_ranks(some)} called", _shown(calls[some[0]]), line) for line, some in by_line.items()]


def _last_calls(groups: dict) -> list[str]:
    said = []
    for (name, members), calls in groups.items():
        last = {rank: of[max(of)] for rank, of in calls.items() if of}
        if last:
            said.append(f"the last collective of the others in group {name} (ranks {_list(members)})")
            said += [line for some in _alike(last) for line in _called(some)]
    return said


def _of_no_trouble(groups: dict, places: dict) -> list[str]:
    """All ranks have called the same."""
    counts = ", ".join(f"{max(map(len, calls.values()))} of group {name}" for (name, _), calls in groups.items())
    said = [f"no rank is missing: in each group all ranks have called the same collectives (the last {counts})"]
    hanging = {rank: place for rank, place in places.items() if place.left != "finished"}
    if hanging:
        said.append(
            "if it hangs all the same, look at where the ranks are: storage, a GPU or the network may be waiting"
        )
    for rank, place in sorted(hanging.items()):
        said.append(_row(f"rank {rank} " + ("left" if place.left else "is at"), place.left or "", place.line))
    return said


def _shown(call: flight.Call) -> str:
    """all_reduce of [4, 8] Float"""
    inputs, dtypes = (side[0] or side[1] for side in (call.sizes, call.dtypes))
    tensors = ", ".join(f"{list(size)} {dtype}" for size, dtype in zip_longest(inputs, dtypes, fillvalue=""))
    return f"{call.kind} of {tensors}" if tensors else call.kind


def _row(who: str, what: str, line: flight.Line | None) -> str:
    """Who did what, and below it the line of the program, with its text where the file is here."""
    row = f"  {who} {what}".rstrip()
    if line is None:
        return row
    text = linecache.getline(line.file, line.line).strip()
    return f"{row}\n      {Path(line.file).name}:{line.line} in {line.function}" + (f":  {text}" if text else "")


def _ranks(some) -> str:
    return f"rank{'s' * (len(some) > 1)} {_list(some)}"


def _list(some) -> str:
    """0-3, 6"""
    runs = []
    for rank in sorted(some):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


if __name__ == "__main__":
    wanted = options.parse(Options, __doc__)
    try:
        print(report(wanted.folder, wanted.prefix))
    except UserError as error:
        options.leave(str(error))
