# SPDX-License-Identifier: BSD-3-Clause
"""Save and resume gpt_jax.py with Orbax, which writes each device's shard and reads it for any number of devices.

The folders, and the values that a resumed run must share, are those of labkit/training/checkpoints.py.
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

STATE = "state"  # name of Orbax's folder within a checkpoint


class Saver:
    """Resume and save a run according to its options; without --checkpoint do nothing.

    Args:
        config: gpt_jax.py's options.
        run: its ``checkpoints.identity``.

    Raises:
        UserError: the folder cannot be used: see ``CheckpointFolder.of``.
    """

    def __init__(self, config, run: dict):
        self.config, self.run, self.path = config, run, None
        # Orbax takes absolute paths only
        self.folder = CheckpointFolder.of(config) if config.checkpoint else None

    def find(self, last_step: int) -> int:
        """Find and verify the newest checkpoint, before anything is allocated, and return its step; 0 if there is none.

        Args:
            last_step: number of steps at the end of training.

        Raises:
            UserError: the checkpoint is damaged, belongs to another run, or training is complete (``checkpoints.resume``).
        """
        if not self.folder:
            return 0

        def verify(path: Path) -> int:
            checkpoints.checked(path, self.run)
            self.path = path
            return step_of(path)

        return checkpoints.resume(self.folder, self.config, last_step, verify)

    def load(self, training):
        """Load the checkpoint that ``find`` has found, if any, and replace the arrays of ``training``.

        Args:
            training: gpt_jax.py's. Its arrays define dtypes and shardings; the devices may differ from those that saved.

        Raises:
            UserError: its arrays have other shapes, or it cannot be read.
        """
        if not self.path:
            return
        checkpoints.check_shapes(self.path, manifest.read(self.path), _named(training))
        wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _named(training))
        try:
            with _checkpointer() as checkpointer:
                arrays = checkpointer.restore(self.path.absolute() / STATE, wanted)
        except Exception as error:  # of many types
            raise checkpoints.unreadable(self.path, error) from None
        structure = jax.tree.structure((training.params, training.state))
        training.params, training.state = jax.tree.unflatten(structure, arrays.values())

    def save(self, step: int, training):
        """Save the state after ``step`` steps.

        Args:
            step: number of steps trained.
            training: gpt_jax.py's.

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
            metadata = {"run": self.run, "options": checkpoints.changeable(self.config)}
            metadata["ranks"] = len(training.mesh.devices.flat)
            metadata["shapes"] = {name: list(array.shape) for name, array in named.items()}
            metadata["formats"] = {name: str(array.dtype) for name, array in named.items()}
            manifest.write(partial, files, **metadata, versions=jax_world.versions())
            to_disk(partial)
            self.folder.commit(partial)
        except OSError as error:
            clear(partial)
            raise SaveFailed(
                f"step {step} could not be saved to {self.folder.path} ({error.strerror or error}), where older "
                "checkpoints are as they were: make room, or name another --checkpoint"
            ) from None

    def last(self, step: int, training):
        """Save the state of a run that ends now, and release the folder. The arguments are those of ``save``."""
        self.save(step, training)
        self.close()

    def close(self):
        """Release the folder for the next run."""
        if self.folder:
            self.folder.close()


def _named(training) -> dict:
    """Return {name: array} of everything to save, in the order of the tree's leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path((training.params, training.state))
    return {f"{number:03d}{jax.tree_util.keystr(path)}": leaf for number, (path, leaf) in enumerate(leaves)}


def _checkpointer():
    logging.getLogger("absl").setLevel(logging.ERROR)  # it logs each phase of each save
    return ocp.StandardCheckpointer()
