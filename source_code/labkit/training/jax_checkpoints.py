"""Checkpoints of gpt_jax.py by Orbax: each device's part written where it lies, and read for any number of devices.

Folders, and what must be the same when a run is resumed, are those of labkit/training/checkpoints.py.
"""

import logging
import shutil
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from labkit.training import checkpoints, jax_world, manifest, saving

STATE = "state"  # what Orbax writes within a checkpoint's folder


def find(config, run: dict) -> Path | None:
    """The checkpoint to go on from, if --resume says so, judged before anything is made. run: its ``identity``.

    UserError: it is damaged, of another run, or leaves nothing to train, or see ``checkpoints.to_resume``.
    """
    step = checkpoints.go_on(config, config.max_steps, lambda path: checkpoints.checked(path, run) and step_of(path))
    return Path(config.checkpoint) / checkpoints.name_of(step) if step else None


def step_of(path: Path | None) -> int:
    """After how many steps a checkpoint was made; 0 without one."""
    return int(path.name.removeprefix("step-")) if path else 0


def load(path: Path, training):
    """Read a checkpoint, whatever devices wrote it, in the place of the arrays there are. training: gpt_jax.py's.

    UserError: it is of arrays of other shapes.
    """
    checkpoints.check_shapes(path, manifest.read(path), _named(training))
    # Number formats and where the parts are to lie: what is read takes these.
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _named(training))
    try:
        with _checkpointer() as checkpointer:
            found = checkpointer.restore(_absolute(path) / STATE, wanted)
    except Exception as error:  # of many kinds
        raise checkpoints.unreadable(path, error) from None
    structure = jax.tree.structure((training.params, training.state))
    training.params, training.state = jax.tree.unflatten(structure, found.values())


def save(folder: str | Path, step: int, training, run: dict, keep: int | None = None):
    """Write the state after ``step`` steps: ``saving.save``."""
    partial = _absolute(folder) / f"{checkpoints.name_of(step)}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was ended while it saved
    named = _named(training)
    with _checkpointer() as checkpointer:
        checkpointer.save(partial / STATE, named)
    paths = [path for path in partial.rglob("*") if path.is_file()]
    files = {str(path.relative_to(partial)): manifest.digest(path) for path in paths}
    shapes = {name: list(array.shape) for name, array in named.items()}
    versions, devices = jax_world.versions(), len(training.mesh.devices.flat)
    manifest.write(partial, files, run=run, ranks=devices, versions=versions, shapes=shapes)
    saving.put_in_place(partial, keep)


def _named(training) -> dict:
    """{name: array} of all that is saved, in the order of the tree's leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path((training.params, training.state))
    return {f"{number:03d}{jax.tree_util.keystr(path)}": leaf for number, (path, leaf) in enumerate(leaves)}


def _checkpointer():
    logging.getLogger("absl").setLevel(logging.ERROR)  # it tells each phase of each save
    return ocp.StandardCheckpointer()


def _absolute(path: str | Path) -> Path:
    return Path(path).absolute()  # Orbax takes no other
