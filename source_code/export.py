"""Take the trained model out of a checkpoint: one safetensors file, whole tensors, no optimizer.

  python export.py ckpt model.safetensors              the newest checkpoint in ckpt
  python export.py ckpt/step-000040 model.safetensors  this one

The file needs nothing of this course, nor the number of ranks that trained: ``safetensors.torch.load_file`` reads it
as {name: tensor}, for ``model.load_state_dict``. Nothing in it can run.
"""

import argparse
import os
from pathlib import Path

from labkit import UserError
from labkit.measuring import records
from labkit.running import options
from labkit.training import checkpoints, dcp_reading
from safetensors.torch import save_file

MODEL = "model."  # how the names of its tensors begin in a checkpoint


def export(checkpoint: Path, file: Path) -> dict:
    """Write the model of a checkpoint, or of the newest in a folder, to a file; return its {name: tensor}.

    The file is either whole or not there. UserError: there is no checkpoint, it is damaged, or the file cannot be
    written.
    """
    path = checkpoint if (checkpoint / dcp_reading.METADATA).exists() else checkpoints.latest(checkpoint)
    if path is None:
        raise UserError(f"no checkpoint in {checkpoint}: name a folder that a run was given as --checkpoint")
    checkpoints.checked(path, {})
    records.check_writable(file, "file")
    try:
        found = dcp_reading.tensors(path, MODEL)
    except Exception as error:
        raise checkpoints.unreadable(path, error) from None
    tensors = {name.removeprefix(MODEL): tensor for name, tensor in found.items()}
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file(tensors, partial, metadata={"format": "pt", "checkpoint": path.name})
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
    given = parser.parse_args()
    try:
        tensors = export(given.checkpoint, given.file)
    except UserError as error:
        options.exit_with_error(str(error))
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{given.file}: {len(tensors)} tensors, {size:,} bytes of them")


if __name__ == "__main__":
    main()
