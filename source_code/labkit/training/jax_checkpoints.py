"""Checkpoints of gpt_jax.py by Orbax: each device's part written where it lies, and read for any number of devices.

Folders, and what must be the same when a run is resumed, are those of labkit/training/checkpoints.py.
"""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from labkit import Diverged
from labkit.training import checkpoints, jax_world, manifest
from labkit.training.checkpoint_folder import CheckpointFolder, clear, step_of, to_disk
from labkit.training.saving import SaveFailed

STATE = "state"  # what Orbax writes within a checkpoint's folder


class Saver:
    """Resumes and saves a run as its options say; without --checkpoint it does nothing.

    Args:
        config: gpt_jax.py's options.
        run: its ``checkpoints.identity``.

    Raises:
        UserError: the folder cannot be used: see ``CheckpointFolder.of``.
    """

    def __init__(self, config, run: dict):
        self.config, self.run, self.found = config, run, None
        # Orbax takes absolute paths only
        self.folder = CheckpointFolder.of(config) if config.checkpoint else None

    def find(self, last_step: int) -> int:
        """Return the step from which to train, judged before anything is made; 0 without a checkpoint.

        Raises:
            UserError: the checkpoint is damaged, of another run, or leaves nothing to train: see ``checkpoints.resume``.
        """
        if not self.folder:
            return 0

        def judged(path: Path) -> int:
            checkpoints.checked(path, self.run)
            self.found = path
            return step_of(path)

        return checkpoints.resume(self.folder, self.config, last_step, judged)

    def load(self, training):
        """Read the checkpoint that was found, whatever devices wrote it, in the place of the arrays there are.

        Args:
            training: gpt_jax.py's.

        Raises:
            UserError: it is of arrays of other shapes, or cannot be read.
        """
        if not self.found:
            return
        checkpoints.check_shapes(self.found, manifest.read(self.found), _named(training))
        # Number formats and where the parts are to lie: what is read takes these.
        wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _named(training))
        try:
            with _checkpointer() as checkpointer:
                found = checkpointer.restore(self.found.absolute() / STATE, wanted)
        except Exception as error:  # of many kinds
            raise checkpoints.unreadable(self.found, error) from None
        structure = jax.tree.structure((training.params, training.state))
        training.params, training.state = jax.tree.unflatten(structure, found.values())

    def save(self, step: int, training):
        """Write the state after ``step`` steps.

        Raises:
            Diverged: it has values that are not finite; nothing was written.
            SaveFailed: it could not be written.
        """
        if not self.folder:
            return
        named = _named(training)
        floats = [each for each in named.values() if jnp.issubdtype(each.dtype, jnp.floating)]
        if not all(bool(jnp.isfinite(each).all()) for each in floats):
            raise Diverged(
                f"after step {step} the model or its optimizer has values that are not finite: not saved, the checkpoints "
                "before are as they were"
            )
        partial = self.folder.partial(step).absolute()
        clear(partial)
        try:
            with _checkpointer() as checkpointer:
                checkpointer.save(partial / STATE, named)
            paths = [path for path in partial.rglob("*") if path.is_file()]
            files = {str(path.relative_to(partial)): manifest.digest(path) for path in paths}
            about = {"run": self.run, "options": checkpoints.changeable(self.config)}
            about["ranks"] = len(training.mesh.devices.flat)
            about["shapes"] = {name: list(array.shape) for name, array in named.items()}
            about["formats"] = {name: str(array.dtype) for name, array in named.items()}
            manifest.write(partial, files, **about, versions=jax_world.versions())
            to_disk(partial)
            self.folder.commit(partial)
        except OSError as error:
            clear(partial)
            raise SaveFailed(
                f"step {step} could not be saved to {self.folder.path} ({error.strerror or error}), where older "
                "checkpoints are as they were: make room, or name another --checkpoint"
            ) from None

    def close(self):
        """Let the next run have the folder at once."""
        if self.folder:
            self.folder.close()


def _named(training) -> dict:
    """{name: array} of all that is saved, in the order of the tree's leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path((training.params, training.state))
    return {f"{number:03d}{jax.tree_util.keystr(path)}": leaf for number, (path, leaf) in enumerate(leaves)}


def _checkpointer():
    logging.getLogger("absl").setLevel(logging.ERROR)  # it tells each phase of each save
    return ocp.StandardCheckpointer()
