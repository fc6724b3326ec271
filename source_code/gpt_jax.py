"""Train the transformer of gpt_fsdp.py in JAX: one process, many devices, and shardings for the compiler.

  python gpt_jax.py --devices 8 --strategy fsdp --record run.json       8 virtual devices of the CPU, or 8 GPUs
  python gpt_jax.py --strategy fsdp-explicit --recompute full           explicit collectives, in jax.shard_map
  python gpt_jax.py --mesh fsdp=4,tensor=2                              with tensor parallelism
  python gpt_jax.py --checkpoint ckpt && python gpt_jax.py --checkpoint ckpt --resume --devices 4 --batch-size 16

  replicated      every device has the whole model, and a part of the batch
  fsdp            parameters and optimizer state are sharded along one mesh axis; the compiler inserts the collectives
  fsdp-explicit   explicit all-gathers where the model needs parameters, and their transposes, reduce-scatters

Model, initial weights, batches and losses are those of gpt_fsdp.py, step by step. It needs the packages of make jax.
"""

import math
import platform
import time
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar, Literal

import gpt_fsdp
import torch
from labkit import UserError
from labkit.measuring import records
from labkit.running import options, progress
from labkit.running.options import option
from labkit.training import checkpoints, jax_world, loop, models, text
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
    from labkit.training import jax_checkpoints, jax_models

# The model is defined in labkit/training/jax_models.py; here it is sharded, compiled and trained. The options come last.
CUT = ("fsdp", "fsdp-explicit")  # strategies that shard all large arrays
# The dimension of a weight, (in, out), that is sharded along the axis "tensor": the first matmul of a pair is
# column-parallel, the second row-parallel (arXiv:1909.08053).
TENSOR = {name: -1 for name in ("query", "key", "value", "gate", "up", "head")} | {"output": -2, "down": -2}


def device_mesh(config, world):
    """Return the device mesh with named axes. With type Auto, the compiler chooses the shardings of results."""
    axes = config.axes(world.world_size)
    kinds = (AxisType.Auto,) * len(axes)  # or JAX would require the sharding of each result (since 0.9)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=world.devices)


def partition(name: str, shape: tuple, config, axes: dict) -> P:
    """Return the partition spec of a leaf: P(None, "fsdp") shards the second dimension, P() none.

    The axis fsdp shards the largest dimension that it divides, except the layer axis, over which the model's loop runs.
    The axis tensor shards the dimension in ``TENSOR``. Leaves of fewer elements than --min-size are replicated: there is
    little to save, and each would need a collective.

    Args:
        name: of the leaf.
        shape: of the leaf.
        config: the options.
        axes: {axis of the mesh: number of devices along it}.

    Raises:
        UserError: no dimension of a large leaf is divisible. It is not replicated silently, so that each device has
            exactly its share of all sharded leaves.
    """
    if config.strategy not in CUT or prod(shape) < config.min_size:
        return P()
    free = set(range(1 if name.startswith(jax_models.STACK) else 0, len(shape)))
    where = dict.fromkeys(range(len(shape)))
    if axes.get("tensor", 1) > 1 and (rule := TENSOR.get(name.split(".")[-2])):
        where[len(shape) + rule] = "tensor"
        free.discard(len(shape) + rule)
    dividable = [dim for dim in sorted(free) if shape[dim] % axes["fsdp"] == 0]
    if not dividable:
        raise UserError(
            f"no dimension of {name}, {shape}, can be cut into {axes['fsdp']} equal parts: "
            f"take another number of devices, or --min-size {prod(shape) + 1}, which leaves it whole"
        )
    where[max(dividable, key=lambda dim: shape[dim])] = "fsdp"
    return P(*where.values())


def shardings(shapes, config, mesh):
    """Return the shardings of a tree of shapes, such as the parameters, by ``partition``."""
    leaves, structure = jax.tree.flatten(shapes)
    axes = dict(mesh.shape)
    specs = [
        partition(name, leaf.shape, config, axes) for name, leaf in zip(jax_models.names(shapes), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, [NamedSharding(mesh, spec) for spec in specs])


def gather(specs, name, module):
    """All-gather the parameters of a part of the model, within ``shard_map``, as FSDP's hook does before forward.

    The transpose of a tiled all-gather is a reduce-scatter, which backward therefore runs.

    Args:
        specs: tree of partition specs.
        name, module: of the part of the model.
    """

    def whole(leaf, spec):
        axes = spec[len(spec) - leaf.ndim :]  # in the loop a leaf is one layer's, without the layer axis
        return jax.lax.all_gather(leaf, "fsdp", axis=axes.index("fsdp"), tiled=True) if "fsdp" in axes else leaf

    return with_parameters(module, whole, specs[name])


def constrain_gathered(mesh, specs, name, module):
    """Constrain the parameters of a part of the model to be unsharded along fsdp; the compiler inserts the all-gathers.

    Without this constraint it would gather activations, too: a matmul with a sharded weight does not need a gather.
    """

    def whole(leaf, spec):
        axes = spec[len(spec) - leaf.ndim :]
        gathered = NamedSharding(mesh, P(*(None if axis == "fsdp" else axis for axis in axes)))
        return jax.lax.with_sharding_constraint(leaf, gathered) if "fsdp" in axes else leaf

    return with_parameters(module, whole, specs[name])


def with_parameters(module, change, specs):
    """Return a copy of a module with each parameter replaced by change(leaf, spec)."""
    definition, parameters = nnx.split(module)
    return nnx.merge(definition, jax.tree.map(change, parameters, specs))


def make_losses(config, mesh, model, placed):
    """Return losses(params, inputs, targets): the mean cross-entropy of each sequence, in nats per token, (batch,).

    Args:
        config: the options.
        mesh: the device mesh.
        model: the graph definition of ``jax_models.structure``.
        placed: the parameters' shardings.
    """
    specs = jax.tree.map(lambda sharding: sharding.spec, placed)
    explicit = config.strategy == "fsdp-explicit"
    whole = partial(gather, specs) if explicit else partial(constrain_gathered, mesh, specs)

    def losses(params, inputs, targets):
        logits = nnx.merge(model, params)(inputs, whole, config.recompute == "full")
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(axis=-1)

    # In shard_map a function sees the shards of one device, and needs collectives for the others.
    batch = P("fsdp")
    return jax.shard_map(losses, mesh=mesh, in_specs=(specs, batch, batch), out_specs=batch) if explicit else losses


def make_optimizer(config):
    """Return AdamW with the defaults of torch.optim.AdamW; Optax's default weight decay is a hundred times smaller."""
    return optax.adamw(config.lr, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)


def train_step(params, state, inputs, targets, losses, optimizer, placed):
    """Train one step on all devices; inputs and targets: (accumulate, batch, seq_len). This function is compiled.

    Returns:
        (parameters, optimizer state, loss).
    """

    def micro_batch(total, batch):
        loss, gradient = jax.value_and_grad(lambda params: losses(params, *batch).mean())(params)
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
    model, shapes = jax_models.structure(config.shape, config.dtype)
    mesh = device_mesh(config, world)
    placed = shardings(shapes, config, mesh)
    refuse_if_too_big(planned(config, world), config, world)

    optimizer = make_optimizer(config)
    states, replicated = jax.eval_shape(optimizer.init, shapes), NamedSharding(mesh, P())
    # The moments are trees like the parameters, with the same shardings; the step counter is replicated.
    states_placed = jax.tree.map(
        lambda part: placed if isinstance(part, nnx.State) else replicated,
        states,
        is_leaf=lambda part: isinstance(part, nnx.State),
    )
    losses = make_losses(config, mesh, model, placed)
    batch = NamedSharding(mesh, P(None, "fsdp"))
    step = jax.jit(
        partial(train_step, losses=losses, optimizer=optimizer, placed=placed),
        in_shardings=(placed, states_placed, batch, batch),
        out_shardings=(placed, states_placed, replicated),
        # Donated: the new parameters and state reuse the memory of the old ones.
        donate_argnums=(0, 1),
    )
    tokens = jax.ShapeDtypeStruct(config.batch_shape(world.world_size), jnp.int32)
    begin = time.perf_counter()
    step = step.lower(shapes, states, tokens, tokens).compile()
    compile_seconds = time.perf_counter() - begin
    refuse_if_too_big(jax_world.needed(step), config, world)  # all of it, as planned by the compiler

    params = jax_models.import_weights(pytorch_model(config), shapes, placed)
    state = jax.jit(optimizer.init, out_shardings=states_placed)(params)  # created sharded
    return Training(mesh, params, state, step, jax.jit(losses), compile_seconds)


def pytorch_model(config):
    """Return gpt_fsdp.py's model with its initial weights, unsharded, in CPU memory."""
    with torch.device("meta"):
        model = models.GPT(config.shape)
    model.to_empty(device="cpu")
    model.tie()
    gpt_fsdp.init_weights(model, config.seed)
    return model


def planned(config, world) -> int:
    """Return a lower bound of the bytes per device: persistent memory, and the gradients or the blocks' inputs."""
    shape, cut, itemsize = config.shape, config.strategy in CUT, 8 if config.precision == "fp64" else 4
    persistent = jax_sharding.persistent(shape, world.world_size if cut else 1, config.min_size, itemsize)
    inputs = (
        shape.num_hidden_layers * config.batch_size * config.seq_len * shape.hidden_size * itemsize
    )  # of the blocks
    return sum(persistent.values()) + max(persistent["parameters", "parameters"], inputs)


def refuse_if_too_big(needed: int, config, world):
    """Check that each device has ``needed`` free bytes.

    Raises:
        UserError: it has not.
    """
    free = jax_world.free_memory(world)
    if needed > free:
        raise UserError(
            f"--preset {config.preset} with --strategy {config.strategy} and {config.accumulate:,} x "
            f"{config.batch_size:,} sequences on each of {world.world_size} devices needs more than "
            f"{needed / 2**30:,.1f} GiB there, and {free / 2**30:,.1f} GiB are free: take a smaller preset, fewer "
            "sequences or more devices"
        )


def training_batches(tokens, config, mesh, steps):
    """Yield the micro-batches of each step: (inputs, targets), each (accumulate, batch, seq_len), sharded along the batch.

    They are gpt_fsdp.py's: each device along the axis fsdp reads the sequences of one rank there.
    """
    accumulate, batch, _ = config.batch_shape(mesh.size)
    for step in steps:
        starts = text.starts(tokens, config.seq_len, accumulate * batch, config.seed, step).view(accumulate, batch)
        yield on_devices(text.sequences(tokens, starts, config.seq_len), NamedSharding(mesh, P(None, "fsdp")))


def on_devices(batch, sharding):
    """Convert token ids from PyTorch tensors to sharded JAX arrays."""
    return [jax.device_put(part.numpy().astype("int32"), sharding) for part in batch]


def evaluate(training, tokens, config):
    """Return the mean loss on the validation text, on the same sequences as gpt_fsdp.py."""
    _, batch, _ = config.batch_shape(training.mesh.size)
    total = max(gpt_fsdp.VALIDATION_SEQUENCES, training.mesh.shape["fsdp"])
    starts = torch.linspace(0, len(tokens) - config.seq_len - 1, total).long()
    losses = []
    for first in range(0, total, batch):  # always the same shape, which needs only one compilation
        part = starts[torch.arange(first, first + batch) % total]
        inputs, targets = on_devices(
            text.sequences(tokens, part, config.seq_len), NamedSharding(training.mesh, P("fsdp"))
        )
        losses += training.losses(training.params, inputs, targets).tolist()
    return sum(losses[:total]) / total


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
        if (step + 1) % loop.LOG_EVERY == 0 or step + 1 == config.max_steps:
            world.say(f"step {step + 1}: loss {losses[-1]:.4f}")
        if not math.isfinite(losses[-1]):  # records.report raises Diverged, and nothing more is saved
            break
        if (step + 1) % save_every == 0 or step + 1 == config.max_steps:
            saver.save(step + 1, training)
    saver.close()
    bar.close()
    validation_loss = evaluate(training, data.validation, config)
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
    strategy: Literal["replicated", *CUT] = option("fsdp", "sharding strategy")
    mesh: str | None = option(
        None,
        "device mesh: fsdp=4,tensor=2 adds tensor parallelism on two devices",
        form=(r"fsdp=[1-9]\d*(,tensor=[1-9]\d*)?", "fsdp=SIZE,tensor=SIZE"),
        only=("fsdp",),
    )
    min_size: int = option(2**14, "replicate arrays of fewer elements (of all layers together)", least=0, only=CUT)
    max_steps: int = option(20, "steps to train, including those before a resume", least=1)
    batch_size: int = option(8, "sequences in a micro-batch on each device", least=1)
    seq_len: int = option(128, "tokens in a sequence", least=1, resumed=True)
    precision: Literal["fp32", "fp64"] = option("fp32", "dtype of weights and computation", resumed=True)
    recompute: Literal["none", "full"] = option(
        "none", "activation checkpointing: none, or full (save a block's input)"
    )
    accumulate: int = option(1, "micro-batches in a step", least=1)
    lr: float = option(1e-3, "learning rate", above=0, resumed="print")
    seed: int = option(1, "seed of the initial weights and the order of the text", resumed=True)
    checkpoint_every: int | None = option(None, "also save every N steps", least=1, needs="checkpoint")

    @property
    def shape(self) -> GPTShape:
        return GPT_SHAPES[self.preset]

    @property
    def dtype(self):
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
        return self.accumulate, self.batch_size * self.axes(devices)["fsdp"], self.seq_len


if __name__ == "__main__":
    jax_world.run(main, options.parse(Config, __doc__))
