# SPDX-License-Identifier: BSD-3-Clause
"""Write TensorBoard event files, for --log: scalars by step, from rank 0."""

import math
import tempfile
from importlib.util import find_spec
from pathlib import Path

from labkit import UserError


def check(folder: str, rank: int):
    """Refuse --log before training if its files could not be written.

    Args:
        folder: The value of --log.
        rank: This process's rank. Only rank 0 writes, so only rank 0 tries the folder.

    Raises:
        UserError: The package tensorboard is missing, or the folder cannot be written to.
    """
    if find_spec("tensorboard") is None:
        raise UserError("--log needs tensorboard: python -m pip install tensorboard, or leave --log out")
    if rank != 0:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"event files cannot be written to {folder} ({error.strerror}): name another --log folder"
        ) from None


class EventFiles:
    """Write the scalars of one run into a folder that TensorBoard reads.

    Args:
        folder: The value of --log.
        first_step: Number of steps trained before this run. TensorBoard hides scalars of later steps that are in the
            folder already: those of steps that a resumed run repeats, or of an earlier run that this one starts over.
    """

    def __init__(self, folder: str, first_step: int):
        from torch.utils.tensorboard import SummaryWriter  # only here: it takes a second, and needs a package

        self.writer = SummaryWriter(folder, purge_step=first_step + 1)

    def write(self, scalars: dict[str, list[tuple[int, float | None]]]):
        """Write {name: [(step, value), …]}, all but values that are None or not finite, and flush them to the disk.

        A rank ends without exit handlers, so nothing may wait in memory. If the folder cannot be written to any more,
        print that once and let training go on.
        """
        try:
            for name, points in scalars.items() if self.writer else ():
                for step, value in points:
                    if value is not None and math.isfinite(value):
                        self.writer.add_scalar(name, value, step)
            if self.writer:
                self.writer.flush()
        except OSError as error:
            print(f"event files cannot be written any more ({error.strerror}): training goes on without", flush=True)
            self.writer = None
