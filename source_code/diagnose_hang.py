# SPDX-License-Identifier: BSD-3-Clause
"""Diagnose a hang: compare the flight records of all ranks, and name the rank that the others wait for.

  python diagnose_hang.py --folder flight     records of labkit/measuring/flight_recorder.py, or PyTorch's own dumps
  python diagnose_hang.py                     dumps in PyTorch's default folder: ~/.cache/torch, unless
                                               TORCH_FR_DUMP_TEMP_FILE or XDG_CACHE_HOME is set

It follows who waits for whom through all process groups (FSDP, HSDP, tensor parallelism, pipelines). It first reports the
root: a rank that waits for no other and did not arrive at a collective, or ranks that wait for each other in a circle;
then the ranks that wait because of them. It also reports a rank that called a different collective, or with different
shapes or dtypes, even if it went on; a rank that is dead or stopped (kill -STOP); and the current line of each rank. No
rank needs to be alive, and events are not ordered by clocks of different ranks. If no rank is missing, it looks for a
straggler: a rank that takes longer than the others between collectives, again and again.

Dumps are called flight_<rank> (the recorder's), comm_lib_trace_rank_<rank> (PyTorch 2.11 to 2.15) or nccl_trace_rank_<rank>
(older). PyTorch 2.15 writes one by default when a collective of NCCL times out. Which ranks write depends on the backend:
ProcessGroupNCCL (in older versions, or with TORCH_DIST_USE_NCCL2=0) notifies its peers through the store, so that all ranks
that can write do so. nccl2, the default of 2.15, writes only on ranks whose own collective failed or timed out, so that a
rank that waits in no collective has no dump. Dumps of earlier runs are ignored, and reported as such.

If the job still hangs, first query NCCL itself on one of its nodes (2.24 or later): ncclras -v, or
echo verbose status | nc localhost 28028
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html).
"""

import linecache
import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import prod
from operator import itemgetter
from pathlib import Path
from textwrap import shorten

from labkit import UserError
from labkit.measuring import flight_recorder, stragglers
from labkit.running import gpu_errors, options, ranks

UNEVEN = ("all_to_all", "all_to_all_single", "alltoall_base", "gather", "scatter")  # ranks may give different sizes
LOST_CONTACT = re.compile(f"{ranks.LOST_CONTACT.pattern}|NCCL|DistBackendError", re.IGNORECASE)
WORDS = {"kind": "what they called", "dtypes": "the type of the numbers", "sizes": "the shape of the tensors"}


@dataclass(frozen=True)
class Config(options.Options):
    folder: str | None = options.option(None, "folder of the ranks' dumps (default: PyTorch's)")
    prefix: str | None = options.option(None, "prefix of the dumps' names, before the rank (default: any known one)")


@dataclass(frozen=True)
class Blocked:
    """Calls in a process group that cannot complete, because other ranks have not joined them."""

    title: str  # "collective 2 of group tp (ranks 2-3)"
    where: str  # "in group tp, collective 2"
    waiting: dict[int, flight_recorder.Call]
    missing: frozenset[int]  # ranks that have not arrived, or have no record
    hint: tuple[str, ...] = ()  # lines to add


def report(folder: str | Path | None = None, prefix: str | None = None) -> str:
    """Report which ranks the others of a run wait for: the root first, then the ranks that wait because of it.

    Args:
        folder, prefix: where the dumps are, as for ``flight_recorder.located``.

    Returns:
        Lines of text.

    Raises:
        UserError: the dumps cannot be read.
    """
    return diagnosis(flight_recorder.read(folder, prefix))


def diagnosis(run: flight_recorder.Run) -> str:
    """Report on a run that has been read, as ``report`` does."""
    groups, places, valid_until = _by_group(run.dumps), run.places, run.valid_until
    lost = _lost(places, valid_until)
    unreliable = lost | _outdated(groups, valid_until)  # their records may be of an earlier pause
    dumps = {rank: dump for rank, dump in run.dumps.items() if rank not in unreliable}
    groups, valid_until = _by_group(dumps), {r: until for r, until in valid_until.items() if r not in unreliable}
    members = {rank for dump in run.dumps.values() for group in dump.calls for rank in group.ranks}
    silent = sorted((members | set(places)) - set(valid_until))

    lines = _of_failures(places, valid_until)
    one_failed = bool(lines)
    lines += _of_silent_ranks(silent, lost, places, one_failed)
    blocked, clashing = _messages(dumps), set()
    for group, calls in groups.items():
        alike = [of for other, of in groups.items() if other.label == group.label and other != group]
        findings, held, diverged = _compared(group, calls, dumps, places, alike)
        lines += findings
        blocked += held
        clashing |= diverged
    blocked.sort(
        key=lambda held: min((call.order for call in held.waiting.values()), default=0)
    )  # usually consistent between ranks
    roots, rest = _of_the_waiting(blocked, clashing, dumps, places)
    lines += roots
    lines += ["these wait because of that:"] if lines and rest else []
    lines += rest
    if silent and not blocked and not clashing and not one_failed:
        lines += _last_calls(groups)
    lines = lines or _of_no_trouble(groups, places, stragglers.find(run.dumps))
    lines += [
        f"left out, as of an earlier run: what {_ranks(some)} left ({why}); remove it" for some, why in run.left_out
    ]
    return "\n".join(lines)


def _by_group(dumps: dict) -> dict:
    """Sort the calls of all ranks by group: {group: {rank: {number: Call}}}."""
    pending = defaultdict(dict)
    for rank, dump in dumps.items():
        for group, calls in dump.calls.items():
            pending[group][rank] = calls
    return pending


def _of_failures(places: dict, valid_until: dict) -> list[str]:
    """Report ranks that failed by themselves, not because of another one."""
    alike, findings = defaultdict(list), []
    for rank, place in sorted(places.items()):
        aborted = rank in valid_until and place.left == "Aborted"  # as NCCL's watchdog does with ranks that wait
        if place.left == "Aborted" and place.inside and not aborted:
            sentence = (
                f"rank {rank} was aborted in {place.inside}(): gloo aborts a rank that receives more bytes than it expects, so "
                "a rank has another shape or dtype; start again with TORCH_DISTRIBUTED_DEBUG=DETAIL to see which "
                "(in PyTorch 2.15 DDP crashes with it)"
            )
            findings.append(_row(sentence, "", place.line).strip())
        elif place.left not in (None, "finished") and not LOST_CONTACT.search(place.left) and not aborted:
            alike[shorten(place.left, 160, placeholder=" …"), place.line].append(rank)
    findings += [_row(f"{_ranks(some)} failed:", left, line).strip() for (left, line), some in alike.items()]
    return findings + [gpu_errors.HINT] * any(gpu_errors.is_hardware(left) for left, _ in alike)


def _lost(places: dict, valid_until: dict) -> set:
    """Return the ranks that are known to be dead or stopped.

    If a launcher has killed all ranks at once, those that died before can be recognized by their last heartbeat only.
    """
    last = max((place.seen for place in places.values()), default=0)
    over = any(place.ended or LOST_CONTACT.search(place.left or "") for place in places.values())
    some_live = any(place.state == "there" for place in places.values())
    lost = set()
    for rank, place in places.items():
        if place.left is not None or place.ended or place.state == "there":
            continue
        alone = place.state == "gone" and (over or some_live)
        early = rank in valid_until and last - place.seen > 4 * place.beat
        may_live = place.state is None and not over and time.time() - place.seen < 4 * place.beat
        mute = rank not in valid_until and place.line is None and not may_live
        if place.state == "stopped" or alone or early or mute:
            lost.add(rank)
    return lost


def _outdated(groups: dict, valid_until: dict) -> set:
    """Return the ranks whose record ends before calls of other ranks in their group."""
    pending = set()
    for calls in groups.values():
        last = max((call.created for of in calls.values() for call in of.values()), default=0) / 1e9
        pending |= {rank for rank in calls if valid_until[rank] < last}
    return pending


def _of_silent_ranks(silent: list, lost: set, places: dict, one_failed: bool) -> list[str]:
    """Report what is known of ranks without a valid flight record."""
    findings, ended = [], defaultdict(list)
    for rank in silent:
        place = places.get(rank)
        if place is None:
            findings.append(
                f"rank {rank} is dead, or has not begun, or waits in no collective, or writes elsewhere: there is nothing of it "
                "here (PyTorch's nccl2 writes a dump only on ranks whose own collective failed or timed out)"
            )
        elif rank in lost:
            findings.append(_of_a_lost_rank(rank, place, one_failed))
            if place.line:
                findings.append(_row("it had been quiet before, at", "", place.line))
        elif place.left == "Aborted" and place.inside:
            continue  # reported with the failures
        elif place.line or place.ended:  # a signal's handler wrote that; a record needs the interpreter
            ended[place.line].append(rank)
        elif place.state == "there" and time.time() - place.seen > 4 * place.beat:
            findings.append(
                f"rank {rank} is there ({place.process}), but none of its Python runs: a thread that is stuck outside of "
                "it holds the interpreter; kill -TERM ends it, and it writes where it was"
            )
        elif not place.left:
            findings.append(
                f"rank {rank} is there ({place.process}), and has not been quiet for long: look again later"
            )
    if ended:
        findings.append("these were ended from outside, and left no complete flight record:")
    return findings + [_row(_ranks(some), "", line) for line, some in ended.items()]


def _of_a_lost_rank(rank: int, place: flight_recorder.RankState, one_failed: bool) -> str:
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


# Who waits for whom


def _compared(
    group: flight_recorder.Group, calls: dict, dumps: dict, places: dict, of_peers: list[dict]
) -> tuple[list[str], list[Blocked], set]:
    """Compare what the ranks of a group have called, number by number, up to where they cannot go on.

    Args:
        group: the group.
        calls: {rank: {number: flight_recorder.Call}} of those ranks whose record counts.
        dumps, places: of the run.
        of_peers: the calls of groups with the same label, such as the other shard groups of a mesh.

    Returns:
        Lines on calls that differ; the call, if any, that ranks of the group have not joined; and the ranks that wait for
        each other in calls that differ.
    """
    oldest = max((min(of) for of in calls.values() if of), default=0)  # ranks keep the last ones
    numbers = sorted({number for of in calls.values() for number in of if number >= oldest})
    findings, seen = [], set()  # seen: whether what was found went on; NCCL can go on although calls differ
    for number in numbers:
        arrived = {rank: of[number] for rank, of in calls.items() if number in of}
        done = all(call.state == "completed" for call in arrived.values())
        if done in seen:
            continue
        missing = frozenset() if done else _missing(group, number, arrived, calls, dumps, places)
        peers = [by_number[number] for of in of_peers for by_number in of.values() if number in by_number]
        alike = _group_compatible(arrived, peers)
        if not missing and len(alike) == 1:
            continue
        title = f"collective {number} of group {group.label} (ranks {_list(group.ranks)})"
        diverged = () if seen else tuple(_first_divergence(number, oldest, calls))
        if len(alike) > 1:
            findings += _differing(title, alike)
            findings += ["it went on all the same, probably with wrong numbers"] if done else []
            findings += diverged
            diverged = ()
        seen.add(done)
        if not done:
            waiting = {rank: call for rank, call in arrived.items() if call.waits}
            where = f"in group {group.label}, collective {number}"
            held = [Blocked(title, where, waiting, missing, diverged)] if missing else []
            return findings, held, set(waiting) if len(alike) > 1 else set()
    return findings, [], set()


def _missing(group, number: int, arrived: dict, calls: dict, dumps: dict, places: dict) -> frozenset:
    """Return the ranks of a group that have not arrived at a collective, as far as is known.

    A rank without a record is missing if the others have not completed the call; so is a rank whose record may have
    dropped it.
    """
    known = {rank for rank in group.ranks if rank in dumps and (calls.get(rank) or not dumps[rank].cut)}
    unknown = set(group.ranks) - known - set(arrived)
    if all(call.ended and not _timed_out(rank, call, dumps, places) for rank, call in arrived.items()):
        unknown = set()
    return frozenset(unknown | {rank for rank in known if max(calls.get(rank) or [0]) < number})


def _timed_out(rank: int, call: flight_recorder.Call, dumps: dict, places: dict) -> bool:
    """Return whether a rank lost contact in this call, which gloo records like a completed call."""
    place = places.get(rank)
    return bool(place and LOST_CONTACT.search(place.left or "")) and call.order == dumps[rank].last


def _messages(dumps: dict) -> list[Blocked]:
    """Return the sends and receives in which ranks wait, because the peer has not called its counterpart."""
    both = {(group, rank, call.peer, call.kind) for rank, dump in dumps.items() for group, call in dump.messages}
    other = {"send": "recv", "recv": "send"}
    pending = {}
    for rank, dump in dumps.items():
        for group, call in dump.messages:
            if (group, call.peer, rank, other[call.kind]) not in both:
                peer = f"rank {call.peer}" if call.peer is not None else "any rank"
                way = f"{call.kind} {'to' if call.kind == 'send' else 'from'} {peer}"
                title = f"rank {rank}'s {way} in group {group.label} (ranks {_list(group.ranks)})"
                missing = frozenset() if call.peer is None else frozenset((call.peer,))
                held = Blocked(title, f"in group {group.label}, in a {call.kind}", {rank: call}, missing)
                pending.setdefault((group, rank, call.peer, call.kind), held)
    return list(pending.values())


def _of_the_waiting(blocked: list[Blocked], clashing: set, dumps: dict, places: dict) -> tuple[list[str], list[str]]:
    """Follow who waits for whom.

    Args:
        blocked: the calls in which ranks wait.
        clashing: ranks that wait for each other in calls that differ, which has been reported.
        dumps, places: of the run.

    Returns:
        Lines on the ranks that wait for nobody, or for each other in a circle; lines on those that wait because of them.
    """
    waits_for = defaultdict(set)
    for held in blocked:
        for rank in held.waiting:
            waits_for[rank] |= held.missing
    roots = {rank for held in blocked for rank in held.missing} - set(waits_for) - clashing
    findings = _of_roots(roots & set(dumps), blocked, dumps, places)
    for_any = {rank for rank, others in waits_for.items() if not others}  # whose message may be from any rank
    explained = _waiting_for(roots | clashing | for_any, waits_for)
    circles = set()
    while circle := _circle(waits_for, explained):
        findings.append(f"deadlock: {_ranks(circle)} wait for each other, in a circle")
        for rank, its_next in pairwise([*circle, circle[0]]):
            held = next(held for held in blocked if rank in held.waiting and its_next in held.missing)
            findings += _waits([rank], held, {its_next})
        circles |= set(circle)
        explained |= _waiting_for(set(circle), waits_for)
    rest = []
    for held in blocked:
        some = sorted(set(held.waiting) - circles)
        if some and not held.missing & roots & set(dumps):  # else it is reported with the root
            rest += _waits(some, held, held.missing)
    return findings, rest


def _waiting_for(some: set, waits_for: dict) -> set:
    """Return these ranks and all that wait for them, directly or indirectly."""
    pending, new = set(some), set(some)
    while new:
        new = {rank for rank, others in waits_for.items() if others & new} - pending
        pending |= new
    return pending


def _circle(waits_for: dict, explained: set) -> list[int]:
    """Return a circle of ranks that are not explained yet: each waits for the next, and the last for the first."""
    path = sorted(set(waits_for) - explained)[:1]
    while path:
        its_next = min(waits_for[path[-1]])
        if its_next in path:
            return path[path.index(its_next) :]
        path.append(its_next)
    return []


def _of_roots(roots: set, blocked: list[Blocked], dumps: dict, places: dict) -> list[str]:
    """Report the calls at which these ranks did not arrive, who waits there, and where the ranks are instead."""
    by_absent = defaultdict(list)
    for held in blocked:
        if absent := tuple(sorted(held.missing & roots)):
            by_absent[absent].append(held)
    findings, placed = [], set()
    for absent, some in sorted(by_absent.items()):
        for held in some:
            findings.append(f"{_ranks(absent)} did not arrive at {held.title}")
            findings += [line for alike in _group_compatible(held.waiting) for line in _called(alike)]
        findings += [_where(rank, dumps[rank], places.get(rank)) for rank in absent if rank not in placed]
        findings += [line for held in some for line in held.hint]
        placed |= set(absent)
    return findings


def _where(rank: int, dump: flight_recorder.Dump, place: flight_recorder.RankState | None) -> str:
    """Report where a rank is or was, or else its last call."""
    if place and (place.left or place.line):
        had_left = f"rank {rank} had left", f"({place.left})"
        row = _row(*(had_left if place.left else (f"rank {rank} is at", "")), place.line)
        if place.inside and (not place.left or LOST_CONTACT.search(place.left)):  # and in no call that is recorded
            row += (
                f"\n      it waits there, in {place.inside}() of torch.distributed, in a call that its record does not have "
                "(gloo's has no send or receive): see which rank that line waits for"
            )
        return row
    ordered = [
        (call.order, f"collective {number} of group {group.label}", call)
        for group, calls in dump.calls.items()
        for number, call in calls.items()
    ]
    if not ordered:
        return f"  rank {rank} has called no collective"
    _, which, call = max(ordered, key=itemgetter(0))
    return _row(f"rank {rank} last called", f"{which}, {_shown(call)}", call.line)


def _first_divergence(number: int, oldest: int, calls: dict) -> list[str]:
    """Report the first earlier collective whose calls match by accident only.

    The calls come from different lines, which may be correct (``if rank == 0: … else: …``), but one of the ranks has also
    called another rank's line at another time, so that it is ahead of or behind the others.
    """
    all_paths = {rank: {call.path for call in of.values()} for rank, of in calls.items()}
    for earlier in range(oldest, number):
        at = {rank: of[earlier] for rank, of in calls.items() if earlier in of}
        paths = {call.path for call in at.values()}
        if any(len(paths & all_paths[rank]) > 1 for rank in at):
            depth = next(i for i, lines in enumerate(zip_longest(*paths)) if len(set(lines)) > 1)
            hint = (
                f"they diverged earlier: at number {earlier} the calls happen to match, but come from different lines"
            )
            return [hint, *_called(at, depth)]
    return []


def _group_compatible(arrived: dict, peers=()) -> list[dict]:
    """Group the ranks whose calls are compatible: [{rank: its call}, …], the largest group first.

    Of two groups of the same size, the first is the one with more compatible calls among ``peers``, those of ranks of other
    process groups.
    """
    same = defaultdict(dict)
    for rank, call in sorted(arrived.items()):
        same[_form(call)][rank] = call
    votes = Counter(map(_form, peers))
    return [calls for _, calls in sorted(same.items(), key=lambda each: (-len(each[1]), -votes[each[0]]))]


def _form(call: flight_recorder.Call) -> tuple:
    """Return what the calls of a collective must have in common."""
    if call.kind in UNEVEN:  # and only one of the ranks may have a list
        return call.kind, frozenset(dtype for side in call.dtypes for dtype in side)
    return call.kind, call.dtypes, tuple(tuple(map(prod, side)) for side in call.sizes)  # [] and [1] have one element


def _differing(title: str, alike: list) -> list[str]:
    usual, *others = alike
    findings = []
    for odd in others:
        pair = [next(iter(some.values())) for some in (odd, usual)]
        what = next(what for what in WORDS if getattr(pair[0], what) != getattr(pair[1], what))
        apart = {call.line for call in odd.values()}.isdisjoint(call.line for call in usual.values())
        sentence = f"{_ranks(odd)} and {_ranks(usual)} differ in {WORDS[what]} at {title}"
        findings.append(sentence + (", called from different lines" if apart and what != "kind" else ""))
    return findings + [line for some in alike for line in _called(some)]


def _called(calls: dict, depth: int = 0) -> list[str]:
    """Format the calls of ranks, and their lines. calls: {rank: Call}, which are compatible; depth: callers to show."""
    by_lines = defaultdict(list)
    for rank, call in calls.items():
        by_lines[call.path[: depth + 1]].append(rank)
    return [_row(f"{_ranks(some)} called", _shown(calls[some[0]]), *lines) for lines, some in by_lines.items()]


def _waits(ranks: list, held: Blocked, missing) -> list[str]:
    """Report in which calls ranks wait, and for which ranks."""
    by_call = defaultdict(list)
    for rank in ranks:
        by_call[held.waiting[rank].line, _shown(held.waiting[rank])].append(rank)
    whom = _ranks(missing) if missing else "any rank"
    return [
        _row(f"{_ranks(some)} {'are' if len(some) > 1 else 'is'} waiting", f"{held.where}, for {whom}: {shown}", line)
        for (line, shown), some in by_call.items()
    ]


def _last_calls(groups: dict) -> list[str]:
    findings = []
    for group, calls in groups.items():
        last = {rank: of[max(of)] for rank, of in calls.items() if of}
        if last:
            findings.append(f"the last collective of the others in group {group.label} (ranks {_list(group.ranks)})")
            findings += [line for some in _group_compatible(last) for line in _called(some)]
    return findings


def _of_no_trouble(groups: dict, places: dict, slow: stragglers.Straggler | None) -> list[str]:
    """Report that all ranks have called the same collectives, and which rank is slow."""
    counts = ", ".join(f"{max(map(len, calls.values()))} of group {group.label}" for group, calls in groups.items())
    findings = _of_a_straggler(slow) if slow else []
    findings.append(f"no rank is missing: in each group all ranks have called the same collectives (the last {counts})")
    hanging = {rank: place for rank, place in places.items() if place.left != "finished"}
    if hanging:
        findings.append(
            "if it hangs all the same, look at where the ranks are: storage, a GPU or the network may be waiting"
        )
    for rank, place in sorted(hanging.items()):
        findings.append(_row(f"rank {rank} " + ("left" if place.left else "is at"), place.left or "", place.line))
    return findings


def _of_a_straggler(slow: stragglers.Straggler) -> list[str]:
    others = [time for rank, time in slow.own.items() if rank != slow.rank]
    low, high = (f"{time:.2f}" for time in (min(others), max(others)))
    theirs = f"{low} to {high}" if len(others) > 1 else high
    sentence = (
        f"rank {slow.rank} is a straggler: of {slow.span:.2f} s it spends {slow.own[slow.rank]:.2f} s between "
        f"collectives, the others {theirs} s; most of it before it calls"
    )
    return [_row(sentence, "", slow.line).strip()]


def _shown(call: flight_recorder.Call) -> str:
    """Format a call: "all_reduce of [4, 8] Float"."""
    inputs, dtypes = (side[0] or side[1] for side in (call.sizes, call.dtypes))
    tensors = ", ".join(f"{list(size)} {dtype}" for size, dtype in zip_longest(inputs, dtypes, fillvalue=""))
    return f"{call.kind} of {tensors}" if tensors else call.kind


def _row(who: str, what: str, *lines: flight_recorder.Line | None) -> str:
    """Format a rank's action, and below it the program's lines, with their text if the file is available."""
    row = f"  {who} {what}".rstrip()
    for line in filter(None, lines):
        text = linecache.getline(line.file, line.line).strip()
        row += f"\n      {Path(line.file).name}:{line.line} in {line.function}" + (f":  {text}" if text else "")
    return row


def _ranks(some) -> str:
    return f"rank{'s' * (len(some) > 1)} {_list(some)}"


def _list(some) -> str:
    """Format ranks: "0-3, 6"."""
    runs = []
    for rank in sorted(some):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


if __name__ == "__main__":
    wanted = options.parse(Config, __doc__)
    try:
        run = flight_recorder.read(wanted.folder, wanted.prefix)
        what = f"the dumps {run.prefix}* of {_ranks(run.dumps)}" if run.dumps else f"what {_ranks(run.places)} left"
        print(f"read {what} in {run.folder.absolute()}")
        print(diagnosis(run))
    except UserError as error:
        options.exit_with_error(str(error))
