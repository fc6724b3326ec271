"""torch.distributed.checkpoint's reading (DCP), made to run nothing that a file says.

DCP unpickles its metadata, and every value that is no tensor, without restriction (PyTorch 2.15): a checkpoint from
elsewhere can run code when it is read. Here both are first read with what checkpoints need allowed, and nothing else.
Tensors DCP reads with ``weights_only`` itself.

Private PyTorch used here, and only here: the classes that DCP's metadata is made of.
"""

import pickle
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta

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
    ("pathlib._local", "PosixPath"),  # as Python 3.13 calls it
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module, name):
        number_format = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if number_format or (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint needs")


class Reader(FileSystemReader):
    """DCP's reader of a folder, that refuses metadata with anything in it but metadata, and reads it once.

    It has an entry for each piece of each tensor on each rank, and takes half a minute for a million of them.
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
    """DCP's planner, that takes numbers, strings and containers of them for what is no tensor."""

    def load_bytes(self, read_item, value):
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def tensors(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """{name: tensor} of all tensors of a checkpoint whose names begin so, whole, on the CPU. No collective.

    Errors are those that DCP raises; whether the files are what was written is not looked at (``manifest``).
    """
    reader = Reader(folder)
    entries = reader.read_metadata().state_dict_metadata.items()
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries
        if name.startswith(prefix) and hasattr(entry, "size")
    }
    with warnings.catch_warnings(action="ignore"):  # that no other process takes part, which is the intent
        dcp.load(found, storage_reader=reader, planner=Planner(), no_dist=True)
    return found
