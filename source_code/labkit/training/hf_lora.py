# SPDX-License-Identifier: BSD-3-Clause
"""Adapters of a frozen model (LoRA, https://arxiv.org/abs/2106.09685), as the peft library defines and stores them."""

import hashlib
import os
import re
from pathlib import Path

import torch
from torch import nn

from labkit import UserError
from labkit.measuring.trace import local
from labkit.training import hf_files

try:
    from transformers.distributed.sharding_utils import DtensorShardOperation
    from transformers.pytorch_utils import Conv1D
except ImportError:  # reported by ``hf_models.configuration``
    Conv1D = nn.Linear

ADAPTER = "default"  # peft's name of the only adapter
FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
# What may differ from peft's defaults in an adapter_config.json; the rest changes more than low-rank updates of weights
SUPPORTED = {"r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"}
SUPPORTED |= {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"}
SUPPORTED |= {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
SAMPLE = 2**20  # bytes that are read of a large file for its checksum, at its beginning and at its end
INITIAL = (True, False, "gaussian", "orthogonal")  # init_lora_weights that leave the base model as it is


def source(config) -> str:
    """Return the option that asks for adapters, and its value, for messages."""
    return f"--adapters {config.adapters}" if config.adapters else f"--lora {config.lora}"


def settings(config):
    """Return peft's configuration of the adapters: that in --adapters, or what the options describe.

    Raises:
        UserError: peft is not installed, or the adapters cannot be trained here.
    """
    try:
        from peft import LoraConfig
    except ImportError:
        raise UserError(f"{source(config)} needs peft: python -m pip install peft") from None
    if config.adapters:
        return _settings_of(config.adapters)
    return LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha or 2 * config.lora,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear" if config.lora_targets == "all-linear" else _targets(config),
        task_type="CAUSAL_LM",
    )


def _targets(config) -> list[str]:
    return [name.strip() for name in config.lora_targets.split(",")]


def _settings_of(folder: str):
    """Read a folder's adapter_config.json.

    Raises:
        UserError: it cannot be read, or its adapters are of another kind.
    """
    from peft import LoraConfig, PeftConfig

    if not (Path(folder) / SETTINGS).is_file():
        raise UserError(f"--adapters {folder} has no {SETTINGS}: name a folder that peft or --save has written")
    try:
        found = PeftConfig.from_pretrained(folder)
    except Exception as error:  # of JSON, or of peft's checks
        raise UserError(f"--adapters {folder}: {SETTINGS} cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(found, LoraConfig):
        raise UserError(f"--adapters {folder} are of the kind {found.peft_type}, and this lab trains LoRA's")
    plain, values = LoraConfig().to_dict(), found.to_dict()
    for name, value in values.items():
        more = name not in SUPPORTED and value != plain[name] and (value or plain[name])
        if more or (name == "init_lora_weights" and value not in INITIAL):
            raise UserError(f"--adapters {folder} set {name} to {value!r}, which this lab does not train")
    found.inference_mode = False
    return found


def identity(config) -> dict:
    """Return the base model that a resumed run must share, as ``checkpoints.identity``: it is in no checkpoint.

    Returns:
        {name in messages: a checksum of the beginning and the end of each file of --model}; {} without adapters.
    """
    if not (config.adapts and config.model):
        return {}
    checksum = hashlib.sha256()
    for path in sorted(set(hf_files.weight_map(Path(config.model)).values())):
        with open(path, "rb") as file:
            checksum.update(file.read(SAMPLE))
            file.seek(-min(SAMPLE, path.stat().st_size), os.SEEK_END)
            checksum.update(file.read())
    return {"a base model with the checksum": checksum.hexdigest()[:16]}


def add(model, config):
    """Freeze a model and add adapters to it, in place.

    Raises:
        UserError: no module has the name of --lora-targets, or one cannot be adapted, or peft does not support the family.
    """
    found = settings(config)
    from peft import inject_adapter_in_model
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    try:
        convert_peft_config_for_transformers(found, model, None)  # which injecting does, too
        if found.target_modules and config.lora_targets == "all-linear" and not config.adapters:
            # For some mixtures, peft counts experts among the linear layers; their adapters have a form of their own.
            found.target_parameters, found.rank_pattern, found.alpha_pattern = None, {}, {}
        inject_adapter_in_model(found, model, ADAPTER)
    except ValueError as error:
        raise UserError(f"{source(config)}: {str(error).strip().splitlines()[0]}") from None
    _check_adapted(model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # trained in fp32 even if the base model is in bf16: small steps would be rounded away
            parameter.data = parameter.data.to(config.adapter_dtype)


def _check_adapted(model, config):
    """Check that each name of --lora-targets was found, and that only linear layers inside of the model have adapters.

    Raises:
        UserError: it is not so.
    """
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    if not config.adapters and config.lora_targets != "all-linear":
        for target in _targets(config):
            if not any(f".{name}".endswith(f".{target}") for name in adapted):
                raise UserError(f"--lora-targets {config.lora_targets}: no module of the model is called {target!r}")
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in adapted.items():
        if module in ends or not isinstance(module.base_layer, (nn.Linear, Conv1D)):
            raise UserError(
                f"{source(config)}: {name} cannot be adapted here: name linear layers other than the head as targets"
            )


def renamed_weights(model, config) -> dict[str, str]:
    """Return the renaming that reads a model's files into one with adapters, {regular expression: replacement}.

    An adapter replaces a layer by one that has the original as ``base_layer``.

    Args:
        model: without adapters, on the meta device; gets some.
        config: hf_fsdp.py's options.
    """
    add(model, config)
    adapted = {name.rpartition(".base_layer.")[0] for name, _ in model.named_parameters() if ".base_layer." in name}
    last = "|".join(sorted({re.escape(name.rpartition(".")[2]) for name in adapted}))
    return {rf"(\b(?:{last}))(?=\.(?:weight|bias)$)": r"\1.base_layer"}


def original_name(name: str) -> str:
    """Return the name that a base model's tensor has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def stored(model) -> dict[str, nn.Parameter]:
    """Return {name in peft's file: parameter} of the adapters of a model."""
    named = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    return {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": parameter for name, parameter in named.items()}


@torch.no_grad()
def read(model, folder: str):
    """Read this rank's shards of the adapters of --adapters into a model that has such adapters.

    Args:
        model: sharded or not.
        folder: with adapter_model.safetensors.

    Raises:
        UserError: the file has not exactly the model's adapters.
    """
    file, named = Path(folder) / FILE, stored(model)
    if not file.is_file():
        raise UserError(f"--adapters {folder} has no {FILE}: save the adapters with a newer peft, as safetensors")
    other = "are these adapters of another base model?"
    with hf_files.opened(file) as tensors:
        there = set(tensors.keys())
        if missing := sorted(named.keys() - there):
            raise UserError(f"{file} has no tensor {missing[0]}: {other}")
        if more := sorted(there - named.keys()):
            raise UserError(f"{file} has tensors that the adapted model does not have, such as {more[0]}: {other}")
        for name, parameter in named.items():
            piece = tensors.get_slice(name)
            if (shape := piece.get_shape()) != list(parameter.shape):
                raise UserError(f"{file}: {name} has the shape {shape} instead of {list(parameter.shape)}: {other}")
            if hasattr(parameter, "placements"):
                piece = DtensorShardOperation(parameter).shard_tensor(piece, dtype=parameter.dtype)
            if (value := piece[...]).isnan().any():
                raise UserError(f"{file} has no value for {name}: is it damaged?")
            local(parameter).copy_(value)


@torch.no_grad()
def merged(model, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Merge adapters into unsharded weights: W + scale B A, in fp32 or wider, which is the result's dtype.

    Args:
        model: which the tensors are of.
        group: {name in the model: unsharded tensor}, for each adapted weight with its adapters.

    Returns:
        {name in the model without adapters: tensor}; a tensor without adapters is returned as it is.
    """
    result = {}
    for name, tensor in group.items():
        if ".lora_" in name:
            continue
        owner, adapted, last = name.rpartition(".base_layer.")
        if adapted and last == "weight":
            layer, wide = model.get_submodule(owner), torch.promote_types(tensor.dtype, torch.float32)
            b, a = (group[f"{owner}.lora_{which}.{ADAPTER}.weight"].to(wide) for which in "BA")
            delta = layer.scaling[ADAPTER] * (b @ a)
            tensor = tensor.to(wide) + (delta.T if layer.fan_in_fan_out else delta)
        result[original_name(name)] = tensor
    return result
