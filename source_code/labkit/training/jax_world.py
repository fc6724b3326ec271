"""JAX behind one door: whether it is there, the devices that a run computes on, the record's and the refusals' share.

Nothing here imports JAX before it is asked for: the course does without it, and gpt_jax.py and notebook 14 need it.
"""

import contextlib
import importlib.metadata
import itertools
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch

from labkit import UserError
from labkit.measuring import hlo, host_memory, meters, records
from labkit.measuring.trace import CATEGORIES
from labkit.running import options, progress, ranks

OLDEST = (0, 10)  # jax.shard_map, AxisType, jax_num_cpu_devices, and recomputation that saves memory
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint")
VIRTUAL = 8  # devices that the CPU is taken for, where nobody says how many


@dataclass(frozen=True)
class World(ranks.Rank):
    """One process that drives all devices. In a record they are its ranks: ``world_size`` is their number."""

    devices: tuple = ()  # as JAX has them

    @property
    def hardware(self) -> str:
        """What computes, in a few words, as ``records.hardware`` has them."""
        return self.devices[0].device_kind if self.device.type == "cuda" else records.hardware(self.device)


def check():
    """UserError: JAX, or what the lab needs beside it, is not installed, or JAX is too old."""
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(f"{package} is not installed, which FSDP in JAX needs: run make jax") from None
        if package == "jax" and tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise UserError(f"JAX {version} is installed, and {oldest} is the oldest that will do: run make jax")


@contextlib.contextmanager
def imports(name: str) -> Iterator[None]:
    """Around the imports of JAX in a file called ``name``: if it cannot be had, a UserError; of a script, its end."""
    try:
        check()
    except UserError as error:
        if name == "__main__":
            options.exit_with_error(str(error), launched=True)
        raise
    # JAX would take three quarters of a GPU's memory when it first computes, PyTorch's in the same notebook included.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    yield


def load(devices: int | None = None, device: str = "auto", precision: str = "fp32") -> World:
    """The devices of a run, ready to compute. UserError: there are not so many, or not of this kind.

    devices: how many (default: every GPU, or 8 virtual devices of the CPU). device: "cpu", "cuda", or "auto": GPUs
    where JAX sees one. precision: fp64 lets JAX compute in it, which it otherwise does not, whatever it is given.
    """
    with imports(__name__):
        jax = import_module("jax")
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")  # or JAX would look for GPUs, and take memory on them
    with contextlib.suppress(RuntimeError):  # JAX has its devices already: those of an earlier call
        jax.config.update("jax_num_cpu_devices", devices or VIRTUAL)
    jax.config.update("jax_enable_x64", precision == "fp64")
    on_gpus = device != "cpu" and jax.default_backend() == "gpu"
    # There JAX multiplies fp32 matrices with fewer digits (TF32) unless told otherwise, which PyTorch does not. On the
    # CPU it never does, and the same words would keep it from its fastest kernels.
    jax.config.update("jax_default_matmul_precision", "highest" if on_gpus else None)
    if device == "cuda" and not on_gpus:
        raise UserError("--device cuda, but JAX sees no GPU here: use --device cpu, or install JAX for your GPUs")
    there = jax.devices("gpu" if on_gpus else "cpu")
    if devices and devices > len(there):
        what = "GPU" if on_gpus else "device"
        rest = "or --device cpu" if on_gpus else "or start a new process: JAX makes devices of a CPU once"
        seen = f"JAX has {len(there)} {what}{'s' * (len(there) > 1)} here"
        raise UserError(f"--devices {devices}, but {seen}: give at most {len(there)}, {rest}")
    used = tuple(there[: devices or len(there)])
    kind = torch.device("cuda" if on_gpus else "cpu")
    return World(0, 0, len(used), socket.gethostname(), kind, "xla", devices=used)


def run(main, config):
    """Call ``main(config, world)``. A user's error ends the process with a sentence and exit code 2."""
    try:
        progress.report()
        refuse_several(dict(os.environ))
        main(config, load(config.devices, config.device, config.precision))
    except UserError as error:
        with contextlib.suppress(SystemExit):
            options.exit_with_error(str(error), launched=True)
        os._exit(2)  # at once: the threads of a read that failed would each end in a traceback
    except KeyboardInterrupt:
        sys.exit(130)


def refuse_several(environ: dict):
    """UserError where torchrun, or srun with several tasks, would start one whole run each."""
    step = environ.get("SLURM_STEP_NUM_TASKS", "1") if "SLURM_STEP_ID" in environ else "1"
    several = max(environ.get("WORLD_SIZE", "1"), step, key=int)
    if several != "1":
        raise UserError(f"{several} processes were started, and one drives all devices: use python, or srun --ntasks=1")


def free_memory(world: World) -> float:
    """Bytes that each device can still allocate: its own on a GPU, its part of what the machine has on the CPU."""
    if world.device.type == "cpu":
        return host_memory.free() / world.world_size
    stats = [device.memory_stats() for device in world.devices]
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)


def needed(step) -> int:
    """Bytes that each device needs for a compiled step, as the compiler has planned it: nothing is allocated yet."""
    compiled = hlo.memory(step)
    return compiled["arguments"] + _within(compiled)


def _within(compiled: dict) -> int:
    """Of ``hlo.memory``: what a step needs beside what it is given. Donated arguments become results."""
    return compiled["temporary"] + compiled["outputs"] - compiled["aliased"]


def versions() -> dict[str, str]:
    """{package: version}, for a record."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}


# What is measured


def bytes_on_each(tree, world: World) -> list[int]:
    """Bytes of a tree of arrays that lie on each device."""
    leaves = import_module("jax").tree.leaves(tree)
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    return [sum(shard.data.nbytes for shard in shards if shard.device == device) for device in world.devices]


def measured(training, world: World, ends: list[float], global_batch: int) -> dict:
    """{"memory", "time", "traffic", "compile_seconds"} for a record (``meters.Meter.summary``).

    training: gpt_jax.py's. ends: when each step was done, in seconds. What persists is counted on the devices; what a
    step needs beside it, and what it sends, is read from the compiled program.
    """
    durations = [end - start for start, end in itertools.pairwise(ends)][meters.FIRST_TIMED_STEP - 1 :]
    return {
        "memory": _memory(training, world),
        "time": meters.times(durations, global_batch),
        "traffic": hlo.collectives(training.step.as_text(), dict(training.mesh.shape)),
        "compile_seconds": training.compile_seconds,
    }


def _memory(training, world: World) -> dict:
    params, state = bytes_on_each(training.params, world), bytes_on_each(training.state, world)
    compiled = hlo.memory(training.step)
    start = dict.fromkeys(CATEGORIES, 0) | {"parameters": params[0], "optimizer state": state[0]}
    start["activations"] = compiled["arguments"] - params[0] - state[0]  # the batch
    within = _within(compiled)
    peak = start | {"temporary": within}
    return {
        "peak": peak,
        "peak_phase": "step",  # a compiled one is not divided into forward, backward and optimizer
        "peak_operator": None,
        "start": start,
        "timeline": [["start", *start.values()], ["step", *peak.values()]],
        "peak_by_rank": [p + s + start["activations"] + within for p, s in zip(params, state, strict=True)],
        "allocator": None,
        "compiled": compiled,
    }
