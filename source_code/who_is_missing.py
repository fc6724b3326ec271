"""Why does it hang? Compare what the ranks of a run have left, and name the one that the others wait for.

  python who_is_missing.py --folder flight                                what labkit/measuring/flight.py has written
  python who_is_missing.py --folder . --prefix nccl_trace_rank_           what NCCL has, when it timed out

It names a rank that did not arrive at a collective, or that called another one, with other sizes or of another type
(dtype) than the rest, even if it went on; a rank that is dead or stopped (kill -STOP); and the line of the program
where each is. It needs no rank to be alive; on the node where a rank was, it looks whether its process is there.
"""

import linecache
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
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
    lost = _lost(places, told)
    unsaid = lost | _outdated(groups, told)  # what these have written may be of a pause before
    for calls in groups.values():
        for rank in unsaid & set(calls):
            del calls[rank]
    told = {rank: until for rank, until in told.items() if rank not in unsaid}
    silent = sorted(({rank for _, members in groups for rank in members} | set(places)) - set(told))
    lines = _of_failures(places, told)
    one_failed = bool(lines)
    lines += _of_silent_ranks(silent, lost, places, one_failed)
    troubles = [found for group, calls in groups.items() for found in _troubles(*group, calls, places, told)]
    for _, said in sorted(troubles):  # what began first is the cause, or near it
        lines += said
    if silent and not troubles and not one_failed:
        lines += _last_calls(groups)
    return "\n".join(lines or _of_no_trouble(groups, places))


def _of_failures(places: dict, told: dict) -> list[str]:
    """Of ranks that did not fail because of another one."""
    alike = defaultdict(list)
    for rank, place in sorted(places.items()):
        aborted = rank in told and place.left == "Aborted"  # as NCCL's watchdog does with ranks that wait
        if place.left not in (None, "finished") and not LOST_CONTACT.search(place.left) and not aborted:
            alike[shorten(place.left, 160, placeholder=" …"), place.line].append(rank)
    return [_row(f"{_ranks(some)} failed:", left, line).strip() for (left, line), some in alike.items()]


def _lost(places: dict, told: dict) -> set:
    """The ranks that are dead or stopped, as far as can be known.

    Where all were killed at once, as a launcher may do, the ones that were dead before show in the dates alone.
    """
    last = max((place.seen for place in places.values()), default=0)
    over = any(place.ended or LOST_CONTACT.search(place.left or "") for place in places.values())
    some_live = any(place.state == "there" for place in places.values())
    lost = set()
    for rank, place in places.items():
        if place.left is not None or place.ended or place.state == "there":
            continue
        alone = place.state == "gone" and (over or some_live)
        early = rank in told and last - place.seen > 4 * place.beat
        may_live = place.state is None and not over and time.time() - place.seen < 4 * place.beat
        mute = rank not in told and place.line is None and not may_live
        if place.state == "stopped" or alone or early or mute:
            lost.add(rank)
    return lost


def _outdated(groups: dict, told: dict) -> set:
    """Ranks whose record holds until a moment after which others of their group have called something."""
    found = set()
    for calls in groups.values():
        last = max((call.created for of in calls.values() for call in of.values()), default=0) / 1e9
        found |= {rank for rank in calls if told[rank] < last}
    return found


def _of_silent_ranks(silent: list, lost: set, places: dict, one_failed: bool) -> list[str]:
    """What can be known of ranks without a flight record that counts."""
    said, ended = [], defaultdict(list)
    for rank in silent:
        place = places.get(rank)
        if place is None:
            said.append(f"rank {rank} is dead, or has not begun, or writes elsewhere: there is nothing of it here")
        elif rank in lost:
            said.append(_of_a_lost_rank(rank, place, one_failed))
            if place.line:
                said.append(_row("it had been quiet before, at", "", place.line))
        elif place.line or place.ended:  # a signal's handler wrote that; a record needs the interpreter
            ended[place.line].append(rank)
        elif place.state == "there" and time.time() - place.seen > 4 * place.beat:
            said.append(
                f"rank {rank} is there ({place.process}), but none of its Python runs: a thread that is stuck outside of "
                "it holds the interpreter; kill -TERM ends it, and it says where it was"
            )
        elif not place.left:
            said.append(f"rank {rank} is there ({place.process}), and has not been quiet for long: look again later")
    if ended:
        said.append("these were ended from outside, and left no flight record that counts:")
    return said + [_row(_ranks(some), "", line) for line, some in ended.items()]


def _of_a_lost_rank(rank: int, place: flight.Place, one_failed: bool) -> str:
    if place.state == "stopped":
        return f"rank {rank} is stopped: {place.process} lives, but does nothing; kill -CONT lets it go on"
    if place.state == "gone":
        why = (
            "another rank has failed, so perhaps the launcher ended it"
            if one_failed
            else "see the launcher's output, or dmesg"
        )
        return f"rank {rank} is dead: {place.process} ended without a word; {why}"
    hint = "ps -o stat= -p PID there says T if it is stopped, and nothing if it is dead"
    return f"rank {rank} is dead or stopped: {place.process} gives no sign of life; {hint}"


def _troubles(name: str, members: tuple, calls: dict, places: dict, told: dict) -> list[tuple]:
    """[(when it began, what to say)] of the collectives at which the ranks of a group part.

    They are the first that went on all the same, as NCCL sometimes can, and the first that did not.
    calls: {rank: {number: flight.Call}} of those ranks that have told.
    """
    oldest = max((min(of) for of in calls.values() if of), default=0)  # ranks keep the last ones
    numbers = sorted({number for of in calls.values() for number in of if number >= oldest})
    found = {}  # {whether it went on: (when, what to say)}
    for number in numbers:
        arrived = {rank: of[number] for rank, of in calls.items() if number in of}
        done = all(call.state == "completed" for call in arrived.values())
        created = min(call.created for call in arrived.values())
        absent = [] if done else sorted(rank for rank in set(calls) - set(arrived) if told[rank] > created / 1e9)
        alike = _alike(arrived)
        if done not in found and (absent or len(alike) > 1):
            title = f"collective {number} of group {name} (ranks {_list(members)})"
            said = _told(title, alike, absent, calls, places)
            if done:
                said.append("it went on all the same, probably with wrong numbers")
            if not found:
                said += _apart_before(number, oldest, calls)
            found[done] = created, said
        if False in found:
            break
    return list(found.values())


def _apart_before(number: int, oldest: int, calls: dict) -> list[str]:
    """Of the first collective before at which calls fit that were not meant for each other.

    Their lines differ, which may be right (``if rank == 0: … else: …``), and a rank has called the line of another one
    at another time, which then is a rank ahead of or behind the others.
    """
    all_paths = {rank: {call.path for call in of.values()} for rank, of in calls.items()}
    for earlier in range(oldest, number):
        at = {rank: of[earlier] for rank, of in calls.items() if earlier in of}
        paths = {call.path for call in at.values()}
        if any(len(paths & all_paths[rank]) > 1 for rank in at):
            depth = next(i for i, lines in enumerate(zip_longest(*paths)) if len(set(lines)) > 1)
            hint = (
                f"they were apart before: number {earlier} fits, by accident it seems, but comes from different lines"
            )
            return [hint, *_called(at, depth)]
    return []


def _alike(arrived: dict) -> list[dict]:
    """[{rank: its call}] of the ranks whose calls fit together, most ranks first."""
    same = defaultdict(dict)
    for rank, call in sorted(arrived.items()):
        if call.kind in UNEVEN:  # and only one of the ranks may have a list
            fits = frozenset(dtype for side in call.dtypes for dtype in side)
        else:
            fits = call.dtypes, tuple(tuple(map(prod, side)) for side in call.sizes)  # [] and [1] are one number each
        same[call.kind, fits][rank] = call
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


def _called(calls: dict, depth: int = 0) -> list[str]:
    """What ranks called, and where in the program. calls: {rank: Call}, which fit together; depth: callers to show."""
    by_lines = defaultdict(list)
    for rank, call in calls.items():
        by_lines[call.path[: depth + 1]].append(rank)
    return [_row(f"{_ranks(some)} called", _shown(calls[some[0]]), *lines) for lines, some in by_lines.items()]


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


def _row(who: str, what: str, *lines: flight.Line | None) -> str:
    """Who did what, and below it the lines of the program, with their text where the file is here."""
    row = f"  {who} {what}".rstrip()
    for line in filter(None, lines):
        text = linecache.getline(line.file, line.line).strip()
        row += f"\n      {Path(line.file).name}:{line.line} in {line.function}" + (f":  {text}" if text else "")
    return row


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
