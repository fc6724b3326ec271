# SPDX-License-Identifier: BSD-3-Clause
"""FSDP in JAX (gpt_jax.py): what each device stores from step to step, and what it sends. Imports no JAX.

The model is a tree of arrays, its leaves. Each leaf is one array for all layers (``scan`` runs over the first
dimension), and is sharded along one of its other dimensions, or replicated where it has fewer elements than a threshold.
Sizes are bytes; categories and kinds are those of planner/predict.py.
"""

from collections import Counter
from math import prod

from planner import UserError
from planner.models.shapes import GPTShape

COUNTER, LOSS = 4, 4  # bytes: the steps done, one counter for all leaves, as in optax; the loss in fp32
BLOCKS = "blocks."  # how the names of the blocks' leaves begin


def leaves(shape: GPTShape) -> dict[str, tuple[int, ...]]:
    """Return {name of a leaf: its dimensions}.

    A weight has its input features first; the blocks' leaves have the layers before them.
    """
    hidden_size, intermediate_size, kv_size = shape.hidden_size, shape.intermediate_size, shape.key_value_size
    block = {
        "attention_norm": (hidden_size,),
        "attention.query": (hidden_size, hidden_size),
        "attention.key": (hidden_size, kv_size),
        "attention.value": (hidden_size, kv_size),
        "attention.output": (hidden_size, hidden_size),
        "feed_forward_norm": (hidden_size,),
        "feed_forward.gate": (hidden_size, intermediate_size),
        "feed_forward.up": (hidden_size, intermediate_size),
        "feed_forward.down": (intermediate_size, hidden_size),
    }
    stacked = {BLOCKS + name: (shape.num_hidden_layers, *dims) for name, dims in block.items()}
    head = {} if shape.tie_word_embeddings else {"head": (hidden_size, shape.vocab_size)}
    return {"embedding": (shape.vocab_size, hidden_size), **stacked, "norm": (hidden_size,), **head}


def dimension(name: str, dims: tuple[int, ...], devices: int, threshold: int) -> int | None:
    """Return the dimension along which a leaf is sharded: the largest that the devices divide, the first of equal ones.

    It is never the layers' dimension, over which the model's loop runs.

    Args:
        name: of the leaf.
        dims: its dimensions.
        devices: how many share it.
        threshold: leaves with fewer elements are replicated.

    Returns:
        An index into ``dims``; None if the leaf is replicated.

    Raises:
        UserError: the devices divide no dimension.
    """
    if prod(dims) < threshold:
        return None
    first = 1 if name.startswith(BLOCKS) else 0
    divisible = [d for d in range(first, len(dims)) if dims[d] % devices == 0]
    if not divisible:
        raise UserError(f"no dimension of {name}, {dims}, can be cut into {devices} equal parts")
    return max(divisible, key=lambda d: dims[d])


def shard_numel(name: str, dims: tuple[int, ...], devices: int, threshold: int) -> int:
    """Return the elements of a leaf that each device stores; the arguments are those of ``dimension``."""
    return prod(dims) // (1 if dimension(name, dims, devices, threshold) is None else devices)


def persistent(shape: GPTShape, devices: int, threshold: int, itemsize: int = 4) -> dict[tuple[str, str], int]:
    """Return what a device stores from step to step under AdamW: {(category, name): bytes}.

    Args:
        shape: the model.
        devices: how many share it; 1 for a replicated model.
        threshold: leaves with fewer elements are replicated.
        itemsize: bytes per element.
    """
    held = itemsize * sum(shard_numel(name, dims, devices, threshold) for name, dims in leaves(shape).items())
    return {
        ("parameters", "parameters"): held,
        ("optimizer state", "step counters"): COUNTER,
        ("optimizer state", "first moments"): held,
        ("optimizer state", "second moments"): held,
    }


def traffic(
    shape: GPTShape,
    devices: int,
    threshold: int,
    again: bool = False,
    micro_batches: int = 1,
    itemsize: int = 4,
    replicas: int = 1,
    scatters: bool = True,
) -> list[dict]:
    """Return a step's collectives in the form of ``Plan.traffic``.

    A sharded leaf is gathered where it is used, in a block layer by layer, and its gradient reduce-scattered there. With
    replicas the gradient's shard is then all-reduced over them. The gradients of replicated leaves are all-reduced, and so
    is the loss. XLA combines neighbors: it sends the planned bytes of each kind in fewer collectives (see
    ``bytes_by_kind``).

    Every micro-batch gathers the blocks. The other leaves are gathered once, before all micro-batches: XLA moves out of a
    loop what stays the same in it.

    Args:
        shape: the model.
        devices: how many share a replica.
        threshold: leaves with fewer elements are replicated.
        again: whether backward gathers the blocks again: they are resharded after forward, or recomputed.
        micro_batches: in a step.
        itemsize: bytes per element.
        replicas: of the model (HSDP); then only with ``scatters``.
        scatters: False for programs whose collectives XLA writes for the CPU: it all-reduces all gradients.
    """
    everywhere = "fsdp" if replicas == 1 else "replicate+fsdp"
    counts = Counter({("all-reduce", LOSS, everywhere): micro_batches})
    for name, dims in leaves(shape).items():
        layers, size = (dims[0], prod(dims[1:])) if name.startswith(BLOCKS) else (1, prod(dims))
        size, times = size * itemsize, layers * micro_batches
        if dimension(name, dims, devices, threshold) is None:
            counts["all-reduce", size, everywhere] += times
            continue
        gathers = micro_batches * (2 if again else 1) if name.startswith(BLOCKS) else 1
        counts["all-gather", size, "fsdp"] += layers * gathers
        counts["reduce-scatter" if scatters else "all-reduce", size, "fsdp"] += times
        if replicas > 1:
            counts["all-reduce", size // devices, "replicate"] += times
    ranks = {"fsdp": devices, "replicate": replicas, "replicate+fsdp": replicas * devices}
    return [
        {"kind": kind, "bytes": size, "count": count, "ranks": ranks[dimension], "dimension": dimension}
        for (kind, size, dimension), count in sorted(counts.items())
    ]


def temporary(
    shape: GPTShape,
    batch_size: int,
    seq_len: int,
    recompute: bool = False,
    sharded: bool = True,
    itemsize: int = 4,
    reshard: bool = False,
) -> int:
    """Estimate the bytes that a device needs within a step, in addition to arguments and results.

    Counted are what JAX's automatic differentiation saves of each block (its gathered weights too, if sharded and
    not resharded after forward; of a recomputed block, its input only); for the block that backward is in, values and weights again, copied or recomputed
    and gathered; and gradients of parameters: a block's if sharded, else the model's. Left out: gradients of
    activations, which replace values no longer needed, and the head, where backward begins. Compared with XLA's figures
    on the CPU (jax 0.10.2 and 0.12.0): within 15 % from 64 tokens per device on; with 8, 26 % off.

    Args:
        shape: the model.
        batch_size: sequences on each device.
        seq_len: tokens of a sequence.
        recompute: whether blocks are recomputed.
        sharded: False if the model is replicated.
        itemsize: bytes per element.
        reshard: whether blocks are resharded after forward.
    """
    weights = {name: prod(dims[1:]) for name, dims in leaves(shape).items() if len(dims) == 3}
    block, model = sum(weights.values()), sum(map(prod, leaves(shape).values()))
    values = sum(saved_elements(shape, batch_size, seq_len).values())
    saved = batch_size * seq_len * shape.hidden_size if recompute else values + block * (sharded and not reshard)
    return itemsize * (shape.num_hidden_layers * saved + values + block + (block if sharded else model))


def saved_elements(shape: GPTShape, batch_size: int, seq_len: int) -> dict[str, int]:
    """Return {what: elements} that JAX saves of one block's forward, except weights, where nothing fuses them away.

    Read from the loop that jax 0.10.2 compiles for labkit/training/jax_models.py: an operation saves its inputs, and
    what its derivative needs, one by one. (PyTorch's RMSNorm, softmax, and attention are operators with a backward of
    their own, which save less.)

    Args:
        shape: the model.
        batch_size: sequences on each device.
        seq_len: tokens of a sequence.
    """
    tokens, scores = batch_size * seq_len, batch_size * shape.num_attention_heads * seq_len * seq_len
    return {
        "inputs and outputs of norms and matmuls, of the hidden size": 10 * tokens * shape.hidden_size,
        "keys and values": 2 * tokens * shape.key_value_size,
        "scores, and their exponentials": 2 * scores,
        "gate, up, and the steps of SiLU": 6 * tokens * shape.intermediate_size,
        "means, maxima, and sums": 4 * tokens + 2 * tokens * shape.num_attention_heads,
    }


def bytes_by_kind(collectives: list[dict]) -> dict[tuple[str, str | None], int]:
    """Return {(kind, dimension): bytes} of a step's collectives, planned or counted."""
    sums = Counter()
    for each in collectives:
        sums[each["kind"], each["dimension"]] += each["bytes"] * each["count"]
    return dict(sums)
