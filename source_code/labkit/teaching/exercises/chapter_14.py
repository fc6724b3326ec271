"""Exercises of chapter 14, FSDP in JAX. Code that needs JAX runs in a separate process, with its own virtual devices."""

from contextlib import suppress
from math import prod

from planner import UserError
from planner.models.shapes import GPT_SHAPES
from planner.parallel import jax_sharding

from labkit.measuring import hlo
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered
from labkit.training import jax_world

DEVICES, LAYERS, WIDTH, BATCH = 8, 3, 16, 32
LLAMA, MANY, THRESHOLD = GPT_SHAPES["llama3-8b"], 64, 2**14


def _shared(me, forward):
    """Run ``forward`` on weights sharded over the devices.

    Returns:
        None if ``forward`` returns nothing; the shape of its result if that is wrong; otherwise (whether the result is
        right, whether the weights' gradients are, the collectives of both, the number of all-gathers in the program).
    """
    world = jax_world.load(DEVICES, "cpu")
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,), devices=world.devices)
    rows, nothing = P("fsdp", None), []
    layouts = [NamedSharding(mesh, spec) for spec in (P(None, "fsdp", None), rows)]
    keys = jax.random.split(jax.random.key(1))
    weights = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    x = jax.random.normal(keys[1], (BATCH, WIDTH))

    def whole(weights, x):
        return jax.lax.scan(lambda h, weight: (jnp.tanh(h @ weight), None), x, weights)[0]

    def theirs(shards, x):
        result = forward(shards, x)
        nothing.append(unanswered(result))
        return x if nothing[-1] else result

    # Without the check for values that vary across devices: a replicated result is detected by its values.
    parts = jax.shard_map(theirs, mesh=mesh, in_specs=(P(None, "fsdp", None), rows), out_specs=rows, check_vma=False)

    def both(function):
        def loss(weights, x):
            result = function(weights, x)
            return (result**2).mean(), result

        return jax.value_and_grad(loss, has_aux=True)

    right, right_gradient = both(whole)(weights, x)
    shape = jax.eval_shape(parts, weights, x).shape
    if nothing[-1] or shape != x.shape:
        return None if nothing[-1] else shape
    compiled = jax.jit(both(parts), in_shardings=layouts).lower(weights, x).compile()
    result, gradient = compiled(*map(jax.device_put, (weights, x), layouts))
    close = [bool(jnp.allclose(a, b, atol=1e-5)) for a, b in ((result[1], right[1]), (gradient, right_gradient))]
    text = compiled.as_text()
    return *close, hlo.collectives(text, {"fsdp": DEVICES}), text.count(" all-gather(")


def judge_forward(forward) -> str:
    with suppress(Exception):  # a written answer calls all_gather, which fails outside a mesh
        if unanswered(forward(object(), object())):
            return "not answered yet"
    outcome = on_ranks(_shared, forward, ranks=1)[0]
    if outcome is None:
        return "not answered yet"
    if not isinstance(outcome[0], bool):
        return f"not quite: all devices together return shape {outcome} instead of {(BATCH, WIDTH)}, the shape of x"
    result, gradients, sent, written = outcome
    gathers = [each for each in sent if each["kind"] == "all-gather"]
    layer = WIDTH * WIDTH * 4
    if not gathers:
        return "not quite: nothing is gathered, so no device has a full layer; use jax.lax.all_gather(…, tiled=True)"
    if max(each["bytes"] for each in gathers) > layer:
        return "not quite: all layers are gathered at once; gather each layer in the loop, where it is used"
    if written >= LAYERS:  # a loop body appears once, and twice if backward gathers again
        return (
            "not quite: there is an all-gather outside of the loop over layers; move it into the body of jax.lax.scan"
        )
    if not result:
        return "not quite: the result is not that of the full layers: apply tanh(x @ weight), layer by layer"
    if not gradients:
        return "not quite: the result is right, but the weights' gradients are not; do not sum over devices yourself"
    return "right"


# (shape of an array, devices, threshold); the first case is easy to check by hand
LEAVES = [
    ((256, 512), 8, 0),
    ((512, 256), 8, 0),
    ((100, 64), 8, 0),
    ((64, 64), 8, 0),
    ((128,), 8, 1000),
    ((40, 25), 8, 1000),
    ((7, 24, 30), 8, 0),
    ((9, 25), 8, 0),
]


def judge_spec(spec) -> str:
    for shape, devices, threshold in LEAVES:
        result = spec(shape, devices, threshold)
        if unanswered(result):
            return "not answered yet"
        cut = None
        with suppress(UserError):  # no dimension is divisible: the lab refuses it, the exercise replicates it
            cut = jax_sharding.dimension("", shape, devices, threshold)
        right = tuple("fsdp" if d == cut else None for d in range(len(shape)))
        about = f"an array of {shape}, {devices} devices, threshold {threshold}: {result}"
        if not isinstance(result, (tuple, list)) or set(result) - {"fsdp", None} or len(result) != len(shape):
            return f'not quite: {about}: return a tuple, with "fsdp" or None for each of the {len(shape)} dimensions'
        if tuple(result) != right:
            return f"not quite: {about}, by the rule {right}{_slip(tuple(result), shape, devices, threshold)}"
    return "right"


def _slip(result, shape, devices, threshold) -> str:
    cut = [d for d, axis in enumerate(result) if axis]
    if prod(shape) < threshold:
        return f"; it has {prod(shape):,} elements, fewer than the threshold: replicate it"
    if not cut:
        return f"; it has {prod(shape):,} elements, not fewer than the threshold" if threshold else ""
    if len(cut) > 1:
        return "; the mesh axis shards one dimension"
    if shape[cut[0]] % devices:
        return f"; {shape[cut[0]]} is not divisible by {devices} devices"
    return "; take the largest divisible dimension, or the first of equal ones"


def gathered(times: int | None = None) -> float:
    """Return the GB that a step of Llama 3 8B gathers in fp32, with recomputation.

    Blocks are gathered twice and the rest once; with ``times``, all parameters are gathered that many times.
    """
    if times:
        return times * sum(map(prod, jax_sharding.leaves(LLAMA).values())) * 4 / 1e9
    by_kind = jax_sharding.bytes_by_kind(jax_sharding.traffic(LLAMA, MANY, THRESHOLD, recompute=True))
    return by_kind["all-gather", "fsdp"] / 1e9


EXERCISES = {
    "14.1": Do(
        title="layers gathered one by one",
        level=2,
        minutes=10,
        judge=judge_forward,
        hint="jax.lax.scan(body, x, shards) calls body(x, shard) for each layer; body returns (new x, None), and scan\n"
        "returns (last x, …). In body, jax.lax.all_gather(shard, ?, axis=?, tiled=True) gathers the layer.",
        solution="""
import jax
import jax.numpy as jnp

def forward_of_a_device(shards, x):
    def layer(x, shard):
        weight = jax.lax.all_gather(shard, "fsdp", axis=0, tiled=True)  # here, so that only one layer is gathered at a time
        return jnp.tanh(x @ weight), None
    return jax.lax.scan(layer, x, shards)[0]
""",
    ),
    "14.2": Predict(
        title="what a step of Llama 3 8B gathers",
        level=2,
        minutes=5,
        answer=gathered(),
        unit="GB",
        slips={
            "blocks are gathered twice, but embedding and head stay gathered from forward to backward": gathered(
                times=2
            ),
            "recomputed, a block is gathered once in forward and once more in backward": gathered(times=1),
            "that is in GiB of 1024³; traffic is reported in GB of 1000³": gathered() * 1e9 / 2**30,
            "an element in fp32 has 4 bytes": gathered() / 2,
        },
        hint="A block is gathered in forward, and again when backward recomputes it. Which parameters are not in blocks?",
        solution=f"""
# 32 blocks twice, embedding and head once; 4 bytes per element. (The norms are below the threshold, and replicated.)
block = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
answer = 4 * (2 * 32 * block + 2 * {LLAMA.vocab_size} * 4096) / 1e9
""",
    ),
    "14.3": Do(
        title="which dimension is cut",
        level=1,
        minutes=6,
        judge=judge_spec,
        hint="math.prod(shape) is the number of elements. max(dims, key=lambda d: shape[d]) takes the first of the largest.",
        solution="""
from math import prod

def spec(shape, devices, threshold):
    dims = [d for d, size in enumerate(shape) if size % devices == 0]
    if prod(shape) < threshold or not dims:
        return (None,) * len(shape)
    cut = max(dims, key=lambda d: shape[d])
    return tuple("fsdp" if d == cut else None for d in range(len(shape)))
""",
    ),
}
