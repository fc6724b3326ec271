"""Simulate a training step of a model of one's own: any module, on one rank of a world that is not there.

Used by plan.py; simulate.py does the work, on tensors without memory.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path

import torch
from planner import networks
from torch import nn
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


def step(build, ranks: int, strategy: str, precision: str = "fp32", reshard: str = "true") -> dict:
    """A step of AdamW on rank 0 of ``ranks``: what ``simulate.step`` returns.

    build() → (module, inputs, loss), where loss(module, *inputs) is the number to minimise.
    Joins the world: once in a process.
    """
    if strategy not in ("single", "fsdp1", "fsdp2"):
        raise UserError(f"{strategy} cannot be simulated: choose single, fsdp1 or fsdp2")
    simulate.join(ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def setup():
        module, inputs, loss_of = build()
        if strategy != "single":
            with simulate.ranks_are_real():
                module = sharded(module, strategy, precision, reshard, mesh)
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], foreach=True)

        def train(*inputs):
            by_autocast = precision == "bf16" and strategy == "single"  # FSDP casts by its own policy
            with torch.autocast("cpu", torch.bfloat16) if by_autocast else contextlib.nullcontext():
                loss = loss_of(module, *inputs)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()

        return module, optimizer, tuple(inputs), train

    return simulate.step(setup)


def units_of(module: nn.Module) -> list[nn.Module]:
    """What becomes a unit of its own: the members of the outermost ModuleLists, each of them once.

    A list inside a member, such as the experts of a block, is gathered with it. A member that is a list itself has no
    forward around which to gather: its members stand for it.
    """
    units = []
    for child in module.children():
        is_unit = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        units += [child] if is_unit else units_of(child)
    return list(dict.fromkeys(units))


def sharded(module, strategy, precision, reshard, mesh):
    """The module with FSDP1 or FSDP2 around its units and itself."""
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if precision == "bf16" else {}
    units = units_of(module)
    if strategy == "fsdp1":
        whole = ShardingStrategy.FULL_SHARD if reshard == "true" else ShardingStrategy.SHARD_GRAD_OP
        return FullyShardedDataParallel(
            module,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            auto_wrap_policy=lambda module, recurse, **_: recurse or any(module is unit for unit in units),
            sharding_strategy=whole,
            mixed_precision=MixedPrecision(**bf16) if bf16 else None,
        )
    keep = int(reshard) if reshard.isdecimal() else reshard == "true"
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=keep, mp_policy=MixedPrecisionPolicy(**bf16))
    return fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**bf16))


def load(text: str):
    """The function that FILE.py:function names."""
    path, _, name = text.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"--module {text}: there is no file {path}")
    spec = importlib.util.spec_from_file_location("own_model", path)
    if spec is None:
        raise UserError(f"--module {text}: {path} is not a file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    with told(f"{path} cannot be imported"):
        spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise UserError(f"--module {text}: {path} has no function {name}")
    return getattr(module, name)


@contextlib.contextmanager
def told(what: str):
    """Tell an error of the user's own code as a sentence."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    except Exception as error:  # it may raise anything
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{what}: {type(error).__name__}: {first_line}") from error


def blueprint(name: str, build) -> networks.Blueprint:
    """A network of one's own as far as its parameters go: enough for what stays between steps and what is sent."""
    with told(f"{name} fails"), torch.device("meta"):
        returned = build()
        if not (isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[0], torch.nn.Module)):
            raise UserError("it must return (module, inputs, loss)")
    module = returned[0]
    units = units_of(module)
    taken = {parameter for unit in units for parameter in unit.parameters()}
    groups = [(f"unit {i}", list(unit.parameters()), True) for i, unit in enumerate(units)]
    groups.insert(0, ("root", [p for p in module.parameters() if p not in taken], False))
    modules = tuple(
        networks.SizedModule(
            unit,
            {str(i): tuple(p.shape) for i, p in enumerate(parameters)},
            forward=None,
            wrapped=wrapped,
            frozen=frozenset(str(i) for i, p in enumerate(parameters) if not p.requires_grad),
        )
        for unit, parameters, wrapped in groups
    )
    return networks.Blueprint(name, modules, batch=None, loss=None, samples=1, flops=0.0)
