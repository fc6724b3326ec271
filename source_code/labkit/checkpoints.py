"""Save a training run and go on with it: atomic, sharded, and independent of the number of ranks.

A checkpoint is a folder ``step-000123`` written by torch.distributed.checkpoint. It is made under another
name and renamed when every rank has finished, so that a folder of that name is always whole.
"""

import re
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from labkit import UserError


def prepare(folder: str | Path):
    """Make the folder for checkpoints, before the training that is to fill it. UserError if that cannot be."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{dist.get_rank()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"checkpoints cannot be written to {folder} ({error.strerror}): name another --checkpoint"
        ) from None


def save(folder: str | Path, step: int, model, optimizer):
    """Write the state after ``step`` steps. Collective: every rank calls it, each writes what it holds."""
    final = Path(folder) / f"step-{step:06d}"
    partial = final.with_suffix(".partial")
    if dist.get_rank() == 0:  # left by a run that was ended while it saved
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=partial)
    if dist.get_rank() == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    dist.barrier()


def latest(folder: str | Path) -> Path | None:
    """The checkpoint with the most steps, or None if there is none."""
    found = [p for p in Path(folder).glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()]
    return max(found, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def load(path: Path, model, optimizer) -> int:
    """Read a checkpoint into model and optimizer, whatever number of ranks wrote it; return its step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    try:
        dcp.load(state, checkpoint_id=path)
    except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception; it wraps what went wrong
        reason = str(error).strip().splitlines()[-1]
        raise UserError(f"the checkpoint {path} cannot be read ({reason}): remove it to use the one before") from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]
