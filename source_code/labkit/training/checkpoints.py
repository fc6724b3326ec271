# SPDX-License-Identifier: BSD-3-Clause
"""Resume from a checkpoint, on any number of ranks. Writing one: saving.py. Their folder: checkpoint_folder.py.

A checkpoint that differs from its manifest is never loaded.
"""

import dataclasses

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from labkit import UserError
from labkit.running.options import flag
from labkit.training import dcp_reading, loss_scaling, manifest
from labkit.training.checkpoint_folder import (
    CheckpointFolder,
    Path,
    latest,
    name_of,
    rank,
    rank0_then_broadcast,
    stored,
)
from labkit.training.manifest import Damaged, Unreadable

# Frozen weights are in no checkpoint: the run that resumes has them from its model's files, or its seed. So not all
# names of the model are there (not strict); ``check_shapes`` checks those that must be.
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)

__all__ = ["CheckpointFolder", "Damaged", "Unreadable", "latest", "name_of", "rank0_then_broadcast", "stored"]


def identity(config, global_batch: int, data: str) -> dict:
    """Return the values that a resumed run must share with the run before, {name in messages: value}.

    These are the options declared with ``resumed=True``, the global batch size, and the data set: with others, the same
    step would have read other samples.

    Args:
        config: the run's options.
        global_batch: images or sequences per step, of all ranks together.
        data: name of the data set.
    """
    return _options(config, True) | {"a global batch of": global_batch, "data": data}


def changeable(config) -> dict:
    """Return the options that a resumed run may change, {flag: value}; a change is printed."""
    options = _options(config, "print")
    if getattr(config, "lr_schedule", "constant") != "constant":  # a decay ends with the run
        options["--max-steps"] = config.max_steps
    return options


def _options(config, resumed: bool | str) -> dict:
    names = [field.name for field in dataclasses.fields(config) if field.metadata["resumed"] == resumed]
    return {flag(name): getattr(config, name) for name in names}


def resume(folder: CheckpointFolder, config, last_step: int, load) -> int:
    """Load the newest checkpoint of a folder; with --fallback, the newest intact one. Collective.

    Args:
        folder: the run's folder, which it owns.
        config: has ``fallback``. If it has ``save`` (an export at the end), a completed run may resume to write it.
        last_step: number of steps at the end of training.
        load: loads the checkpoint at a path and returns its step.

    Returns:
        The step from which to train; 0 without a checkpoint.

    Raises:
        UserError: no checkpoint is intact, training is complete, or the checkpoint belongs to another run.
    """
    paths = rank0_then_broadcast(lambda: stored(folder.path))
    for path in paths:
        try:
            step = load(path)
        except (Damaged, Unreadable) as error:
            if not config.fallback:
                raise
            rank0_then_broadcast(lambda path=path, error=error: _skip(folder, path, error))
            continue
        export_is_due = step == last_step and getattr(config, "save", None)  # trained, but ended before the export
        if step >= last_step and not export_is_due:
            raise UserError(f"nothing left to train: the checkpoint is at step {step} of {last_step}; train for more")
        rank0_then_broadcast(lambda path=path: _resume_from(folder, path, config))
        return step
    if paths:
        raise UserError(f"no checkpoint in {folder.path} is whole: name another --checkpoint, and start anew")
    rank0_then_broadcast(folder.clear_leftovers)
    return 0


def _skip(folder: CheckpointFolder, path: Path, error: Damaged | Unreadable):
    """Print why a checkpoint is skipped, and set it aside if it is damaged. On rank 0."""
    if isinstance(error, Damaged):
        folder.set_aside(path)
        print(f"{path} is damaged ({error.reason}): set aside, trying the one before", flush=True)
    else:
        print(f"{path} cannot be read now ({error.reason}): trying the one before", flush=True)


def _resume_from(folder: CheckpointFolder, path: Path, config):
    """Register a loaded checkpoint as intact, and print the options that have changed since. On rank 0."""
    folder.whole.add(path.name)
    folder.clear_leftovers()
    now, saved = changeable(config), manifest.read(path)
    if (before := saved.get("versions", {}).get("torch", torch.__version__)) != torch.__version__:
        print(f"{path.name} was saved with torch {before}, and is read with {torch.__version__}", flush=True)
    for name, before in saved.get("options", {}).items():
        if name in now and now[name] != before:
            print(f"{name} was {_shown(before)} up to {path.name}, and is {_shown(now[name])} from here on", flush=True)


def _shown(value) -> str:
    return (
        {None: "not given", True: "on", False: "off"}.get(value, value)
        if not isinstance(value, float)
        else f"{value:g}"
    )


def load(path: Path, model, optimizer, run: dict | None = None, narrow: bool = True) -> int:
    """Load a checkpoint into model and optimizer, on any number of ranks. Collective.

    Args:
        path: the checkpoint.
        model, optimizer: the same modules and optimizer as when it was saved; ranks and strategy may differ.
        run: the values that must match, as ``identity`` returns them; names that only one side has are not compared.
        narrow: whether weights may be loaded in a dtype with fewer bits.

    Returns:
        The step after which it was saved.

    Raises:
        Damaged: it differs from its manifest.
        Unreadable: its storage does not respond.
        UserError: it belongs to a run with other values than ``run``, or to another model.
    """
    saved = checked(path, run or {})
    model_state, optimizer_state = get_state_dict(model, optimizer, options=TRAINED)
    tensors = {f"model.{name}": tensor for name, tensor in model_state.items()}
    check_shapes(path, saved, tensors)
    if not narrow:
        check_formats(path, saved, {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()})
    # Learning rate, weight decay and so on are this run's own options: only the optimizer's state is loaded.
    groups = optimizer_state.pop("param_groups")
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    reader, scaler = dcp_reading.Reader(path), loss_scaling.scaler_of(optimizer)
    try:
        metadata = reader.read_metadata()  # DCP does it, too, but PyTorch 2.11 hides why it failed
        _check_listed(path, reader, saved)
        # A run in another format has saved no scale: it begins at the default.
        if scaler.is_enabled() and any(name.startswith("loss_scaling.") for name in metadata.state_dict_metadata):
            state["loss_scaling"] = scaler.state_dict()
        dcp.load(state, storage_reader=reader, planner=dcp_reading.Planner())
    except Damaged:
        raise
    except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception; it wraps the cause
        raise unreadable(path, error) from None
    if "loss_scaling" in state:
        scaler.load_state_dict(state["loss_scaling"])
    optimizer_state = state["optimizer"] | {"param_groups": groups}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state, options=TRAINED)
    return state["step"]


def _check_listed(path: Path, reader, saved: dict):
    """Check that the manifest ``saved`` lists all files to be read.

    Raises:
        Damaged: a file is not listed, so it has no checksum.
    """
    read = {each.relative_path for each in reader.read_metadata().storage_data.values()} | {dcp_reading.METADATA}
    if missing := read - set(saved["files"]):
        raise Damaged(path, f"{min(missing)} is not in its {manifest.NAME}")


def check_shapes(path: Path, saved: dict, tensors: dict):
    """Check that a checkpoint has all tensors of the model, in their shapes.

    Args:
        path: the checkpoint, for messages.
        saved: its manifest.
        tensors: {name: tensor} of the model.

    Raises:
        UserError: a tensor is missing, or has another shape.
    """
    for name, tensor in tensors.items():
        if (shape := saved["shapes"].get(name)) != list(tensor.shape):
            there = f"has the shape {shape}" if shape else "is not there"
            raise UserError(
                f"the checkpoint {path} is of another model: {name} {there}, and here it has {list(tensor.shape)}: "
                "name another --checkpoint"
            )


BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def check_formats(path: Path, saved: dict, formats: dict[str, str]):
    """Check that no weight would be loaded in a dtype with fewer bits.

    Args:
        path: the checkpoint, for messages.
        saved: its manifest.
        formats: {name: dtype in this run, such as "float32"}.

    Raises:
        UserError: a weight would lose bits.
    """
    for name, here in formats.items():
        before = saved.get("formats", {}).get(name)
        if BITS.get(before, 0) > BITS.get(here, 64):
            raise UserError(
                f"the checkpoint {path} has {name} in {before}, and this run has {here}, which would lose the other bits "
                "for good: give the --precision and --weights it was trained with, or --allow-narrowing"
            )


def checked(path: Path, run: dict) -> dict:
    """Verify a checkpoint, and return its manifest. Collective; each rank verifies some of the files.

    Args:
        path: the checkpoint.
        run: the values that must match (``identity``); names that only one side has are not compared.

    Raises:
        Damaged: a file differs from the manifest.
        Unreadable: its storage does not respond.
        UserError: it belongs to a run with other values.
    """
    saved = rank0_then_broadcast(lambda: manifest.read(path))
    for name, value in run.items():
        if name in saved["run"] and saved["run"][name] != value:
            raise UserError(
                f"the checkpoint {path} was made with {name} {saved['run'][name]}, and this run has {value}: "
                "give the same, or name another --checkpoint"
            )
    world = dist.get_world_size() if dist.is_initialized() else 1
    mine = dict(sorted(saved["files"].items())[rank() :: world])
    try:
        problem = manifest.difference(path, mine)
    except Unreadable as error:
        problem = error
    problems = [problem]
    if world > 1:
        problems = [None] * world
        dist.all_gather_object(problems, problem)
    if reasons := [each for each in problems if isinstance(each, str)]:
        raise Damaged(path, reasons[0])
    if errors := [each for each in problems if each]:
        raise errors[0]
    return saved


def unreadable(path: Path, error: BaseException) -> UserError:
    """Return the error to raise for an intact checkpoint that could not be read because of ``error``."""
    if isinstance(cause(error), OSError):
        return Unreadable(path, reason(error))
    return UserError(f"the checkpoint {path} cannot be read ({reason(error)}): name another --checkpoint")


def reason(error: BaseException) -> str:
    """Return an exception's message as one line."""
    error = cause(error)
    return getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[-1]


def cause(error: BaseException) -> BaseException:
    """Return the exception of the first rank that failed, if DCP has wrapped it."""
    if isinstance(error, dcp.CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return error
