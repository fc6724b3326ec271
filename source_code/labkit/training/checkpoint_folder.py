# SPDX-License-Identifier: BSD-3-Clause
"""Manage the folder of one run's checkpoints: ownership, listing, commits, retention. Their content: checkpoints.py.

A checkpoint is a folder ``step-000123``. It is written as ``step-000123.<run>.partial`` and renamed when it is complete.
A damaged one is renamed to ``step-000123.damaged`` and ignored from then on.
"""

import atexit
import os
import re
import shutil
import socket
import time
import uuid
from pathlib import Path

import torch.distributed as dist

from labkit import UserError
from labkit.running import job_status
from labkit.training import manifest, ownership

SEEN_SECONDS = 5  # after which a shared file system shows a new file on all nodes
STORED = re.compile(r"step-\d+")
PARTIAL = re.compile(r"(step-\d+)(\.[0-9a-f]{8})?\.partial")
REMOVED = re.compile(r"step-\d+(\.[0-9a-f]{8})?\.removed")


class CheckpointFolder:
    """The folder of a run's checkpoints. Every rank has an instance; only rank 0 changes the folder.

    Attributes:
        path: the folder.
        keep: number of newest checkpoints to keep; None: all.
        keep_every: also keep older ones that are at least this many steps apart; None: none of them.
        owner: on rank 0, the run's ownership; None on other ranks, and without ownership (``saving.save``).
    """

    def __init__(self, path: str | Path, keep: int | None = None, keep_every: int | None = None):
        self.path, self.keep, self.keep_every = Path(path), keep, keep_every
        self.owner: ownership.Owner | None = None
        self.token = ""  # in the names of this run's unfinished checkpoints
        self.whole: set[str] = set()  # names of checkpoints that are known to be intact

    @classmethod
    def of(cls, config) -> "CheckpointFolder":
        """Acquire the folder of --checkpoint for this run. Collective.

        Args:
            config: a lab's options.

        Raises:
            UserError: it contains checkpoints and --resume is not given; another run owns it; it cannot be written to, or
                not all ranks see it. Nothing in it has been changed.
        """
        folder = cls(_of_this_task(Path(config.checkpoint)), config.keep_last, config.keep_every)
        mark = rank0_then_broadcast(lambda: folder._begin(config.resume))
        folder.token = mark.name.rpartition("-")[2]
        problems = [folder._problem_here(mark)]
        if dist.is_initialized():
            problems = [None] * dist.get_world_size()
            dist.all_gather_object(problems, folder._problem_here(mark))
        problem = next(filter(None, problems), None)
        rank0_then_broadcast(lambda: folder._begun(mark, problem))
        return folder

    def _begin(self, resume: bool) -> Path:
        """Become the owner, and create a file that the other ranks must see. On rank 0."""
        try:
            if (existing := stored(self.path)) and not resume:
                raise UserError(
                    f"{self.path} holds the checkpoint {existing[0].name}: give --resume to continue from it, "
                    "or name another --checkpoint"
                )
            _make(self.path)
            self.owner, taken = ownership.acquire(self.path)
            atexit.register(self.owner.release)  # whenever this process ends, unless it is killed
            if taken:
                print(taken, flush=True)
            mark = self.path / f".seen-{self.owner.token}"  # a new name, since nodes cache that a file does not exist
            mark.touch()
            return mark
        except OSError as error:
            raise self._cannot_be_written(error) from None

    def _problem_here(self, mark: Path) -> UserError | None:
        """Return the error that prevents this rank from writing to the folder, if any."""
        if not wait_until_visible(self.path / mark.name):
            return UserError(
                f"{socket.gethostname()} does not see rank 0's files in {self.path}: name a --checkpoint folder that "
                "all nodes share"
            )
        probe = self.path / f".writable-{uuid.uuid4().hex}"
        try:
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            return self._cannot_be_written(error)
        return None

    def _begun(self, mark: Path, problem: UserError | None):
        """Remove the file of ``_begin``; rename complete checkpoints that an ended run had not renamed. On rank 0."""
        mark.unlink(missing_ok=True)
        if problem:
            self.owner.withdraw()
            raise problem
        for partial in self._unfinished(PARTIAL):
            final = self.path / PARTIAL.fullmatch(partial.name)[1]
            if not final.exists() and self.reason_not_whole(partial) is None:
                partial.rename(final)

    def _cannot_be_written(self, error: OSError) -> UserError:
        return UserError(f"checkpoints cannot be written to {self.path} ({error.strerror}): name another --checkpoint")

    def _unfinished(self, *names: re.Pattern) -> list[Path]:
        return [path for path in self.path.glob("step-*") if any(name.fullmatch(path.name) for name in names)]

    def clear_leftovers(self):
        """Remove unfinished and removed checkpoints, and probe files, of runs that have ended. On rank 0."""
        probes = [path for name in (".seen-*", ".writable-*") for path in self.path.glob(name)]
        for path in (*self._unfinished(PARTIAL, REMOVED), *probes):
            clear(path)

    def close(self):
        """Release the folder for the next run."""
        if self.owner:
            self.owner.release()

    def partial(self, step: int) -> Path:
        """Return the path to which the checkpoint of a step is written until it is complete."""
        return self.path / f"{name_of(step)}{self.token and '.' + self.token}.partial"

    def commit(self, partial: Path):
        """Rename a complete checkpoint to its final name, and remove surplus ones. On rank 0.

        Args:
            partial: as ``partial`` returns it.

        Raises:
            TakenOver: another run owns the folder now.
            OSError: the file system refused.
        """
        if self.owner:
            self.owner.check()
        final = self.path / PARTIAL.fullmatch(partial.name)[1]
        if os.path.lexists(final):  # one that could not be read when this run started
            clear(replaced := final.with_suffix(".removed"))
            final.rename(replaced)
            self.whole.discard(final.name)
        partial.rename(final)
        to_disk(self.path)
        self.whole.add(final.name)
        job_status.note("saved", step_of(final))
        self._thin(step_of(final))

    def _thin(self, newest: int):
        """Remove surplus checkpoints among the intact ones up to the step ``newest``."""
        for path in self._unfinished(REMOVED):
            clear(path)
        if self.keep is None:
            return
        older = {step_of(path): path for path in stored(self.path) if step_of(path) <= newest}
        whole = [step for step, path in older.items() if self._is_whole(path)]
        for step in surplus(whole, self.keep, self.keep_every):
            removed = older[step].with_suffix(".removed")
            older[step].rename(removed)  # atomic: a half-removed one must not look intact
            clear(removed)

    def _is_whole(self, path: Path) -> bool:
        """Return whether a checkpoint is intact. A damaged one is set aside; one that cannot be read now is not changed."""
        if path.name not in self.whole:
            try:
                if self.reason_not_whole(path):
                    self.set_aside(path)
                    return False
            except UserError:  # unavailable storage, or a later version's checkpoint
                return False
            self.whole.add(path.name)
        return True

    @staticmethod
    def reason_not_whole(path: Path) -> str | None:
        """Return why a checkpoint is not intact, judging by its manifest and the lengths of its files; None if it is."""
        try:
            return manifest.difference(path, manifest.read(path)["files"], lengths_only=True)
        except manifest.Damaged as damaged:
            return damaged.reason

    def set_aside(self, path: Path):
        """Rename a damaged checkpoint so that no run resumes from it or counts it. On rank 0."""
        names = (path.with_suffix(f".damaged{number}") for number in ("", *(f"-{n}" for n in range(2, 1000))))
        path.rename(next(name for name in names if not name.exists()))


def _of_this_task(path: Path) -> Path:
    """Return a subfolder for each task of a Slurm job array, unless the name has the task's number already."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if not task or re.search(rf"(^|\D)0*{task}$", path.name):
        return path
    return path / f"task-{task}"


def surplus(steps: list[int], keep: int, keep_every: int | None = None) -> list[int]:
    """Return the steps of the checkpoints to remove, the oldest first.

    Args:
        steps: of all intact checkpoints.
        keep: number of newest ones to keep.
        keep_every: also keep the oldest one, and then each next one at least this many steps later; None: none of them.
    """
    steps = sorted(steps)
    retained, last = set(steps[-keep:]), None
    for step in steps if keep_every else ():
        if last is None or step - last >= keep_every:
            retained.add(step)
            last = step
    return [step for step in steps if step not in retained]


def rank0_then_broadcast(function, group=None):
    """Run a function on rank 0, and broadcast its result or its exception to all ranks. Collective.

    Args:
        function: called without arguments; its result or exception must be picklable.
        group: process group of the broadcast (default: the default group).
    """
    try:
        result = [function() if rank() == 0 else None]
    except Exception as error:  # of any type, or the others would wait for rank 0
        result = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(result, group=group)
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def stored(folder: str | Path) -> list[Path]:
    """Return the paths of the checkpoints in a folder, the newest first."""
    paths = [path for path in Path(folder).glob("step-*") if STORED.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=step_of, reverse=True)


def latest(folder: str | Path) -> Path | None:
    """Return the path of the checkpoint with the most steps; None if there is none."""
    return next(iter(stored(folder)), None)


def clear(path: Path):
    """Remove a checkpoint, or a file with the name of one; of a symbolic link the link, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def wait_until_visible(path: Path) -> bool:
    """Wait until a file of another node is visible here; return False if it is not within ``SEEN_SECONDS``."""
    end = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def to_disk(folder: Path):
    """Flush a folder's entries to the disk (fsync): a power failure could otherwise lose them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make(folder: Path):
    """Create a folder and its parents, and flush them to the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        to_disk(each.parent)
