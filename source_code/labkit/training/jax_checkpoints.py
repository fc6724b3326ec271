"""Checkpoints of gpt_jax.py by Orbax: each device's part written where it lies, and read for any number of devices.

Folders, and what must be the same when a run is resumed, are those of labkit/training/checkpoints.py.
"""

import json
import logging
import shutil
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from labkit.training import checkpoints

STATE = "state"  # what Orbax writes within a checkpoint's folder
FILES = "files"  # in run.json: their sizes


def find(config, run: dict) -> Path | None:
    """The newest checkpoint in --checkpoint if --resume says so, before anything is made. run: its ``identity``.

    UserError: it is of another run, or leaves nothing to train, or see ``checkpoints.to_resume``.
    """
    if path := checkpoints.to_resume(config):
        checkpoints.compare(path, run)
        _check_files(path)
        checkpoints.check_left(step_of(path), config.max_steps)
    return path


def _sizes(path: Path) -> dict[str, int]:
    """{file that Orbax has written: bytes}"""
    files = sorted(file for file in (path / STATE).rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.stat().st_size for file in files}


def _check_files(path: Path):
    """UserError if a file is missing or cut short. Orbax finds it, too: with a traceback from each of its threads."""
    if not (path / checkpoints.RUN).exists():
        return
    there = _sizes(path)
    for file, size in json.loads((path / checkpoints.RUN).read_text()).get(FILES, {}).items():
        if there.get(file) != size:
            found = f"of {there[file]} bytes" if file in there else "missing"
            raise checkpoints.unreadable(path, ValueError(f"{file} is {found}, and was of {size}"))


def step_of(path: Path | None) -> int:
    """After how many steps a checkpoint was made; 0 without one."""
    return int(path.name.removeprefix("step-")) if path else 0


def load(path: Path, training):
    """Read a checkpoint, whatever devices wrote it, in the place of the arrays there are. training: gpt_jax.py's.

    UserError: it is damaged, or of arrays of other shapes.
    """
    # Shapes, number formats and where the parts are to lie: what is read takes these.
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _named(training))
    try:
        with _checkpointer() as checkpointer:
            _check_shapes(checkpointer.metadata(_absolute(path) / STATE).item_metadata, wanted)
            found = checkpointer.restore(_absolute(path) / STATE, wanted)
    except Exception as error:  # of many kinds, all of which mean: it is not whole, or not of this model
        raise checkpoints.unreadable(path, error) from None
    structure = jax.tree.structure((training.params, training.state))
    training.params, training.state = jax.tree.unflatten(structure, found.values())


def _check_shapes(saved, wanted: dict):
    """ValueError if there are no arrays, or of other shapes. Orbax finds it, too, but in the midst of reading all the others."""
    if saved is None:
        raise ValueError(f"there is no {STATE} of Orbax's in it")
    for name, array in wanted.items():
        if tuple(saved[name].shape) != array.shape:
            raise ValueError(f"{name} is {tuple(saved[name].shape)} there, and {array.shape} in this model")


def save(folder: str | Path, step: int, training, run: dict):
    """Write the state after ``step`` steps. The folder has its name when it is whole."""
    final = _absolute(folder) / f"step-{step:06d}"
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was ended while it saved
    with _checkpointer() as checkpointer:
        checkpointer.save(partial / STATE, _named(training))
    (partial / checkpoints.RUN).write_text(json.dumps(run | {FILES: _sizes(partial)}, indent=1) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def _named(training) -> dict:
    """{name: array} of all that is saved, in the order of the tree's leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path((training.params, training.state))
    return {f"{number:03d}{jax.tree_util.keystr(path)}": leaf for number, (path, leaf) in enumerate(leaves)}


def _checkpointer():
    logging.getLogger("absl").setLevel(logging.ERROR)  # it tells each phase of each save
    return ocp.StandardCheckpointer()


def _absolute(path: str | Path) -> Path:
    return Path(path).absolute()  # Orbax takes no other
