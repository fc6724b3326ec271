# SPDX-License-Identifier: BSD-3-Clause
"""Shard models of Hugging Face's transformers by the library's own plans, where these are right.

Used here without being documented: ``maybe_distribute_model``, the device meshes that it takes, and the models' plans
(transformers 5.23). proofs/census.py runs every family; what it found wrong is refused or completed here.
"""

import math
import sys
import warnings
from collections import Counter
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from labkit import UserError
from labkit.measuring.replaced import replaced
from labkit.training.hf_models import blocks, first_line, tied

try:
    import transformers.distributed.fsdp
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.distributed import DistributedConfig
    from transformers.distributed.mixin import DistributedMixin
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce
    from transformers.distributed.utils import TransformersDeviceMesh
except ImportError:  # reported by ``hf_models.configuration``
    transformers = DistributedConfig = None
else:
    DISTRIBUTE = DistributedMixin.maybe_distribute_model.__func__  # ``hf_loading.load`` replaces the method

# {family: why its tensor-parallel plan is not used}
NO_TENSOR_PLAN = {
    "gemma3n_text": "takes mean and deviation of a part of each vector",
    **dict.fromkeys(("cohere", "doge", "gemma4", "inkling_text", "llama4", "llama4_text"), "does not run"),
}
# {family: rules that its tensor-parallel plan lacks}
TENSOR_RULES = {"apertus": {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}}
EXPERT_RULES = ("grouped_gemm", "ep_dispatch_experts")  # the others of Gemma 4's expert-parallel plan do not run


def fsdp_plan(model) -> dict[str, str]:
    """Return the FSDP units of a model in the form of the library's plans, {name of modules, with * for a number: how}.

    They are the library's own, where its rules name something in the model. For some families they name no blocks, or
    neither embedding nor head: these are added, as all that is in no unit is gathered throughout the step.

    A weight that embedding and head share must be in the unit of both, which is the root's: with the library's plan, the
    root would gather it a second time.
    """
    names = {module: replace_layer_number_by_wildcard(name) for name, module in model.named_modules()}
    plan = {rule: how for rule, how in (model.fsdp_plan or {}).items() if rule in names.values()}
    ends = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    if tied(model):
        at_the_ends = {names[module] for module in ends}
        plan = {rule: how for rule, how in plan.items() if rule not in at_the_ends and how == "free_full_weight"}
    elif len(ends) == 2:
        plan = {names[ends[0]]: "free_full_weight", names[ends[1]]: "keep_full_weight"} | plan
    return {names[block]: "free_full_weight" for block in blocks(model)} | plan


def distribute(model, distribution, device_type: str, pin_memory: bool):
    """Apply the parallelism of a ``DistributedConfig`` to a model on the meta device, by the library's plans.

    Args:
        model: unsharded.
        distribution: sizes and policies.
        device_type: "cpu" or "cuda".
        pin_memory: whether --cpu-offload page-locks memory, which needs a GPU.

    Raises:
        UserError: the library has no right plan for this model, or the sizes do not fit it.
    """
    _check_plans(model, distribution)
    if distribution.tp_size == 1:
        model.tie_weights()
    owners = Counter(parameter for block in blocks(model) for parameter in block.parameters())
    if distribution.dp_size > 1 and max(owners.values(), default=1) > 1:
        raise UserError(
            f"{model.config.model_type} shares weights among its blocks, which FSDP2 cannot: take --strategy ddp or single"
        )
    shared = tied(model) and distribution.tp_size > 1  # without files to read; the library reads into separate weights
    if shared:  # its tensor parallelism splits both
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight), head.weight.requires_grad)
    model.fsdp_plan = fsdp_plan(model)
    first = distribution.pp_size, distribution.dp_replicate_size
    dense = init_device_mesh(
        device_type,
        (*first, distribution.fsdp_size, distribution.tp_size),
        mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
    )
    expert = init_device_mesh(
        device_type,
        (*first, distribution.efsdp_size, distribution.ep_size),
        mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"),
    )
    # What a module returns is then a view of a DTensor's local part; no model changes it in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    offload = lambda: CPUOffloadPolicy(pin_memory=pin_memory)  # noqa: E731
    summed = replaced(ReplicatedWithGradAllReduce, install_forward=sum_gradients)
    with replaced(transformers.distributed.fsdp, CPUOffloadPolicy=offload), summed:
        try:
            model = DISTRIBUTE(type(model), model, distribution, TransformersDeviceMesh(dense, expert))
        except (ValueError, RuntimeError, AttributeError) as error:
            raise UserError(f"{model.config.model_type} cannot be sharded like this: {first_line(error)}") from None
    if shared:
        model.tie_weights()
    if distribution.dp_size > 1:
        _check_experts(model)
    return model


def _check_experts(model):
    """Print a warning on rank 0 if some ranks have no part of a layer's experts.

    FSDP2 shards the first dimension, which for experts is their number.

    Raises:
        UserError: the files hold each expert on its own: the library cannot read them on ranks that have none.
    """
    for name, parameter in model.named_parameters():
        if "experts" not in name or parameter.ndim < 3 or not isinstance(parameter, DTensor):
            continue
        ways = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        shards = math.prod(size for size, how in ways if getattr(how, "dim", None) == 0)
        experts = parameter.shape[0]
        each = math.ceil(experts / shards)
        if (used := math.ceil(experts / each)) == shards:
            continue
        problem = (
            f"{name}: {shards} ranks share {experts} experts, so {used} ranks hold {each} each and the others none"
        )
        instead = "put a part of the ranks into replicate or tensor of --mesh"
        if any(_has(each, "MergeModulelist") for each in get_model_conversion_mapping(model)):
            raise UserError(f"{problem}, which the library cannot load: {instead}")
        if dist.get_rank() == 0:
            print(f"{problem}; for even shares, {instead}", file=sys.stderr, flush=True)
        return


def sum_gradients(_, module, mesh):
    """Sum the gradients of a module's parameters over the tensor-parallel ranks, which have one term each.

    It replaces the library's function, which sums ``grad`` itself, with each micro-batch again what earlier ones have
    left there (transformers 5.23). As there, hooks are added in the first forward, when parameters are final.

    Args:
        module: with replicated parameters.
        mesh: of the ranks.
    """
    forward, hooked = module.forward, {}

    def summed(gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=mesh.get_group())
        return gradient

    def hooking_forward(*args, **kwargs):
        for name, parameter in module.named_parameters(recurse=False):
            if torch.is_grad_enabled() and parameter.requires_grad and hooked.get(name) is not parameter:
                parameter.register_hook(summed)
                hooked[name] = parameter
        return forward(*args, **kwargs)

    module.forward = hooking_forward
    return module


def _check_plans(model, distribution):
    """Check that the library has plans for these dimensions, and complete those that need it.

    Raises:
        UserError: it has none, or one that is wrong.
    """
    family, splits, spreads = model.config.model_type, distribution.tp_size > 1, distribution.ep_size > 1
    for what, given, plan in (("tensor", splits, model.tp_plan), ("expert", spreads, model.ep_plan)):
        if given and not plan:
            raise UserError(f"transformers has no {what}-parallel plan for {family}: leave {what} out")
    if splits and family in NO_TENSOR_PLAN:
        raise UserError(f"transformers' tensor-parallel plan for {family} {NO_TENSOR_PLAN[family]}: leave tensor out")
    if splits:
        distribution.tp_plan = TENSOR_RULES.get(family)
    if spreads and family.startswith("gemma4"):
        model.ep_plan = {rule: style for rule, style in model.ep_plan.items() if style in EXPERT_RULES}
    # With each expert on one rank, FSDP2 divides their gradients twice if they are neither fp32 nor bf16 (torch 2.15).
    if spreads and distribution.efsdp_size == 1 and model.dtype not in (torch.float32, torch.bfloat16):
        raise UserError(
            "with each expert on one rank, gradients would be halved in --precision fp64: take fp32 or bf16, or fewer "
            "expert ranks than shards"
        )
    joined = [each.target_patterns for each in get_model_conversion_mapping(model) if _joins_rows(each)]
    for target in chain(*joined):
        split = splits and any(rule.endswith(target.removesuffix(".weight")) for rule in model.tp_plan)
        if split or distribution.dp_size > 1:
            raise UserError(
                f"transformers puts {target} of {family} together from several tensors of the files, wrongly if they are "
                "sharded: take --strategy ddp or single"
            )


def _joins_rows(conversion) -> bool:
    """Return whether a conversion of stored tensors concatenates or splits them along the dimension that FSDP shards."""
    operations = getattr(conversion, "operations", ())
    return any(type(each).__name__ in ("Concatenate", "Chunk") and each.dim == 0 for each in operations)


def _has(conversion, operation: str) -> bool:
    """Return whether a conversion of stored tensors has this operation."""
    return operation in [type(each).__name__ for each in getattr(conversion, "operations", ())]
