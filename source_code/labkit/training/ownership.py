"""One run per checkpoint folder: who owns it, checked before anything in it is changed.

Each owner makes a file of its own, ``.owner-000001``, ``.owner-000002``, …: the highest number owns the folder. Creating
a file that must not exist yet is atomic, on NFS too, so that of two runs that start at once one becomes the owner and
the other is refused. The number is a fencing token: a run that finds a higher one than its own, because it hung or its
node was cut off while the job started elsewhere, must not touch the folder any more.

While it lives, the owner sets the file's modification time every few seconds (its heartbeat). A new run takes over if
the owner has released the folder, if it was an earlier start of the same job, if its process is gone from this machine,
or if its heartbeat has stopped.
"""

import json
import os
import re
import shlex
import socket
import sys
import threading
import time
import uuid
from pathlib import Path

from labkit import UserError

HEARTBEAT_SECONDS = 10
STALE_SECONDS = 120  # without a heartbeat. Longer than a busy file server makes a client wait
NAME = re.compile(r"\.owner-(\d{6,})")


class InUse(UserError):
    """Another run owns the folder."""


class TakenOver(UserError):
    """Another run has become the owner of the folder."""


class Owner:
    """This run's ownership of a checkpoint folder. One process of a run has it: rank 0.

    Attributes:
        folder: the folder, which exists.
        token: a short name of this run, unique among all that ever owned the folder.
        number: of this run's file, higher than those of all owners before.
    """

    def __init__(self, folder: Path, number: int, token: str):
        self.folder, self.number, self.token = folder, number, token
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def check(self):
        """Make sure that this run still owns the folder.

        Raises:
            TakenOver: another run does.
        """
        if (newest := _newest(self.folder)) and newest[0] > self.number:
            raise TakenOver(
                f"{self.folder} has been taken over by {_described(_read(newest[1]))}: this run ends, "
                "and leaves the folder to that one"
            )

    def release(self):
        """Let the next run have the folder at once."""
        self._over.set()
        if (path := _path(self.folder, self.number)).exists():
            _write(path, {**_read(path), "released": True})

    def withdraw(self):
        """Leave the folder as it was before: this run was refused before it changed anything."""
        self._over.set()
        _path(self.folder, self.number).unlink(missing_ok=True)

    def _beat(self):
        path = _path(self.folder, self.number)
        while not self._over.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(path)
            except OSError:  # away for a moment, or for good: then others see the heartbeat stop
                continue


def acquire(folder: Path) -> tuple[Owner, str | None]:
    """Become the owner of a folder that exists.

    Returns:
        The ownership, and a sentence about the run it was taken over from; None if there was none, or it had released
        the folder.

    Raises:
        InUse: another run owns it and may be alive.
        OSError: no file can be made there.
    """
    me = _this_run()
    while True:
        newest = _newest(folder)
        reason = None
        if newest:
            owner = _read(newest[1])
            reason = _why_over(owner, me, _age(newest[1]))
            if reason is None:
                raise InUse(
                    f"{folder} is in use by {_described(owner)}, which gave a sign of life {_age(newest[1]):.0f} s ago: "
                    "name another --checkpoint, or wait until that run has ended"
                )
        number = newest[0] + 1 if newest else 1
        try:
            _write(_path(folder, number), me, "x")
        except FileExistsError:  # another run was faster
            continue
        for older in _all(folder)[:-1]:
            older[1].unlink(missing_ok=True)
        taken = f"took {folder} over from {_described(owner)}: {reason}" if newest and reason != RELEASED else None
        return Owner(folder, number, me["run"]), taken


RELEASED = "it had released the folder"


def _why_over(owner: dict, me: dict, age: float) -> str | None:
    """Why an owner need not be asked any more; None if it may be alive. age: seconds since its last heartbeat."""
    if owner.get("released"):
        return RELEASED
    same_job = owner.get("job") and owner["job"] == me["job"]
    same_launch = not me["job"] and owner.get("launch") and owner["launch"] == me["launch"]
    if (same_job or same_launch) and owner.get("restarts", me["restarts"]) < me["restarts"]:
        return "this is a later start of the same job"
    if (owner.get("host"), owner.get("boot")) == (me["host"], me["boot"]):
        if (owner.get("pid"), owner.get("started")) == (me["pid"], me["started"]):
            return RELEASED  # an earlier run in this process, which an error has ended
        if not _lives(owner):
            return "its process has ended"
    if age > STALE_SECONDS:
        return f"it gave no sign of life for {age:.0f} s"
    return None


def _this_run() -> dict:
    environ = os.environ
    return {
        "run": uuid.uuid4().hex[:8],
        "job": environ.get("SLURM_JOB_ID"),
        "launch": environ.get("TORCHELASTIC_RUN_ID"),
        # How often Slurm has requeued the job, and then torchrun started its ranks again: compared in this order.
        "restarts": [int(environ.get(name) or 0) for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")],
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _boot() -> str | None:
    """An identifier of this machine since it was started; None where there is none (macOS)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _started(process: int) -> str | None:
    """When a process of this machine began, in the kernel's ticks; None if it is not there, or not known."""
    try:
        # The second field is the program's name in parentheses, and may contain anything.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _lives(owner: dict) -> bool:
    """Whether the owner, a process of this machine, is still there (and is not another with its number)."""
    if owner.get("started") is not None:
        return _started(owner.get("pid", 0)) == owner["started"]
    try:
        os.kill(owner["pid"], 0)
    except (KeyError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


def _path(folder: Path, number: int) -> Path:
    return folder / f".owner-{number:06d}"


def _all(folder: Path) -> list[tuple[int, Path]]:
    """(number, file) of every owner that has a file, the newest last."""
    found = ((NAME.fullmatch(name), name) for name in os.listdir(folder))
    return sorted((int(match[1]), folder / name) for match, name in found if match)


def _newest(folder: Path) -> tuple[int, Path] | None:
    """The newest owner's number and file. Asks the file server, not what this node remembers of the folder."""
    with _probe(folder):  # making a file has NFS look at the folder again
        found = _all(folder)
    return found[-1] if found else None


def _age(path: Path) -> float:
    """Seconds since a file was touched, by the clock of its file server."""
    with _probe(path.parent) as probe:
        now = probe.stat().st_mtime
    try:
        return max(0.0, now - path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0


class _probe:
    """A file that is there for a moment."""

    def __init__(self, folder: Path):
        self.path = folder / f".probe-{uuid.uuid4().hex}"

    def __enter__(self) -> Path:
        self.path.touch()
        return self.path

    def __exit__(self, *error):
        self.path.unlink(missing_ok=True)


def _write(path: Path, about: dict, mode: str = "w"):
    with open(path, mode) as file:
        json.dump(about, file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict:
    """What an owner says of itself; {} if it has not written it yet, or is gone."""
    for _ in range(5):
        try:
            found = json.loads(path.read_text())
            return found if isinstance(found, dict) else {}
        except ValueError:  # it is being written
            time.sleep(0.05)
        except OSError:
            break
    return {}


def _described(owner: dict) -> str:
    """A run in a few words: "job 123 on node7 (python mnist_fsdp.py --epochs 4)"."""
    if not owner:
        return "another run"
    job = f"job {owner['job']}" if owner.get("job") else f"process {owner.get('pid')}"
    return f"{job} on {owner.get('host')} ({owner.get('command')})"
