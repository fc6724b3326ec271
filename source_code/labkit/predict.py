"""Predict the peak memory of a training step by arithmetic, in named terms. Imports no torch.

So far for the MNIST network on the CPU in fp32 or fp64, with Adadelta: enough for the ladder.

How: what lives at a moment of the step can be listed. ``moments`` lists it for the few moments that can be
the highest of a steady step, and the peak is the highest of them. The terms carry the names of the meters
(``labkit.trace.CATEGORIES``). All sizes are bytes on rank 0, which never holds less than another rank.
"""

from math import ceil, prod

# The shapes of the network's parameters, by layer.
SHAPES = {
    "conv1": [(32, 1, 3, 3), (32,)],
    "conv2": [(64, 32, 3, 3), (64,)],
    "fc1": [(128, 9216), (128,)],
    "fc2": [(10, 128), (10,)],
}
# Numbers per image: the input, and what the layers put out.
IMAGE, CONV1, CONV2, POOLED, HIDDEN, CLASSES = 28 * 28, 32 * 26 * 26, 64 * 24 * 24, 64 * 12 * 12, 128, 10
INT64 = 8


def numel(layers) -> int:
    """How many parameters the layers have together."""
    return sum(prod(shape) for layer in layers for shape in SHAPES[layer])


def units_of(wrap: str, min_num_params: int = 20000) -> list[list[str]]:
    """The groups of layers that FSDP gathers together, the root (what no other unit took) last."""
    apart = [layer for layer in SHAPES if wrap == "size" and numel([layer]) >= min_num_params]
    rest = [layer for layer in SHAPES if layer not in apart]
    return [[layer] for layer in apart] + [rest]


def shard(strategy: str, layers, ranks: int) -> int:
    """How many numbers of a unit's parameters one rank holds.

    FSDP1 cuts the unit's flat tensor into equal parts, FSDP2 each parameter along its first dimension;
    both round up to whole parts.
    """
    if strategy == "fsdp1":
        return ceil(numel(layers) / ranks)
    return sum(ceil(shape[0] / ranks) * prod(shape[1:]) for layer in layers for shape in SHAPES[layer])


def persistent(strategy: str, wrap: str, ranks: int, itemsize: int = 4, min_num_params: int = 20000) -> dict:
    """What a rank holds from step to step: {"parameters", "optimizer state", "all-reduce buckets"}.

    Adadelta keeps two numbers for each parameter and one 4-byte step counter for each parameter tensor.
    """
    if strategy in ("single", "ddp"):
        held, tensors = numel(SHAPES), sum(map(len, SHAPES.values()))
    else:
        units = units_of(wrap, min_num_params)
        held = sum(shard(strategy, unit, ranks) for unit in units)
        tensors = sum(map(bool, units)) if strategy == "fsdp1" else sum(map(len, SHAPES.values()))
    terms = {"parameters": held * itemsize, "optimizer state": 2 * held * itemsize + 4 * tensors}
    if strategy == "ddp":
        terms["all-reduce buckets"] = held * itemsize
    return terms


def updated_tensors(strategy: str, units, ranks: int) -> list[int]:
    """How many numbers each tensor has that the optimizer updates on one rank, in its order."""
    if strategy == "fsdp1":
        return [shard(strategy, unit, ranks) for unit in units if unit]
    parts = ranks if strategy == "fsdp2" else 1
    return [ceil(shape[0] / parts) * prod(shape[1:]) for shapes in SHAPES.values() for shape in shapes]


def adadelta_temporary(sizes: list[int]) -> int:
    """Numbers in Adadelta's intermediate results at their most.

    It makes two for each tensor, and each takes the place of the one before it only when it is there.
    """
    return max(max(2 * before + size, before + 2 * size) for before, size in zip([0, *sizes], sizes, strict=False))


def moments(
    strategy: str,
    wrap: str = "unit",
    ranks: int = 1,
    batch: int = 64,
    itemsize: int = 4,
    dropout: bool = True,
    min_num_params: int = 20000,
    sharding: str = "full",
) -> dict:
    """What lives at each moment that can be the peak: {moment: {category: bytes}}.

    batch: images on each rank. itemsize: bytes a number, 4 for fp32 and 8 for fp64. sharding: "grad-op" keeps
    gathered parameters from forward to backward.
    """
    base = persistent(strategy, wrap, ranks, itemsize, min_num_params)
    per_image = itemsize * batch  # bytes of one number an image
    # Labels, images, the result, and a few scalars live through the step; conv2 and the ReLUs need their inputs.
    kept = batch * INT64 + per_image * (IMAGE + CLASSES)
    late = {"activations": kept + per_image * (CONV1 + CONV2) + 3 * itemsize}
    # Backward of the second ReLU: the gradient that comes in and the one that goes out, each as big as
    # conv2's output. fc1 and fc2 have their gradients already.
    relu = base | late | {"temporary": 2 * per_image * CONV2}
    fc2 = numel(["fc2"]) * itemsize
    head = numel(["fc1"]) * itemsize + fc2
    *apart, root = units_of(wrap, min_num_params)
    optimizer = base | {
        "activations": kept + 2 * itemsize,
        "gradients": base["parameters"],
        "temporary": itemsize * adadelta_temporary(updated_tensors(strategy, [root, *apart], ranks)),
    }
    if not strategy.startswith("fsdp"):
        return {"backward of relu2": relu | {"gradients": head}, "optimizer": optimizer}

    def gathered(unit):
        return shard(strategy, unit, ranks) * ranks * itemsize

    if not apart:
        # The end of backward: the gradient whole, twice: as computed, and packed for the reduce-scatter.
        # FSDP1 still has the parameters then; FSDP2 has freed them, and has made room for the result.
        # FSDP1 packs, then pads; FSDP2 packs into a padded buffer.
        packed, rest = (
            (numel(root) * itemsize, {"all-gather": gathered(root)})
            if strategy == "fsdp1"
            else (gathered(root), {"gradients": base["parameters"]})
        )
        end = base | rest | {"activations": kept + 3 * itemsize, "reduce-scatter": numel(root) * itemsize + packed}
        return {
            "backward of relu2": relu | {"all-gather": gathered(root), "reduce-scatter": head},
            "end of backward": end,
            "optimizer": optimizer,
        }

    # Where the convolutions are units, backward has yet to come to them. conv2 is fetched ahead while fc1's
    # backward runs, or was kept; conv1 is there only if it was kept. The root's parameters stay.
    waiting = [["conv1"], ["conv2"]] if sharding == "grad-op" else [["conv2"]]
    others = gathered(root) + sum(gathered(unit) for unit in apart if unit in waiting)

    fc1 = ["fc1"]
    shards = {"gradients": shard(strategy, fc1, ranks) * itemsize}
    behind, packed = {}, fc2  # fc2's gradient waits whole for the root's turn …
    if ["fc2"] in apart:  # … or has been reduced: this rank has its part of it
        behind = {"gradients": shard(strategy, ["fc2"], ranks) * itemsize}
        shards["gradients"] += behind["gradients"]
        fc2 = 0
        # FSDP2 lets go of a unit's packed gradient only when it packs the next unit's.
        packed = gathered(["fc2"]) if strategy == "fsdp2" else 0
    # Max-pooling's backward needs its indices, dropout's its mask, and fc1's its input.
    masks = batch * INT64 * POOLED + (per_image * POOLED if dropout else 0)
    early = {"activations": late["activations"] + masks + per_image * POOLED}
    if strategy == "fsdp1":
        return {
            "backward of relu2": relu | shards | {"all-gather": others, "reduce-scatter": fc2},
            # fc1's gradient twice, as computed and packed, while its parameters are still there.
            "backward of fc1": base
            | behind
            | {
                "activations": late["activations"] + masks,  # fc1's input has gone
                "all-gather": others + gathered(fc1),
                "reduce-scatter": 2 * numel(fc1) * itemsize + fc2,
                "temporary": per_image * POOLED,
            },
            "optimizer": optimizer,
        }
    gather = {
        # fc1's parameters have arrived, and are copied from the buffer they came in to where they are used.
        "fc1 gathered": base
        | early
        | behind
        | {
            "all-gather": gathered(root) + 2 * gathered(fc1),
            "reduce-scatter": packed,
            "temporary": per_image * HIDDEN,
        },
    }
    return (gather if sharding == "full" else {}) | {
        # fc1's gradient is still there as it was packed: no other unit's has been since.
        "backward of relu2": relu | shards | {"all-gather": others, "reduce-scatter": gathered(fc1) + fc2},
        # fc1's parameters, its gradient, and the gradients of its input and output.
        "backward of fc1": base
        | early
        | behind
        | {
            "all-gather": others + gathered(fc1),
            "reduce-scatter": numel(fc1) * itemsize + packed,
            "temporary": per_image * (POOLED + HIDDEN),
        },
        "optimizer": optimizer,
    }


def total(terms: dict) -> int:
    return sum(terms.values())


def peak(*args, **options) -> tuple[str, dict]:
    """(which moment, {category: bytes}) of the highest of ``moments``; takes the same arguments."""
    found = moments(*args, **options)
    where = max(found, key=lambda moment: total(found[moment]))
    return where, found[where]
