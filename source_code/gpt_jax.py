"""The transformer of gpt_fsdp.py in JAX: one process, many devices, and a compiler that is told where arrays lie.

  python gpt_jax.py --devices 8 --strategy fsdp --record run.json       8 virtual devices of the CPU, or 8 GPUs
  python gpt_jax.py --strategy fsdp-explicit --recompute full           the collectives written out, in jax.shard_map
  python gpt_jax.py --mesh fsdp=4,tensor=2                              matrix products split, too
  python gpt_jax.py --checkpoint ckpt && python gpt_jax.py --checkpoint ckpt --resume --devices 4 --batch-size 2

  replicated      every device has all of the model, and a part of the batch
  fsdp            parameters and optimizer state are cut along one axis of the mesh; what must be sent, the compiler finds
  fsdp-explicit   the same, with the all-gather where the model needs it, and with its transpose, a reduce-scatter

Model, first values, batches and losses are those of gpt_fsdp.py, step by step. It needs what make jax installs.
"""

import time
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import ClassVar, Literal

import gpt_fsdp
import torch
from labkit import UserError
from labkit.measuring import hlo, limits, meters, records
from labkit.running import options, progress
from labkit.running.options import option
from labkit.training import jax_world, models, text
from planner import networks
from planner.shapes import GPT_SHAPES, GPTShape

with jax_world.imports(__name__):  # if it is not installed: one sentence
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P
    from labkit.training import jax_checkpoints, jax_models

# The model is in labkit/training/jax_models.py; here it is cut, compiled and trained. The options come last.
CUT = ("fsdp", "fsdp-explicit")  # strategies under which nothing large is whole on a device
# The dimension of a weight, (in, out), that lies along the axis "tensor": the first product of a pair makes parts of a
# result, the second takes them (arXiv:1909.08053).
TENSOR = {name: -1 for name in ("query", "key", "value", "gate", "up", "head")} | {"output": -2, "down": -2}


def device_mesh(config, world):
    """The devices as a grid with named axes. Auto: the compiler decides how a result lies, where nobody says."""
    axes = config.axes(world.world_size)
    kinds = (AxisType.Auto,) * len(axes)  # else JAX wants to be told how each result lies (since 0.9)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=world.devices)


def partition(name: str, shape: tuple, config, axes: dict) -> P:
    """Which dimension of a leaf lies along which axis of the mesh: P(None, "fsdp") cuts the second, P() none.

    The axis fsdp cuts the largest dimension that it divides, but for that of the layers, over which the model's loop
    runs; tensor the one that ``TENSOR`` names. Leaves of fewer elements than --min-size stay whole: there is little to
    save, and each would be a collective. UserError: a leaf that is large enough, and that an axis does not divide. It
    is not left whole in silence, so that each device has exactly its part of all that is cut.
    """
    if config.strategy not in CUT or prod(shape) < config.min_size:
        return P()
    free = set(range(1 if name.startswith(jax_models.STACK) else 0, len(shape)))
    where = dict.fromkeys(range(len(shape)))
    if axes.get("tensor", 1) > 1 and (rule := TENSOR.get(name.split(".")[-2])):
        where[len(shape) + rule] = "tensor"
        free.discard(len(shape) + rule)
    dividable = [dim for dim in free if shape[dim] % axes["fsdp"] == 0]
    if not dividable:
        raise UserError(
            f"no dimension of {name}, {shape}, can be cut into {axes['fsdp']} equal parts: "
            f"take another number of devices, or --min-size {prod(shape) + 1}, which leaves it whole"
        )
    where[max(dividable, key=lambda dim: shape[dim])] = "fsdp"
    return P(*where.values())


def shardings(shapes, config, mesh):
    """The shardings of a tree of shapes, such as the parameters, each leaf's by ``partition``."""
    leaves, structure = jax.tree.flatten(shapes)
    axes = dict(mesh.shape)
    specs = [partition(name, leaf.shape, config, axes) for name, leaf in zip(jax_models.names(shapes), leaves)]
    return jax.tree.unflatten(structure, [NamedSharding(mesh, spec) for spec in specs])


def gather(specs, name, module):
    """A part of the model with its parameters whole, as FSDP's hook makes it before forward; for ``shard_map``.

    specs: what ``partition`` says of each parameter. The transpose of gathering tiles is to sum them and to scatter the
    sums: where forward runs this, backward runs a reduce-scatter.
    """

    def whole(leaf, spec):
        axes = spec[len(spec) - leaf.ndim :]  # in the loop a leaf is a layer's, without the first axis
        return jax.lax.all_gather(leaf, "fsdp", axis=axes.index("fsdp"), tiled=True) if "fsdp" in axes else leaf

    return with_parameters(module, whole, specs[name])


def say_whole(mesh, specs, name, module):
    """The same, said to the compiler: here the parameters lie whole along fsdp. It finds what must be sent for it.

    Left to itself, it gathers activations, too: a cut matrix can be multiplied by without ever being whole.
    """

    def whole(leaf, spec):
        axes = spec[len(spec) - leaf.ndim :]
        uncut = P(*(None if axis == "fsdp" else axis for axis in axes))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, uncut))

    return with_parameters(module, whole, specs[name])


def with_parameters(module, change, specs):
    """A module like this one, with other parameters: change(leaf, spec) of each."""
    what, parameters = nnx.split(module)
    return nnx.merge(what, jax.tree.map(change, parameters, specs))


def make_losses(config, mesh, model, placed):
    """losses(params, inputs, targets): of each sequence the mean cross-entropy, in nats a token; shape (batch,).

    model: as ``jax_models.structure`` has it. placed: the parameters' shardings.
    """
    specs = jax.tree.map(lambda sharding: sharding.spec, placed)
    explicit = config.strategy == "fsdp-explicit"
    whole = partial(gather, specs) if explicit else partial(say_whole, mesh, specs)

    def losses(params, inputs, targets):
        logits = nnx.merge(model, params)(inputs, whole, config.recompute == "full")
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(axis=-1)

    # In shard_map a function sees what lies on one device; what it needs of others it must ask for.
    batch = P("fsdp")
    return jax.shard_map(losses, mesh=mesh, in_specs=(specs, batch, batch), out_specs=batch) if explicit else losses


def make_optimizer(config):
    """torch.optim.AdamW with its own settings. Optax's decay is a hundredth of that, unless it is told."""
    return optax.adamw(config.lr, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)


def train_step(params, state, inputs, targets, losses, optimizer, placed):
    """One step of all devices; inputs and targets of shape (accumulate, batch, seq_len). What the compiler gets.

    Returns (parameters, optimizer state, loss).
    """

    def micro_batch(total, batch):
        loss, gradient = jax.value_and_grad(lambda params: losses(params, *batch).mean())(params)
        gradient = jax.lax.with_sharding_constraint(gradient, placed)  # what is summed stays cut
        return jax.tree.map(jnp.add, total, (loss, gradient)), None

    nothing = jax.tree.map(jnp.zeros_like, params)
    zero = jnp.zeros((), jax.tree.leaves(params)[0].dtype)
    total, _ = jax.lax.scan(micro_batch, (zero, nothing), (inputs, targets))
    loss, gradient = jax.tree.map(lambda each: each / len(inputs), total)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss
