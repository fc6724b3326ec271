# SPDX-License-Identifier: BSD-3-Clause
"""The floating-point operations of a step on one rank: the model's, for MFU, and the hardware's, for time and HFU. No torch.

The model's are PaLM's count (arXiv:2204.02311, appendix B; ``per_token``): every token attends to all others, and nothing
is computed twice. The hardware's differ in two ways. Attention is causal, and a fused kernel skips the masked half of its
matrix: half of 12 × layers × hidden size × length remains. And what a block recomputes in backward counts. Not counted:
the scores that a fused kernel recomputes inside its own backward, norms, the optimizer.
"""

from math import fsum, prod

from planner.models.parameters import active_shares, block_parameters, linear_parameters, norm_parameters
from planner.models.shapes import GPTShape
from planner.ops import attention
from planner.ops.autograd import BF16

LOOKED_UP = ("embedding.weight", "positions.weight")  # parameters that multiply nothing


def per_token(shape: GPTShape, seq_len: int, lora: int | None = None, blocks: range | None = None) -> float:
    """Return the floating-point operations that training on one token takes (PaLM, arXiv:2204.02311, appendix B).

    For each parameter that multiplies (all but the embedding, and the experts that a token is not routed to): 2 in
    forward, 2 for the gradient of the input, and 2 for the parameter's own gradient if it is trained. For attention:
    12 × layers × hidden size × length. Recomputation does not count, as it adds nothing to the model.

    Args:
        shape: the model.
        seq_len: tokens of a sequence.
        lora: the adapters' rank; then they alone are trained.
        blocks: of a pipeline stage; by default all.
    """
    layers, blocks = shape.num_hidden_layers, blocks or range(shape.num_hidden_layers)
    last = norm_parameters(shape, "norm") | linear_parameters(shape, "head", shape.vocab_size, shape.hidden_size)
    multiplied = 0 if blocks.stop < layers else sum(map(prod, last.values()))
    trained = 0 if lora else multiplied
    attended = 0
    for number in blocks:
        sizes = multiplied_elements(shape, block_parameters(shape, lora, number=number))
        multiplied += fsum(sizes.values())
        trained += fsum(size for name, size in sizes.items() if not lora or name.endswith((".down", ".up")))
        attended += shape.attended_elements(number, seq_len)
    return 4 * multiplied + 2 * trained + 12 * attended


def multiplied_elements(shape: GPTShape, parameters: dict[str, tuple]) -> dict[str, float]:
    """Return {name: elements that multiply a token}; of experts, those that the router chooses."""
    shares = active_shares(shape, parameters)
    return {name: prod(size) * shares.get(name, 1) for name, size in parameters.items() if name not in LOOKED_UP}


def recomputed_operations(shape: GPTShape, recompute: str, lora: int | None, number: int = 0) -> tuple[float, bool]:
    """Return what backward recomputes in a block: (parameters that multiply a second time, whether attention runs again).

    Args:
        shape: the model.
        recompute: one of ``networks.RECOMPUTE``.
        lora: the adapters' rank, or None.
        number: of the block.
    """
    parameters = block_parameters(shape, lora, number=number)
    elements = multiplied_elements(shape, parameters)
    sizes = [(len(size), elements[name]) for name, size in parameters.items()]
    matmuls = [numel for dimensions, numel in sizes if dimensions > 1]  # in the order in which they run
    kinds = {"full": (fsum(numel for _, numel in sizes), True), "alternate": (fsum(matmuls[1::2]), False)}
    return kinds.get(recompute, (0, False))


def model_flops(plan) -> float:
    """Return the model's operations of a step on one rank of a ``Plan``, as MFU counts them."""
    return plan.micro_batches * plan.blueprint.samples * plan.blueprint.flops / plan.tp_degree


def hardware_flops(plan) -> float:
    """Return the operations that one rank of a ``Plan`` computes in a step, as HFU counts them."""
    return plan.micro_batches * fsum(map(fsum, module_flops(plan)))


def module_flops(plan) -> list[tuple[float, float]]:
    """Return the hardware's operations of each module in a micro-batch: [(forward, backward), …].

    Zeros for a blueprint that does not state its operations.
    """
    work, modules = plan.blueprint, plan.blueprint.modules
    if not work.flops:
        return [(0.0, 0.0)] * len(modules)
    multiplied = [_multiplying(module, work) for module in modules]
    attended, share, flops = attention_flops(plan), work.samples / plan.tp_degree, []
    load = work.spread.load(work.samples)
    for module, (every, trained) in zip(modules, multiplied, strict=True):
        more = (load - 1) * _multiplied_by_experts(module, work)
        every, trained = every + more, trained + more
        mixing_forward, mixing_backward = attended if module.heads else (0.0, 0.0)
        forward = 2 * share * every + mixing_forward
        matmuls, attends = module.recomputed
        recomputed = 2 * share * (matmuls + (more if matmuls else 0)) + (mixing_forward if attends else 0.0)
        flops.append((forward, recomputed + share * (2 * every + 2 * trained) + mixing_backward))
    return flops


def attention_flops(plan) -> tuple[float, float]:
    """Return the hardware's operations of one attention in a micro-batch: (forward, backward).

    PaLM's count of its two matmuls, of the part that is computed: a third in forward, the rest in backward.
    """
    attending = [module for module in plan.blueprint.modules if module.heads]
    multiplied = [_multiplying(module, plan.blueprint) for module in plan.blueprint.modules]
    mixing = plan.blueprint.flops - fsum(4 * every + 2 * trained for every, trained in multiplied)
    mixing *= _share_computed(plan, attending) * plan.blueprint.samples / plan.tp_degree / max(1, len(attending))
    return mixing / 3, mixing * 2 / 3


def _multiplied_by_experts(module, work) -> float:
    """Return the parameters of experts that multiply a token, if no token is dropped, and no rank has more than others."""
    ranks = work.spread.ep_degree
    sizes = ((prod(module.parameters[name]), name) for name in module.active)
    return sum(size * module.active[name] * (ranks if name in module.spread else 1) for size, name in sizes)


def _multiplying(module, work) -> tuple[float, float]:
    """Return (parameters that multiply, those of them that are trained), on all ranks of a tensor or expert group together."""
    tp_degree, ep_degree = work.tensor_parallel.tp_degree, work.spread.ep_degree
    sizes = {
        name: prod(shape)
        * (1 if name in module.replicated else tp_degree)
        * (ep_degree if name in module.spread else 1)
        * module.active.get(name, 1)
        for name, shape in module.parameters.items()
        if name not in LOOKED_UP
    }
    return fsum(sizes.values()), fsum(size for name, size in sizes.items() if name not in module.frozen)


def _share_computed(plan, attending: list) -> float:
    """Return the share of attention's matrix that is computed: half, but all of it where a GPU has no fused kernel.

    Of ranks that share sequences, it is the slowest rank's.
    """
    itemsize = BF16 if plan.precision in ("bf16", "fp16") else plan.itemsize
    grouped = any(module.heads.grouped for module in attending)
    computed = 1.0 if attention.kernel(plan.on_gpu, itemsize, grouped, plan.torch, plan.flash) == "math" else 0.5
    return computed * plan.blueprint.context.slowest_share
