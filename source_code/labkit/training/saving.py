"""Write a checkpoint: atomic, sharded, at once or while training goes on. Reading it: checkpoints.py.

A checkpoint is written by torch.distributed.checkpoint (DCP), with a manifest: its files and their checksums, and what
must be the same when it is resumed. It is made under another name and renamed when every rank has finished and the
manifest is on the disk, so that a run that is ended while it saves, or that runs out of space, never costs the
checkpoint before. One whose numbers are not finite is not written at all.
"""

import errno
import os
import platform
import shutil
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from labkit import Diverged, UserError
from labkit.measuring.trace import local
from labkit.training import checkpoint_folder, checkpoints, dcp_reading, dcp_writing, manifest
from labkit.training.checkpoint_folder import CheckpointFolder, clear, name_of, on_one, to_disk
from labkit.training.ownership import TakenOver

FULL = 2**20  # bytes: with fewer left on a disk, a file could not be written because it is full
# A terabyte through a gigabyte per second takes 17 minutes: more than the 10 after which NCCL's collectives fail.
TIMEOUT = timedelta(hours=2)
REPORT_SECONDS = 300  # how long a save may take before the run says that it waits for it
# What a file server may answer now and not in a moment. The rest (a full disk, a quota, no permission) will not pass.
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ENOTCONN, errno.EBUSY)
WAITS = (1.0, 10.0)  # seconds before each further attempt to write
# PyTorch 2.11's DefaultStager closes itself after one use, which later versions (2.15 was looked at) do not.
KEEPS_STAGER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


class SaveFailed(UserError):
    """A checkpoint could not be written; those before it are as they were. errno: the system's number for the cause."""

    def __init__(self, sentence: str, errno: int | None = None):
        super().__init__(sentence, errno)
        self.sentence, self.errno = sentence, errno

    def __str__(self):
        return self.sentence


class Saver:
    """Resumes and saves a run as its options say. Every rank makes one, and calls it at the same steps.

    Args:
        config: a lab's options; ``checkpoint`` None: nothing is saved.
        model, optimizer: what is trained, sharded already.
        run: its ``checkpoints.identity``.

    Raises:
        UserError: the folder cannot be used: see ``CheckpointFolder.of``.
    """

    def __init__(self, config, model, optimizer, run: dict):
        self.config, self.model, self.optimizer, self.run = config, model, optimizer, run
        self.last = 0  # the newest step that is on the disk, or on its way there
        self.stalls = []  # seconds that training stood still, of each save
        self.folder = self.group = self.background = self.writing = self.stager = None
        if config.checkpoint:
            self.folder = CheckpointFolder.of(config)
            # Messages of its own: in the training's groups a slow disk would run into their time-out, and a save in the
            # background would get between the messages of the steps. In the CPU's memory: a GPU need not be waited for.
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        if config.checkpoint and config.async_checkpoint:
            self.background = _thread()

    def resume(self, last_step: int) -> int:
        """Read the newest checkpoint if there is one; return the step from which to train. Collective.

        Raises:
            UserError: see ``checkpoints.resume``.
        """
        if not self.folder:
            return 0
        load = partial(
            checkpoints.load,
            model=self.model,
            optimizer=self.optimizer,
            run=self.run,
            narrow=self.config.allow_narrowing,
        )
        self.last = checkpoints.resume(self.folder, self.config, last_step, load)
        return self.last

    def save(self, step: int, must: bool = False):
        """Write the state after ``step`` steps, or have it written while training goes on. Collective.

        Args:
            step: how many steps the state has behind it.
            must: the run ends now and is to resume from here, so that a failure ends it whatever --on-failed-save says.

        Raises:
            Diverged: a parameter or the optimizer's state is not finite; nothing was written.
            SaveFailed: it could not be written, and this ends the run.
        """
        if not self.folder or step == self.last:
            return
        begin = time.perf_counter()
        failed = self._wait()  # for the one before: two at once would need twice the memory
        if not self._is_finite():
            raise Diverged(
                f"after step {step} the model or its optimizer has values that are not finite: not saved, the "
                f"newest checkpoint is that of step {self.last or 0}"
            )
        if self.background and not must and not failed:
            copy = self._copied(state_of(self.model, self.optimizer, step))
            self.writing = self.background.submit(self._write_meanwhile, step, copy, *self._about())
            self.last = step
        else:  # after one that failed what is in hand is written first, at once
            self._write_now(step, must)
        self.stalls.append(time.perf_counter() - begin)

    def finish(self, step: int | None = None, must: bool = False):
        """Wait until all is written, and let the next run have the folder. Collective.

        Args:
            step: the run's last; if its save has failed, it is tried once more.
            must: see ``save``.

        Raises:
            SaveFailed: see ``save``.
        """
        if self._wait() and step is not None and self._is_finite():
            self._write_now(step, must)
        if self.folder:
            self.folder.close()

    def _about(self) -> tuple:
        return self.run, checkpoints.changeable(self.config), self.group

    def _write_now(self, step: int, must: bool):
        try:
            write(self.folder, step, state_of(self.model, self.optimizer, step), *self._about())
            self.last = step
        except SaveFailed as error:
            self.last = None
            if must or self.config.on_failed_save == "stop":
                raise
            if dist.get_rank() == 0:
                print(f"{error}; training goes on", flush=True)

    def _write_meanwhile(self, step: int, *about):
        """On the background's thread: ``write``, and say at once if it fails or takes long."""
        done = threading.Event()
        if dist.get_rank() == 0:
            threading.Thread(target=_report_waiting, args=(done, step), daemon=True).start()
        try:
            write(self.folder, step, *about)
        except SaveFailed as error:
            if dist.get_rank() == 0:
                print(f"{error}; what the next save writes is tried at once", flush=True)
            raise
        finally:
            done.set()

    def _wait(self) -> bool:
        """Wait for what is being written; return whether it failed."""
        if not self.writing:
            return False
        writing, self.writing = self.writing, None
        try:
            writing.result()
        except SaveFailed:
            self.last = None
            return True
        return False

    @torch.no_grad()
    def _is_finite(self) -> bool:
        """Whether all ranks' parameters and optimizer state are finite."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [local(each) for each in (*self.model.parameters(), *states) if isinstance(each, torch.Tensor)]
        flags = [torch.isfinite(each).all() for each in tensors if each.is_floating_point() and each.numel()]
        here = all(bool(flag) for flag in flags)
        infinite = torch.tensor(0 if here else 1)
        dist.all_reduce(infinite, dist.ReduceOp.MAX, self.group)
        return not infinite.item()

    def _copied(self, state: dict) -> dict:
        """A copy of this rank's part in the CPU's memory, which training no longer changes."""
        if self.stager is None or not KEEPS_STAGER:
            self.stager = _stager()
        return self.stager.stage(state)

    def summary(self) -> dict | None:
        """For a record: how many saves there were, and for how many seconds (median) each held up training."""
        if not self.stalls:
            return None
        return {
            "asynchronous": self.config.async_checkpoint,
            "saves": len(self.stalls),
            "stall": statistics.median(self.stalls),
        }


def _report_waiting(done: threading.Event, step: int):
    waited = 0
    while not done.wait(REPORT_SECONDS):
        waited += REPORT_SECONDS
        print(f"{name_of(step)} is still being written after {waited} s: is the storage slow, or away?", flush=True)


def _thread() -> ThreadPoolExecutor:
    """One thread. A new one is on GPU 0, where its first call would take memory, whichever GPU is the rank's."""
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))


def _stager() -> DefaultStager:
    """What copies a state to the CPU's memory: from a GPU into page-locked memory, which is several times faster.

    One for the whole run, where PyTorch allows it: it keeps that memory for the next save.
    """
    pinned = torch.cuda.is_initialized()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=pinned,
        )
    )


def state_of(model, optimizer, step: int) -> dict:
    """What a checkpoint holds. No copy: the tensors are those that are trained. Collective."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def save(folder: str | Path, step: int, model, optimizer, run: dict | None = None, keep: int | None = None):
    """Write the state after ``step`` steps, at once, into a folder that no other run uses. Collective.

    Args:
        folder: where checkpoints are; it is made if it is not there.
        step: how many steps the state has behind it.
        model, optimizer: what is saved; each rank writes what it holds.
        run: what must be the same when it is resumed (``checkpoints.identity``).
        keep: how many checkpoints are left there, the newest. None: all.

    Raises:
        SaveFailed: it could not be written.
    """
    write(CheckpointFolder(folder, keep), step, state_of(model, optimizer, step), run or {})


def write(folder: CheckpointFolder, step: int, state: dict, run: dict, options: dict | None = None, group=None):
    """Write a state in hand; try again after a while where the storage fails to answer. Collective.

    Args:
        folder: where it goes, and how many are kept there.
        step: in its name.
        state: ``state_of``, or a copy.
        run: what must be the same when it is resumed. options: what may change, and is then printed.
        group: whose messages to use (default: the run's).

    Raises:
        SaveFailed: it could not be written; those before it are as they were.
    """
    for wait in (*WAITS, None):
        every = _written(folder.partial(step), state, group)
        try:
            return on_one(partial(_complete, folder, folder.partial(step), every, run, options or {}), group)
        except SaveFailed as error:
            if wait is None or error.errno not in PASSING:
                raise
        time.sleep(wait)


def _written(partial: Path, state: dict, group) -> list:
    """Have every rank write its part; return of each a ``Written``, or (errno or None, what went wrong)."""
    if dist.get_rank() == 0:
        clear(partial)  # left by an attempt that failed
    dist.barrier(group)
    writer = dcp_writing.Writer(partial)
    try:
        dcp.save(state, storage_writer=writer, process_group=group)
        to_disk(partial)  # the files' names, on the node that made them
        mine = {"files": writer.digests, "shapes": writer.shapes, "formats": writer.formats}
    except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception
        mine = _what_failed(partial.parent, writer.error or checkpoints.cause(error))
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine, group)
    return every


def _what_failed(folder: Path, error: BaseException) -> tuple[int | None, str]:
    """(errno, in words) of why a checkpoint could not be written; no errno where PyTorch does not tell."""
    if isinstance(error, OSError) and error.errno:
        return error.errno, os.strerror(error.errno)
    try:
        full = shutil.disk_usage(folder).free < FULL
    except OSError:  # it is away
        full = False
    return (errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else (None, checkpoints.reason(error))


def _complete(folder: CheckpointFolder, partial: Path, every: list, run: dict, options: dict):
    """Make a checkpoint of what the ranks have written. every: see ``_written``. On rank 0."""
    try:
        if errors := [each for each in every if isinstance(each, tuple)]:
            # The one to put right: what does not pass, before what does, before what PyTorch does not tell.
            number, reason = min(errors, key=lambda each: (each[0] is None, each[0] in PASSING))
            raise OSError(number or 0, reason)
        files = {name: digest for each in every for name, digest in each["files"].items()}
        if unseen := next((name for name in files if not checkpoint_folder.appears(partial / name)), None):
            raise OSError(0, f"{unseen} is not seen by rank 0's node")
        known = next(each for each in every if dcp_reading.METADATA in each["files"])
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        about = {"run": run, "options": options, "ranks": len(every), "versions": versions}
        manifest.write(partial, files, **about, shapes=known["shapes"], formats=known["formats"])
        to_disk(partial)
        folder.commit(partial)
    except TakenOver:
        clear(partial)
        raise
    except OSError as error:
        clear(partial)
        raise SaveFailed(
            f"{name_of_partial(partial)} could not be saved to {partial.parent} ({error.strerror}), where older "
            "checkpoints are as they were: make room, or name another --checkpoint",
            error.errno,
        ) from None


def name_of_partial(partial: Path) -> str:
    return partial.name.partition(".")[0]
