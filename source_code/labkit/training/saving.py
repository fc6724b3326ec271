# SPDX-License-Identifier: BSD-3-Clause
"""Save sharded checkpoints atomically, synchronously or asynchronously. Reading them: checkpoints.py.

A checkpoint is written by torch.distributed.checkpoint (DCP), with a manifest: its files and their checksums, and the
values that a resumed run must share. Frozen weights are not in it. It is written under another name and renamed when
every rank has finished and the manifest is on the disk, so that a run that ends while it saves, or runs out of space,
never damages the previous checkpoint. A state with values that are not finite is not saved.
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
from labkit.training import checkpoint_folder, checkpoints, dcp_reading, dcp_writing, loss_scaling, manifest
from labkit.training.checkpoint_folder import CheckpointFolder, clear, name_of, rank0_then_broadcast, to_disk
from labkit.training.ownership import TakenOver

FULL = 2**20  # bytes: a disk with less free space counts as full
# A terabyte at a gigabyte per second takes 17 minutes, more than the 10 minutes of NCCL's default timeout.
TIMEOUT = timedelta(hours=2)
REPORT_SECONDS = 300  # after which a save in progress is reported
# Transient errors of a file server. Others (a full disk, a quota, no permission) are permanent.
TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ENOTCONN, errno.EBUSY)
WAITS = (1.0, 10.0)  # seconds before each further attempt to write
# PyTorch 2.11's DefaultStager closes itself after one use, which later versions (2.15 was looked at) do not.
KEEPS_STAGER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


class SaveFailed(UserError):
    """A checkpoint could not be written; earlier ones are unchanged. errno: the operating system's error code."""

    def __init__(self, sentence: str, errno: int | None = None):
        super().__init__(sentence, errno)
        self.sentence, self.errno = sentence, errno

    def __str__(self):
        return self.sentence


class Saver:
    """Resume and save a run according to its options. Every rank creates one and calls it at the same steps.

    Args:
        config: a lab's options; nothing is saved if ``checkpoint`` is None.
        model, optimizer: what is trained, already sharded.
        run: its ``checkpoints.identity``.

    Raises:
        UserError: the folder cannot be used: see ``CheckpointFolder.of``.
    """

    def __init__(self, config, model, optimizer, run: dict):
        self.config, self.model, self.optimizer, self.run = config, model, optimizer, run
        self.last = 0  # the newest step that is saved or being saved
        self.stalls = []  # seconds for which each save blocked training
        self.folder = self.group = self.background = self.writing = self.stager = None
        if config.checkpoint:
            self.folder = CheckpointFolder.of(config)
            # A separate group: with training's groups a slow disk would exceed their timeout, and an asynchronous save
            # would interleave with the collectives of the steps. On the CPU, so that nothing waits for the GPU.
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        if config.checkpoint and config.async_checkpoint:
            self.background = _thread()

    def resume(self, last_step: int) -> int:
        """Load the newest checkpoint if there is one, and return the step from which to train. Collective.

        Args:
            last_step: number of steps at the end of training.

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
        """Save the state after ``step`` steps; with --async-checkpoint, while training continues. Collective.

        Args:
            step: number of steps trained.
            must: whether a failure ends the run regardless of --on-save-error, because the run ends now.

        Raises:
            Diverged: a parameter or the optimizer's state is not finite; nothing was written.
            SaveFailed: it could not be written, and this ends the run.
        """
        if not self.folder or step == self.last:
            return
        begin = time.perf_counter()
        failed = self._wait()  # for the previous save: two at the same time would need twice the memory
        if not self._is_finite():
            raise Diverged(
                f"after step {step} the model or its optimizer has values that are not finite: not saved, the "
                f"newest checkpoint is that of step {self.last or 0}"
            )
        if self.background and not must and not failed:
            copy = self._stage(state_of(self.model, self.optimizer, step))
            self.writing = self.background.submit(self._write_in_background, step, copy, *self._metadata())
            self.last = step
        else:  # also after a failed save: synchronously, so that the next failure is noticed at once
            self._write_now(step, must)
        self.stalls.append(time.perf_counter() - begin)

    def finish(self, step: int | None = None, must: bool = False):
        """Wait for the last save, and release the folder for the next run. Collective.

        Args:
            step: the run's last step; if its save has failed, it is tried once more.
            must: see ``save``.

        Raises:
            SaveFailed: see ``save``.
        """
        if self._wait() and step is not None and self._is_finite():
            self._write_now(step, must)
        if self.folder:
            self.folder.close()

    def _metadata(self) -> tuple:
        return self.run, checkpoints.changeable(self.config), self.group

    def _write_now(self, step: int, must: bool):
        try:
            write(self.folder, step, state_of(self.model, self.optimizer, step), *self._metadata())
            self.last = step
        except SaveFailed as error:
            self.last = None
            if must or self.config.on_save_error == "stop":
                raise
            if dist.get_rank() == 0:
                print(f"{error}; training goes on", flush=True)

    def _write_in_background(self, step: int, *arguments):
        """Call ``write`` on the background thread, and report at once if it fails or takes long."""
        done = threading.Event()
        if dist.get_rank() == 0:
            threading.Thread(target=_report_waiting, args=(done, step), daemon=True).start()
        try:
            write(self.folder, step, *arguments)
        except SaveFailed as error:
            if dist.get_rank() == 0:
                print(f"{error}; what the next save writes is tried at once", flush=True)
            raise
        finally:
            done.set()

    def _wait(self) -> bool:
        """Wait for a save in progress, and return whether it failed."""
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
        """Return whether all ranks' parameters and optimizer state are finite."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [local(each) for each in (*self.model.parameters(), *states) if isinstance(each, torch.Tensor)]
        flags = {}  # {device: one per tensor}, so that each device is waited for once
        for each in tensors:
            if each.is_floating_point() and each.numel():
                flags.setdefault(each.device, []).append(torch.isfinite(each).all())
        here = all(torch.stack(of_device).all().item() for of_device in flags.values())
        infinite = torch.tensor(0 if here else 1)
        dist.all_reduce(infinite, dist.ReduceOp.MAX, self.group)
        return not infinite.item()

    def _stage(self, state: dict) -> dict:
        """Copy this rank's shard of the state to CPU memory, which training does not change."""
        if self.stager is None or not KEEPS_STAGER:
            self.stager = _stager()
        return self.stager.stage(state)

    def summary(self) -> dict | None:
        """Return the number of saves and the median seconds for which one blocked training, for a record."""
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
    """Return a pool of one thread on this rank's GPU: a new thread uses GPU 0, and its first call allocates memory there."""
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))


def _stager() -> DefaultStager:
    """Return the stager that copies a state to CPU memory; from a GPU to pinned memory, which is several times faster.

    Use one for the whole run, where PyTorch allows it: it reuses that memory for the next save.
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
    """Return the state to save, {"model", "optimizer", "step"}: what is trained, without copying tensors. Collective.

    With --precision fp16 it also has the "loss_scaling".
    """
    model_state, optimizer_state = get_state_dict(model, optimizer, options=checkpoints.TRAINED)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    scaler = loss_scaling.scaler_of(optimizer)
    return state | {"loss_scaling": scaler.state_dict()} if scaler.is_enabled() else state


def save(folder: str | Path, step: int, model, optimizer, run: dict | None = None, keep: int | None = None):
    """Save the state after ``step`` steps synchronously, to a folder that no other run uses. Collective.

    Args:
        folder: of the checkpoints; it is created if it does not exist.
        step: number of steps trained.
        model, optimizer: what to save; each rank writes its shards.
        run: values that a resumed run must share (``checkpoints.identity``).
        keep: number of newest checkpoints to keep; None: all.

    Raises:
        SaveFailed: it could not be written.
    """
    write(CheckpointFolder(folder, keep), step, state_of(model, optimizer, step), run or {})


def write(folder: CheckpointFolder, step: int, state: dict, run: dict, options: dict | None = None, group=None):
    """Write a state as a checkpoint, and retry after transient errors of the storage. Collective.

    Args:
        folder: of the checkpoints.
        step: number of steps trained, for the name.
        state: as ``state_of`` returns it, or a copy.
        run: values that a resumed run must share.
        options: values that a resumed run may change; the change is printed.
        group: process group to use (default: the default group).

    Raises:
        SaveFailed: it could not be written; earlier checkpoints are unchanged.
    """
    for wait in (*WAITS, None):
        every = _write_shards(folder.partial(step), state, group)
        try:
            return rank0_then_broadcast(
                partial(_complete, folder, folder.partial(step), every, run, options or {}), group
            )
        except SaveFailed as error:
            if wait is None or error.errno not in TRANSIENT:
                raise
        time.sleep(wait)


def _write_shards(partial: Path, state: dict, group) -> list:
    """Write every rank's shards, and return for each rank {"files", "shapes", "formats"}, or (errno or None, reason)."""
    if dist.get_rank() == 0:
        clear(partial)  # of a failed attempt
    dist.barrier(group)
    writer = dcp_writing.Writer(partial)
    try:
        dcp.save(state, storage_writer=writer, process_group=group)
        to_disk(partial)  # the folder's entries, on the node that created them
        mine = {"files": writer.digests, "shapes": writer.shapes, "formats": writer.formats}
    except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception
        mine = _failure(partial.parent, writer.error or checkpoints.cause(error))
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine, group)
    return every


def _failure(folder: Path, error: BaseException) -> tuple[int | None, str]:
    """Return (errno, reason) of a failed write; errno is None if PyTorch does not report it."""
    if isinstance(error, OSError) and error.errno:
        return error.errno, os.strerror(error.errno)
    try:
        full = shutil.disk_usage(folder).free < FULL
    except OSError:  # the file system is unavailable
        full = False
    return (errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else (None, checkpoints.reason(error))


def _complete(folder: CheckpointFolder, partial: Path, every: list, run: dict, options: dict):
    """Complete a checkpoint: write its manifest and commit it. every: of ``_write_shards``. On rank 0."""
    try:
        if errors := [each for each in every if isinstance(each, tuple)]:
            # The most useful error: a permanent one, else a transient one, else one without errno.
            number, reason = min(errors, key=lambda each: (each[0] is None, each[0] in TRANSIENT))
            raise OSError(number or 0, reason)
        files = {name: digest for each in every for name, digest in each["files"].items()}
        if unseen := next((name for name in files if not checkpoint_folder.wait_until_visible(partial / name)), None):
            raise OSError(0, f"{unseen} is not seen by rank 0's node")
        known = next(each for each in every if dcp_reading.METADATA in each["files"])
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        metadata = {"run": run, "options": options, "ranks": len(every), "versions": versions}
        manifest.write(partial, files, **metadata, shapes=known["shapes"], formats=known["formats"])
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
