# SPDX-License-Identifier: BSD-3-Clause
"""Read torch.distributed.checkpoint (DCP) without executing code from the files.

DCP unpickles its metadata, and every value that is not a tensor, without restriction (PyTorch 2.15), so that a checkpoint
from another source can execute code when it is read. Here both are first unpickled with an allowlist of the types that
checkpoints need. Tensors are read by DCP with ``weights_only``.

Private PyTorch used here, and only here: the classes that DCP's metadata is made of.
"""

import pickle
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta

METADATA = ".metadata"
_OF_DCP = "torch.distributed.checkpoint.metadata"
ALLOWED = {
    (_OF_DCP, "Metadata"),
    (_OF_DCP, "MetadataIndex"),
    (_OF_DCP, "StorageMeta"),
    (_OF_DCP, "TensorStorageMetadata"),
    (_OF_DCP, "BytesStorageMetadata"),
    (_OF_DCP, "ChunkStorageMetadata"),
    (_OF_DCP, "TensorProperties"),
    (_OF_DCP, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) == ("pathlib._local", "PosixPath"):  # its name in Python 3.13, which others do not have
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint needs")


def _member(kind, name: str):
    """Return a member of DCP's enum: Python 3.11.2 pickles it as a call of ``getattr``, 3.11.7 as a call of the enum's class."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"its metadata names {name} of {kind!r}, which no checkpoint needs")
    return kind[name]


class Reader(FileSystemReader):
    """Read a folder as DCP's reader does, but unpickle only allowed types in the metadata, and only once.

    The metadata has an entry for each shard of each tensor; a million entries take half a minute to read.
    """

    _metadata = None

    def read_metadata(self, *args, **kwargs):
        if self._metadata is None:
            with open(Path(self.path) / METADATA, "rb") as file:
                self._metadata = _Restricted(file).load()
            if getattr(self._metadata, "storage_meta", None) is None:
                self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class Planner(DefaultLoadPlanner):
    """Plan as DCP's default planner does, but load only numbers, strings, and containers of them besides tensors."""

    def load_bytes(self, read_item, value):
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def tensors(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Read unsharded tensors of a checkpoint to the CPU, in one process.

    Errors are those that DCP raises; the files are not verified (see ``manifest``).

    Args:
        folder: the checkpoint.
        prefix: of the names to read.

    Returns:
        {name: tensor}.
    """
    reader = Reader(folder)
    entries = reader.read_metadata().state_dict_metadata.items()
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries
        if name.startswith(prefix) and hasattr(entry, "size")
    }
    with warnings.catch_warnings(action="ignore"):  # about a single process, which is intended
        dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=True)
    return state
