"""Find the checkpoint to go on from and read it, whatever number of ranks wrote it. Writing it: saving.py.

What differs from its manifest is never loaded.
"""

import dataclasses
import re
import shutil
import socket
import time
import uuid
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from labkit import UserError
from labkit.running.options import flag
from labkit.training import dcp_reading, manifest
from labkit.training.manifest import Damaged

SEEN_SECONDS = 5  # in which a shared file system shows a new file on another node


def identity(config, global_batch: int, data: str) -> dict:
    """What a run that resumes another must share with it: {what it is called: its value}.

    The options that are declared with ``resumed=True``; the global batch (images or sequences per step) and the data
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
        saves_yet = step == last_step and getattr(config, "save", None)  # trained, and ended before that was done
        if step >= last_step and not saves_yet:
            raise UserError(f"nothing left to train: the checkpoint is at step {step} of {last_step}; train for more")
        return step
    if found:
        raise UserError(f"no checkpoint in {config.checkpoint} is whole: name another --checkpoint, and start anew")
    return 0


def to_resume(config) -> list[Path]:
    """The checkpoints in --checkpoint, the newest first. Collective, where there are several ranks.

    UserError: there are some, and --resume is not given; or none can be written there, or not for all ranks to see.
    """
    if not config.checkpoint:
        return []
    _prepare(config.checkpoint)
    _check_shared(Path(config.checkpoint))
    found = on_one(lambda: stored(config.checkpoint))
    if found and not config.resume:
        raise UserError(
            f"{config.checkpoint} holds the checkpoint {found[0].name}: give --resume to go on from it, "
            "or name another --checkpoint"
        )
    return found


def on_one(function, group=None):
    """What ``function()`` returns on rank 0, on every rank; what it raises likewise. So that all ranks do the same.

    group: whose messages to use (default: the run's).
    """
    try:
        result = [function() if _rank() == 0 else None]
    except Exception as error:  # any: the others would wait for rank 0
        result = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(result, group=group)
    if isinstance(result[0], Exception):
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
        probe.unlink(missing_ok=True)
        if _rank() == 0:
            for path in folder.glob("step-*"):  # left by a run that was ended there
                if re.fullmatch(r"step-\d+\.(partial|removed)", path.name):
                    clear(path)
    except OSError as error:
        raise UserError(
            f"checkpoints cannot be written to {folder} ({error.strerror}): name another --checkpoint"
        ) from None


def _check_shared(folder: Path):
    """UserError, on every rank, if a rank does not see there what rank 0 writes: each node would save its own part alone.

    Collective, where there are several ranks.
    """
    if not dist.is_initialized():
        return

    def touched() -> str:
        name = f".seen-{uuid.uuid4().hex}"  # a new one: no node remembers that it is not there
        (folder / name).touch()
        return name

    token = folder / on_one(touched)
    unseen = [None] * dist.get_world_size()
    dist.all_gather_object(unseen, None if appears(token) else socket.gethostname())
    on_one(lambda: token.unlink(missing_ok=True))
    if any(unseen):
        raise UserError(
            f"{next(filter(None, unseen))} does not see what rank 0 writes to {folder}: name a --checkpoint folder that "
            "all nodes share"
        )


def appears(path: Path) -> bool:
    """Whether a file that another node has just written is here, or comes soon."""
    end = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def clear(path: Path):
    """Remove a checkpoint, or whatever else has the name of one; of a link the link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def stored(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    found = [p for p in Path(folder).glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()]
    return sorted(found, key=step_of, reverse=True)


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
    # The stages of a pipeline all save the options of their parameters under one name, and DCP keeps one stage's: its
    # options are everyone's, its list of parameters is not, and PyTorch gives options only to those that are listed.
    listed = [group["params"] for group in optimizer_state["param_groups"]]
    reader = dcp_reading.Reader(path)
    try:
        reader.read_metadata()  # DCP does it too, but PyTorch 2.11's keeps to itself why it could not
        dcp.load(state, storage_reader=reader, planner=dcp_reading.Planner())
    except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception; it wraps what went wrong
        raise unreadable(path, error) from None
    for group, parameters in zip(state["optimizer"]["param_groups"], listed, strict=True):
        group["params"] = parameters
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
    return UserError(f"the checkpoint {path} cannot be read ({reason(error)}): name another --checkpoint")


def reason(error: BaseException) -> str:
    """What went wrong, in a line. DCP's exception has that of the first rank to fail within it."""
    if isinstance(error, dcp.CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[-1]
