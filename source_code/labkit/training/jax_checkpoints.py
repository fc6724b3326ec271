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


def resume(config, training, run: dict) -> int:
    """Read the newest checkpoint in --checkpoint if --resume says so; return the step from which to train.

    training: gpt_jax.py's, whose arrays are replaced. run: its ``checkpoints.identity``. UserError as there.
    """
    if (path := checkpoints.to_resume(config)) is None:
        return 0
    checkpoints.compare(path, run)
    # Shapes, number formats and where the parts are to lie: what is read takes these, whatever devices wrote it.
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _named(training))
    try:
        with _checkpointer() as checkpointer:
            found = checkpointer.restore(_absolute(path) / STATE, wanted)
    except Exception as error:  # of many kinds, all of which mean: it is not whole, or not of this model
        raise checkpoints.unreadable(path, error) from None
    step = int(path.name.removeprefix("step-"))
    checkpoints.check_left(step, config.max_steps)
    training.params, training.state = jax.tree.unflatten(
        jax.tree.structure((training.params, training.state)), found.values()
    )
    return step


def save(folder: str | Path, step: int, training, run: dict):
    """Write the state after ``step`` steps. The folder has its name when it is whole."""
    final = _absolute(folder) / f"step-{step:06d}"
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was ended while it saved
    with _checkpointer() as checkpointer:
        checkpointer.save(partial / STATE, _named(training))
    (partial / checkpoints.RUN).write_text(json.dumps(run, indent=1) + "\n")
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
