"""A Hugging Face model's folder: safetensors read part by part, each rank what it keeps; and written for everybody.

Layout: https://huggingface.co/docs/safetensors and, where there are several files, model.safetensors.index.json with
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
LARGEST_FILE = 5 * 10**9  # bytes; what the writing rank holds at a time. The library's own files are of this size
BESIDE = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "*.jinja", "generation_config.json")


class Folder:
    """The weights in a model's folder. UserError: there are none, or a file is missing or not whole."""

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
        """Return [(tensor, its names in the files)]. UserError where the model and the files have other tensors."""
        shared = {}  # by the tensor's identity: a tensor may have several names
        for name, tensor in tensors.items():
            # A file of the base model alone has its names without the prefix.
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
        """Fill {name: tensor}, which have memory, of a DTensor this rank's rows; return how many bytes were read.

        A file is open for one tensor at a time: what has been read of it counts as this process's memory while it is.

        Args:
            tensors: All that the model wants of the files. A tensor may have several names.
            prefix: Of the base model's names.
            left_out: Regular expressions of tensors that the files may have besides.

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
        """Return the rows of a stored tensor that this rank keeps, in the file's number format."""
        begin, end = rows(tensor)
        with self._opened(self.files[name]) as opened:
            kept = opened.get_slice(name)
            if kept.get_shape() != list(tensor.shape):
                there = f"{name} has the shape {kept.get_shape()}"
                raise UserError(f"{self.path}: {there}, and by its config.json {list(tensor.shape)}")
            return kept[begin:end] if tensor.dim() else opened.get_tensor(name)


def rows(tensor) -> tuple[int, int]:
    """The rows of a tensor that this rank keeps, [begin, end). FSDP2 cuts the first dimension as torch.chunk does."""
    whole = tensor.shape[0] if tensor.dim() else 0
    if not isinstance(tensor, DTensor) or Shard(0) not in tensor.placements:
        return 0, whole
    dimension = tensor.placements.index(Shard(0))
    mesh = tensor.device_mesh
    each = -(-whole // mesh.size(dimension))
    begin = min(mesh.get_local_rank(dimension) * each, whole)
    return begin, min(begin + each, whole)


def check_new(folder: str):
    """UserError, before hours of training, where a model cannot be saved to ``folder``."""
    path = Path(folder)
    if path.exists():
        raise UserError(f"--save {folder} is there already: name another folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"--save {folder} cannot be written ({error.strerror}): name another folder") from None


def save(named: dict[str, torch.Tensor], folder: str, about, source: str | None = None, stem: str = "model"):
    """Write {name: parameter} and ``about`` as the library's ``save_pretrained`` does. Collective.

    about: what describes them and has a ``save_pretrained`` of its own, a model's configuration or peft's. source: the
    folder the model came from, whose tokenizer goes with it. Rank 0 writes, and holds one file's tensors whole; the
    others one parameter at a time, while it is gathered. The folder is there when it is whole. UserError: no room.
    """
    partial, parts = Path(f"{folder}.partial"), _parts(named)
    checkpoints.on_one(lambda: _made_anew(partial))
    files = [f"{stem}-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    files = files if len(parts) > 1 else [f"{stem}.safetensors"]
    for file, part in zip(files, parts, strict=True):
        tensors = _whole(part, keep=dist.get_rank() == 0)
        _on_one(partial, functools.partial(save_file, tensors, partial / file, {"format": "pt"}))
    _on_one(partial, functools.partial(_finish, partial, folder, about, source, files, parts))


def _made_anew(partial: Path):
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _on_one(partial: Path, write):
    """``write()`` on rank 0. UserError on all, and nothing left, where it fails."""

    def tried():
        try:
            write()
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(f"{partial.stem} could not be saved ({error}): make room, or name another --save") from None

    checkpoints.on_one(tried)


def _finish(partial, folder, about, source, files, parts):
    """What lies beside the weights, and the folder's name."""
    if len(parts) > 1:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        size = sum(parameter.nbytes for part in parts for parameter in part.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=1))
    about.save_pretrained(partial)
    for pattern in BESIDE if source else ():
        for file in Path(source).glob(pattern):
            shutil.copy(file, partial)
    partial.rename(folder)


def _parts(parameters: dict) -> list[dict]:
    """{name: parameter} in parts of at most LARGEST_FILE bytes each, or of one parameter that has more."""
    parts, room = [], 0
    for name, parameter in parameters.items():
        if parameter.nbytes > room:
            parts.append({})
            room = LARGEST_FILE
        parts[-1][name] = parameter
        room -= parameter.nbytes
    return parts


@torch.no_grad()
def _whole(part, keep: bool) -> dict:
    """{name: the whole tensor on the CPU}, of what is kept; gathered one after the other, on all ranks."""
    kept = {}
    for name, parameter in part.items():
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            kept[name] = value.cpu().contiguous()
        del value
    return kept
