# SPDX-License-Identifier: BSD-3-Clause
"""Export the trained model from a checkpoint to one safetensors file of unsharded tensors, without optimizer state.

  python export.py ckpt model.safetensors              the newest checkpoint in ckpt
  python export.py ckpt/step-000040 model.safetensors  this one

Weights that were frozen, such as those of --lora's base model, are in no checkpoint, and so not in the file.
The file is independent of this course and of the number of ranks: ``safetensors.torch.load_file`` reads it as
{name: tensor}, for ``model.load_state_dict``. It contains no code.
"""

import argparse
import os
from pathlib import Path

from labkit import UserError
from labkit.measuring import records
from labkit.running import options
from labkit.training import checkpoints, dcp_reading, hf_files

MODEL = "model."  # prefix of its tensors' names in a checkpoint


def export(checkpoint: Path, file: Path) -> dict:
    """Write the model of a checkpoint to a file, atomically, and return {name: tensor}.

    Args:
        checkpoint: a checkpoint, or a folder, of which the newest checkpoint is exported.
        file: the new file.

    Raises:
        UserError: there is no checkpoint, it is damaged, or the file cannot be written.
    """
    path = checkpoint if (checkpoint / dcp_reading.METADATA).exists() else checkpoints.latest(checkpoint)
    if path is None:
        raise UserError(f"no checkpoint in {checkpoint}: name a folder that a run was given as --checkpoint")
    checkpoints.checked(path, {})
    records.check_writable(file, "file")
    try:
        tensors = dcp_reading.tensors(path, MODEL)
    except Exception as error:
        raise checkpoints.unreadable(path, error) from None
    tensors = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        hf_files.save(tensors, partial, checkpoint=path.name)
        partial.replace(file)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): make room, or name another file") from None
    finally:
        partial.unlink(missing_ok=True)
    return tensors


def main():
    parser = options.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of them")
    parser.add_argument("file", type=Path, help="the file to write")
    arguments = parser.parse_args()
    try:
        tensors = export(arguments.checkpoint, arguments.file)
    except UserError as error:
        options.exit_with_error(str(error))
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{arguments.file}: {len(tensors)} tensors, {size:,} bytes of them")


if __name__ == "__main__":
    main()
