"""Resume from a checkpoint, whatever number of ranks wrote it. Writing one: saving.py. Their folder: checkpoint_folder.py.

What differs from its manifest is never loaded.
"""

import dataclasses

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from labkit import UserError
from labkit.running.options import flag
from labkit.training import dcp_reading, manifest
from labkit.training.checkpoint_folder import CheckpointFolder, Path, latest, name_of, on_one, rank, stored
from labkit.training.manifest import Damaged, Unreadable

__all__ = ["CheckpointFolder", "Damaged", "Unreadable", "latest", "name_of", "on_one", "stored"]


def identity(config, global_batch: int, data: str) -> dict:
    """What a run that resumes another must share with it: {what it is called: its value}.

    The options that are declared with ``resumed=True``; the global batch (images or sequences per step) and the data
    set, as step n of another would have read something else.
    """
    return _options(config, True) | {"a global batch of": global_batch, "data": data}


def changeable(config) -> dict:
    """The options that a run may change when it resumes, and is told that it did: {flag: value}."""
    found = _options(config, "print")
    if getattr(config, "lr_schedule", "constant") != "constant":  # a decay ends with the run
        found["--max-steps"] = config.max_steps
    return found


def _options(config, resumed: bool | str) -> dict:
    names = [field.name for field in dataclasses.fields(config) if field.metadata["resumed"] == resumed]
    return {flag(name): getattr(config, name) for name in names}


def resume(folder: CheckpointFolder, config, last_step: int, load) -> int:
    """Read the newest checkpoint of a folder; with --fallback the newest that is whole. Collective.

    Args:
        folder: the run's folder, which it owns.
        config: has ``fallback``; a ``save`` that is set (an export at the end) lets a finished run come back for it.
        last_step: how many steps the run is to have made at its end.
        load: reads the checkpoint at a path and returns its step.

    Returns:
        The step from which to train; 0 where there is no checkpoint.

    Raises:
        UserError: there is nothing to go on with or to train, or the folder belongs to another run.
    """
    found = on_one(lambda: stored(folder.path))
    for path in found:
        try:
            step = load(path)
        except (Damaged, Unreadable) as error:
            if not config.fallback:
                raise
            on_one(lambda path=path, error=error: _do_without(folder, path, error))
            continue
        saves_yet = step == last_step and getattr(config, "save", None)  # trained, and ended before that was done
        if step >= last_step and not saves_yet:
            raise UserError(f"nothing left to train: the checkpoint is at step {step} of {last_step}; train for more")
        on_one(lambda path=path: _go_on_from(folder, path, config))
        return step
    if found:
        raise UserError(f"no checkpoint in {folder.path} is whole: name another --checkpoint, and start anew")
    on_one(folder.clear_leftovers)
    return 0


def _do_without(folder: CheckpointFolder, path: Path, error: Damaged | Unreadable):
    """Say why a checkpoint is not used; set it aside if it is damaged. On rank 0."""
    if isinstance(error, Damaged):
        folder.set_aside(path)
        print(f"{path} is damaged ({error.reason}): set aside, trying the one before", flush=True)
    else:
        print(f"{path} cannot be read now ({error.reason}): trying the one before", flush=True)


def _go_on_from(folder: CheckpointFolder, path: Path, config):
    """Note that a checkpoint was read and is whole; print which options have changed since it was written. On rank 0."""
    folder.whole.add(path.name)
    folder.clear_leftovers()
    now, found = changeable(config), manifest.read(path)
    if (before := found.get("versions", {}).get("torch", torch.__version__)) != torch.__version__:
        print(f"{path.name} was saved with torch {before}, and is read with {torch.__version__}", flush=True)
    for name, before in found.get("options", {}).items():
        if name in now and now[name] != before:
            print(f"{name} was {_shown(before)} up to {path.name}, and is {_shown(now[name])} from here on", flush=True)


def _shown(value) -> str:
    return (
        {None: "not given", True: "on", False: "off"}.get(value, value)
        if not isinstance(value, float)
        else f"{value:g}"
    )


def load(path: Path, model, optimizer, run: dict | None = None, narrow: bool = True) -> int:
    """Read a checkpoint into model and optimizer, whatever number of ranks wrote it. Collective.

    Args:
        path: the checkpoint.
        model, optimizer: as they were when their state was saved, on any number of ranks and by any strategy.
        run: what must be the same, see ``identity``; what only one of the two knows is not compared.
        narrow: whether weights may be read into a number format with fewer bits.

    Returns:
        The step after which it was written.

    Raises:
        Damaged: it is not what was written. Unreadable: its storage does not answer.
        UserError: it is of another run than ``run``, or of another model.
    """
    found = checked(path, run or {})
    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors = {f"model.{name}": tensor for name, tensor in model_state.items()}
    check_shapes(path, found, tensors)
    if not narrow:
        check_formats(path, found, {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()})
    # Learning rate, weight decay and the like are this run's own options: of the optimizer, only the state is read.
    groups = optimizer_state.pop("param_groups")
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    reader = dcp_reading.Reader(path)
    try:
        reader.read_metadata()  # DCP does it too, but PyTorch 2.11's keeps to itself why it could not
        _check_listed(path, reader, found)
        dcp.load(state, storage_reader=reader, planner=dcp_reading.Planner())
    except Damaged:
        raise
    except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception; it wraps what went wrong
        raise unreadable(path, error) from None
    optimizer_state = state["optimizer"] | {"param_groups": groups}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state)
    return state["step"]


def _check_listed(path: Path, reader, found: dict):
    """Damaged if the checkpoint has files whose checksums are not in its manifest."""
    read = {each.relative_path for each in reader.read_metadata().storage_data.values()} | {dcp_reading.METADATA}
    if missing := read - set(found["files"]):
        raise Damaged(path, f"{min(missing)} is not in its {manifest.NAME}")


def check_shapes(path: Path, found: dict, tensors: dict):
    """UserError if the checkpoint has not each of these {name: tensor} in its shape. found: its manifest."""
    for name, tensor in tensors.items():
        if (saved := found["shapes"].get(name)) != list(tensor.shape):
            there = f"has the shape {saved}" if saved else "is not there"
            raise UserError(
                f"the checkpoint {path} is of another model: {name} {there}, and here it has {list(tensor.shape)}: "
                "name another --checkpoint"
            )


BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def check_formats(path: Path, found: dict, formats: dict[str, str]):
    """UserError if a weight would be read into a format with fewer bits. formats: {name: "float32"} of this run."""
    for name, here in formats.items():
        saved = found.get("formats", {}).get(name)
        if BITS.get(saved, 0) > BITS.get(here, 64):
            raise UserError(
                f"the checkpoint {path} has {name} in {saved}, and this run has {here}, which would lose the other bits "
                "for good: give the --precision and --weights it was trained with, or --allow-narrowing"
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
    mine = dict(sorted(found["files"].items())[rank() :: world])
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
    return found


def unreadable(path: Path, error: BaseException) -> UserError:
    """What is said of a checkpoint that is what was written, and raised this when it was read."""
    if isinstance(cause(error), OSError):
        return Unreadable(path, reason(error))
    return UserError(f"the checkpoint {path} cannot be read ({reason(error)}): name another --checkpoint")


def reason(error: BaseException) -> str:
    """What went wrong, in a line."""
    error = cause(error)
    return getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[-1]


def cause(error: BaseException) -> BaseException:
    """DCP's exception has that of the first rank to fail within it."""
    if isinstance(error, dcp.CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return error
