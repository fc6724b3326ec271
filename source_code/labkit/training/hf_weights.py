"""Read a Hugging Face model's safetensors, on each rank only its shard, and write a gathered model.

Format: https://huggingface.co/docs/safetensors and, for several files, model.safetensors.index.json with
{"weight_map": {name of a tensor: its file}}.
"""

import functools
import json
import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Shard

from labkit import UserError
from labkit.measuring.trace import local
from labkit.training import checkpoints

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_FILE = 5 * 10**9  # bytes, which the writing rank has in memory at a time; the library's own limit
BESIDE = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "*.jinja", "generation_config.json")


class Folder:
    """The weights in a model's folder.

    Raises:
        UserError: there are none, or a file is missing or incomplete.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        self.files = self._files()  # {name of a tensor: its file}

    def _files(self) -> dict[str, Path]:
        index, one = self.path / INDEX, self.path / ONE
        if index.exists():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
                files = {name: self.path / file for name, file in weight_map.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f"{index} cannot be read: fetch it again") from None
        elif one.exists():
            with self._opened(one) as opened:
                files = dict.fromkeys(opened.keys(), one)
        else:
            raise UserError(f"there is no {ONE} in {self.path}: name a folder with safetensors, or give --config")
        if missing := next((file for file in files.values() if not file.is_file()), None):
            raise UserError(f"{missing} is missing: fetch it again, or name another --model")
        return files

    @contextmanager
    def _opened(self, file: Path):
        try:
            with safe_open(file, "pt") as opened:
                yield opened
        except (SafetensorError, OSError) as error:
            why = str(error).splitlines()[0]
            raise UserError(f"{file} is not whole ({why}): fetch it again") from None

    def _matched(self, tensors: dict, prefix: str, left_out) -> list[tuple[torch.Tensor, list[str]]]:
        """Return [(tensor, its names in the files), …].

        Raises:
            UserError: the model and the files have different tensors.
        """
        shared = {}  # by the tensor's identity: a tensor may have several names
        for name, tensor in tensors.items():
            # In files of a base model the names lack the prefix.
            for stored in dict.fromkeys((name, name.removeprefix(f"{prefix}."))):
                shared.setdefault(id(tensor), (tensor, []))[1].append(stored)
        known = {name for _, names in shared.values() for name in names}
        more = [name for name in self.files if name not in known and not any(re.search(p, name) for p in left_out)]
        missing = next((names[0] for _, names in shared.values() if self.files.keys().isdisjoint(names)), None)
        if missing and more:
            raise UserError(
                f"{self.path} has no tensor {missing}, but has {more[0]}: its config.json is of another model, or "
                "transformers renames this family's tensors on loading, which this lab does not"
            )
        if missing:
            raise UserError(f"{self.path} has no tensor {missing}: its config.json is of another model")
        if more:
            raise UserError(
                f"{self.path} has tensors that the model of its config.json does not have, such as {more[0]}: "
                "its config.json is of another model"
            )
        return [(tensor, [name for name in names if name in self.files]) for tensor, names in shared.values()]

    @torch.no_grad()
    def read_into(self, tensors: dict[str, torch.Tensor], prefix: str, left_out=()) -> int:
        """Load the files into allocated tensors, into a DTensor only this rank's rows, and return the bytes read.

        A file is opened anew for each tensor, because its mapped pages count as this process's memory while it is open.

        Args:
            tensors: {name: tensor} of all that the files must contain. A tensor may have several names.
            prefix: Of the base model's names.
            left_out: Regular expressions of further tensors in the files, to be ignored.

        Raises:
            UserError: The files have other tensors than these, or other shapes, or two values for one tensor.
        """
        size = 0
        for tensor, (name, *others) in self._matched(tensors, prefix, left_out):
            part = self._part(name, tensor)
            local(tensor).copy_(part)
            size += part.nbytes
            for other in others:
                if not torch.equal(self._part(other, tensor), part):
                    raise UserError(
                        f"{self.path}: {name} and {other} differ, and its config.json makes them one weight: "
                        "set tie_word_embeddings to false there"
                    )
        return size

    def _part(self, name: str, tensor) -> torch.Tensor:
        """Return this rank's rows of a stored tensor, in the file's dtype."""
        begin, end = rows(tensor)
        with self._opened(self.files[name]) as opened:
            stored = opened.get_slice(name)
            if stored.get_shape() != list(tensor.shape):
                there = f"{name} has the shape {stored.get_shape()}"
                raise UserError(f"{self.path}: {there}, and by its config.json {list(tensor.shape)}")
            return stored[begin:end] if tensor.dim() else opened.get_tensor(name)


def rows(tensor) -> tuple[int, int]:
    """Return this rank's rows [begin, end) of a tensor: FSDP2 shards the first dimension as torch.chunk does."""
    whole = tensor.shape[0] if tensor.dim() else 0
    if not isinstance(tensor, DTensor) or Shard(0) not in tensor.placements:
        return 0, whole
    dimension = tensor.placements.index(Shard(0))
    mesh = tensor.device_mesh
    each = -(-whole // mesh.size(dimension))
    begin = min(mesh.get_local_rank(dimension) * each, whole)
    return begin, min(begin + each, whole)


def check_new(folder: str):
    """Check before training that a model can be saved to a new folder.

    Raises:
        UserError: the folder exists, or cannot be written.
    """
    path = Path(folder)
    if path.exists():
        raise UserError(f"--save {folder} is there already: name another folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"--save {folder} cannot be written ({error.strerror}): name another folder") from None


def save(named: dict[str, torch.Tensor], folder: str, metadata, source: str | None = None, stem: str = "model"):
    """Save a model as the library's ``save_pretrained`` does. Collective.

    Rank 0 writes, and has the unsharded tensors of one file in memory; the other ranks one parameter at a time, while it
    is gathered. The folder appears when it is complete.

    Args:
        named: {name: parameter}, sharded or not.
        folder: the new folder.
        metadata: a model's configuration or peft's, with a ``save_pretrained`` method.
        source: the original model's folder, whose tokenizer is copied.
        stem: of the files' names.

    Raises:
        UserError: it could not be written.
    """
    partial, parts = Path(f"{folder}.partial"), _parts(named)
    checkpoints.rank0_then_broadcast(lambda: _recreate(partial))
    files = [f"{stem}-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    files = files if len(parts) > 1 else [f"{stem}.safetensors"]
    for file, part in zip(files, parts, strict=True):
        tensors = _gathered(part, keep=dist.get_rank() == 0)
        _write_on_rank0(partial, functools.partial(save_file, tensors, partial / file, {"format": "pt"}))
    _write_on_rank0(partial, functools.partial(_finish, partial, folder, metadata, source, files, parts))


def _recreate(partial: Path):
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_on_rank0(partial: Path, write):
    """Call ``write()`` on rank 0; if it fails, remove the folder and raise UserError on all ranks."""

    def attempt():
        try:
            write()
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(f"{partial.stem} could not be saved ({error}): make room, or name another --save") from None

    checkpoints.rank0_then_broadcast(attempt)


def _finish(partial, folder, metadata, source, files, parts):
    """Write the files other than the weights, and rename the folder."""
    if len(parts) > 1:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        size = sum(parameter.nbytes for part in parts for parameter in part.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=1))
    metadata.save_pretrained(partial)
    for pattern in BESIDE if source else ():
        for file in Path(source).glob(pattern):
            shutil.copy(file, partial)
    partial.rename(folder)


def _parts(parameters: dict) -> list[dict]:
    """Divide {name: parameter} into parts of at most LARGEST_FILE bytes, or of one larger parameter."""
    parts, room = [], 0
    for name, parameter in parameters.items():
        if parameter.nbytes > room:
            parts.append({})
            room = LARGEST_FILE
        parts[-1][name] = parameter
        room -= parameter.nbytes
    return parts


@torch.no_grad()
def _gathered(part, keep: bool) -> dict:
    """Gather parameters one after another, and return {name: unsharded tensor on the CPU}; {} without ``keep``."""
    gathered = {}
    for name, parameter in part.items():
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            gathered[name] = value.cpu().contiguous()
        del value
    return gathered
