"""Write a checkpoint: atomic, sharded, at once or while training goes on. Finding and reading it: checkpoints.py.

A checkpoint is a folder ``step-000123`` written by torch.distributed.checkpoint (DCP), with a manifest: its files and
their checksums, and what must be the same when it is resumed. It is made under another name and renamed when every
rank has finished and the manifest is on the disk, so that a run that is ended while it saves, or that runs out of
space, never costs the checkpoint before.
"""

import errno
import os
import platform
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from labkit import UserError
from labkit.training import checkpoints, dcp_reading, manifest

FULL = 2**20  # bytes: with fewer left on a disk, a file could not be written because it is full


class Saver:
    """Saves a run as its options say. Every rank makes one and calls it at the same steps.

    config: has ``checkpoint`` (None: nothing is saved), ``keep``, ``async_checkpoint`` and ``on_failed_save``.
    run: its ``checkpoints.identity``. step: the one that training starts from, which need not be saved again.
    """

    def __init__(self, config, model, optimizer, run: dict, step: int):
        self.config, self.model, self.optimizer, self.run = config, model, optimizer, run
        self.last = step  # the newest that is on the disk, or on its way there
        self.stalls = []  # seconds that training stood still, of each save
        self.background = self.group = self.writing = None
        if config.checkpoint and config.async_checkpoint:
            self.background = _thread()
            # Messages of its own: in the training's groups they would get between those of the steps.
            self.group = dist.new_group(backend="gloo")

    def save(self, step: int, must: bool = False):
        """Write the state after ``step`` steps, or have it written while training goes on. must, UserError: see ``finish``."""
        if not self.config.checkpoint or step == self.last:
            return
        begin = time.perf_counter()
        self.finish()  # one after the other: two at once would need twice the memory
        self.last = step
        state = state_of(self.model, self.optimizer, step)
        where = self.config.checkpoint, step, state, self.run, self.config.keep, self.group
        if self.background:
            self.writing = self.background.submit(write, *where[:2], copied(state), *where[3:])
        else:
            self._try(lambda: write(*where), must)
        self.stalls.append(time.perf_counter() - begin)

    def finish(self, must: bool = False):
        """Wait until all is written. UserError: it could not be, and --on-failed-save says that this ends the run.

        must: it ends the run in any case, as where the run ends now and is to go on from there.
        """
        if self.writing:
            writing, self.writing = self.writing, None
            self._try(writing.result, must)

    def _try(self, function, must):
        try:
            function()
        except UserError as error:
            self.last = None
            if must or self.config.on_failed_save == "stop":
                raise
            if dist.get_rank() == 0:
                print(f"{error}; training goes on", flush=True)

    def summary(self) -> dict | None:
        """For a record: how many saves there were, and for how many seconds (median) each held up training."""
        if not self.stalls:
            return None
        return {
            "asynchronous": self.config.async_checkpoint,
            "saves": len(self.stalls),
            "stall": statistics.median(self.stalls),
        }


def _thread() -> ThreadPoolExecutor:
    """One thread. A new one is on GPU 0, where its first call would take memory, whichever GPU is the rank's."""
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))


def state_of(model, optimizer, step: int) -> dict:
    """What a checkpoint holds. No copy: the tensors are those that are trained. Collective."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def copied(state: dict) -> dict:
    """A copy of this rank's part in the CPU's memory, which training no longer changes."""
    plain = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    return DefaultStager(plain).stage(state)


def save(folder: str | Path, step: int, model, optimizer, run: dict | None = None, keep: int | None = None):
    """Write the state after ``step`` steps, at once. Collective: every rank calls it, each writes what it holds.

    keep: how many checkpoints are left there, the newest. None: all. UserError: it could not be written.
    """
    write(folder, step, state_of(model, optimizer, step), run or {}, keep)


def write(folder: str | Path, step: int, state: dict, run: dict, keep: int | None, group=None):
    """``save`` for a state in hand. group: whose messages to use (default: the run's)."""
    partial = Path(folder) / f"{checkpoints.name_of(step)}.partial"
    if dist.get_rank() == 0:  # left by a run that was ended while it saved
        checkpoints.clear(partial)
    dist.barrier(group)
    try:
        dcp.save(state, checkpoint_id=partial, process_group=group)
        mine = {path.name: manifest.digest(path) for path in partial.glob(f"__{dist.get_rank()}_*")}
    except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception
        full = shutil.disk_usage(folder).free < FULL  # PyTorch does not tell why it could not write
        mine = os.strerror(errno.ENOSPC) if full else checkpoints.reason(error)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine, group)
    checkpoints.on_one(lambda: _complete(partial, every, run, keep), group)


def _complete(partial: Path, every: list, run: dict, keep: int | None):
    """Make a checkpoint of what the ranks have written. every: of each rank its files' digests, or what went wrong."""
    try:
        if failed := [each for each in every if isinstance(each, str)]:
            raise OSError(0, failed[0])
        files = {name: digest for each in every for name, digest in each.items()}
        if unseen := next((name for name in files if not checkpoints.appears(partial / name)), None):
            raise OSError(0, f"{unseen} is not seen by rank 0's node")
        files[dcp_reading.METADATA] = manifest.digest(partial / dcp_reading.METADATA)
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        about = {"run": run, "ranks": len(every), "versions": versions, "shapes": dcp_reading.shapes(partial)}
        manifest.write(partial, files, **about)
        put_in_place(partial, keep)
    except OSError as error:
        checkpoints.clear(partial)
        raise UserError(
            f"{partial.stem} could not be saved to {partial.parent} ({error.strerror}), where older checkpoints are as "
            "they were: make room, or name another --checkpoint"
        ) from None


def put_in_place(partial: Path, keep: int | None):
    """Give a checkpoint its name, now that it is whole; remove all but the ``keep`` newest. No collective."""
    final = partial.with_suffix("")
    checkpoints.clear(final)  # a damaged one, that the run did without
    partial.rename(final)
    _to_disk(final.parent)
    # Newer ones do not count: they were damaged when this run began before them.
    found = [
        path for path in checkpoints.stored(final.parent) if checkpoints.step_of(path) <= checkpoints.step_of(final)
    ]
    for old in found[keep:] if keep else ():
        checkpoints.clear(removed := old.with_suffix(".removed"))
        old.rename(removed)  # at once: half of one shall not be taken for a whole one
        checkpoints.clear(removed)


def _to_disk(folder: Path):
    """Have the names in a folder written to the disk: a rename may otherwise be lost with the node's power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
