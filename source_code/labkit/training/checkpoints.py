"""Save a training run and go on with it: atomic, sharded, and independent of the number of ranks.

A checkpoint is a folder ``step-000123`` written by torch.distributed.checkpoint, with a file ``run.json`` that says
what must be the same when it is resumed. It is made under another name and renamed when every rank has finished, so
that a folder of that name is always whole.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from labkit import UserError
from labkit.running.options import flag

RUN = "run.json"


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
    if (newest := to_resume(config)) is None:
        return 0
    step = load(newest, model, optimizer, run)
    check_left(step, last_step)
    return step


def to_resume(config) -> Path | None:
    """The newest checkpoint in --checkpoint, if there is one to go on from. Collective, where there are several ranks.

    UserError: there is one, and --resume is not given; or none can be written there.
    """
    if not config.checkpoint:
        return None
    _prepare(config.checkpoint)
    newest = [latest(config.checkpoint) if _rank() == 0 else None]  # one looks, all take the same
    if dist.is_initialized():
        dist.broadcast_object_list(newest)
    if newest[0] is not None and not config.resume:
        raise UserError(
            f"{config.checkpoint} holds the checkpoint {newest[0].name}: give --resume to go on from it, "
            "or name another --checkpoint"
        )
    return newest[0]


def check_left(step: int, last_step: int):
    """UserError if a checkpoint of so many steps leaves none to train."""
    if step >= last_step:
        raise UserError(f"nothing left to train: the checkpoint is at step {step} of {last_step}; train for more")


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


def save(folder: str | Path, step: int, model, optimizer, run: dict | None = None):
    """Write the state after ``step`` steps. Collective: every rank calls it, each writes what it holds."""
    final = Path(folder) / f"step-{step:06d}"
    partial = final.with_suffix(".partial")
    if dist.get_rank() == 0:  # left by a run that was ended while it saved
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=partial)
    if dist.get_rank() == 0:
        (partial / RUN).write_text(json.dumps(run or {}, indent=1) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    dist.barrier()


def latest(folder: str | Path) -> Path | None:
    """The checkpoint with the most steps, or None if there is none."""
    found = [p for p in Path(folder).glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()]
    return max(found, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def load(path: Path, model, optimizer, run: dict | None = None) -> int:
    """Read a checkpoint into model and optimizer, whatever number of ranks wrote it; return its step.

    UserError: it is damaged, or is of a run that differs from ``run``.
    """
    compare(path, run or {})
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    try:
        dcp.load(state, checkpoint_id=path)
    except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception; it wraps what went wrong
        raise unreadable(path, error) from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def unreadable(path: Path, error: BaseException) -> UserError:
    """What is said of a checkpoint that raised this when it was read."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
    return UserError(f"the checkpoint {path} cannot be read ({reason}): remove it to use the one before")


def compare(path: Path, run: dict):
    """UserError if the checkpoint is of another run. What only one of the two knows is not compared."""
    try:
        saved = json.loads((path / RUN).read_text())
    except FileNotFoundError:  # written before there was one, or by a loop of one's own
        return
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    for name, value in run.items():
        if name in saved and saved[name] != value:
            raise UserError(
                f"the checkpoint {path} was made with {name} {saved[name]}, and this run has {value}: "
                "give the same, or name another --checkpoint"
            )
