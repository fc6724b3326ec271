"""The transformer of gpt_fsdp.py in JAX: one process, many devices, and a compiler that is told where arrays lie.

  python gpt_jax.py --devices 8 --strategy fsdp --record run.json       8 virtual devices of the CPU, or 8 GPUs
  python gpt_jax.py --strategy fsdp-explicit --recompute full           the collectives written out, in jax.shard_map
  python gpt_jax.py --mesh fsdp=4,tensor=2                              matrix products split, too
  python gpt_jax.py --checkpoint ckpt && python gpt_jax.py --checkpoint ckpt --resume --devices 4 --batch-size 16

  replicated      every device has all of the model, and a part of the batch
  fsdp            parameters and optimizer state are cut along one axis of the mesh; what must be sent, the compiler finds
  fsdp-explicit   the same, with the all-gather where the model needs it, and with its transpose, a reduce-scatter

Model, first values, batches and losses are those of gpt_fsdp.py, step by step. It needs what make jax installs.
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
    dividable = [dim for dim in sorted(free) if shape[dim] % axes["fsdp"] == 0]
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
    specs = [
        partition(name, leaf.shape, config, axes) for name, leaf in zip(jax_models.names(shapes), leaves, strict=True)
    ]
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
        uncut = NamedSharding(mesh, P(*(None if axis == "fsdp" else axis for axis in axes)))
        return jax.lax.with_sharding_constraint(leaf, uncut) if "fsdp" in axes else leaf

    return with_parameters(module, whole, specs[name])


def with_parameters(module, change, specs):
    """A module like this one, with other parameters: change(leaf, spec) of each."""
    what, parameters = nnx.split(module)
    return nnx.merge(what, jax.tree.map(change, parameters, specs))


def make_losses(config, mesh, model, placed):
    """losses(params, inputs, targets): of each sequence the mean cross-entropy, in nats per token; shape (batch,).

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
    """One step of all devices; inputs and targets of shape (accumulate, batch, seq_len). This is what is compiled.

    Returns (parameters, optimizer state, loss).
    """

    def micro_batch(total, batch):
        loss, gradient = jax.value_and_grad(lambda params: losses(params, *batch).mean())(params)
        gradient = jax.lax.with_sharding_constraint(gradient, placed)  # what is summed stays cut
        return jax.tree.map(jnp.add, total, (loss, gradient)), None

    zero = jnp.zeros((), jax.tree.leaves(params)[0].dtype), jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(micro_batch, zero, (inputs, targets))
    loss, gradient = jax.tree.map(lambda each: each / len(inputs), total)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss


@dataclass
class Training:
    """What ``prepare`` makes of the options: arrays that lie where they are to lie, and compiled programs."""

    mesh: object
    params: object
    state: object  # of the optimizer
    step: object  # compiled: (params, state, inputs, targets) → (params, state, loss)
    losses: object  # compiled at its first call: (params, inputs, targets) → (batch,)
    compile_seconds: float


def prepare(config, world) -> Training:
    """Everything that training needs. Whatever can be refused is refused before anything is allocated."""
    model, shapes = jax_models.structure(config.shape, config.dtype)
    mesh = device_mesh(config, world)
    placed = shardings(shapes, config, mesh)
    refuse_if_too_big(planned(config, world), config, world)

    optimizer = make_optimizer(config)
    states, everywhere = jax.eval_shape(optimizer.init, shapes), NamedSharding(mesh, P())
    # The moments are trees like the parameters, and lie as these do; the number of steps is on every device.
    states_placed = jax.tree.map(
        lambda part: placed if isinstance(part, nnx.State) else everywhere,
        states,
        is_leaf=lambda part: isinstance(part, nnx.State),
    )
    losses = make_losses(config, mesh, model, placed)
    batch = NamedSharding(mesh, P(None, "fsdp"))
    step = jax.jit(
        partial(train_step, losses=losses, optimizer=optimizer, placed=placed),
        in_shardings=(placed, states_placed, batch, batch),
        out_shardings=(placed, states_placed, everywhere),
        # Donated: the new parameters and state take the place of the old; otherwise both would be there at once.
        donate_argnums=(0, 1),
    )
    numbers = jax.ShapeDtypeStruct(config.batch_shape(world.world_size), jnp.int32)
    begin = time.perf_counter()
    step = step.lower(shapes, states, numbers, numbers).compile()
    compile_seconds = time.perf_counter() - begin
    refuse_if_too_big(jax_world.needed(step), config, world)  # the rest of it, as the compiler has planned it

    params = jax_models.import_weights(pytorch_model(config), shapes, placed)
    state = jax.jit(optimizer.init, out_shardings=states_placed)(params)  # made in parts: it is never whole anywhere
    return Training(mesh, params, state, step, jax.jit(losses), compile_seconds)


def pytorch_model(config):
    """gpt_fsdp.py's model with its first values, whole, in the CPU's memory."""
    with torch.device("meta"):
        model = models.GPT(config.shape)
    model.to_empty(device="cpu")
    model.tie()
    gpt_fsdp.init_weights(model, config.seed)
    return model


def planned(config, world) -> int:
    """Bytes that a device needs in any case: what persists, and gradients or what backward needs at the very least."""
    shape, cut, itemsize = config.shape, config.strategy in CUT, 8 if config.precision == "fp64" else 4
    kept = jax_sharding.persistent(shape, world.world_size if cut else 1, config.min_size, itemsize)
    inputs = (
        shape.num_hidden_layers * config.batch_size * config.seq_len * shape.hidden_size * itemsize
    )  # of the blocks
    return sum(kept.values()) + max(kept["parameters", "parameters"], inputs)


def refuse_if_too_big(needed: int, config, world):
    """UserError if a device has fewer bytes than that."""
    free = jax_world.free_memory(world)
    if needed > free:
        raise UserError(
            f"--preset {config.preset} with --strategy {config.strategy} and {config.accumulate:,} x "
            f"{config.batch_size:,} sequences on each of {world.world_size} devices needs more than "
            f"{needed / 2**30:,.1f} GiB there, and {free / 2**30:,.1f} GiB are free: take a smaller preset, fewer "
            "sequences or more devices"
        )


def training_batches(tokens, config, mesh, steps):
    """A step's micro-batches: (inputs, targets), each of shape (accumulate, batch, seq_len), cut along the batch.

    Those of gpt_fsdp.py: a device along the axis fsdp reads what there a rank reads.
    """
    accumulate, batch, _ = config.batch_shape(mesh.size)
    for step in steps:
        starts = text.starts(tokens, config.seq_len, accumulate * batch, config.seed, step).view(accumulate, batch)
        yield on_devices(text.sequences(tokens, starts, config.seq_len), NamedSharding(mesh, P(None, "fsdp")))


def on_devices(batch, sharding):
    """Token numbers, PyTorch's tensors, as arrays of the devices."""
    return [jax.device_put(part.numpy().astype("int32"), sharding) for part in batch]


def evaluate(training, tokens, config):
    """Mean loss on the validation text: of the sequences that gpt_fsdp.py takes."""
    _, batch, _ = config.batch_shape(training.mesh.size)
    total = max(gpt_fsdp.VALIDATION_SEQUENCES, training.mesh.shape["fsdp"])
    starts = torch.linspace(0, len(tokens) - config.seq_len - 1, total).long()
    found = []
    for first in range(0, total, batch):  # each of the same shape, or it would be compiled again
        part = starts[torch.arange(first, first + batch) % total]
        inputs, targets = on_devices(
            text.sequences(tokens, part, config.seq_len), NamedSharding(training.mesh, P("fsdp"))
        )
        found += training.losses(training.params, inputs, targets).tolist()
    return sum(found[:total]) / total


def train(config, world) -> dict:
    """Train as ``config`` says; returns this run's part of a record."""
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
        if not math.isfinite(losses[-1]):  # records.report says so, and ends the run; nothing more is saved
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
    """What the process runs. world: its devices (labkit/training/jax_world.py)."""
    begin = time.perf_counter()
    config.axes(world.world_size)  # refuses what the devices cannot share
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
        "how many; on the CPU, virtual ones that share it (default: every GPU, or 8 on the CPU)",
        least=1,
        at_most=1024,
    )
    strategy: Literal["replicated", *CUT] = option("fsdp", "how the devices share")
    mesh: str | None = option(
        None,
        "fsdp=4,tensor=2 splits matrix products between two devices, too",
        form=(r"fsdp=[1-9]\d*(,tensor=[1-9]\d*)?", "fsdp=SIZE,tensor=SIZE"),
        only=("fsdp",),
    )
    min_size: int = option(
        2**14, "arrays of fewer elements, all layers together, stay whole on every device", least=0, only=CUT
    )
    max_steps: int = option(20, "steps to train, those of the run being resumed included", least=1)
    batch_size: int = option(8, "sequences in a micro-batch on each device", least=1)
    seq_len: int = option(128, "tokens in a sequence", least=1, resumed=True)
    precision: Literal["fp32", "fp64"] = option("fp32", "number format of everything", resumed=True)
    recompute: Literal["none", "full"] = option("none", "what backward computes again: nothing, or each block")
    accumulate: int = option(1, "micro-batches in a step", least=1)
    lr: float = option(1e-3, "learning rate", above=0, resumed="print")
    seed: int = option(1, "seed of the weights and the order of the text", resumed=True)
    checkpoint_every: int | None = option(None, "save after every so many steps too", least=1, needs="checkpoint")

    @property
    def shape(self) -> GPTShape:
        return GPT_SHAPES[self.preset]

    @property
    def dtype(self):
        return jnp.float64 if self.precision == "fp64" else jnp.float32

    def axes(self, devices: int) -> dict[str, int]:
        """{axis of the mesh: how many devices lie along it}. UserError: the options do not fit the devices."""
        if not self.mesh:
            return {"fsdp": devices}
        axes = {name: int(size) for name, size in (pair.split("=") for pair in self.mesh.split(","))}
        if prod(axes.values()) != devices:
            raise UserError(f"--mesh {self.mesh} is for {prod(axes.values())} devices, but there are {devices}")
        parts = {
            "heads of keys and values": self.shape.num_key_value_heads,
            "hidden numbers": self.shape.intermediate_size,
        }
        for what, count in parts.items():
            if count % axes.get("tensor", 1):
                raise UserError(f"the {count} {what} cannot be shared evenly by the devices of --mesh {self.mesh}")
        return axes

    def batch_shape(self, devices: int) -> tuple[int, int, int]:
        """Of a step's token numbers, all devices together: (accumulate, batch, seq_len)."""
        return self.accumulate, self.batch_size * self.axes(devices)["fsdp"], self.seq_len


if __name__ == "__main__":
    jax_world.run(main, options.parse(Config, __doc__))
