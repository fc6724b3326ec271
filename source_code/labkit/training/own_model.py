# SPDX-License-Identifier: BSD-3-Clause
"""Simulate a training step of the user's own model: any module, on one rank of a simulated world.

Used by plan.py; based on labkit/measuring/simulate.py.
"""

import contextlib
import importlib.util
import sys
from collections import Counter
from pathlib import Path

import torch
from planner.models import networks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

from labkit import UserError
from labkit.measuring import simulate
from labkit.measuring.gpu_operators import GpuOperators
from labkit.training.units import units_of

STRATEGIES = ("single", "ddp", "zero1", "fsdp1", "fsdp2")


def step(
    build,
    ranks: int,
    strategy: str,
    precision: str = "fp32",
    reshard: str = "true",
    gpu: GpuOperators | None = None,
) -> dict:
    """Simulate a step with AdamW on one rank of a world of ``ranks``: the one that needs most.

    Args:
        build: returns (module, inputs, loss), where loss(module, *inputs) is the scalar to minimize.
        ranks: size of the simulated world.
        strategy: one of ``STRATEGIES``.
        precision: "fp32" or "bf16" (FSDP's mixed precision; elsewhere autocast).
        reshard: "true", "false", or a number of shards, as --reshard-after-forward.
        gpu: a GPU's operators instead of the CPU's.

    Returns:
        Memory and traffic as ``simulate.step`` returns them.

    Raises:
        UserError: the strategy or the model cannot be simulated.
    """
    if strategy not in STRATEGIES:
        raise UserError(f"{strategy} cannot be simulated: choose {', '.join(STRATEGIES[:-1])} or {STRATEGIES[-1]}")
    simulate.join(ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    shards = strategy.startswith("fsdp")

    def setup():
        module, inputs, loss_of = build()
        if shards:
            with simulate.real_tensors():
                module = sharded(module, strategy, precision, reshard, mesh)
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            raise UserError("no parameter of it is trained: leave requires_grad of one at least")
        optimizer = torch.optim.AdamW(largest_part(trained, ranks) if strategy == "zero1" else trained, foreach=True)

        def train(*inputs):
            by_autocast = precision == "bf16" and not shards  # FSDP casts by its own policy
            with torch.autocast("cpu", torch.bfloat16) if by_autocast else contextlib.nullcontext():
                loss = loss_of(module, *inputs)
            loss.backward()
            del loss
            optimizer.step()
            module.zero_grad()

        return module, optimizer, tuple(inputs), train

    traced = simulate.step(setup, gpu, ddp_reductions=int(strategy in ("ddp", "zero1")))
    if strategy == "zero1":  # after the step each rank broadcasts the parameters that it has updated
        sent = Counter(parameter.nbytes for parameter in _trained(build))
        traced["traffic"] += [{"kind": "broadcast", "bytes": b, "dimension": None, "count": n} for b, n in sent.items()]
    return traced


def _trained(build) -> list:
    """Return the trained parameters of the user's own model, on the meta device."""
    with torch.device("meta"):
        return [p for p in build()[0].parameters() if p.requires_grad]


def largest_part(parameters: list, ranks: int) -> list:
    """Return the parameters whose rank has most of all, as ZeroRedundancyOptimizer assigns them (planner/parallel/zero.py)."""
    parts = [[] for _ in range(ranks)]
    for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
        min(parts, key=lambda part: sum(p.numel() for p in part)).append(parameter)
    return max(parts, key=lambda part: sum(p.numel() for p in part))


def sharded(module, strategy, precision, reshard, mesh):
    """Wrap the FSDP units of a module, and the module itself, with FSDP1 or FSDP2.

    Args:
        module: any module.
        strategy: "fsdp1" or "fsdp2".
        precision, reshard: as for ``step``.
        mesh: a one-dimensional device mesh.
    """
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if precision == "bf16" else {}
    units = units_of(module)
    if strategy == "fsdp1":
        sharding = ShardingStrategy.FULL_SHARD if reshard == "true" else ShardingStrategy.SHARD_GRAD_OP
        return FullyShardedDataParallel(
            module,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            auto_wrap_policy=lambda module, recurse, **_: recurse or any(module is unit for unit in units),
            sharding_strategy=sharding,
            mixed_precision=MixedPrecision(**bf16) if bf16 else None,
        )
    keep = int(reshard) if reshard.isdecimal() else reshard == "true"
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=keep, mp_policy=MixedPrecisionPolicy(**bf16))
    return fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**bf16))


def load(text: str):
    """Load a function from "FILE.py:function".

    Raises:
        UserError: there is no such file or function, or the file cannot be imported.
    """
    path, _, name = text.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"--module {text}: there is no file {path}")
    spec = importlib.util.spec_from_file_location("own_model", path)
    if spec is None:
        raise UserError(f"--module {text}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    with as_user_error(f"{path} cannot be imported"):
        spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise UserError(f"--module {text}: {path} has no function {name}")
    return getattr(module, name)


@contextlib.contextmanager
def as_user_error(what: str):
    """Convert an error in the user's own code to a UserError of one sentence that begins with ``what``."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    except Exception as error:  # it may raise anything
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{what}: {type(error).__name__}: {first_line}") from error


def blueprint(name: str, build) -> networks.Blueprint:
    """Describe the user's own model by its parameters, which is enough for persistent memory and traffic.

    Args:
        name: for messages.
        build: as for ``step``.

    Raises:
        UserError: ``build`` fails, or returns something else.
    """
    with as_user_error(f"{name} fails"), torch.device("meta"):
        returned = build()
        if not (isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[0], torch.nn.Module)):
            raise UserError("it must return (module, inputs, loss)")
    module = returned[0]
    units = units_of(module)
    taken = {parameter for unit in units for parameter in unit.parameters()}
    groups = [(f"unit {i}", list(unit.parameters()), True) for i, unit in enumerate(units)]
    groups.insert(0, ("root", [p for p in module.parameters() if p not in taken], False))
    modules = tuple(
        networks.AbstractModule(
            unit,
            {str(i): tuple(p.shape) for i, p in enumerate(parameters)},
            forward=None,
            wrapped=wrapped,
            frozen=frozenset(str(i) for i, p in enumerate(parameters) if not p.requires_grad),
        )
        for unit, parameters, wrapped in groups
    )
    return networks.Blueprint(name, modules, batch=None, loss=None, samples=1, flops=0.0)
