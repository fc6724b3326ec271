"""What every rank was doing when a run hung: the collectives it has called, and the line it is at.

  with flight.recorder(folder, quiet=60):       on every rank, around what may hang
      train()

When a rank has called no collective for ``quiet`` seconds, and when its work ends or raises, it leaves two files:

  flight_3    what PyTorch's flight recorder has of rank 3: its last collectives, with the Python stack of each call, in
              the form of the dumps that NCCL writes when it times out (``torchfrtrace`` reads both)
  where_3     its process and node; the stacks of its threads; how it left. A C thread of Python's faulthandler writes
              the stacks, so they come from a process that is stuck for good, and need no right to look into it

``who_is_missing.py`` compares the ranks. A process that is killed writes nothing more: that tells it from the others.

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
STACK = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')


# Recording


@contextlib.contextmanager
def recorder(folder: str | Path, quiet: float = 60):
    """Record this rank's collectives while the work inside runs; write them when there have been none for ``quiet`` seconds.

    Enter it before the first collective, and choose ``quiet`` shorter than the process group's time-out, which ends a run
    that hangs: this only writes, and the run goes on. Nothing that goes wrong in writing ends it.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", KEPT)  # read at the first collective
    folder, rank = Path(folder), os.environ.get("RANK", "0")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{FLIGHT}{rank}").unlink(missing_ok=True)  # an earlier run's
    with open(folder / f"{WHERE}{rank}", "w", buffering=1) as where:
        print(f"process {os.getpid()} on {socket.gethostname()}", file=where)
        faulthandler.enable(where)  # a crash
        faulthandler.register(signal.SIGTERM, file=where, chain=True)  # ended by a launcher, it says where it was
        over = threading.Event()
        written = []  # the last call of each record that the watcher has written
        watcher = threading.Thread(target=_watch, args=(folder, rank, where, quiet, over, written), daemon=True)
        watcher.start()
        try:
            yield
            print("left: finished", file=where)
        except BaseException as error:
            frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
            stack = [f'File "{code.co_filename}", line {line} in {code.co_name}' for code, line in reversed(frames)]
            print(RAISED, *stack, sep="\n", file=where)
            print(f"left: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", file=where)
            raise
        finally:
            over.set()
            watcher.join()
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGTERM)
            faulthandler.disable()
            if written[-1:] != [_last_call()]:
                _dump(folder, rank, where)


def _watch(folder, rank, where, quiet, over, written):
    """Until it is over: when no collective has been called for so long, write what there is to know."""
    called = "nothing looked at yet"
    while True:
        if (now := _last_call()) != called:
            called, since = now, time.monotonic()
            faulthandler.dump_traceback_later(quiet, file=where)
        elif written[-1:] != [called] and time.monotonic() - since > quiet:
            _dump(folder, rank, where)
            written.append(called)
        if over.wait(quiet / 4):
            return


def _trace(stacks: bool) -> dict:
    on_nccl = dist.is_initialized() and "nccl" in dist.get_backend()
    dump = torch._C._distributed_c10d._dump_nccl_trace if on_nccl else torch._C._distributed_c10d._dump_fr_trace
    return pickle.loads(dump(True, stacks, False))  # this process's own


def _last_call():
    return max((entry["record_id"] for entry in _trace(stacks=False).get("entries", [])), default=None)


def _dump(folder, rank, where):
    """Write flight_<rank>, whole or not at all; what hinders it, into where_<rank>."""
    try:
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
        print(f"no flight record: {type(error).__name__}: {error}", file=where)


# Reading


@dataclass(frozen=True)
class Call:
    """One call of a collective by one rank."""

    kind: str  # "all_reduce"
    sizes: tuple  # (shapes of the inputs, shapes of the outputs), each a tuple of tuples
    dtypes: tuple  # (of the inputs, of the outputs), as PyTorch's C++ calls them: "Float"
    state: str  # "scheduled", "started" or "completed"; gloo's stay scheduled
    created: int  # ns since 1970
    line: "Line | None"


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


class _Restricted(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a flight record names nothing")


def read(folder: str | Path, prefix: str = FLIGHT) -> tuple[dict, dict, set]:
    """What a run has left: (groups, places, the ranks that have written a record).

    groups: {(name, ranks): {rank: {number: Call}}}; point-to-point calls are left out. places: {rank: Place}.

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
    return groups, places, set(found)


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
        line=own(lines),
    )


def _place(path: Path) -> Place:
    text = path.read_text(errors="replace")
    raised = text.partition(f"\n{RAISED}\n")[2].partition("\nleft: ")[0].partition("Thread ")[0]
    *_, stacks = re.split(r"(?m)^Timeout .*$", text)  # the last ones; the main thread's comes last
    main = raised or re.split(r"(?m)^(?:Current t|T)hread .*$", stacks)[-1]
    lines = [Line(m["file"], int(m["line"]), m["function"]) for m in STACK.finditer(main)]
    left = re.search(r"(?m)^(?:left|Fatal Python error): (.*)$", text)
    return Place(text.partition("\n")[0], own(lines), left and left[1])


def own(lines: list[Line]) -> Line | None:
    """The innermost line that is neither Python's nor a library's nor labkit's; else the innermost of all."""
    libraries = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|/labkit/|/torch/|^<")
    return next((line for line in lines if not libraries.search(line.file)), lines[0] if lines else None)
