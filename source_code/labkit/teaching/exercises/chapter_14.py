"""Exercises of chapter 14, FSDP in JAX. What needs JAX runs in a process of its own, with its own virtual devices."""

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
    """What ``forward`` makes of weights of which each device has a part: None if it returns nothing, the wrong shape,
    or (its result is right, so are the weights' gradients, the collectives of both, how many gathers the program has)."""
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

    # Without the check of what varies from device to device: a result that is the same on all is told by its numbers.
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
    found, gradient = compiled(*map(jax.device_put, (weights, x), layouts))
    close = [bool(jnp.allclose(a, b, atol=1e-5)) for a, b in ((found[1], right[1]), (gradient, right_gradient))]
    text = compiled.as_text()
    return *close, hlo.collectives(text, {"fsdp": DEVICES}), text.count(" all-gather(")


def judge_forward(forward) -> str:
    with suppress(Exception):  # what is written gathers, and cannot outside of a mesh
        if unanswered(forward(object(), object())):
            return "not answered yet"
    found = on_ranks(_shared, forward, ranks=1)[0]
    if found is None:
        return "not answered yet"
    if not isinstance(found[0], bool):
        return f"not quite: all devices together return {found}; {(BATCH, WIDTH)} is wanted, the shape of x"
    result, gradients, sent, written = found
    gathers = [each for each in sent if each["kind"] == "all-gather"]
    layer = WIDTH * WIDTH * 4
    if not gathers:
        return "not quite: nothing is gathered, and no device has a whole layer; jax.lax.all_gather(…, tiled=True)"
    if max(each["bytes"] for each in gathers) > layer:
        return "not quite: all layers are whole at once; gather a layer in the loop, where it is used"
    if written >= LAYERS:  # what is in a loop stands there once, twice where backward gathers again
        return "not quite: there is a gather outside of the loop over layers; put it into the body of jax.lax.scan"
    if not result:
        return "not quite: the result is not that of the whole layers: x, layer by layer, through tanh(x @ weight)"
    if not gradients:
        return "not quite: the result is right, the weights' gradients are not; sum over devices nowhere yourself"
    return "right"


# dimensions of an array, devices, threshold: the first of them is a case that one can do by head
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
        given = spec(shape, devices, threshold)
        if unanswered(given):
            return "not answered yet"
        cut = None
        with suppress(UserError):  # the devices divide none: the lab refuses it, the exercise leaves it whole
            cut = jax_sharding.dimension("", shape, devices, threshold)
        right = tuple("fsdp" if d == cut else None for d in range(len(shape)))
        about = f"an array of {shape}, {devices} devices, threshold {threshold}: {given}"
        if not isinstance(given, (tuple, list)) or set(given) - {"fsdp", None} or len(given) != len(shape):
            return f'not quite: {about}: a tuple is wanted, "fsdp" or None for each of the {len(shape)} dimensions'
        if tuple(given) != right:
            return f"not quite: {about}, by the rule {right}{_slip(tuple(given), shape, devices, threshold)}"
    return "right"


def _slip(given, shape, devices, threshold) -> str:
    cut = [d for d, axis in enumerate(given) if axis]
    if prod(shape) < threshold:
        return f"; it has {prod(shape):,} numbers, fewer than the threshold: it stays whole"
    if not cut:
        return f"; it has {prod(shape):,} numbers, no fewer than the threshold" if threshold else ""
    if len(cut) > 1:
        return "; the axis cuts one dimension"
    if shape[cut[0]] % devices:
        return f"; {devices} devices do not divide {shape[cut[0]]}"
    return "; of those that can be divided the largest, of equal ones the first"


def gathered(times: int | None = None) -> float:
    """GB of parameters that a step of Llama 3 8B gathers in fp32: blocks twice, recomputed, and the rest once; or all ``times`` times."""
    if times:
        return times * sum(map(prod, jax_sharding.leaves(LLAMA).values())) * 4 / 1e9
    found = jax_sharding.bytes_by_kind(jax_sharding.traffic(LLAMA, MANY, THRESHOLD, recompute=True))
    return found["all-gather", "fsdp"] / 1e9


EXERCISES = {
    "14.1": Do(
        title="layers gathered one by one",
        level=2,
        minutes=10,
        judge=judge_forward,
        hint="jax.lax.scan(body, x, shards) calls body(x, shard) for each layer; body returns (new x, None), and scan\n"
        "(last x, …). Inside body, jax.lax.all_gather(shard, ?, axis=?, tiled=True) makes the layer whole.",
        solution="""
import jax
import jax.numpy as jnp

def forward_of_a_device(shards, x):
    def layer(x, shard):
        weight = jax.lax.all_gather(shard, "fsdp", axis=0, tiled=True)  # here, so that one layer is whole at a time
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
            "blocks are gathered twice, but embedding and head stay from forward to backward": gathered(times=2),
            "recomputed, a block is gathered once in forward and once more in backward": gathered(times=1),
            "that is in GiB of 1024³; traffic is told in GB of 1000³": gathered() * 1e9 / 2**30,
            "in fp32 a number has 4 bytes": gathered() / 2,
        },
        hint="A block is gathered in forward, and again where backward recomputes it. What is outside of the blocks?",
        solution=f"""
# 32 blocks twice, embedding and head once; 4 bytes per number. (The norms are below the threshold, and whole everywhere.)
block = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
answer = 4 * (2 * 32 * block + 2 * {LLAMA.vocab_size} * 4096) / 1e9
""",
    ),
    "14.3": Do(
        title="which dimension is cut",
        level=1,
        minutes=6,
        judge=judge_spec,
        hint="math.prod(shape) is the number of numbers. max(dims, key=lambda d: shape[d]) takes the first of the largest.",
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
