"""Save a training run and go on with it: atomic, sharded, and independent of the number of ranks.

A checkpoint is a folder ``step-000123`` written by torch.distributed.checkpoint (DCP), with a manifest: its files and
their checksums, and what must be the same when it is resumed. It is made under another name and renamed when every
rank has finished and the manifest is on the disk, so that a run that is ended while it saves never costs the
checkpoint before. What differs from its manifest is never loaded.
"""

import dataclasses
import os
import platform
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from labkit import UserError
from labkit.running.options import flag
from labkit.training import dcp_reading, manifest
from labkit.training.manifest import Damaged


def identity(config, global_batch: int, data: str) -> dict:
    """What a run that resumes another must share with it: {what it is called: its value}.

    The options that are declared with ``resumed=True``; the global batch (images or sequences a step) and the data
    set, as step n of another would have read something else.
    """
    kept = [field.name for field in dataclasses.fields(config) if field.metadata["resumed"]]
    return {flag(name): getattr(config, name) for name in kept} | {"a global batch of": global_batch, "data": data}


def resume(config, model, optimizer, run: dict, last_step: int) -> int:
    """Read the newest checkpoint in --checkpoint if --resume says so; return the step from which to train.

    run: this run's ``identity``. Collective. UserError: there is nothing to go on with or to train, or the folder
    belongs to another run.
    """
    return go_on(config, last_step, lambda path: load(path, model, optimizer, run))


def go_on(config, last_step: int, load) -> int:
    """The step that ``load(path)`` returns of the newest checkpoint, with --fall-back of the newest whole one; or 0."""
    found = to_resume(config)
    for path in found:
        try:
            step = load(path)
        except Damaged as error:
            if not config.fall_back:
                raise
            if _rank() == 0:
                print(f"{path} is damaged ({error.reason}): trying the one before", flush=True)
            continue
        if step >= last_step:
            raise UserError(f"nothing left to train: the checkpoint is at step {step} of {last_step}; train for more")
        return step
    if found:
        raise UserError(f"no checkpoint in {config.checkpoint} is whole: name another --checkpoint, and start anew")
    return 0


def to_resume(config) -> list[Path]:
    """The checkpoints in --checkpoint, the newest first. Collective, where there are several ranks.

    UserError: there are some, and --resume is not given; or none can be written there.
    """
    if not config.checkpoint:
        return []
    _prepare(config.checkpoint)
    found = on_one(lambda: stored(config.checkpoint))
    if found and not config.resume:
        raise UserError(
            f"{config.checkpoint} holds the checkpoint {found[0].name}: give --resume to go on from it, "
            "or name another --checkpoint"
        )
    return found


def on_one(function):
    """What ``function()`` returns on rank 0, on every rank; a UserError likewise. So that all ranks take the same."""
    try:
        result = [function() if _rank() == 0 else None]
    except UserError as error:
        result = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(result)
    if isinstance(result[0], UserError):
        raise result[0]
    return result[0]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _prepare(folder: str | Path):
    """Make the folder for checkpoints, before the training that is to fill it. UserError if that cannot be."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{_rank()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"checkpoints cannot be written to {folder} ({error.strerror}): name another --checkpoint"
        ) from None


def save(folder: str | Path, step: int, model, optimizer, run: dict | None = None, keep: int | None = None):
    """Write the state after ``step`` steps. Collective: every rank calls it, each writes what it holds.

    keep: how many checkpoints are left there, the newest. None: all.
    """
    partial = Path(folder) / f"{name_of(step)}.partial"
    if dist.get_rank() == 0:  # left by a run that was ended while it saved
        _clear(partial)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=partial)
    files = {path.name: manifest.digest(path) for path in partial.glob(f"__{dist.get_rank()}_*")}  # this rank's
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, files)
    if dist.get_rank() == 0:
        files = {name: digest for each in every for name, digest in each.items()}
        files[dcp_reading.METADATA] = manifest.digest(partial / dcp_reading.METADATA)
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        about = {"run": run or {}, "ranks": len(every), "versions": versions, "shapes": dcp_reading.shapes(partial)}
        manifest.write(partial, files, **about)
        put_in_place(partial, keep)
    dist.barrier()


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def put_in_place(partial: Path, keep: int | None):
    """Give a checkpoint its name, now that it is whole; remove all but the ``keep`` newest. No collective."""
    final = partial.with_suffix("")
    _clear(final)  # a damaged one, that the run did without
    partial.rename(final)
    _to_disk(final.parent)
    for old in stored(final.parent)[keep:] if keep else ():
        _clear(removed := old.with_suffix(".removed"))
        old.rename(removed)  # at once: half of one shall not be taken for a whole one
    for removed in final.parent.glob("step-*.removed"):  # also what a run that was ended here has left
        _clear(removed)


def _clear(path: Path):
    """Remove a checkpoint, or whatever else has the name of one; of a link the link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _to_disk(folder: Path):
    """Have the names in a folder written to the disk: a rename may otherwise be lost with the node's power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stored(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    found = [p for p in Path(folder).glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def latest(folder: str | Path) -> Path | None:
    """The checkpoint with the most steps, or None if there is none."""
    return next(iter(stored(folder)), None)


def load(path: Path, model, optimizer, run: dict | None = None) -> int:
    """Read a checkpoint into model and optimizer, whatever number of ranks wrote it; return its step. Collective.

    Damaged: it is not what was written. UserError: it is of another run than ``run``, or of another model.
    """
    found = checked(path, run or {})
    model_state, optimizer_state = get_state_dict(model, optimizer)
    check_shapes(path, found, {f"model.{name}": tensor for name, tensor in model_state.items()})
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    reader = dcp_reading.Reader(path)
    try:
        reader.read_metadata()  # DCP does it too, but PyTorch 2.11's keeps to itself why it could not
        dcp.load(state, storage_reader=reader, planner=dcp_reading.Planner())
    except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception; it wraps what went wrong
        raise unreadable(path, error) from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def check_shapes(path: Path, found: dict, tensors: dict):
    """UserError if the checkpoint has not each of these {name: tensor} in its shape. found: its manifest."""
    for name, tensor in tensors.items():
        if (saved := found["shapes"].get(name)) != list(tensor.shape):
            there = f"has the shape {saved}" if saved else "is not there"
            raise UserError(
                f"the checkpoint {path} is of another model: {name} {there}, and here it has {list(tensor.shape)}: "
                "name another --checkpoint"
            )


def checked(path: Path, run: dict) -> dict:
    """The manifest of a checkpoint that is of this run, whole and unchanged. Collective; each rank reads some files.

    run: what must be the same; what only one of the two knows is not compared.
    """
    found = on_one(lambda: manifest.read(path))
    for name, value in run.items():
        if name in found["run"] and found["run"][name] != value:
            raise UserError(
                f"the checkpoint {path} was made with {name} {found['run'][name]}, and this run has {value}: "
                "give the same, or name another --checkpoint"
            )
    world = dist.get_world_size() if dist.is_initialized() else 1
    mine = dict(sorted(found["files"].items())[_rank() :: world])
    differences = [manifest.difference(path, mine)] * world
    if world > 1:
        dist.all_gather_object(differences, differences[0])
    if any(differences):
        raise Damaged(path, next(filter(None, differences)))
    return found


def unreadable(path: Path, error: BaseException) -> UserError:
    """What is said of a checkpoint that is what was written, and raised this when it was read."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
    return UserError(f"the checkpoint {path} cannot be read ({reason}): name another --checkpoint")
