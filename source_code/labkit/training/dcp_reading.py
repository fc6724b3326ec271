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
    """DCP's reader of a folder, that refuses metadata with anything in it but metadata."""

    def read_metadata(self, *args, **kwargs):
        with open(Path(self.path) / METADATA, "rb") as file:
            _Restricted(file).load()
        return super().read_metadata(*args, **kwargs)


class Planner(DefaultLoadPlanner):
    """DCP's planner, that takes numbers, strings and containers of them for what is no tensor."""

    def load_bytes(self, read_item, value):
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def shapes(folder: Path) -> dict[str, list[int]]:
    """{name: shape} of all tensors of a checkpoint, as its metadata has them."""
    found = Reader(folder).read_metadata().state_dict_metadata
    return {name: list(entry.size) for name, entry in found.items() if hasattr(entry, "size")}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """{name: tensor} of all tensors of a checkpoint, each whole, on the CPU, in this process alone.

    Raises what DCP raises of a checkpoint that it cannot read.
    """
    reader = Reader(folder)
    found = reader.read_metadata().state_dict_metadata
    state = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in found.items() if hasattr(e, "size")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*load in a single process")  # which is meant
        dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=True)
    return state
