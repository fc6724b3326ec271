"""The floating-point operations of a step on one rank: the model's, for MFU, and the hardware's, for time and HFU. No torch.

The model's are PaLM's count (arXiv:2204.02311, appendix B; ``per_token``): every token attends to all
others, nothing is computed twice. The hardware's differ in two ways. Attention is causal, and a fused kernel skips the
masked half of its matrix: half of 12 × layers × width × length are left. And what a block computes again in backward
counts. Not counted: the scores that a fused kernel makes once more inside its own backward, norms, the optimizer.
"""

from math import prod

from planner.models.shapes import GPTShape, block_parameters, norm_parameters, product_parameters
from planner.ops import attention
from planner.ops.autograd import BF16

LOOKED_UP = ("embedding.weight", "positions.weight")


def per_token(shape: GPTShape, length: int, lora: int | None = None, blocks: range | None = None) -> float:
    """Floating-point operations that training on one token takes, by the count of PaLM (arXiv:2204.02311, appendix B).

    For each parameter that multiplies (all but the embedding, which is looked up) 2 in forward, 2 for the gradient
    of the input, and 2 for its own gradient if it is trained; 12 × layers × width × length for attention. What is
    computed again to save memory does not count: it is no use to the model. blocks: of a pipeline's stage.
    """
    layers = len(blocks) if blocks else shape.layers
    last = norm_parameters(shape, "norm") | product_parameters(shape, "head", shape.vocabulary, shape.width)
    head = 0 if blocks and blocks.stop < shape.layers else sum(map(prod, last.values()))
    block = block_parameters(shape, lora)
    multiplied = layers * sum(map(prod, block.values())) + head
    trained = multiplied
    if lora:
        trained = layers * sum(prod(s) for name, s in block.items() if name.endswith((".down", ".up")))
    return 4 * multiplied + 2 * trained + 12 * layers * shape.query_width * shape.seen(length)


def again(shape: GPTShape, recompute: str, lora: int | None) -> tuple[int, bool]:
    """What backward computes a second time in a block: (parameters that multiply once more, whether attention does)."""
    sizes = [(len(size), prod(size)) for size in block_parameters(shape, lora).values()]
    products = [numel for dimensions, numel in sizes if dimensions > 1]  # in the order in which they multiply
    kinds = {"full": (sum(numel for _, numel in sizes), True), "alternate": (sum(products[1::2]), False)}
    return kinds.get(recompute, (0, False))


def of_model(plan) -> float:
    return plan.micro_batches * plan.blueprint.samples * plan.blueprint.flops / plan.tensor


def of_hardware(plan) -> float:
    return plan.micro_batches * sum(map(sum, of_modules(plan)))


def of_modules(plan) -> list[tuple[float, float]]:
    """(forward, backward) of each module of the blueprint, in a micro-batch. Zeros where a blueprint does not say."""
    work, modules = plan.blueprint, plan.blueprint.modules
    if not work.flops:
        return [(0.0, 0.0)] * len(modules)
    multiplied = [_multiplied(module, work.tensor.parts) for module in modules]
    attending = [module for module in modules if "query.weight" in module.parameters]
    # What PaLM's count has besides products with parameters: a third of it in forward, the rest in backward.
    each = (work.flops - sum(4 * all_of_it + 2 * trained for all_of_it, trained in multiplied)) / max(1, len(attending))
    each *= _share_computed(plan, attending)
    share, found = work.samples / plan.tensor, []
    for module, (all_of_it, trained) in zip(modules, multiplied, strict=True):
        mixing = each if module in attending else 0.0
        forward = 2 * all_of_it + mixing / 3
        products, attends = module.again
        second = 2 * products + (mixing / 3 if attends else 0.0)
        found.append((share * forward, share * (second + 2 * all_of_it + 2 * trained + mixing * 2 / 3)))
    return found


def _multiplied(module, parts: int) -> tuple[float, float]:
    """How many parameters multiply, and how many of them are trained. What is looked up is not."""
    sizes = {
        name: prod(shape) * (1 if name in module.everywhere else parts)
        for name, shape in module.parameters.items()
        if name not in LOOKED_UP
    }
    return sum(sizes.values()), sum(size for name, size in sizes.items() if name not in module.frozen)


def _share_computed(plan, attending: list) -> float:
    """Of attention's matrix: half, but all of it where a GPU has no fused kernel."""
    itemsize = BF16 if plan.precision == "bf16" else plan.itemsize
    grouped = any(m.parameters["key.weight"][0] < m.parameters["query.weight"][0] for m in attending)
    return 1.0 if attention.kernel(plan.on_gpu, itemsize, grouped, plan.torch) == "math" else 0.5
