# SPDX-License-Identifier: BSD-3-Clause
"""Record the last collectives and the current stack of every rank, to diagnose a run that hangs.

  with flight_recorder.recorder(folder, quiet=60):       on every rank, around code that may hang
      train()

When a rank has called no collective for ``quiet`` seconds, and when its work ends or raises, it writes two files:

  flight_3    the dump of PyTorch's flight recorder on rank 3: its last collectives, with the Python stack of each call,
              in the format of the dumps that PyTorch writes when NCCL times out (``torchfrtrace`` reads both)
  where_3     its process and node, the stacks of its threads, and how it ended. If a thread that is stuck in native code
              holds the interpreter lock, SIGTERM makes faulthandler's handler write the stack

PyTorch retains the last 2,000 calls of a rank (TORCH_FR_BUFFER_SIZE); a step of FSDP2 with 80 units makes 240. Measured on
a CPU with stacks of 84 frames, 2,000 calls take 5 MiB of memory, 0.6 MB on disk, and 0.03 s more to write than one call.
(The first stack of a process takes 1 s, with PyTorch 2.11 3 s.)

When the rank calls collectives again, it removes its dump: it was only a pause. Four times in ``quiet`` seconds the
recorder touches where_3 as a heartbeat, and flight_3 as long as it is complete. ``diagnose_hang.py`` compares the ranks.
A process that was killed or stopped (``kill -STOP``) has no heartbeat.

Private PyTorch used here, and only here: ``_dump_fr_trace`` and ``_dump_nccl_trace``, and the names and ranks of process
groups, which gloo's dumps lack.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import pickle
import re
import signal
import socket
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import labkit
from labkit import UserError

FLIGHT, WHERE = "flight_", "where_"
# File name prefixes of dumps: the recorder's, PyTorch's since 2.11 at the latest, and those of older versions.
PREFIXES = (FLIGHT, "comm_lib_trace_rank_", "nccl_trace_rank_")
MAX_CLOCK_SKEW = 5  # seconds between the clocks of two nodes; restarting a job takes longer
RAISED = "raised:"  # in where_<rank>: the stack of the exception follows
IS_QUIET = "quiet:"  # in where_<rank>: the stacks below are the watcher's
SIGNAL = "Stack (most recent call first):"  # of the main thread, written by SIGTERM's handler
MAIN = re.compile(rf"(?m)^(?:(?:Current t|T)hread .*|{re.escape(SIGNAL)})$")
P2P = re.compile(r"(?P<kind>send|recv) (?:\d+)(?:->|<-)(?P<peer>\d+|\?)$")  # in a profiling_name: "nccl:recv 1<-0"
ROOTED = ("broadcast", "gather", "reduce", "scatter")  # gloo lets some ranks leave these before others arrive
INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<")  # on whatever node
LIBRARIES = tuple(f"{os.path.realpath(Path(module.__file__).parent)}{os.sep}" for module in (torch, labkit))
STACK = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')


# Recording


@contextlib.contextmanager
def recorder(folder: str | Path, quiet: float = 60):
    """Record this rank's collectives within this context, and write them after ``quiet`` seconds without a collective.

    The recorder never ends a run, not even if it fails to write. The process group's timeout does.

    Args:
        folder: where to write. All nodes must see it, for ``diagnose_hang.py`` to compare the ranks.
        quiet: seconds; choose it shorter than the process group's timeout.

    Raises:
        UserError: neither the process group nor the environment defines this process's rank, or the folder cannot be
            written to.
    """
    folder, rank = Path(folder), _rank(os.environ)
    _, began = _state_and_start(os.getpid())
    about = {"pid": os.getpid(), "began": began, "on": _machine(), "beat": quiet / 4}
    with _opened(folder, rank, f"process {os.getpid()} on {socket.gethostname()}\n{json.dumps(about)}\n") as where:
        faulthandler.enable(where)  # a crash
        # When a launcher ends the rank, it writes the stack of its main thread only: the other threads keep running, and
        # reading a stack that changes could crash the process.
        faulthandler.register(signal.SIGTERM, file=where, chain=True, all_threads=False)
        over, removing = threading.Event(), threading.Lock()
        written = []  # the last call of each record that the watcher has written
        arguments = folder, rank, where, quiet, over, removing, written
        watcher = threading.Thread(target=_watch, args=arguments, daemon=True)
        watcher.start()
        left = "finished"
        try:
            yield
        except BaseException as error:
            frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
            stack = [f'File "{code.co_filename}", line {line} in {code.co_name}' for code, line in reversed(frames)]
            left = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise
        finally:
            with removing:  # the watcher removes nothing that is written from here on
                over.set()
            watcher.join()
            try:
                if written[-1:] != [_last_call()]:
                    _dump(folder, rank, where)
                if left != "finished":
                    _write_lines(where, RAISED, *stack)
                _write_lines(where, f"left: {left}")  # last: from here on the record of this rank is complete
            finally:  # or they would write to the next file that gets this descriptor
                faulthandler.unregister(signal.SIGTERM)
                faulthandler.disable()


def _opened(folder: Path, rank: int, head: str):
    """Create where_<rank> with ``head`` as its content, and remove the files of an earlier run.

    Raises:
        UserError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (f"{FLIGHT}{rank}", f"{WHERE}{rank}"):
            (folder / name).unlink(missing_ok=True)
        where = open(folder / f"{WHERE}{rank}", "ab", buffering=0)  # append: truncating it leaves no hole
        where.write(head.encode())
        return where
    except OSError as error:
        raise UserError(
            f"flight records cannot be written to {folder} ({error.strerror}): name another folder"
        ) from None


def _rank(environ) -> int:
    """Return this process's rank: the process group's, else torchrun's, else that of a Slurm step with several tasks."""
    if dist.is_initialized():
        return dist.get_rank()
    in_step = int(environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1  # outside of such steps SLURM_PROCID is always 0
    declared = environ.get("RANK") or (environ.get("SLURM_PROCID") if in_step else None)
    if declared is None or not declared.isdigit():
        raise UserError("the flight recorder does not know its rank: enter it after init_process_group, or set RANK")
    return int(declared)


def _watch(folder, rank, where, quiet, over, removing, written):
    """Watch until ``over``: write a record whenever no collective has been called for ``quiet`` seconds.

    This thread reads the stacks while it holds the interpreter, so they stand still. (faulthandler's own thread, of
    ``dump_traceback_later``, cannot hold it, and has crashed processes that ran on.)
    """
    called, head = "not read yet", os.fstat(where.fileno()).st_size
    while True:
        looked = time.time()  # calls after this time may not be in the record
        if (now := _last_call()) != called:
            called, since = now, time.monotonic()
            # Truncate only what this thread has written: SIGTERM's handler may be writing to where_<rank> right now.
            with removing, contextlib.suppress(OSError):
                if written and not over.is_set():  # a record of a pause: if the rank died now, it would be misleading
                    written.clear()
                    (folder / f"{FLIGHT}{rank}").unlink(missing_ok=True)
                    os.ftruncate(where.fileno(), head)
        elif written[-1:] != [called] and time.monotonic() - since > quiet:
            _write_lines(where, f"{IS_QUIET} no collective for {quiet:g} s", _stacks())
            _dump(folder, rank, where)
            written.append(called)
        with contextlib.suppress(OSError):
            os.utime(where.fileno())  # the heartbeat
            if written[-1:] == [called]:
                os.utime(folder / f"{FLIGHT}{rank}", (looked, looked))  # it is complete up to that time
        if over.wait(quiet / 4):
            return


def _write_lines(where, *lines: str):
    """Write lines to where_<rank>. A full disk or an unavailable file system must not end training."""
    with contextlib.suppress(OSError):
        where.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))


def _stacks() -> str:
    """Return the stacks of all threads.

    faulthandler blocks the other threads while it writes, so it writes to a local file: a network folder could hang.
    """
    try:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read()
    except OSError as error:
        return f"no stacks: {error}"


def _trace(stacks: bool) -> dict:
    """Return the dump of this process's flight recorder; if there are several recorders, the first that has entries.

    PyTorch has one recorder for each implementation of a backend. Which one ``nccl`` is differs: from 2.15 on usually
    ``nccl2``.
    """
    c10d = torch._C._distributed_c10d
    if not (dist.is_initialized() and "nccl" in dist.get_backend()):
        return pickle.loads(
            c10d._dump_fr_trace(True, stacks, False)
        )  # gloo's; unpickling this process's own data is safe
    trace = pickle.loads(c10d._dump_nccl_trace(True, stacks, False))
    for name in ("nccl2", "nccl-lazy"):
        if not trace.get("entries"):
            with contextlib.suppress(TypeError):  # before 2.15 there is no such argument
                trace = pickle.loads(c10d._dump_fr_trace(True, stacks, False, name))
    return trace


def _last_call():
    return max((entry["record_id"] for entry in _trace(stacks=False).get("entries", [])), default=None)


def _dump(folder, rank, where):
    """Write flight_<rank> atomically; if that fails, write the reason to where_<rank>."""
    try:
        if dist.is_initialized() and dist.get_rank() != rank:  # or another rank would be blamed
            raise UserError(f"the environment's rank is {rank}, the process group {dist.get_rank()}: enter it later")
        trace, world = _trace(stacks=True), dist.distributed_c10d._world
        trace.setdefault("entries", [])
        trace["pg_config"] = {
            world.pg_names[group]: {"desc": group.group_desc, "ranks": str(sorted(world.pg_group_ranks[group]))}
            for group in world.pg_map
        }
        path = folder / f"{FLIGHT}{rank}"
        unfinished = path.with_name(f".{path.name}")
        unfinished.write_bytes(pickle.dumps(trace))
        unfinished.replace(path)
    except Exception as error:  # a full disk, another version of PyTorch: must not end training
        _write_lines(where, f"no flight record: {type(error).__name__}: {error}")


# Processes


def _machine() -> list | None:
    """Identify this machine and this container's process ids; None where there is no /proc (not Linux)."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return None


def _state_and_start(pid: int) -> tuple[str, str] | tuple[None, None]:
    """Return (state as ps shows it, start time in ticks since boot) of a process; (None, None) if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a process name may contain anything
    except OSError:
        return None, None
    return fields[0], fields[19]


def _state(known: dict) -> str | None:
    """Return the state of a recorded process: "there", "stopped" or "gone"; None if it was not on this machine."""
    if not known.get("on") or known["on"] != _machine():
        return None
    state, began = _state_and_start(known["pid"])
    if began != known["began"] or state in ("Z", "X"):
        return "gone"
    return "stopped" if state in ("T", "t") else "there"


# Reading


class Group(NamedTuple):
    """A process group."""

    name: str  # unique, and the same on all of its ranks
    label: str  # its name in a report: "mesh_tp", "default_pg"
    ranks: tuple[int, ...]  # global ranks, in the order of their ranks in the group


@dataclass(frozen=True)
class Call:
    """One call of a collective, or of a send or receive, by one rank."""

    kind: str  # "all_reduce"
    sizes: tuple  # (shapes of the inputs, shapes of the outputs), each a tuple of tuples
    dtypes: tuple  # (of the inputs, of the outputs), PyTorch's C++ names: "Float"
    state: str  # "scheduled", "started" or "completed"; always "scheduled" with gloo
    ended: bool  # completed; with gloo completed or timed out
    order: int  # among the calls of this rank
    created: int  # ns since 1970, by the clock of its node
    path: "tuple[Line, ...]"  # the program's lines in the stack of the call, innermost first
    peer: int | None = None  # of a send or receive: the other global rank; None if it may be any

    @property
    def line(self) -> "Line | None":
        return self.path[0] if self.path else None

    @property
    def waits(self) -> bool:
        """Return whether the rank waits in this call for other ranks."""
        return self.state != "completed" and not (self.ended and self.kind in ROOTED)


@dataclass(frozen=True)
class Line:
    """A line of a Python program."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class RankState:
    """The state of a rank, from where_<rank>."""

    process: str  # "process 123 on node-1"
    line: Line | None  # the current line, or the one that raised
    left: str | None  # "finished", an error message, or None: unknown, or still running
    ended: bool = False  # SIGTERM has ended it, and it has written its stack
    state: str | None = None  # "there", "stopped" or "gone" now; None if it runs on another machine
    seen: float = 0  # seconds since 1970: its last heartbeat
    beat: float = 15  # seconds between two heartbeats
    inside: str | None = None  # the function of torch.distributed that it is in, "recv"


@dataclass(frozen=True)
class Dump:
    """The flight record of one rank."""

    calls: dict[Group, dict[int, Call]]  # {group of the rank: {sequence number: collective}}
    messages: list[tuple[Group, Call]]  # sends and receives that have not completed
    cut: bool  # whether earlier calls were dropped from the recorder's buffer
    last: int  # Call.order of its last call


@dataclass(frozen=True)
class Run:
    """The flight records of a run.

    valid_until: {rank with a record: time up to which it is complete, in seconds since 1970}. A rank that was ended may
        have made calls after that; one that finished or hangs has not.
    """

    folder: Path
    prefix: str
    dumps: dict[int, Dump]
    places: dict[int, RankState]
    valid_until: dict[int, float]
    left_out: list[tuple[list[int], str]]  # (ranks, reason) of files that belong to an earlier run


class _Restricted(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, and a flight record contains only plain data")


def located(folder: str | Path | None = None, prefix: str | None = None, environ=os.environ) -> tuple[Path, str]:
    """Find the dumps of a run, and return (their folder, the prefix of their names).

    Without a folder, search where PyTorch writes them: TORCH_FR_DUMP_TEMP_FILE (or its older name) is their path up to
    the rank; else they are in $XDG_CACHE_HOME/torch, else in ~/.cache/torch (FlightRecorder.cpp, getWriter).

    Args:
        folder: where to search instead.
        prefix: the part of their names before the rank. None: any known prefix.
        environ: environment variables.

    Raises:
        UserError: there are no dumps, or dumps with two prefixes.
    """
    variables = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    base = next((environ[name] for name in variables if name in environ), None)
    if prefix is not None:
        wanted = [prefix]
    elif base is None:
        wanted = [*PREFIXES]
    else:
        own = os.path.basename(base)
        wanted = [own] if folder is None else [*dict.fromkeys((*PREFIXES, own))]
    if folder is None and base is None:
        cache = environ.get("XDG_CACHE_HOME", f"{environ.get('HOME', '/tmp')}/.cache")
        folder = f"{cache}/torch"
    elif folder is None:
        folder = os.path.dirname(base) or "."
    folder = Path(folder)
    there = [each for each in wanted if _by_rank(folder, each)]
    if len(there) > 1:
        raise UserError(f"{folder} has dumps of {len(there)} kinds ({', '.join(there)}): give the --prefix of one")
    if not there and not (FLIGHT in wanted and _by_rank(folder, WHERE)):
        names = ", ".join(f"{each}<rank>" for each in wanted)
        raise UserError(f"there is no dump ({names}) in {folder}: give the dumps' --folder, and their --prefix")
    return folder, there[0] if there else FLIGHT


def _by_rank(folder: Path, prefix: str) -> dict[int, Path]:
    """Find files named by rank: {rank: path}."""
    names = ((path.name[len(prefix) :], path) for path in folder.glob(f"{prefix}*"))
    return {int(rest): path for rest, path in sorted(names) if rest.isdigit()}


def read(folder: str | Path | None = None, prefix: str | None = None) -> Run:
    """Read the flight records of a run.

    A dump is a pickle, which could execute code: the unpickler accepts plain data only.

    Args:
        folder, prefix: as for ``located``.

    Raises:
        UserError: there is no dump, or one is damaged or of another run.
    """
    folder, prefix = located(folder, prefix)
    places = {rank: _place(path) for rank, path in _by_rank(folder, WHERE).items()}
    paths, raw, groups = _by_rank(folder, prefix), {}, {}
    for rank, path in paths.items():
        with _damage_of(path):
            raw[rank] = _unpickled(path)
            groups[rank] = _groups(raw[rank])
    left_out = _leave_out(raw, groups, places, paths)
    for rank in raw:
        if any(rank not in group.ranks for group in groups[rank].values()):
            raise UserError(f"{paths[rank]} is of a run without a rank {rank}: remove the dumps of other runs")
    # A recorder does not list groups that its rank has destroyed; other ranks may.
    known = {name: group for of_rank in groups.values() for name, group in of_rank.items()}
    dumps = {}
    for rank in raw:
        with _damage_of(paths[rank]):
            mine = {name: group for name, group in known.items() if rank in group.ranks}
            dumps[rank] = _dump_in(raw[rank]["entries"], mine | groups[rank])
    ended = {rank for rank, place in places.items() if place.ended}
    valid_until = {rank: paths[rank].stat().st_mtime if rank in ended else float("inf") for rank in dumps}
    return Run(folder, prefix, dumps, places, valid_until, left_out)


@contextlib.contextmanager
def _damage_of(path: Path):
    """Convert any error that a damaged file causes into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is not a flight record, or is damaged ({reason}): remove it, or dump again") from None


def _unpickled(path: Path) -> dict:
    with path.open("rb") as file:
        return _Restricted(file).load()


def _groups(raw: dict) -> dict[str, Group]:
    """Return the process groups of a dump, {name: group}."""
    return {
        name: Group(
            name,
            name if about["desc"] in ("", "undefined") else str(about["desc"]),
            tuple(map(int, json.loads(about["ranks"]))),
        )
        for name, about in raw["pg_config"].items()
    }


def _leave_out(raw: dict, groups: dict, places: dict, paths: dict) -> list[tuple[list[int], str]]:
    """Remove the dumps of earlier runs than the newest dump, and return [(ranks, reason), …].

    Such a dump has another world, or was written before the first call in the newest one. (The recorder removes its own
    old files, and one of its ranks may have ended, and written its dump, long before the others.)
    """
    worlds = {rank: {member for group in known.values() for member in group.ranks} for rank, known in groups.items()}
    written = {rank: paths[rank].stat().st_mtime for rank in raw}
    newest = max(filter(worlds.get, raw), key=written.get, default=None)
    if newest is None:
        return []
    with _damage_of(paths[newest]):
        began = min((int(entry["time_created_ns"]) for entry in raw[newest]["entries"]), default=0) / 1e9
    others = {rank for rank in raw if worlds[rank] and worlds[rank] != worlds[newest]}
    others |= set(places) - set(raw) - worlds[newest]
    older = {rank for rank in set(raw) - others - set(places) if written[rank] < began - MAX_CLOCK_SKEW}
    for rank in others | older:
        for known in (raw, groups, places):
            known.pop(rank, None)
    declared = []
    if others:
        sizes = ", ".join(map(str, sorted({len(worlds[rank]) for rank in others if worlds.get(rank)})))
        why = f"of a run of {sizes or 'more'} ranks; {paths[newest].name} is of one of {len(worlds[newest])}"
        declared.append((sorted(others), why))
    if older:
        last = max(written[rank] for rank in older)
        declared.append((sorted(older), f"written {began - last:.0f} s before the first call in {paths[newest].name}"))
    return declared


def _dump_in(entries: list[dict], groups: dict[str, Group]) -> Dump:
    """Convert the entries of a dump. groups: {name: a group of the rank}."""
    calls = {group: {} for group in groups.values()}
    messages = []
    # Of NCCL's coalesced sends and receives only the last entry has a state.
    ends = {_message(entry): entry["state"] for entry in entries if str(entry["profiling_name"]).endswith(":coalesced")}
    for entry in entries:
        name = entry["process_group"][0]
        if (name == "" and len(groups) > 1) or (name != "" and "" in groups):
            raise UserError(
                "gloo does not record in which process group a collective was called if PyTorch writes the dump, or with "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL: record with labkit/measuring/flight_recorder.py, and without that variable"
            )
        if name == "" and groups:
            name = next(iter(groups))
        if name not in groups:
            continue  # its ranks are unknown: all of them have destroyed the group
        group, call = groups[name], _call(entry)
        trace = P2P.search(str(entry["profiling_name"]))
        if not entry["is_p2p"]:
            calls[group][int(entry["collective_seq_id"])] = call
        elif trace and ends.get(_message(entry), call.state) != "completed":
            peer = None if trace["peer"] == "?" else group.ranks[int(trace["peer"])]
            messages.append((group, dataclasses.replace(call, peer=peer)))
    orders = [int(entry["record_id"]) for entry in entries] or [0]
    return Dump(calls, messages, cut=min(orders) > 0, last=max(orders))


def _message(entry: dict) -> tuple:
    return entry["process_group"][0], entry["p2p_seq_id"], entry["is_p2p"]


def _call(entry: dict) -> Call:
    stack = tuple((str(f["filename"]), int(f["line"]), str(f["name"])) for f in entry.get("frames", ()))
    library, _, name = str(entry["profiling_name"]).rpartition(":")
    return Call(
        kind=name.partition(" ")[0],
        sizes=tuple(tuple(tuple(map(int, shape)) for shape in entry[f"{side}_sizes"]) for side in ("input", "output")),
        dtypes=tuple(tuple(map(str, entry.get(f"{side}_dtypes", ()))) for side in ("input", "output")),
        state=str(entry["state"]),
        ended=entry["state"] == "completed" or (library == "gloo" and bool(entry.get("retired"))),
        order=int(entry["record_id"]),
        created=int(entry["time_created_ns"]),
        path=_path(stack),
    )


@functools.cache
def _path(stack: tuple) -> tuple[Line, ...]:
    """Return the program's lines of a stack. Cached: thousands of calls share a few stacks."""
    return own([Line(*frame) for frame in stack])


def _place(path: Path) -> RankState:
    text, seen = path.read_text(errors="replace"), path.stat().st_mtime
    process, known, *_ = [*text.split("\n", 2), ""]
    try:
        known = dict(json.loads(known))
    except (ValueError, TypeError):  # truncated, or another file
        known = {}
    raised = text.partition(f"\n{RAISED}\n")[2].partition("\nleft: ")[0]
    *_, stacks = re.split(rf"(?m)^{IS_QUIET}.*$", text)  # the last ones; the main thread's comes last
    left = re.search(r"(?m)^(?:left|Fatal Python error): (.*)$", text)
    lines = _lines(raised) if raised else _outside(_lines(MAIN.split(stacks)[-1]))
    return RankState(
        process=process,
        line=next(iter(own(lines)), None),
        left=left and left[1],
        ended=not left and f"\n{SIGNAL}\n" in stacks,
        state=_state(known),
        seen=seen,
        beat=known.get("beat", RankState.beat),
        inside=lines[0].function if lines and "/torch/distributed/" in lines[0].file else None,
    )


def _lines(stack: str) -> list[Line]:
    return [Line(m["file"], int(m["line"]), m["function"]) for m in STACK.finditer(stack)]


def _outside(lines: list[Line]) -> list[Line]:
    """Return no lines if the recorder itself is in the stack: its caller is not where the program waits."""
    return [] if any(line.file.endswith("labkit/measuring/flight_recorder.py") for line in lines) else lines


def own(lines: list[Line]) -> tuple[Line, ...]:
    """Return the lines outside of Python, libraries, and labkit; if there are none, the innermost line.

    Args:
        lines: of a stack, innermost first.
    """
    return tuple(line for line in lines if not _of_a_library(line.file)) or tuple(lines[:1])


@functools.cache
def _of_a_library(file: str) -> bool:
    """Return whether a file belongs to Python, an installed package, PyTorch, or labkit. Folder names do not count."""
    return bool(INSTALLED.search(file)) or os.path.realpath(file).startswith(LIBRARIES)
