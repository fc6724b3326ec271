# SPDX-License-Identifier: BSD-3-Clause
"""Draw the initial weights of a Hugging Face model, independently of how it is sharded.

transformers initializes weights module by module (``_init_weights``, private, unchanged since 5.0), including buffers such
as tables of rotary embeddings. Applied to one block at a time, it fills a sharded model without ever having all of it.
"""

import copy
import math
import zlib

import torch

from labkit import UserError
from labkit.measuring.trace import local
from labkit.training import hf_lora
from labkit.training.units import units_of

try:
    from transformers import PreTrainedModel
    from transformers.distributed.sharding_utils import DtensorShardOperation
except ImportError:  # reported by ``hf_models.configuration``
    PreTrainedModel = None


def tensors(model) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of a model's parameters and buffers."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


@torch.no_grad()
def initialize(model, pattern, names: set[str], seed: int, source: str):
    """Draw the initial values of some tensors of a model; every rank draws them unsharded, and takes its shards.

    Args:
        model: sharded or not.
        pattern: the same model on the meta device, unsharded.
        names: of the tensors to initialize.
        seed: any integer.
        source: option and path of the model, for messages.

    Raises:
        UserError: a module does not initialize one of them.
    """
    mine = {name: tensor for name, tensor in tensors(model).items() if name in names}
    for tensor in mine.values():
        if tensor.is_floating_point():
            local(tensor).fill_(math.nan)
    filled = set()
    for name, value in initial_weights(pattern, seed, tensors(pattern).keys() - names):
        filled.add(name)
        if (tensor := mine.get(name)) is not None:  # None for the second name of a shared tensor
            local(tensor).copy_(_shard(value, tensor))
    forgotten = [name for name, t in mine.items() if name not in filled or local(t).isnan().any()]
    if forgotten:
        raise UserError(
            f"{source}: no value for {', '.join(forgotten[:3])}: its module does not initialize it, take another model"
        )


def _shard(value, tensor):
    """Return this rank's shard of an unsharded value, cut as the library cuts what it reads from files."""
    if hasattr(tensor, "placements"):
        return DtensorShardOperation(tensor).shard_tensor(value, device=value.device, dtype=tensor.dtype)
    return value


def initial_weights(pattern, seed: int, but: frozenset = frozenset()):
    """Yield (name, tensor on the CPU) with the initial weights of every parameter and buffer.

    One block at a time is initialized, or one module outside of blocks, each from its own seed, so that the values do not
    depend on the sharding.

    Args:
        pattern: the model on the meta device, not sharded.
        seed: any integer.
        but: names to leave out.
    """
    owners = {name: module for name, module in pattern.named_modules() if isinstance(module, PreTrainedModel)}
    blocks = units_of(pattern.base_model)
    inside = {module for block in blocks for module in block.modules()}
    whole = {id(block) for block in blocks}
    for name, module in pattern.named_modules():
        if id(module) in whole:
            part = copy.deepcopy(module)
        elif module in inside or not (module._parameters or module._buffers):
            continue
        else:
            part = copy.copy(module)
            part._parameters, part._buffers = dict(module._parameters), dict(module._buffers)
        prefix = f"{name}." if name else ""
        members = dict(part.named_modules()) if id(module) in whole else {"": part}
        wanted = _with_memory(members, prefix, but)
        if not wanted:
            continue
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            # The innermost PreTrainedModel that contains a module initializes it.
            enclosing = (owner for owner in owners if not owner or f"{name}.".startswith(f"{owner}."))
            _initialize(owners[max(enclosing, key=len)], list(members.values()))
        yield from wanted.items()


def _with_memory(members: dict, prefix: str, but) -> dict:
    """Allocate the tensors of some modules, except those in ``but``, and return {name: tensor}."""
    wanted = {}
    for path, module in members.items():
        for of_module in (module._parameters, module._buffers):
            for own, tensor in of_module.items():
                name = prefix + (f"{path}.{own}" if path else own)
                if tensor is None or name in but:
                    continue
                # NaN, so that a tensor that the library does not initialize is noticed.
                fill = math.nan if tensor.is_floating_point() else 0
                of_module[own] = wanted[name] = torch.full_like(tensor, fill, device="cpu")
    return wanted


def _initialize(owner, modules: list):
    for module in reversed(modules):  # children before their parents, as the library does
        owner._init_weights(module)
    for module in modules:
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters(hf_lora.ADAPTER, init_lora_weights=True)
