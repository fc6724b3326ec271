"""FSDP in JAX (gpt_jax.py), by arithmetic: what each device keeps from step to step, what fsdp-explicit sends. No JAX.

The model is a tree of arrays, its leaves. Each leaf is one array for all layers (``scan`` runs over the first
dimension), and is cut along one of its other dimensions, or whole on each device where it has fewer numbers than a
threshold. Sizes are bytes; categories and kinds are those of planner/predict.py.
"""

from collections import Counter
from math import prod

from planner import UserError
from planner.models.shapes import GPTShape

COUNTER, LOSS = 4, 4  # bytes: the steps done, one number for all leaves, as optax counts them; the loss in fp32
BLOCKS = "blocks."


def leaves(shape: GPTShape) -> dict[str, tuple[int, ...]]:
    """{name of a leaf: its dimensions}. A matrix has its inputs' dimension first, the blocks' leaves that of the layers."""
    width, hidden, kv_width = shape.width, shape.hidden, shape.kv_width
    block = {
        "attention_norm": (width,),
        "attention.query": (width, width),
        "attention.key": (width, kv_width),
        "attention.value": (width, kv_width),
        "attention.output": (width, width),
        "feed_forward_norm": (width,),
        "feed_forward.gate": (width, hidden),
        "feed_forward.up": (width, hidden),
        "feed_forward.down": (hidden, width),
    }
    stacked = {BLOCKS + name: (shape.layers, *dims) for name, dims in block.items()}
    head = {} if shape.tied else {"head": (width, shape.vocabulary)}
    return {"embedding": (shape.vocabulary, width), **stacked, "norm": (width,), **head}


def dimension(name: str, dims: tuple[int, ...], devices: int, threshold: int) -> int | None:
    """Along which dimension a leaf is cut: the largest that the devices divide, of equal ones the first.

    None: it has fewer than ``threshold`` numbers, and is whole on each device. Never the layers' dimension, over which
    the model's loop runs. UserError: they divide none.
    """
    if prod(dims) < threshold:
        return None
    first = 1 if name.startswith(BLOCKS) else 0
    fitting = [d for d in range(first, len(dims)) if dims[d] % devices == 0]
    if not fitting:
        raise UserError(f"no dimension of {name}, {dims}, can be cut into {devices} equal parts")
    return max(fitting, key=lambda d: dims[d])


def share(name: str, dims: tuple[int, ...], devices: int, threshold: int) -> int:
    """Numbers of a leaf that each device keeps."""
    return prod(dims) // (1 if dimension(name, dims, devices, threshold) is None else devices)


def persistent(shape: GPTShape, devices: int, threshold: int, itemsize: int = 4) -> dict[tuple[str, str], int]:
    """What a device keeps from step to step under AdamW: {(category, name): bytes}. devices: 1 for a replicated model."""
    held = itemsize * sum(share(name, dims, devices, threshold) for name, dims in leaves(shape).items())
    return {
        ("parameters", "parameters"): held,
        ("optimizer state", "step counters"): COUNTER,
        ("optimizer state", "first moments"): held,
        ("optimizer state", "second moments"): held,
    }


def traffic(
    shape: GPTShape, devices: int, threshold: int, recompute: bool = False, micro_batches: int = 1, itemsize: int = 4
) -> list[dict]:
    """A step's collectives under fsdp-explicit: [{"kind", "count", "bytes", "ranks", "dimension"}, …], as Plan.traffic.

    A sharded leaf is gathered where it is used, in a block layer by layer, and its gradient reduce-scattered there.
    What is gathered in forward stays for backward. Recomputed, a block gathers a second time. The gradients of what is
    whole on each device are all-reduced, and so is the loss. XLA combines neighbours: it sends the bytes planned of each
    kind in fewer collectives (see ``sums``).

    Of several micro-batches each gathers the blocks. The leaves outside of these are gathered once, before all of
    them: XLA moves out of a loop what stays the same in it.
    """
    times = Counter({("all-reduce", LOSS): micro_batches})
    for name, dims in leaves(shape).items():
        layers, numel = (dims[0], prod(dims[1:])) if name.startswith(BLOCKS) else (1, prod(dims))
        if dimension(name, dims, devices, threshold) is None:
            times["all-reduce", numel * itemsize] += layers * micro_batches
            continue
        gathers = micro_batches * (2 if recompute else 1) if name.startswith(BLOCKS) else 1
        times["all-gather", numel * itemsize] += layers * gathers
        times["reduce-scatter", numel * itemsize] += layers * micro_batches
    found = [{"kind": kind, "bytes": size, "count": n} for (kind, size), n in sorted(times.items())]
    return [each | {"ranks": devices, "dimension": "fsdp"} for each in found]


def temporary(
    shape: GPTShape, batch: int, length: int, recompute: bool = False, cut: bool = True, itemsize: int = 4
) -> int:
    """Bytes that a device needs within a step, beside arguments and results. An estimate. cut: False where replicated.

    What backward keeps of forward: of each block what automatic differentiation in JAX saves, where cut its gathered
    weights among it; recomputed, each block's input. While backward is in a block, that block's values and weights once
    more, copied out of what is kept, or computed and gathered again. And gradients of parameters: where cut, a block's;
    else the model's. Left out: activations' gradients, which take the place of values no longer needed, and the head,
    as backward begins there. Compared with XLA's figures on the CPU (jax 0.10.2): within 15 %.
    """
    weights = {name: prod(dims[1:]) for name, dims in leaves(shape).items() if len(dims) == 3}
    block, model = sum(weights.values()), sum(map(prod, leaves(shape).values()))
    values = sum(saved(shape, batch, length).values())
    kept = batch * length * shape.width if recompute else values + block * cut
    return itemsize * (shape.layers * kept + values + block + (block if cut else model))


def saved(shape: GPTShape, batch: int, length: int) -> dict[str, int]:
    """{what: numbers} that JAX saves of one block's forward, beside weights, where nothing fuses them away.

    Read from the loop that jax 0.10.2 compiles for labkit/training/jax_models.py: an operation saves its inputs, and
    what its derivative needs, one by one. (PyTorch's RMSNorm, softmax and attention are operators with a backward of
    their own, which save less.)
    """
    tokens, scores = batch * length, batch * shape.heads * length * length
    return {
        "inputs and results of norms and products, as wide as the model": 10 * tokens * shape.width,
        "keys and values": 2 * tokens * shape.kv_width,
        "scores, and their exponentials": 2 * scores,
        "gate, up, and what SiLU makes of them": 6 * tokens * shape.hidden,
        "means, maxima and sums": 4 * tokens + 2 * tokens * shape.heads,
    }


def sums(collectives: list[dict]) -> dict[tuple[str, str | None], int]:
    """{(kind, dimension): bytes} of a step's collectives, planned or counted."""
    found = Counter()
    for each in collectives:
        found[each["kind"], each["dimension"]] += each["bytes"] * each["count"]
    return dict(found)
