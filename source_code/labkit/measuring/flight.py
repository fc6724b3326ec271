"""What every rank was doing when a run hung: the collectives it has called, and the line it is at.

  with flight.recorder(folder, quiet=60):       on every rank, around what may hang
      train()

When a rank has called no collective for ``quiet`` seconds, and when its work ends or raises, it leaves two files:

  flight_3    what PyTorch's flight recorder has of rank 3: its last collectives, with the Python stack of each call, in
              the form of the dumps that NCCL writes when it times out (``torchfrtrace`` reads both)
  where_3     its process and node; the stacks of its threads; how it left. Where no Python can run, as a thread that
              is stuck outside of it holds the interpreter, SIGTERM makes faulthandler's handler write where that is

When the rank calls collectives again, what it has left is removed: it was a pause. Four times in ``quiet`` seconds the
date of where_3 is set, as a sign of life, and that of flight_3, as long as it holds. ``who_is_missing.py`` compares the
ranks. A process that was killed, or stopped (``kill -STOP``), writes nothing more: that tells it from the others.

Private PyTorch used here, and only here: ``_dump_fr_trace`` and ``_dump_nccl_trace``, and the names and ranks of process
groups, which gloo's dumps lack.
"""

import contextlib
import faulthandler
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

import torch
import torch.distributed as dist

from labkit import UserError

FLIGHT, WHERE = "flight_", "where_"
RAISED = "raised:"  # in where_<rank>: what follows is where
KEPT = "200"  # collectives of a rank: to write the stacks of 2,000 took 4 to 12 s
IS_QUIET = "quiet:"  # in where_<rank>: the stacks below are the watcher's
SIGNAL = "Stack (most recent call first):"  # this one, of the main thread, SIGTERM's handler has written
MAIN = re.compile(rf"(?m)^(?:(?:Current t|T)hread .*|{re.escape(SIGNAL)})$")
STACK = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')


# Recording


@contextlib.contextmanager
def recorder(folder: str | Path, quiet: float = 60):
    """Record this rank's collectives while the work inside runs; write them after ``quiet`` seconds without one.

    Enter it before the first collective, and choose ``quiet`` shorter than the process group's time-out, which ends a
    run that hangs: this only writes, and the run goes on. Nothing that goes wrong in writing ends it. UserError if neither
    the process group nor the environment says which rank this is, or the folder cannot be written to.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", KEPT)  # read at the first collective
    folder, rank = Path(folder), _rank(os.environ)
    _, began = _state_and_start(os.getpid())
    about = {"pid": os.getpid(), "began": began, "on": _machine(), "beat": quiet / 4}
    with _opened(folder, rank, f"process {os.getpid()} on {socket.gethostname()}\n{json.dumps(about)}\n") as where:
        faulthandler.enable(where)  # a crash
        # Ended by a launcher, it says where it was: of its main thread only, since the others run on, and to read a stack
        # that changes could crash the process.
        faulthandler.register(signal.SIGTERM, file=where, chain=True, all_threads=False)
        over, removing = threading.Event(), threading.Lock()
        written = []  # the last call of each record that the watcher has written
        given = folder, rank, where, quiet, over, removing, written
        watcher = threading.Thread(target=_watch, args=given, daemon=True)
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
            with removing:  # what is written from here on stays
                over.set()
            watcher.join()
            try:
                if written[-1:] != [_last_call()]:
                    _dump(folder, rank, where)
                if left != "finished":
                    _say(where, RAISED, *stack)
                _say(where, f"left: {left}")  # last: of a rank that has left, all that it has called is in its record
            finally:  # or they would write into whatever file comes after this one
                faulthandler.unregister(signal.SIGTERM)
                faulthandler.disable()


def _opened(folder: Path, rank: int, head: str):
    """where_<rank>, new, with this in it; an earlier run's files are removed. UserError: the folder cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (f"{FLIGHT}{rank}", f"{WHERE}{rank}"):
            (folder / name).unlink(missing_ok=True)
        where = open(folder / f"{WHERE}{rank}", "ab", buffering=0)  # to append: what is cut off leaves no hole
        where.write(head.encode())
        return where
    except OSError as error:
        raise UserError(
            f"flight records cannot be written to {folder} ({error.strerror}): name another folder"
        ) from None


def _rank(environ) -> int:
    """This process's rank: the process group's; before there is one, torchrun's, or a Slurm step's of several tasks."""
    if dist.is_initialized():
        return dist.get_rank()
    in_step = int(environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1  # elsewhere in a job, SLURM_PROCID is 0 for all
    said = environ.get("RANK") or (environ.get("SLURM_PROCID") if in_step else None)
    if said is None or not said.isdigit():
        raise UserError("the flight recorder cannot know its rank: enter it after init_process_group, or set RANK")
    return int(said)


def _watch(folder, rank, where, quiet, over, removing, written):
    """Until it is over: when no collective has been called for so long, write what there is to know.

    This thread reads the stacks while it holds the interpreter, so they stand still. (faulthandler's own thread, of
    ``dump_traceback_later``, cannot hold it, and has crashed processes that ran on.)
    """
    called, head = "nothing looked at yet", os.fstat(where.fileno()).st_size
    while True:
        looked = time.time()  # what is called while this goes on is in no record
        if (now := _last_call()) != called:
            called, since = now, time.monotonic()
            with removing, contextlib.suppress(OSError):
                if not over.is_set():  # what was written was of a pause, and would hide a death
                    (folder / f"{FLIGHT}{rank}").unlink(missing_ok=True)
                    os.ftruncate(where.fileno(), head)
        elif written[-1:] != [called] and time.monotonic() - since > quiet:
            _say(where, f"{IS_QUIET} no collective for {quiet:g} s", _stacks())
            _dump(folder, rank, where)
            written.append(called)
        with contextlib.suppress(OSError):
            os.utime(where.fileno())  # a sign of life
            if written[-1:] == [called]:
                os.utime(folder / f"{FLIGHT}{rank}", (looked, looked))  # until then nothing had been called since
        if over.wait(quiet / 4):
            return


def _say(where, *lines: str):
    """Write lines to where_<rank>. No space, or a file system that is away, is no reason to end a training."""
    with contextlib.suppress(OSError):
        where.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))


def _stacks() -> str:
    """Of all threads. By way of a local file: faulthandler writes without letting the others run, and folders can hang."""
    try:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read()
    except OSError as error:
        return f"no stacks: {error}"


def _trace(stacks: bool) -> dict:
    """The flight recorder of this process; of several, the first that has something.

    PyTorch keeps one for each implementation of a backend, and what ``nccl`` is differs: from 2.15 on usually ``nccl2``.
    """
    c10d = torch._C._distributed_c10d
    if not (dist.is_initialized() and "nccl" in dist.get_backend()):
        return pickle.loads(c10d._dump_fr_trace(True, stacks, False))  # gloo's; this process's own, so it may be read
    found = pickle.loads(c10d._dump_nccl_trace(True, stacks, False))
    for name in ("nccl2", "nccl-lazy"):
        if not found.get("entries"):
            with contextlib.suppress(TypeError):  # before 2.15 there is none, and no such argument
                found = pickle.loads(c10d._dump_fr_trace(True, stacks, False, name))
    return found


def _last_call():
    return max((entry["record_id"] for entry in _trace(stacks=False).get("entries", [])), default=None)


def _dump(folder, rank, where):
    """Write flight_<rank>, whole or not at all; what hinders it, into where_<rank>."""
    try:
        if dist.is_initialized() and dist.get_rank() != rank:  # do not put the blame on another rank
            raise UserError(f"the environment said rank {rank}, the process group {dist.get_rank()}: enter it later")
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
    except Exception as error:  # a full disk, another version of PyTorch: no reason to end a training
        _say(where, f"no flight record: {type(error).__name__}: {error}")


# Processes


def _machine() -> list | None:
    """What tells this machine, and this container's process ids, from others; None where Linux's /proc is not."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return None


def _state_and_start(pid: int) -> tuple[str, str] | tuple[None, None]:
    """(state, as ps shows it: "S"; when it began, in ticks since the machine's start) of a process here, if any."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold what it likes
    except OSError:
        return None, None
    return fields[0], fields[19]


def _state(known: dict) -> str | None:
    """Of the process that wrote this of itself: "there", "stopped" or "gone"; None if it was not on this machine."""
    if not known.get("on") or known["on"] != _machine():
        return None
    state, began = _state_and_start(known["pid"])
    if began != known["began"] or state in ("Z", "X"):
        return "gone"
    return "stopped" if state in ("T", "t") else "there"


# Reading


@dataclass(frozen=True)
class Call:
    """One call of a collective by one rank."""

    kind: str  # "all_reduce"
    sizes: tuple  # (shapes of the inputs, shapes of the outputs), each a tuple of tuples
    dtypes: tuple  # (of the inputs, of the outputs), as PyTorch's C++ calls them: "Float"
    state: str  # "scheduled", "started" or "completed"; gloo's stay scheduled
    created: int  # ns since 1970
    path: "tuple[Line, ...]"  # the lines of the program that led to it, the innermost first

    @property
    def line(self) -> "Line | None":
        return self.path[0] if self.path else None


@dataclass(frozen=True)
class Line:
    """A line of somebody's program."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Place:
    """What where_<rank> says of a rank."""

    process: str  # "process 123 on node-1"
    line: Line | None  # where it is, or was when it raised
    left: str | None  # "finished", an error in words, or None: nobody knows, or it is there
    ended: bool = False  # a signal has asked it to end, and it has written where it was
    state: str | None = None  # "there", "stopped" or "gone" now; None if that cannot be seen from this machine
    seen: float = 0  # seconds since 1970: its last sign of life
    beat: float = 15  # seconds between two signs of life


class _Restricted(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a flight record names nothing")


def read(folder: str | Path, prefix: str = FLIGHT) -> tuple[dict, dict, dict]:
    """What a run has left: (groups, places, told).

    groups: {(name, ranks): {rank: {number: Call}}}; point-to-point calls are left out. places: {rank: Place}.
    told: {rank that has written a record: until when that holds, in seconds since 1970}; a rank that was ended may have
    gone on after its last look at it, one that left or hangs has not.

    A dump is a pickle, which could run what it names: here it may name nothing. UserError if there is no dump, or one
    is damaged or of another run.
    """
    folder = Path(folder)
    found = {int(p.name[len(prefix) :]): p for p in folder.glob(f"{prefix}*") if p.name[len(prefix) :].isdigit()}
    places = {int(p.name[len(WHERE) :]): _place(p) for p in folder.glob(f"{WHERE}*") if p.name[len(WHERE) :].isdigit()}
    if not found and not places:
        raise UserError(f"there is no {prefix}<rank> in {folder}: give the dumps' --folder, and their --prefix")
    groups: dict[tuple, dict] = {}
    for rank, path in sorted(found.items()):
        for group, calls in _calls(path).items():
            if rank not in group[1]:
                raise UserError(f"{path} is of a run without a rank {rank}: remove the dumps of other runs")
            groups.setdefault(group, {})[rank] = calls
    ended = {rank for rank, place in places.items() if place.ended}
    told = {rank: path.stat().st_mtime if rank in ended else float("inf") for rank, path in found.items()}
    return groups, places, told


def _calls(path: Path) -> dict[tuple, dict[int, Call]]:
    """{(group's name, its ranks): {number: Call}} of one rank's dump."""
    try:
        with path.open("rb") as file:
            dump = _Restricted(file).load()
        groups = {
            name: (
                name if about["desc"] in ("", "undefined") else str(about["desc"]),
                tuple(map(int, json.loads(about["ranks"]))),
            )
            for name, about in dump["pg_config"].items()
        }
        calls = {group: {} for group in groups.values()}
        for entry in dump["entries"]:
            name = entry["process_group"][0]
            if name not in groups:  # with TORCH_DISTRIBUTED_DEBUG=DETAIL gloo's entries name no group
                groups[name] = max(calls, key=lambda group: len(group[1]))
            if not entry["is_p2p"]:
                calls[groups[name]][int(entry["collective_seq_id"])] = _call(entry)
        return calls
    except Exception as error:  # whatever a damaged file leads to
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is no flight record, or damaged ({reason}): remove it, or dump again") from None


def _call(entry: dict) -> Call:
    lines = [Line(str(f["filename"]), int(f["line"]), str(f["name"])) for f in entry.get("frames", ())]
    return Call(
        kind=str(entry["profiling_name"]).rpartition(":")[2].partition(" ")[0],
        sizes=tuple(tuple(tuple(map(int, shape)) for shape in entry[f"{side}_sizes"]) for side in ("input", "output")),
        dtypes=tuple(tuple(map(str, entry.get(f"{side}_dtypes", ()))) for side in ("input", "output")),
        state=str(entry["state"]),
        created=int(entry["time_created_ns"]),
        path=own(lines),
    )


def _place(path: Path) -> Place:
    text, seen = path.read_text(errors="replace"), path.stat().st_mtime
    process, known, *_ = [*text.split("\n", 2), ""]
    try:
        known = dict(json.loads(known))
    except (ValueError, TypeError):  # cut off, or of something else
        known = {}
    raised = text.partition(f"\n{RAISED}\n")[2].partition("\nleft: ")[0]
    *_, stacks = re.split(rf"(?m)^{IS_QUIET}.*$", text)  # the last ones; the main thread's comes last
    left = re.search(r"(?m)^(?:left|Fatal Python error): (.*)$", text)
    return Place(
        process=process,
        line=next(iter(own(_lines(raised) if raised else _outside(_lines(MAIN.split(stacks)[-1])))), None),
        left=left and left[1],
        ended=not left and f"\n{SIGNAL}\n" in stacks,
        state=_state(known),
        seen=seen,
        beat=known.get("beat", Place.beat),
    )


def _lines(stack: str) -> list[Line]:
    return [Line(m["file"], int(m["line"]), m["function"]) for m in STACK.finditer(stack)]


def _outside(lines: list[Line]) -> list[Line]:
    """Nothing, if it is the recorder where the rank is: the line that has called it says nothing of the program."""
    return [] if any(line.file.endswith("labkit/measuring/flight.py") for line in lines) else lines


def own(lines: list[Line]) -> tuple[Line, ...]:
    """Those that are neither Python's nor a library's nor labkit's; if there are none, the first, the innermost."""
    libraries = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|/labkit/|/torch/|^<")
    return tuple(line for line in lines if not libraries.search(line.file)) or tuple(lines[:1])
