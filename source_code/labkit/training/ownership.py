# SPDX-License-Identifier: BSD-3-Clause
"""Ensure that only one run at a time owns a checkpoint folder.

Each owner creates a file, ``.owner-000001``, ``.owner-000002``, …: the highest number owns the folder. Exclusive creation
of a file is atomic, on NFS, too, so that of two runs that start at the same time one becomes the owner and the other is
refused. The number is a fencing token: a run that finds a higher one than its own, because it hung or its node was cut
off while the job restarted elsewhere, must not change the folder any more.

The owner updates the file's modification time every few seconds (its heartbeat). A new run takes over if the owner has
released the folder, was an earlier start of the same job, has no process on this machine any more, or has no heartbeat.
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
STALE_SECONDS = 120  # without a heartbeat; longer than the delays of a busy file server
NAME = re.compile(r"\.owner-(\d{6,})")


class InUse(UserError):
    """Another run owns the folder."""


class TakenOver(UserError):
    """Another run has become the owner of the folder."""


class Owner:
    """This run's ownership of a checkpoint folder, on rank 0.

    Attributes:
        folder: an existing folder.
        token: a short unique name of this run.
        number: of this run's file, higher than those of all earlier owners.
    """

    def __init__(self, folder: Path, number: int, token: str):
        self.folder, self.number, self.token = folder, number, token
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def check(self):
        """Check that this run still owns the folder.

        Raises:
            TakenOver: another run does.
        """
        if (newest := _newest(self.folder)) and newest[0] > self.number:
            raise TakenOver(
                f"{self.folder} has been taken over by {_described(_read(newest[1]))}: this run ends, "
                "and leaves the folder to that one"
            )

    def release(self):
        """Release the folder for the next run."""
        self._over.set()
        if (path := _path(self.folder, self.number)).exists():
            _write(path, {**_read(path), "released": True})

    def withdraw(self):
        """Remove this run's file, because the run was refused before it changed anything."""
        self._over.set()
        _path(self.folder, self.number).unlink(missing_ok=True)

    def _beat(self):
        path = _path(self.folder, self.number)
        while not self._over.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(path)
            except OSError:  # the file server may recover; if not, others see that the heartbeat has stopped
                continue


def acquire(folder: Path) -> tuple[Owner, str | None]:
    """Become the owner of an existing folder.

    Returns:
        (the ownership, a sentence about the previous owner). The sentence is None if there was no owner, or it had
        released the folder.

    Raises:
        InUse: another run owns it and may be alive.
        OSError: the folder cannot be written to.
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
                    f"{folder} is in use by {_described(owner)}, whose last heartbeat was {_age(newest[1]):.0f} s ago: "
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
    """Return why an owner has lost the folder; None if it may be alive. age: seconds since its last heartbeat."""
    if owner.get("released"):
        return RELEASED
    same_job = owner.get("job") and owner["job"] == me["job"]
    same_launch = not me["job"] and owner.get("launch") and owner["launch"] == me["launch"]
    if (same_job or same_launch) and owner.get("restarts", me["restarts"]) < me["restarts"]:
        return "this is a later start of the same job"
    if (owner.get("host"), owner.get("boot")) == (me["host"], me["boot"]):
        if (owner.get("pid"), owner.get("started")) == (me["pid"], me["started"]):
            return RELEASED  # an earlier run in this process, ended by an error
        if not _lives(owner):
            return "its process has ended"
    if age > STALE_SECONDS:
        return f"it had no heartbeat for {age:.0f} s"
    return None


def _this_run() -> dict:
    environ = os.environ
    return {
        "run": uuid.uuid4().hex[:8],
        "job": environ.get("SLURM_JOB_ID"),
        "launch": environ.get("TORCHELASTIC_RUN_ID"),
        # Number of requeues by Slurm, then of restarts by torchrun; compared in this order.
        "restarts": [int(environ.get(name) or 0) for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")],
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _boot() -> str | None:
    """Return an identifier of this boot of the machine; None if there is none (macOS)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _started(process: int) -> str | None:
    """Return the start time of a process on this machine, in ticks; None if there is no such process, or no /proc."""
    try:
        # The second field is the program's name in parentheses, and may contain anything.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _lives(owner: dict) -> bool:
    """Return whether the owner, a process on this machine, still exists (and not another one with its id)."""
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
    """Return (number, file) of every owner, the newest last."""
    matches = ((NAME.fullmatch(name), name) for name in os.listdir(folder))
    return sorted((int(match[1]), folder / name) for match, name in matches if match)


def _newest(folder: Path) -> tuple[int, Path] | None:
    """Return the newest owner's number and file, from the file server, not from this node's cache."""
    with _probe(folder):  # creating a file makes NFS refresh its cache of the folder
        owners = _all(folder)
    return owners[-1] if owners else None


def _age(path: Path) -> float:
    """Return the seconds since a file was modified, by the clock of its file server."""
    with _probe(path.parent) as probe:
        now = probe.stat().st_mtime
    try:
        return max(0.0, now - path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0


class _probe:
    """Create a file in a folder for the duration of the context."""

    def __init__(self, folder: Path):
        self.path = folder / f".probe-{uuid.uuid4().hex}"

    def __enter__(self) -> Path:
        self.path.touch()
        return self.path

    def __exit__(self, *error):
        self.path.unlink(missing_ok=True)


def _write(path: Path, owner: dict, mode: str = "w"):
    with open(path, mode) as file:
        json.dump(owner, file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict:
    """Return the content of an owner's file; {} if it is not written yet, or was removed."""
    for _ in range(5):
        try:
            owner = json.loads(path.read_text())
            return owner if isinstance(owner, dict) else {}
        except ValueError:  # it is being written
            time.sleep(0.05)
        except OSError:
            break
    return {}


def _described(owner: dict) -> str:
    """Describe a run: "job 123 on node7 (python mnist_fsdp.py --epochs 4)"."""
    if not owner:
        return "another run"
    job = f"job {owner['job']}" if owner.get("job") else f"process {owner.get('pid')}"
    return f"{job} on {owner.get('host')} ({owner.get('command')})"
