"""Save a trained model in Hugging Face's format, or its adapters in peft's, from all ranks' shards.

The library's own ``save_pretrained`` gathers the whole model on rank 0 first. Here rank 0 has at most the tensors of one
file and of one block.
"""

import functools
import json
import re
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from labkit import UserError
from labkit.training import checkpoints, hf_files, hf_lora, hf_models
from labkit.training.hf_files import INDEX

try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # reported by ``hf_models.configuration``
    revert_weight_conversion = None

SAVED = {"fp32": "float32", "bf16": "bfloat16"}  # {--save-dtype: PyTorch's name of it}
LARGEST_FILE = 5 * 10**9  # bytes, which the writing rank has in memory at a time; the library's own limit
# What else is in a model's folder: everything but weights, their index, and what is written anew
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf", "*.h5")
WEIGHTS += ("*.msgpack", "*.onnx", "config.json", "adapter_config.json", ".*")


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


def save(model, architecture, config, folder: str):
    """Save the model, or with --lora the adapters, to a new folder, which appears when it is complete. Collective.

    Args:
        model: the trained model, sharded or not.
        architecture: as ``hf_models.configuration`` returns it.
        config: hf_fsdp.py's options.
        folder: the new folder.

    Raises:
        UserError: it could not be written.
    """
    partial = Path(f"{folder}.partial")
    checkpoints.rank0_then_broadcast(lambda: _recreate(partial))
    metadata = _adapters_metadata(config) if config.lora else _model_metadata(architecture, config)
    dtypes = hf_files.dtypes(config.model) if config.model and not (config.lora or config.save_dtype) else {}
    dtype = getattr(torch, SAVED[config.save_dtype]) if config.save_dtype else None
    writer = _Writer(partial, "adapter_model" if config.lora else "model", dtypes, dtype, reverts=not config.lora)
    for group in _groups(_stored(model, config.lora)):
        gathered = _gathered(group, keep=dist.get_rank() == 0)
        _on_rank0(partial, functools.partial(writer.add, model, gathered))
    _on_rank0(partial, functools.partial(_finish, partial, folder, metadata, config.model, writer))


def _model_metadata(architecture, config):
    architecture.architectures = [hf_models.MODEL_FOR_CAUSAL_LM_MAPPING[type(architecture)].__name__]
    architecture.use_cache = True
    if config.save_dtype or not config.model:
        architecture.dtype = SAVED[config.save_dtype] if config.save_dtype else config.dtype
    return architecture


def _adapters_metadata(config):
    metadata = hf_lora.settings(config)
    metadata.base_model_name_or_path, metadata.inference_mode = config.model, True
    return metadata


def _stored(model, lora) -> dict[str, torch.Tensor]:
    """Return the tensors that the files contain, {name: tensor}: parameters and persistent buffers, each shared one once."""
    if lora:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return {f"base_model.model.{name.replace(f'.{hf_lora.ADAPTER}.', '.')}": p for name, p in named.items()}
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in named if name in persistent}


def _groups(named: dict) -> list[dict]:
    """Group tensors by block, as the library's conversions to the names in files need all tensors of a layer."""
    groups = {}
    for name, tensor in named.items():
        block = re.match(r".*?\.\d+\.", name)
        groups.setdefault(block[0] if block else name, {})[name] = tensor
    return list(groups.values())


@torch.no_grad()
def _gathered(group, keep: bool) -> dict:
    """Gather tensors one after another, and return {name: unsharded tensor on the CPU}; {} without ``keep``."""
    gathered = {}
    for name, tensor in group.items():
        value = tensor.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            gathered[name] = value.to("cpu", copy=True)
        del value
    return gathered


class _Writer:
    """Write tensors to files of at most LARGEST_FILE bytes, or of one larger group. Used on rank 0.

    Args:
        folder: where the files go.
        stem: of their names.
        dtypes: {name in files: dtype}.
        dtype: of the other tensors; None: their own.
        reverts: whether to convert names and tensors to those in files, which the library converts on loading.
    """

    def __init__(self, folder: Path, stem: str, dtypes: dict, dtype, reverts: bool):
        self.folder, self.stem, self.dtypes, self.dtype, self.reverts = folder, stem, dtypes, dtype, reverts
        self.waiting, self.files = {}, []  # tensors of the file being filled; names of the tensors of each written file
        self.size = 0

    def add(self, model, group: dict):
        """Add a group of tensors under the names that they have in files."""
        group = revert_weight_conversion(model, group) if self.reverts else group
        group = {name: self._converted(name, tensor) for name, tensor in group.items()}
        size = sum(tensor.nbytes for tensor in group.values())
        if self.waiting and size + sum(tensor.nbytes for tensor in self.waiting.values()) > LARGEST_FILE:
            self.flush()
        self.size += size
        self.waiting |= group

    def _converted(self, name: str, tensor):
        dtype = self.dtypes.get(name, self.dtype) if tensor.is_floating_point() else None
        return tensor.to(dtype or tensor.dtype).contiguous()

    def flush(self):
        """Write the file being filled."""
        save_file(self.waiting, self.folder / f"{self.stem}-{len(self.files)}.partial", {"format": "pt"})
        self.files.append(list(self.waiting))
        self.waiting = {}

    def finish(self):
        """Write the last file, give all their final names, and write the index of several."""
        self.flush()
        count, weight_map = len(self.files), {}
        for number, names in enumerate(self.files):
            final = (
                f"{self.stem}-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else f"{self.stem}.safetensors"
            )
            (self.folder / f"{self.stem}-{number}.partial").rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self.size}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=1))


def _recreate(partial: Path):
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _on_rank0(partial: Path, write):
    """Call ``write()`` on rank 0; if it fails, remove the folder and raise UserError on all ranks."""

    def attempt():
        try:
            write()
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(f"{partial.stem} could not be saved ({error}): make room, or name another --save") from None

    checkpoints.rank0_then_broadcast(attempt)


def _finish(partial: Path, folder: str, metadata, source: str | None, writer: _Writer):
    """Write the last weights and all other files, and rename the folder."""
    writer.finish()
    metadata.save_pretrained(partial)
    for file in Path(source).iterdir() if source else ():
        if any(file.match(pattern) for pattern in WEIGHTS):
            continue
        copy = shutil.copytree if file.is_dir() else shutil.copy
        copy(file, partial / file.name)
    partial.rename(folder)
