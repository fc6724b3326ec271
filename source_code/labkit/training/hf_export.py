# SPDX-License-Identifier: BSD-3-Clause
"""Save a trained model in Hugging Face's format, or its adapters in peft's, from all ranks' shards.

The library's own ``save_pretrained`` gathers the whole model on rank 0 first. Here rank 0 has at most the tensors of one
file and of one block.

Used here without being documented: ``revert_weight_conversion``, which ``save_pretrained`` calls, and the names of the
modules that a model needs in fp32, ``_keep_in_fp32_modules_strict`` (transformers 5.23).
"""

import copy
import functools
import json
import re
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
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
WEIGHTS += ("*.msgpack", "*.onnx", "*.ckpt")
WRITTEN = ("config.json", "adapter_config.json", ".*")
# The part of it that goes with adapters
TOKENIZER = ("*token*", "vocab*", "merges.txt", "spiece*", "sentencepiece*", "*chat_template*")


def folder_of(config, step: int) -> str:
    """Return the folder to which --save-every saves the model of a step: FOLDER-step-N.

    It lies next to the last model's, so that each of these folders contains one whole model and nothing else.
    """
    return f"{config.save}-step-{step}"


def check_new(config):
    """Check before training that --save names a new folder. A resumed run may save a step's model again.

    Raises:
        UserError: the folder exists, or cannot be written.
    """
    folder, path = config.save, Path(config.save)
    of_steps = path.parent.glob(f"{path.name}-step-*") if config.save_every and not config.resume else ()
    for existing in (path, *of_steps):
        if existing.exists():
            raise UserError(f"--save {existing} is there already: name another folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"--save {folder} cannot be written ({error.strerror}): name another folder") from None


def save(model, architecture, config, folder: str):
    """Save the model, or its adapters without --merge, to a folder that appears when it is complete. Collective.

    Args:
        model: the trained model, sharded or not.
        architecture: as ``hf_models.configuration`` returns it.
        config: hf_fsdp.py's options.
        folder: where to; --save must be new, and one of ``folder_of`` is replaced.

    Raises:
        UserError: it could not be written.
    """
    adapters, partial = config.adapts and not config.merge, Path(f"{folder}.partial")
    dtype = getattr(torch, SAVED[config.save_dtype]) if config.save_dtype else None
    model.state_dict()  # FSDP shards what a forward, such as that of a validation, has left gathered and cast
    if adapters:
        writer, stored = _Writer(partial, "adapter_model", {}), hf_lora.stored(model)
        metadata, converted = _adapters_metadata(model, config), functools.partial(_cast, dtype=dtype)
    else:
        dtypes = hf_files.dtypes(config.model) if config.model and not dtype else {}
        writer, stored = _Writer(partial, "model", dtypes), _stored(model)
        metadata, dtype = _model_metadata(architecture, config), dtype or (None if config.model else config.dtype)
        converted = functools.partial(_as_in_files, model, dtype=dtype, names=_cast_names(model))
    _on_rank0(partial, lambda: _recreate(partial))
    for group in _groups(stored):
        gathered = _gathered(group, keep=dist.get_rank() == 0)
        _on_rank0(partial, lambda gathered=gathered: writer.add(converted(gathered)))
    _on_rank0(partial, lambda: _finish(partial, Path(folder), metadata, config, writer))


def _model_metadata(architecture, config):
    architecture.architectures = [hf_models.MODEL_FOR_CAUSAL_LM_MAPPING[type(architecture)].__name__]
    architecture.use_cache = True
    if config.save_dtype or not config.model:
        architecture.dtype = SAVED[config.save_dtype] if config.save_dtype else config.dtype
    return architecture


def _adapters_metadata(model, config):
    metadata = copy.copy(model.peft_config[hf_lora.ADAPTER])
    metadata.base_model_name_or_path, metadata.inference_mode = config.model, True
    if not isinstance(metadata.target_modules, str):
        metadata.target_modules = sorted(metadata.target_modules)
    return metadata


def _stored(model) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of the parameters and persistent buffers, each shared one once."""
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in named if name in persistent}


def _cast_names(model) -> set[str]:
    """Return the names of the tensors that have the model's dtype: parameters except those that it needs in fp32."""
    fp32 = model._keep_in_fp32_modules_strict or ()
    names = {name for name, _ in model.named_parameters() if not any(module in name for module in fp32)}
    return {hf_lora.original_name(name) for name in names}


def _as_in_files(model, group: dict, dtype, names: set[str]) -> dict:
    """Convert gathered tensors to those in files: merge adapters, cast, and split what the library joins on loading.

    Args:
        model: which the tensors are of.
        group: {name in the model: tensor}.
        dtype: to cast to; None: each tensor's own.
        names: of the tensors to cast.
    """
    group = hf_lora.merged(model, group)
    group |= _cast({name: tensor for name, tensor in group.items() if name in names}, dtype)
    return revert_weight_conversion(model, group)


def _cast(group: dict, dtype) -> dict:
    return {name: tensor.to(dtype or tensor.dtype) for name, tensor in group.items()}


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
        dtypes: {name in files: dtype}; other tensors are written in their own.
    """

    def __init__(self, folder: Path, stem: str, dtypes: dict):
        self.folder, self.stem, self.dtypes = folder, stem, dtypes
        self.waiting, self.files = {}, []  # tensors of the file being filled; names of the tensors of each written file
        self.size = 0

    def add(self, group: dict):
        """Add a group of tensors, {name in files: tensor}."""
        group = {name: tensor.to(self.dtypes.get(name) or tensor.dtype).contiguous() for name, tensor in group.items()}
        size = sum(tensor.nbytes for tensor in group.values())
        if self.waiting and size + sum(tensor.nbytes for tensor in self.waiting.values()) > LARGEST_FILE:
            self.flush()
        self.size += size
        self.waiting |= group

    def flush(self):
        """Write the file being filled."""
        hf_files.save(self.waiting, self.folder / f"{self.stem}-{len(self.files)}.partial")
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
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{partial.stem} could not be saved ({why}): make room, or name another --save") from None

    checkpoints.rank0_then_broadcast(attempt)


def _finish(partial: Path, folder: Path, metadata, config, writer: _Writer):
    """Write the last weights and all other files, and rename the folder."""
    writer.finish()
    metadata.save_pretrained(partial)
    _copy_others(
        Path(config.model) if config.model else None, partial, only_tokenizer=config.adapts and not config.merge
    )
    if folder.exists():
        if folder == Path(config.save):
            raise UserError(f"--save {folder} has appeared during training: the trained model is in {partial}")
        shutil.rmtree(folder)
    partial.rename(folder)


def _copy_others(source: Path | None, folder: Path, only_tokenizer: bool):
    """Copy what else a model's folder contains: tokenizer, chat template, generation settings, license, and so on."""
    for file in source.iterdir() if source else ():
        wanted = not only_tokenizer or any(map(file.match, TOKENIZER))
        if not wanted or any(map(file.match, (*WEIGHTS, *WRITTEN))):
            continue
        if file.is_dir():
            shutil.copytree(file, folder / file.name, ignore=shutil.ignore_patterns(*WEIGHTS))
        else:
            shutil.copy(file, folder / file.name)
