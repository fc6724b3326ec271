# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 14, FSDP in JAX. Code that needs JAX runs in a separate process, with its own virtual devices."""

from contextlib import suppress
from math import prod

from planner.models.shapes import GPT_SHAPES
from planner.parallel import jax_sharding

from labkit.measuring import hlo
from labkit.teaching.exercises import Do, on_ranks, unanswered
from labkit.training import jax_world

DEVICES, LAYERS, WIDTH, BATCH = 8, 3, 16, 32
THRESHOLD = 2**14


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


def programs() -> list[tuple]:
    """Return (name, collectives at a small batch, at a large one, bytes of the parameters, answer) of steps to tell apart."""
    cases = []
    for preset, devices in (("tiny", 8), ("llama3-8b", 64)):
        shape = GPT_SHAPES[preset]
        size = 4 * sum(map(prod, jax_sharding.leaves(shape).values()))
        summed = {"kind": "all-reduce", "bytes": size + 4, "count": 1}
        cases.append((f"{preset}, all gradients all-reduced", [summed], [summed], size, "replicated"))
        for again, answer in ((False, "kept"), (True, "resharded")):
            for scatters, machine in ((True, "GPUs"), (False, "the CPU")):
                fsdp = jax_sharding.traffic(shape, devices, THRESHOLD, again, scatters=scatters)
                cases.append((f"{preset}, FSDP on {machine}, {answer}", fsdp, fsdp, size, answer))
        kept = jax_sharding.traffic(shape, devices, THRESHOLD, scatters=False)
        activations = [{"kind": "all-gather", "bytes": size, "count": 1}, summed]
        grown = [{"kind": "all-gather", "bytes": size, "count": 4}, summed]
        cases.append((f"{preset}, gathers that grow with the batch", activations, grown, size, "not FSDP"))
        gathers = [each for each in kept if each["kind"] == "all-gather"]
        unsummed = [*gathers, {"kind": "all-reduce", "bytes": size // 2, "count": 1}]
        cases.append((f"{preset}, half of the gradients not summed", unsummed, unsummed, size, "not FSDP"))
        cases.append((f"{preset}, gradients summed at the large batch only", unsummed, kept, size, "not FSDP"))
    return cases


def judge_strategy(strategy_of) -> str:
    for name, small, large, parameters, right in programs():
        answer = strategy_of([dict(each) for each in small], [dict(each) for each in large], parameters)
        if unanswered(answer):
            return "not answered yet"
        if answer != right:
            return f"not quite: {name}: {answer!r}, and it is {right!r}"
    return "right"


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
    return jax.lax.scan(layer, x, shards)[0]  # backward uses the gathered weights that scan has saved, layer by layer
""",
    ),
    "14.2": Do(
        title="a test that reads the program",
        level=2,
        minutes=12,
        judge=judge_strategy,
        hint="Sum bytes times count, of the gathers and of what sums gradients. Which of the two sums must not change with\n"
        "the batch? Which must be the size of the model in every data-parallel program? A collective runs count times.",
        solution="""
def strategy_of(small, large, parameters):
    def sent(program, *kinds):
        return sum(each["bytes"] * each["count"] for each in program if each["kind"] in kinds)
    gathered = [sent(program, "all-gather") for program in (small, large)]
    summed = [sent(program, "all-reduce", "reduce-scatter") for program in (small, large)]
    if gathered[0] != gathered[1] or any(abs(size / parameters - 1) > 0.1 for size in summed):
        return "not FSDP"  # activations are sent, or gradients are not summed over the batch
    times = gathered[0] / parameters
    return "replicated" if times == 0 else "kept" if times < 1.1 else "resharded"
""",
    ),
}
