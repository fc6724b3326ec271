"""The folder of one run's checkpoints: owned by it, listed, added to, and thinned out. What is in them: checkpoints.py.

A checkpoint is a folder ``step-000123``. It is written as ``step-000123.<run>.partial`` and renamed when it is whole. One
that is not what was written is set aside as ``step-000123.damaged`` and counts no more.
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

SEEN_SECONDS = 5  # in which a shared file system shows a new file on another node
STORED = re.compile(r"step-\d+")
PARTIAL = re.compile(r"(step-\d+)(\.[0-9a-f]{8})?\.partial")
REMOVED = re.compile(r"step-\d+(\.[0-9a-f]{8})?\.removed")


class CheckpointFolder:
    """Where a run's checkpoints are. All ranks have one; rank 0 changes what is in it.

    Attributes:
        path: the folder.
        keep: how many checkpoints are left there, the newest; None: all.
        keep_every: of the older ones, one is left every so many steps; None: none is.
        owner: on rank 0, the run's ownership; None on other ranks, and where nobody asked for it (``saving.save``).
    """

    def __init__(self, path: str | Path, keep: int | None = None, keep_every: int | None = None):
        self.path, self.keep, self.keep_every = Path(path), keep, keep_every
        self.owner: ownership.Owner | None = None
        self.token = ""  # in the names of what this run has not finished yet
        self.whole: set[str] = set()  # names of those that are known to be whole

    @classmethod
    def of(cls, config) -> "CheckpointFolder":
        """Own the folder that --checkpoint names. Collective where there are several ranks.

        Raises:
            UserError: it holds checkpoints and --resume is not given; another run owns it; it cannot be written to, or
                not all ranks see it. Then nothing in it has been changed.
        """
        folder = cls(_of_this_task(Path(config.checkpoint)), config.keep_last, config.keep_every)
        mark = on_one(lambda: folder._begin(config.resume))
        folder.token = mark.name.rpartition("-")[2]
        problems = [folder._problem_here(mark)]
        if dist.is_initialized():
            problems = [None] * dist.get_world_size()
            dist.all_gather_object(problems, folder._problem_here(mark))
        problem = next(filter(None, problems), None)
        on_one(lambda: folder._begun(mark, problem))
        return folder

    def _begin(self, resume: bool) -> Path:
        """Become the owner; make a file that the other ranks are to see. On rank 0."""
        try:
            if (found := stored(self.path)) and not resume:
                raise UserError(
                    f"{self.path} holds the checkpoint {found[0].name}: give --resume to go on from it, "
                    "or name another --checkpoint"
                )
            _make(self.path)
            self.owner, taken = ownership.acquire(self.path)
            atexit.register(self.owner.release)  # however this process ends, unless it is killed
            if taken:
                print(taken, flush=True)
            mark = self.path / f".seen-{self.owner.token}"  # a new name: no node remembers that it is not there
            mark.touch()
            return mark
        except OSError as error:
            raise self._cannot_be_written(error) from None

    def _problem_here(self, mark: Path) -> UserError | None:
        """What keeps this rank from writing to the folder."""
        if not appears(self.path / mark.name):
            return UserError(
                f"{socket.gethostname()} does not see what rank 0 writes to {self.path}: name a --checkpoint folder that "
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
        """Take the file away again; adopt what an ended run had finished but for its name. On rank 0."""
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
        """Remove what runs that ended here were writing or removing, or tried the folder with. On rank 0."""
        tried = [path for name in (".seen-*", ".writable-*") for path in self.path.glob(name)]
        for path in (*self._unfinished(PARTIAL, REMOVED), *tried):
            clear(path)

    def close(self):
        """Let the next run have the folder at once."""
        if self.owner:
            self.owner.release()

    def partial(self, step: int) -> Path:
        """Where the checkpoint of a step is written until it is whole."""
        return self.path / f"{name_of(step)}{self.token and '.' + self.token}.partial"

    def commit(self, partial: Path):
        """Give a checkpoint its name, now that it is whole, and remove what is too many. On rank 0.

        Raises:
            TakenOver: another run owns the folder now.
            OSError: it could not be done.
        """
        if self.owner:
            self.owner.check()
        final = self.path / PARTIAL.fullmatch(partial.name)[1]
        if os.path.lexists(final):  # one that this run did without: it could not be read when the run began
            clear(replaced := final.with_suffix(".removed"))
            final.rename(replaced)
            self.whole.discard(final.name)
        partial.rename(final)
        to_disk(self.path)
        self.whole.add(final.name)
        job_status.note("saved", step_of(final))
        self._thin(step_of(final))

    def _thin(self, newest: int):
        """Remove checkpoints that are too many, of those up to a step that are whole."""
        for path in self._unfinished(REMOVED):
            clear(path)
        if self.keep is None:
            return
        older = {step_of(path): path for path in stored(self.path) if step_of(path) <= newest}
        whole = [step for step, path in older.items() if self._is_whole(path)]
        for step in surplus(whole, self.keep, self.keep_every):
            removed = older[step].with_suffix(".removed")
            older[step].rename(removed)  # at once: half of one shall not be taken for a whole one
            clear(removed)

    def _is_whole(self, path: Path) -> bool:
        """Whether a checkpoint counts. One that is damaged is set aside; one that cannot be read now is left alone."""
        if path.name not in self.whole:
            try:
                if self.reason_not_whole(path):
                    self.set_aside(path)
                    return False
            except UserError:  # storage that does not answer, or a later version's
                return False
            self.whole.add(path.name)
        return True

    @staticmethod
    def reason_not_whole(path: Path) -> str | None:
        """Why a checkpoint is not whole, by its manifest and the lengths of its files; None if it is."""
        try:
            return manifest.difference(path, manifest.read(path)["files"], lengths_only=True)
        except manifest.Damaged as damaged:
            return damaged.reason

    def set_aside(self, path: Path):
        """Give a damaged checkpoint a name that no run resumes from or counts. On rank 0."""
        names = (path.with_suffix(f".damaged{number}") for number in ("", *(f"-{n}" for n in range(2, 1000))))
        path.rename(next(name for name in names if not name.exists()))


def _of_this_task(path: Path) -> Path:
    """A folder within ``path`` for each task of a Slurm job array, unless its name has the task's number already."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if not task or re.search(rf"(^|\D)0*{task}$", path.name):
        return path
    return path / f"task-{task}"


def surplus(steps: list[int], keep: int, keep_every: int | None = None) -> list[int]:
    """Which checkpoints to remove, the oldest first.

    Args:
        steps: those that are whole.
        keep: how many of the newest stay.
        keep_every: the oldest stays too, and from each that stays for this reason the next one at least so many steps
            later; None: none of them.
    """
    steps = sorted(steps)
    stay, last = set(steps[-keep:]), None
    for step in steps if keep_every else ():
        if last is None or step - last >= keep_every:
            stay.add(step)
            last = step
    return [step for step in steps if step not in stay]


def on_one(function, group=None):
    """Run ``function`` on rank 0; return its result, or raise its exception, on every rank. Collective.

    group: whose messages to use (default: the run's).
    """
    try:
        result = [function() if rank() == 0 else None]
    except Exception as error:  # any: the others would wait for rank 0
        result = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(result, group=group)
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def stored(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    found = [path for path in Path(folder).glob("step-*") if STORED.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def latest(folder: str | Path) -> Path | None:
    """The checkpoint with the most steps, or None if there is none."""
    return next(iter(stored(folder)), None)


def clear(path: Path):
    """Remove a checkpoint, or whatever else has the name of one; of a link the link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def appears(path: Path) -> bool:
    """Whether a file that another node has just written is here, or comes soon."""
    end = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def to_disk(folder: Path):
    """Have the names in a folder written to the disk: they may otherwise be lost with the node's power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make(folder: Path):
    """Make a folder and those it is in, so that all of them outlast a loss of power."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        to_disk(each.parent)
