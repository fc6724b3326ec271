# SPDX-License-Identifier: BSD-3-Clause
"""Load the model of --model by transformers' ``from_pretrained``, sharded, exactly as its files have it, or refuse.

``from_pretrained`` builds a model on the meta device, applies the parallelism of a ``DistributedConfig``, and then each
rank reads only its shards. Here it also calls the lab's own function between building and reading: adapters and
activation checkpointing must be there before a model is sharded.

Used here without being documented: ``prepare_distribute_model`` and ``maybe_distribute_model``, which ``from_pretrained``
calls (transformers 5.23).
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn

from labkit import UserError
from labkit.measuring.replaced import replaced
from labkit.measuring.trace import local
from labkit.training import hf_files, hf_initial, hf_lora
from labkit.training.hf_models import first_line, on_meta, tied, without_cache

try:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.mixin import DistributedMixin
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
except ImportError:  # reported by ``hf_models.configuration``
    DistributedMixin = None


def load(config, architecture, device: torch.device, parallelize):
    """Load the model of --model. Collective.

    Args:
        config: hf_fsdp.py's options.
        architecture: as ``configuration`` returns it.
        device: where the weights go.
        parallelize: called with the model on the meta device, before any file is read; returns it sharded or not.

    Returns:
        (model, names of the tensors that were initialized and not read).

    Raises:
        UserError: the files do not have exactly the model's tensors; on every rank.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(architecture)]
    how = {"experts_implementation": config.experts_implementation} if config.experts_implementation else {}
    _agree(lambda: hf_files.check(config.model))
    if config.adapts:
        how["key_mapping"] = hf_lora.renamed_weights(on_meta(architecture, config.dtype), config)

    trained = {}  # {name: whether it is trained}, which the library forgets when it reads a parameter

    def distributed(cls, model, *_):
        model = parallelize(model)
        trained.update({name: parameter.requires_grad for name, parameter in model.named_parameters()})
        return model

    # The device must be chosen here: by itself the library takes a GPU wherever there is one.
    hooks = {
        "prepare_distribute_model": classmethod(
            lambda cls, distribution, device_map=None: (distribution, device, None)
        ),
        "maybe_distribute_model": classmethod(distributed),
    }
    with replaced(DistributedMixin, **hooks), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators")  # what the library draws is drawn again
        try:
            model, report = model_class.from_pretrained(
                config.model,
                config=architecture,
                dtype=config.dtype,
                distributed_config=DistributedConfig(),
                ignore_mismatched_sizes=True,  # they are reported, and refused below
                output_loading_info=True,
                **how,
            )
        except UserError:
            raise
        except Exception as error:  # of the library: it checks much, with classes of all kinds
            raise UserError(f"--model {config.model}: {first_line(error)}") from None
    _agree(lambda: _check_report(report, model, config))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    _detach_from_files(model)
    # Buffers that are in no file: the library leaves some of a sharded model as they lie in memory.
    computed = {
        name for name, buffer in model.named_buffers() if buffer.is_floating_point()
    } - model.state_dict().keys()
    initialized = set(report["missing_keys"]) | computed
    if config.adapters:
        _agree(lambda: hf_lora.read(model, config.adapters))
        initialized = {name for name in initialized if "lora_" not in name}
    return without_cache(model), initialized


def _agree(check):
    """Call ``check()`` on every rank, and raise the UserError of the first that failed on all of them. Collective."""
    try:
        problem = check()
    except UserError as error:
        problem = error
    problems = [problem]
    if dist.is_initialized() and dist.get_world_size() > 1:
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    if found := next(filter(None, problems), None):
        raise found


def _check_report(report: dict, model, config):
    """Check that the files had exactly the model's tensors.

    Raises:
        UserError: they had not.
    """
    if report["mismatched_keys"]:
        name, there, wanted = min(report["mismatched_keys"])
        raise UserError(
            f"{config.model}: {name} has the shape {list(there)}, and by its config.json {list(wanted)}: "
            "its config.json is of another model"
        )
    missing = sorted(name for name in report["missing_keys"] if "lora_" not in name)
    more = sorted(report["unexpected_keys"])
    if missing == ["lm_head.weight"] and not more:
        raise UserError(
            f"{config.model} has no lm_head.weight: it is a base model, saved without the head that training needs"
        )
    if missing and (prefix := _prefix(missing, more)):
        raise UserError(
            f"{config.model} has {prefix}{missing[0]} for {missing[0]}: save it without the prefix {prefix}"
        )
    if missing:
        but = f", but has {more[0]}" if more else ""
        raise UserError(f"{config.model} has no tensor {missing[0]}{but}: its config.json is of another model")
    if more:
        raise UserError(
            f"{config.model} has tensors that the model of its config.json does not have, such as {more[0]}: "
            "its config.json is of another model"
        )
    ties = getattr(model.config.get_text_config(), "tie_word_embeddings", False)  # Inkling's has no such value
    if ties and not tied(model):  # the library has separated them
        raise UserError(
            f"{config.model} has two values of one weight: its head and its embedding differ, and its config.json ties "
            "them: set tie_word_embeddings to false there"
        )
    stored = model.state_dict().keys() - set(report["missing_keys"])
    read = {name: local(tensor) for name, tensor in hf_initial.tensors(model).items() if name in stored}
    if damaged := next((name for name, tensor in read.items() if _has_nan(tensor)), None):
        raise UserError(f"{config.model} has no value for {damaged}: is a file damaged?")


def _prefix(missing: list[str], more: list[str]) -> str:
    """Return what stands before each missing name in the files, such as "module." of DDP's models; "": nothing does."""
    prefix = more[0].removesuffix(missing[0]) if more and more[0].endswith(missing[0]) else ""
    return prefix if all(f"{prefix}{name}" in more for name in missing) else ""


def _has_nan(tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


@torch.no_grad()
def _detach_from_files(model):
    """Copy tensors that are views of a larger storage, such as a mapped file, which would count as whole in memory."""
    copies = {}  # {id of a tensor: what replaces it}, as modules share tied weights
    for module in model.modules():
        for owned in (module._parameters, module._buffers):
            for name, tensor in owned.items():
                if tensor is None or local(tensor).untyped_storage().nbytes() <= local(tensor).nbytes:
                    continue
                if id(tensor) not in copies:
                    copy = tensor.clone()
                    if owned is module._parameters:
                        copy = nn.Parameter(copy, tensor.requires_grad)
                    copies[id(tensor)] = tensor, copy  # the tensor too: while it is there, no other has its id
                owned[name] = copies[id(tensor)][1]
