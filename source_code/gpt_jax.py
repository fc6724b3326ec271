# SPDX-License-Identifier: BSD-3-Clause
"""Train the transformer of gpt_fsdp.py in JAX: one process, many devices, and shardings for the compiler.

  python gpt_jax.py --devices 8 --record run.json                       8 virtual devices of the CPU, or 8 GPUs
  python gpt_jax.py --strategy fsdp-shard-map --recompute full          explicit collectives, in jax.shard_map
  python gpt_jax.py --mesh replicate=2,fsdp=4 --precision bf16          HSDP, in mixed precision
  python gpt_jax.py --strategy fsdp-weights --mesh fsdp=4,tensor=2      with tensor parallelism
  python gpt_jax.py --checkpoint ckpt && python gpt_jax.py --checkpoint ckpt --resume --devices 4 --batch-size 16

  replicated        every device has the whole model, and a part of the batch
  fsdp-explicit     sharded parameters, gathered by jax.reshard; Explicit mesh: a sharding is part of an array's type,
                    and what has none that is certain is an error
  fsdp-activations  sharded parameters, activations constrained to stay on their devices; the compiler gathers weights
  fsdp-weights      sharded parameters, constrained to be unsharded where they are used
  fsdp-shard-map    all-gathers written by hand in jax.shard_map, and their transposes, reduce-scatters

Model, initial weights, batches and losses are those of gpt_fsdp.py, step by step. It needs the packages of make jax.
"""

import math
import platform
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar, Literal

import gpt_fsdp
import torch
from labkit import UserError
from labkit.measuring import records
from labkit.running import options, preemption, progress
from labkit.running.options import GIVEN, Conflict, option
from labkit.training import checkpoints, jax_world, loop, text
from planner.models import flops
from planner.models.shapes import GPT_SHAPES, GPTShape
from planner.parallel import jax_sharding

with jax_world.imports(__name__):  # one sentence if JAX is not installed
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P
    from labkit.training import jax_checkpoints, jax_models, jax_partition
    from labkit.training.jax_batches import batch_axes, evaluate, training_batches
    from labkit.training.jax_models import Hooks

# The model is defined in labkit/training/jax_models.py, and which dimension of an array is sharded in jax_partition.py;
# here it is sharded, compiled and trained. The options come last.
GATHERING = ("fsdp-explicit", "fsdp-weights", "fsdp-shard-map")  # the program says where parameters are gathered
CUT = (*GATHERING, "fsdp-activations")  # strategies that shard all large arrays
GATHERS = ("reshard", "sharding_constraint", "all_gather")  # names of the operations that gather, in jax.make_jaxpr


def device_mesh(config, world):
    """Return the device mesh with named axes.

    Explicit, JAX's default, makes the sharding part of each array's type. With Auto the compiler chooses the shardings
    of results.
    """
    axes = config.axes(world.world_size)
    kind = AxisType.Explicit if config.strategy == "fsdp-explicit" else AxisType.Auto
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=world.devices)


def hooks(config, mesh, specs) -> Hooks:
    """Return what a strategy adds to the model's forward.

    Args:
        config: the options.
        mesh: the device mesh.
        specs: tree of the parameters' partition specs.
    """

    def unsharded(spec):
        return NamedSharding(mesh, P(*(None if axis == "fsdp" else axis for axis in spec)))

    gathers = {
        "fsdp-explicit": lambda leaf, spec: jax.reshard(leaf, unsharded(spec)),
        "fsdp-weights": lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, unsharded(spec)),
        "fsdp-shard-map": partial(all_gather, batch_axes(mesh)),
    }

    def gather(name, module):
        return with_parameters(module, specs[name], gathers.get(config.strategy), config.dtype)

    along = NamedSharding(mesh, P(batch_axes(mesh), None, None))

    def edge(x):  # the rest of a block follows: its weights have to be gathered
        return jax.lax.with_sharding_constraint(x, along) if config.strategy == "fsdp-activations" else x

    return Hooks(gather, edge, partial(remat, config), along if config.strategy == "fsdp-explicit" else None)


def all_gather(batch, leaf, spec):
    """All-gather a parameter within ``shard_map``.

    The transpose of a tiled all-gather is a reduce-scatter, which backward therefore runs. With replicas the sum over
    them is the transpose of ``pcast``: the gradient's shard is all-reduced, after the reduce-scatter.
    """
    if others := tuple(axis for axis in batch if axis != "fsdp"):
        leaf = jax.lax.pcast(leaf, others, to="varying")
    return jax.lax.all_gather(leaf, "fsdp", axis=spec.index("fsdp"), tiled=True)


def with_parameters(module, specs, gather, dtype):
    """Return a copy of a module whose parameters are cast to the computation's dtype and, where sharded, gathered.

    Cast first: a parameter in bf16 is half the traffic.
    """
    definition, parameters = nnx.split(module)

    def whole(leaf, spec):
        leaf = leaf.astype(dtype)
        spec = spec[len(spec) - leaf.ndim :]  # in the loop a leaf is one layer's, without the layer axis
        return gather(leaf, spec) if gather and "fsdp" in spec else leaf

    return nnx.merge(definition, jax.tree.map(whole, parameters, specs))


def remat(config, block):
    """Return a block with activation checkpointing, or with FSDP's reshard after forward: all is saved but what was gathered.

    With constrained activations no policy is needed. No operation of the program gathers, so that differentiation saves
    the shard, and the compiler gathers it again in backward.
    """
    if config.recompute == "full":
        # Within a loop there is nothing that common-subexpression elimination could reuse, so it need not be prevented.
        return jax.checkpoint(block, prevent_cse=False)
    if config.strategy in GATHERING and config.reshard_after_forward == "true":
        return jax.checkpoint(block, prevent_cse=False, policy=all_but_gathered)
    return block


def all_but_gathered(operation, *_, **__) -> bool:
    """Return whether differentiation may save the result of an operation: a policy of ``jax.checkpoint``."""
    return str(operation) not in GATHERS


def make_losses(config, mesh, model, placed):
    """Return losses(params, inputs, targets): the mean cross-entropy of each sequence, in nats per token, (batch,).

    Args:
        config: the options.
        mesh: the device mesh.
        model: the graph definition of ``jax_models.structure``.
        placed: the parameters' shardings.
    """
    specs = jax.tree.map(lambda sharding: sharding.spec, placed)
    added = hooks(config, mesh, specs)

    def losses(params, inputs, targets):
        logits = nnx.merge(model, params)(inputs, added)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(axis=-1)

    if config.strategy != "fsdp-shard-map":
        return losses
    # In shard_map a function sees the shards of one device, and needs collectives for the others.
    batch = P(batch_axes(mesh))
    return jax.shard_map(losses, mesh=mesh, in_specs=(specs, batch, batch), out_specs=batch)


def make_optimizer(config):
    """Return AdamW with the defaults of torch.optim.AdamW; Optax's default weight decay is a hundred times smaller."""
    return optax.adamw(config.lr, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)


def train_step(params, state, inputs, targets, losses, optimizer, placed):
    """Train one step on all devices; inputs and targets: (accumulate, batch, seq_len). This function is compiled.

    Returns:
        (parameters, optimizer state, loss).
    """

    explicit = jax.tree.leaves(placed)[0].mesh.axis_types[0] == AxisType.Explicit

    def micro_batch(total, batch):
        loss, gradient = jax.value_and_grad(lambda params: losses(params, *batch).mean())(params)
        if not explicit:  # on an Explicit mesh, a gradient has its parameter's type, and so its sharding
            gradient = jax.lax.with_sharding_constraint(gradient, placed)  # accumulated gradients stay sharded
        return jax.tree.map(jnp.add, total, (loss, gradient)), None

    zero = jnp.zeros((), jax.tree.leaves(params)[0].dtype), jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(micro_batch, zero, (inputs, targets))
    loss, gradient = jax.tree.map(lambda each: each / len(inputs), total)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss


@dataclass
class Training:
    """The result of ``prepare``: sharded arrays and compiled programs."""

    mesh: object
    params: object
    state: object  # of the optimizer
    step: object  # compiled: (params, state, inputs, targets) → (params, state, loss)
    losses: object  # compiled at its first call: (params, inputs, targets) → (batch,)
    compile_seconds: float


def prepare(config, world) -> Training:
    """Compile the step and initialize the model; raise UserError before anything is allocated, if possible."""
    model, shapes = jax_models.structure(config.shape, config.dtype, config.param_dtype)
    mesh = device_mesh(config, world)
    placed = jax_partition.shardings(shapes, config.min_size if config.strategy in CUT else math.inf, mesh)
    jax_world.refuse_if_too_big(planned(config, world), config, world)

    optimizer = make_optimizer(config)
    states, replicated = jax.eval_shape(optimizer.init, shapes), NamedSharding(mesh, P())
    # The moments are trees like the parameters, with the same shardings; the step counter is replicated.
    states_placed = jax.tree.map(
        lambda part: placed if isinstance(part, nnx.State) else replicated,
        states,
        is_leaf=lambda part: isinstance(part, nnx.State),
    )
    losses = make_losses(config, mesh, model, placed)
    batch = NamedSharding(mesh, P(None, batch_axes(mesh)))
    step = jax.jit(
        partial(train_step, losses=losses, optimizer=optimizer, placed=placed),
        in_shardings=(placed, states_placed, batch, batch),
        out_shardings=(placed, states_placed, replicated),
        # Donated: the new parameters and state reuse the memory of the old ones.
        donate_argnums=(0, 1),
    )
    tokens = jax.ShapeDtypeStruct(config.batch_shape(world.world_size), jnp.int32)
    begin = time.perf_counter()
    arguments = typed((shapes, states, tokens, tokens), (placed, states_placed, batch, batch))
    with jax.set_mesh(mesh) if config.strategy == "fsdp-explicit" else nullcontext():  # the type of what has no input
        step = step.lower(*arguments).compile()
    compile_seconds = time.perf_counter() - begin
    jax_world.refuse_if_too_big(jax_world.needed(step), config, world)  # all of it, as planned by the compiler

    params = initial_parameters(config, shapes, placed)
    state = jax.jit(optimizer.init, out_shardings=states_placed)(params)  # created sharded
    return Training(mesh, params, state, step, jax.jit(losses), compile_seconds)


def typed(shapes, shardings):
    """Return a tree of shapes with shardings, from which an Explicit mesh derives the types of all results."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)


def initial_parameters(config, shapes, placed):
    """Return the sharded parameters: those of --weights, or gpt_fsdp.py's initial ones."""
    if not config.weights:
        return jax_models.import_weights(jax_models.initial_weights(config.shape, config.seed), shapes, placed)
    with jax_partition.weights(config.weights, shapes) as weights:
        return jax_models.import_weights(weights, shapes, placed)


def planned(config, world) -> int:
    """Return a lower bound of the bytes per device: persistent memory, and the gradients or the blocks' inputs."""
    shape, cut, itemsize = config.shape, config.strategy in CUT, 8 if config.precision == "fp64" else 4
    shards = config.axes(world.world_size)["fsdp"] if cut else 1
    persistent = jax_sharding.persistent(shape, shards, config.min_size, itemsize)
    inputs = (
        shape.num_hidden_layers * config.batch_size * config.seq_len * shape.hidden_size * itemsize
    )  # of the blocks
    return sum(persistent.values()) + max(persistent["parameters", "parameters"], inputs)


def train(config, world) -> dict:
    """Train, and return the measurements for a record."""
    data = text.load(torch.device("cpu"), config.seq_len)
    accumulate, batch, _ = config.batch_shape(world.world_size)
    saver = jax_checkpoints.Saver(config, checkpoints.identity(config, accumulate * batch, text.NAME))
    first_step = saver.find(config.max_steps)  # before anything is compiled
    training = prepare(config, world)
    saver.load(training)
    where = f"{world.world_size} devices on {world.device.type}, {world.hardware}; data {text.NAME}"
    world.say(f"{where}\n{'resumed' if first_step else 'starting'} at step {first_step} of {config.max_steps}")

    bar, losses, ends = progress.Progress(world, config.max_steps, first_step), [], []
    save_every = config.checkpoint_every or config.max_steps
    steps = range(first_step, config.max_steps)
    for step, (inputs, targets) in zip(steps, training_batches(data.train, config, training.mesh, steps), strict=True):
        training.params, training.state, loss = training.step(training.params, training.state, inputs, targets)
        losses.append(loss.item())  # waits for the devices
        ends.append(time.perf_counter())
        bar.advance()
        preemption.stop_alone(world, partial(saver.last, step + 1, training), step + 1, config.max_steps)
        if (step + 1) % loop.LOG_EVERY == 0 or step + 1 == config.max_steps:
            world.say(f"step {step + 1}: loss {losses[-1]:.4f}")
        if not math.isfinite(losses[-1]):  # records.report raises Diverged, and nothing more is saved
            break
        if (step + 1) % save_every == 0 or step + 1 == config.max_steps:
            saver.save(step + 1, training)
    saver.close()
    bar.close()
    validation_loss = evaluate(training, data.validation, config, gpt_fsdp.VALIDATION_SEQUENCES)
    world.say(f"loss {losses[0]:.4f} in step {first_step + 1}, validation loss {validation_loss:.4f}")
    return {
        "data": {"name": text.NAME, "train": len(data.train), "test": len(data.validation)},
        "batch_size": config.batch_size,
        "first_step": first_step,
        "losses": losses,
        "validation_loss": validation_loss,
        **jax_world.measured(training, world, ends, accumulate * batch),
    }


def main(config, world):
    """Run the lab. world: the devices (labkit/training/jax_world.py)."""
    begin = time.perf_counter()
    preemption.install_handlers(config)  # before the step is compiled
    config.axes(world.world_size)  # raises if the model cannot be sharded like this
    if config.record:
        records.check_writable(config.record)
    result = train(config, world)
    rate = result["time"]["samples_per_second"]
    result["tokens_per_second"] = rate and rate * config.seq_len
    result["flops_per_token"] = flops.per_token(config.shape, config.seq_len, None)
    result["versions"] = {"python": platform.python_version()} | jax_world.versions()
    records.report(config.script, config, world, result, elapsed=time.perf_counter() - begin)


@dataclass(frozen=True)
class Config(options.Training):
    """One run. options.Training adds --device, --checkpoint, --resume and --record."""

    script: ClassVar[str] = "gpt_jax.py"
    # One process drives all devices, by XLA's own collectives.
    ranks: ClassVar[None] = None
    backend: ClassVar[str] = "xla"
    profile: ClassVar[None] = None
    log: ClassVar[None] = None
    async_checkpoint: ClassVar[bool] = False
    on_save_error: ClassVar[str] = "stop"
    allow_narrowing: ClassVar[bool] = False  # --precision must be the same
    dry_run: ClassVar[bool] = False  # XLA plans its memory

    preset: Literal[tuple(GPT_SHAPES)] = option("tiny", "size of the model", resumed=True)
    devices: int | None = option(
        None,
        "number of devices; on the CPU, virtual ones (default: every GPU, or 8 on the CPU)",
        least=1,
        at_most=1024,
    )
    strategy: Literal["replicated", *CUT] = option("fsdp-explicit", "sharding strategy")
    reshard_after_forward: Literal["true", "false"] = option(
        "true", "true gathers a block's parameters again in backward, false keeps them", only=GATHERING
    )
    mesh: str | None = option(
        None,
        "device mesh: replicate=2,fsdp=4 is HSDP, fsdp=4,tensor=2 adds tensor parallelism on two devices",
        form=(
            r"(replicate=[1-9]\d*,)?fsdp=[1-9]\d*(,tensor=[1-9]\d*)?",
            "replicate=SIZE,fsdp=SIZE or fsdp=SIZE,tensor=SIZE",
        ),
        only=CUT,
    )
    min_size: int = option(2**14, "replicate arrays of fewer elements (of all layers together)", least=0, only=CUT)
    max_steps: int = option(20, "steps to train, including those before a resume", least=1)
    batch_size: int = option(8, "sequences in a micro-batch on each device", least=1)
    seq_len: int = option(128, "tokens in a sequence", least=1, resumed=True)
    precision: Literal["fp32", "bf16", "fp64"] = option(
        "fp32", "dtype of weights and computation; bf16: of the computation, with weights in fp32", resumed=True
    )
    recompute: Literal["none", "full"] = option(
        "none", "activation checkpointing: none, or full (save a block's input)"
    )
    accumulate: int = option(1, "micro-batches in a step", least=1)
    lr: float = option(1e-3, "learning rate", above=0, resumed="print")
    weights: str | None = option(None, "start from this safetensors file, written by export.py, of the same --preset")
    seed: int = option(1, "seed of the initial weights and the order of the text", resumed=True)
    checkpoint_every: int | None = option(None, "also save every N steps", least=1, needs="checkpoint")

    @property
    def shape(self) -> GPTShape:
        return GPT_SHAPES[self.preset]

    conflicts = (
        Conflict(
            {"strategy": ("fsdp-explicit", "fsdp-activations", "fsdp-shard-map")},
            {"mesh": lambda mesh: bool(mesh) and "tensor" in mesh},
            "--mesh {c.mesh} has tensor parallelism: choose --strategy fsdp-weights",
        ),
        Conflict(
            {"weights": GIVEN},
            {"resume": True},
            "--weights {c.weights} is where a training starts, and --resume goes on with one: leave one of them out",
        ),
    )

    @property
    def dtype(self):
        """Of the computation."""
        return {"fp64": jnp.float64, "bf16": jnp.bfloat16}.get(self.precision, jnp.float32)

    @property
    def param_dtype(self):
        """Of the parameters, their gradients, and the optimizer's state."""
        return jnp.float64 if self.precision == "fp64" else jnp.float32

    def axes(self, devices: int) -> dict[str, int]:
        """Return {axis of the mesh: number of devices along it}.

        Raises:
            UserError: the options do not fit the number of devices.
        """
        if not self.mesh:
            return {"fsdp": devices}
        axes = {name: int(size) for name, size in (pair.split("=") for pair in self.mesh.split(","))}
        if prod(axes.values()) != devices:
            raise UserError(f"--mesh {self.mesh} is for {prod(axes.values())} devices, but there are {devices}")
        parts = {
            "heads of keys and values": self.shape.num_key_value_heads,
            "columns of the feed-forward network": self.shape.intermediate_size,
        }
        for what, count in parts.items():
            if count % axes.get("tensor", 1):
                raise UserError(f"the {count} {what} cannot be shared evenly by the devices of --mesh {self.mesh}")
        return axes

    def batch_shape(self, devices: int) -> tuple[int, int, int]:
        """Return the shape of a step's token ids, for all devices together: (accumulate, batch, seq_len)."""
        axes = self.axes(devices)
        return self.accumulate, self.batch_size * axes.get("replicate", 1) * axes["fsdp"], self.seq_len


if __name__ == "__main__":
    jax_world.run(main, options.parse(Config, __doc__))
