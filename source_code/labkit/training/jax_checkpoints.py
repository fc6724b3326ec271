"""Checkpoints of gpt_jax.py by Orbax: each device's part written where it lies, and read for any number of devices.

Folders, and what must be the same when a run is resumed, are those of labkit/training/checkpoints.py.
"""

import logging
import shutil
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from labkit.training import checkpoints, jax_world, manifest

STATE = "state"  # what Orbax writes within a checkpoint's folder


def resume(config, training, run: dict) -> int:
    """Read the newest checkpoint in --checkpoint if --resume says so; return the step from which to train.

    training: gpt_jax.py's, whose arrays are replaced. run: its ``checkpoints.identity``. UserError as there.
    """
    return checkpoints.go_on(config, config.max_steps, lambda path: _load(path, training, run))


def _load(path: Path, training, run: dict) -> int:
    checkpoints.checked(path, run)
    # Shapes, number formats and where the parts are to lie: what is read takes these, whatever devices wrote it.
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _named(training))
    try:
        with _checkpointer() as checkpointer:
            found = checkpointer.restore(_absolute(path) / STATE, wanted)
    except Exception as error:  # of many kinds
        raise checkpoints.unreadable(path, error) from None
    training.params, training.state = jax.tree.unflatten(
        jax.tree.structure((training.params, training.state)), found.values()
    )
    return int(path.name.removeprefix("step-"))


def save(folder: str | Path, step: int, training, run: dict, keep: int | None = None):
    """Write the state after ``step`` steps: ``checkpoints.save``."""
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
    checkpoints.put_in_place(partial, keep)


def _named(training) -> dict:
    """{name: array} of all that is saved, in the order of the tree's leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path((training.params, training.state))
    return {f"{number:03d}{jax.tree_util.keystr(path)}": leaf for number, (path, leaf) in enumerate(leaves)}


def _checkpointer():
    logging.getLogger("absl").setLevel(logging.ERROR)  # it tells each phase of each save
    return ocp.StandardCheckpointer()


def _absolute(path: str | Path) -> Path:
    return Path(path).absolute()  # Orbax takes no other
