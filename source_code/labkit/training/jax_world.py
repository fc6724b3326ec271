# SPDX-License-Identifier: BSD-3-Clause
"""Use JAX: check its version, select devices, and measure a run for its record.

JAX is optional: it is imported only when a function of this file is called, for gpt_jax.py and notebook 14.
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
from labkit.running import options, preemption, progress, ranks

OLDEST = (0, 10)  # jax.shard_map, AxisType, jax_num_cpu_devices, and recomputation that saves memory
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint")
VIRTUAL = 8  # default number of virtual devices on the CPU


@dataclass(frozen=True)
class World(ranks.Rank):
    """The one process that drives all devices. Its record counts devices as ranks: ``world_size`` is their number."""

    devices: tuple = ()  # JAX's

    @property
    def hardware(self) -> str:
        """Name of the devices for a figure's caption, as in ``records.hardware``."""
        return self.devices[0].device_kind if self.device.type == "cuda" else records.hardware(self.device)


def check():
    """Check that JAX and the other ``PACKAGES`` are installed.

    Raises:
        UserError: one is missing, or JAX is too old.
    """
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(f"{package} is not installed, which FSDP in JAX needs: run make jax") from None
        if package == "jax" and tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise UserError(f"JAX {version} is installed, and {oldest} is the oldest supported version: run make jax")


@contextlib.contextmanager
def imports(name: str) -> Iterator[None]:
    """Check JAX around its imports in the module ``name``; in a script, exit with the message instead of raising.

    Raises:
        UserError: JAX is not available.
    """
    try:
        check()
    except UserError as error:
        if name == "__main__":
            options.exit_with_error(str(error), launched=True)
        raise
    # By default JAX reserves three quarters of a GPU's memory, which PyTorch in the same notebook would lack.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    yield


def load(devices: int | None = None, device: str = "auto", precision: str = "fp32") -> World:
    """Configure JAX, and return the devices of a run.

    Args:
        devices: their number (default: every GPU, or 8 virtual devices on the CPU).
        device: "cpu", "cuda", or "auto": GPUs if JAX sees any.
        precision: "fp64" enables JAX's 64-bit types, which are otherwise converted to 32 bits.

    Raises:
        UserError: there are fewer devices, or none of this type.
    """
    with imports(__name__):
        jax = import_module("jax")
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")  # or JAX would look for GPUs, and take memory on them
    with contextlib.suppress(RuntimeError):  # JAX has created its devices in an earlier call
        jax.config.update("jax_num_cpu_devices", devices or VIRTUAL)
    jax.config.update("jax_enable_x64", precision == "fp64")
    on_gpus = device != "cpu" and jax.default_backend() == "gpu"
    # On GPUs, JAX by default computes fp32 matmuls in TF32; PyTorch does not. On the CPU it never does, and the same
    # setting would disable its fastest kernels.
    jax.config.update("jax_default_matmul_precision", "highest" if on_gpus else None)
    if device == "cuda" and not on_gpus:
        raise UserError("--device cuda, but JAX sees no GPU here: use --device cpu, or install JAX for your GPUs")
    available = jax.devices("gpu" if on_gpus else "cpu")
    if devices and devices > len(available):
        what = "GPU" if on_gpus else "device"
        rest = "or --device cpu" if on_gpus else "or start a new process: JAX makes devices of a CPU once"
        seen = f"JAX has {len(available)} {what}{'s' * (len(available) > 1)} here"
        raise UserError(f"--devices {devices}, but {seen}: give at most {len(available)}, {rest}")
    used = tuple(available[: devices or len(available)])
    kind = torch.device("cuda" if on_gpus else "cpu")
    return World(0, 0, len(used), socket.gethostname(), kind, "xla", devices=used)


def run(main, config):
    """Call ``main(config, world)``; exit as ``ranks.run`` does: 2 after a user's error, 75 after preemption."""
    try:
        progress.report()
        refuse_several(dict(os.environ))
        main(config, load(config.devices, config.device, config.precision))
    except UserError as error:
        with contextlib.suppress(SystemExit):
            options.exit_with_error(str(error), launched=True)
        os._exit(2)  # immediately: the threads of a failed read would each print a traceback
    except preemption.Preempted:
        sys.exit(preemption.EXIT_REQUEUE)
    except KeyboardInterrupt:
        sys.exit(130)


def refuse_several(environ: dict):
    """Check that a launcher has started one process only: each process would be a complete run.

    Raises:
        UserError: torchrun or srun has started several.
    """
    step = environ.get("SLURM_STEP_NUM_TASKS", "1") if "SLURM_STEP_ID" in environ else "1"
    several = max(environ.get("WORLD_SIZE", "1"), step, key=int)
    if several != "1":
        raise UserError(f"{several} processes were started, and one drives all devices: use python, or srun --ntasks=1")


def free_memory(world: World) -> float:
    """Return the bytes that each device can still allocate: a GPU's own, or an equal part of the host's memory."""
    if world.device.type == "cpu":
        return host_memory.free() / world.world_size
    stats = [device.memory_stats() for device in world.devices]
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)


def refuse_if_too_big(needed: int, config, world):
    """Check that each device has ``needed`` free bytes.

    Raises:
        UserError: it has not.
    """
    free = free_memory(world)
    if needed > free:
        raise UserError(
            f"--preset {config.preset} with --strategy {config.strategy} and {config.accumulate:,} x "
            f"{config.batch_size:,} sequences on each of {world.world_size} devices needs more than "
            f"{needed / 2**30:,.1f} GiB there, and {free / 2**30:,.1f} GiB are free: take a smaller preset, fewer "
            "sequences or more devices"
        )


def needed(step) -> int:
    """Return the bytes that a compiled step needs on each device, as planned by XLA, before anything is allocated."""
    compiled = hlo.memory(step)
    return compiled["arguments"] + _within(compiled)


def _within(compiled: dict) -> int:
    """Return the bytes that a step needs in addition to its arguments; donated arguments become outputs."""
    return compiled["temporary"] + compiled["outputs"] - compiled["aliased"]


def versions() -> dict[str, str]:
    """Return {package: version}, for a record."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}


# Measurements


def bytes_on_each(tree, world: World) -> list[int]:
    """Return the bytes of a tree of arrays on each device."""
    held = dict.fromkeys(world.devices, 0)
    for leaf in import_module("jax").tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return [held[device] for device in world.devices]


def measured(training, world: World, ends: list[float], global_batch: int) -> dict:
    """Return the measurements of a run for its record, as ``meters.Meter.summary`` does.

    Persistent memory is counted on the devices; transient memory and traffic are read from the compiled program.

    Args:
        training: gpt_jax.py's.
        world: the devices.
        ends: time at the end of each step, in seconds.
        global_batch: sequences per step, on all devices together.

    Returns:
        {"memory", "time", "traffic", "compile_seconds"}.
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
