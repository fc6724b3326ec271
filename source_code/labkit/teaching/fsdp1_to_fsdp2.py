# SPDX-License-Identifier: BSD-3-Clause
"""Map each argument and method of FSDP1 to its replacement in FSDP2, with a function that tries it (chapter 09's table).

ROWS lists (FSDP1's name, FSDP2's name, function). A function runs on four ranks, takes x of shape (3, 6) on the rank's
device, and returns (whether FSDP2 did it, a description of what was observed).
"""

import inspect
import warnings
from collections import Counter

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = []


def row(fsdp1, fsdp2):
    """Add the decorated function to the table."""
    return lambda function: ROWS.append((fsdp1, fsdp2, function)) or function


def try_rows(me) -> list[tuple[bool, str]]:
    """Run each row's function on this rank and return its results."""
    torch.set_default_device(me.device)
    warnings.filterwarnings("ignore", ".*returned a view tensor")  # CommDebugMode decomposes a linear layer
    return [function(torch.ones(3, 6)) for _, _, function in ROWS]


def toy():
    """Return two linear layers with a ReLU between them, with equal weights on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))


def wrapped(model, **options):
    """Shard each linear layer as its own unit, then the root."""
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


# What is sharded, and how


@row("`sharding_strategy=FULL_SHARD`", "`reshard_after_forward=True`, the default for all but the root")
def full_shard(x):
    model = wrapped(toy())
    model(x)
    return isinstance(model[0].weight, DTensor), "a DTensor again after forward"


@row("`sharding_strategy=SHARD_GRAD_OP`", "`reshard_after_forward=False`")
def shard_grad_op(x):
    model = wrapped(toy(), reshard_after_forward=False)
    model(x)
    return not isinstance(model[0].weight, DTensor), "whole after forward"


def two_by_two(x):
    return init_device_mesh(x.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))


@row("`sharding_strategy=HYBRID_SHARD`, `device_mesh`, `process_group`", "`mesh` with two dimensions")
def hybrid_shard(x):
    placements = wrapped(toy(), mesh=two_by_two(x))[0].weight.placements
    return placements == (Replicate(), Shard(0)), f"placements {placements}"


@row("`sharding_strategy=_HYBRID_SHARD_ZERO2`", "that `mesh`, and `reshard_after_forward=False`")
def hybrid_shard_zero2(x):
    model = wrapped(toy(), mesh=two_by_two(x), reshard_after_forward=False)
    model(x)
    return not isinstance(model[0].weight, DTensor), "whole after forward, as with `SHARD_GRAD_OP`"


@row("`sharding_strategy=NO_SHARD`", "a `mesh` of shape (ranks, 1), or DDP")
def no_shard(x):
    mesh = init_device_mesh(x.device.type, (4, 1), mesh_dim_names=("replicate", "shard"))
    model, scale = wrapped(toy(), mesh=mesh), torch.distributed.get_rank() + 1
    (scale * model(x)).sum().backward()
    whole, mean = len(model[2].bias.to_local()) == 2, 2.5 * len(x)  # 2.5: of the scales 1 to 4
    averaged = torch.allclose(model[2].bias.grad.to_local(), torch.full_like(model[2].bias.grad.to_local(), mean))
    return whole and averaged, "each rank holds every row; gradients are averaged over 4 ranks"


@row("`auto_wrap_policy`", "call `fully_shard` in a loop, inner modules first")
def auto_wrap_policy(x):
    units = sum(isinstance(module, FSDPModule) for module in wrapped(toy()).modules())
    return units == 3, f"{units} units: two layers and the root"


@row("`ignored_modules`, `ignored_states`", "`ignored_params={…}`. **Trap** of both: their gradients are not reduced")
def ignored(x):
    model, scale = toy().to(x.device), torch.distributed.get_rank() + 1
    wrapped(model, ignored_params={model[2].bias})
    kinds = [isinstance(model[2].bias, DTensor), isinstance(model[2].weight, DTensor)]
    (scale * model(x)).sum().backward()
    own = (model[2].bias.grad == scale * len(x)).all().item()  # this rank's, not the mean over ranks
    return kinds == [False, True] and own, "the bias stays whole, with each rank's own gradient; the weight is sharded"


@row("`device_id`, `param_init_fn`", "build on `meta`, shard, `to_empty(device=…)`, fill in the values")
def param_init_fn(x):
    with torch.device("meta"):
        model = toy()
    wrapped(model, mesh=init_device_mesh(x.device.type, (4,)))
    sharded_on = {str(parameter.device) for parameter in model.parameters()}
    model.to_empty(device=x.device)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 2.0)
    sums = sum(p.full_tensor().sum().item() for p in model.parameters())
    return sharded_on == {"meta"} and sums == 2 * 92, f"cut on meta, filled on {model[0].weight.device.type}: 92 × 2.0"


@row("`use_orig_params`", "nothing to set: parameters keep their names")
def use_orig_params(x):
    names = [name for name, _ in wrapped(toy()).named_parameters()]
    return names == [name for name, _ in toy().named_parameters()], f"names {', '.join(names)}"


# When and how parameters are gathered and gradients reduced


class Collectives(TorchDispatchMode):
    """Count FSDP's collectives, by kind, and collect the data types of reduced gradients."""

    def __init__(self):
        super().__init__()
        self.calls, self.reduced_in = Counter(), set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor first: it turns this into operators on local tensors
        if "allgather" in str(operator):
            self.calls["all-gather"] += 1
        if "reduce_scatter" in str(operator):
            self.calls["reduce-scatter"] += 1
            self.reduced_in.add(args[1].dtype)
        return operator(*args, **(kwargs or {}))


def reduced_in(model, x) -> str:
    """Return the data type in which a step reduces gradients, such as "bfloat16"."""
    with Collectives() as seen:
        model(x).sum().backward()
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in seen.reduced_in))


WIDE = tuple(map(int, torch.__version__.split(".")[:2])) >= (
    2,
    15,
)  # since 2.15, FSDP2 reduces fp32 parameters in fp32 unless reduce_dtype is set


@row(
    "`mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)`",
    "`mp_policy=MixedPrecisionPolicy(…)`. **Trap:** since torch 2.15, add `reduce_dtype=torch.bfloat16` to reduce as before",
)
def mixed_precision(x):
    bf16 = torch.bfloat16
    flat = FullyShardedDataParallel(toy(), device_id=x.device, mixed_precision=MixedPrecision(param_dtype=bf16))
    policies = MixedPrecisionPolicy(param_dtype=bf16), MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)
    models = [flat, *(wrapped(toy(), mp_policy=policy) for policy in policies)]
    before, same_words, as_before = (reduced_in(model, x) for model in models)
    done = (before, same_words, as_before) == ("bfloat16", "float32" if WIDE else "bfloat16", "bfloat16")
    return done, f"reduced in {before}; by the same words in {same_words}; with `reduce_dtype` in {as_before}"


@row("`MixedPrecision(buffer_dtype=…)`", "none: cast buffers yourself")
def buffer_dtype(x):
    dtypes = []
    for flat in (True, False):
        model = toy()
        model.register_buffer("scale", torch.ones(3))
        if flat:
            policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
            model = FullyShardedDataParallel(model, device_id=x.device, mixed_precision=policy)
        else:
            fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model(x)
        dtypes += [buffer.dtype for buffer in model.buffers()]
    return dtypes == [torch.bfloat16, torch.float32], "a buffer is bf16 under FSDP1; under FSDP2 it stays fp32"


@row("`cpu_offload=CPUOffload(True)`", "`offload_policy=CPUOffloadPolicy(…)`")
def cpu_offload(x):
    policy = CPUOffloadPolicy(pin_memory=x.device.type == "cuda")
    model = wrapped(toy(), offload_policy=policy, mesh=init_device_mesh(x.device.type, (4,)))
    model(x).sum().backward()
    devices = {model[0].weight.device.type, model[0].weight.grad.device.type}
    without = "" if x.device.type != "cpu" else ", where they would be without it: a GPU is needed to tell"
    return devices == {"cpu"}, f"shard and gradient on the {' and '.join(devices)}{without} (chapter 6)"


@row("`limit_all_gathers`", "none needed: FSDP2 orders its frees on the GPU's streams")
def limit_all_gathers(x):
    return "limit_all_gathers" not in inspect.signature(fully_shard).parameters, "no such argument"


def gathers_at_relu(x, model) -> tuple[int, int, int]:
    """Count the all-gathers called until forward reaches the ReLU, until backward reaches it, and in total."""
    seen = []

    def note(*_):
        seen.append(sum(n for operator, n in calls.get_comm_counts().items() if "gather" in str(operator)))

    def watch(module, inputs, y):
        note()
        y.register_hook(note)

    model[1].register_forward_hook(watch)
    with CommDebugMode() as calls:
        model(x).sum().backward()
        note()
    return tuple(seen)


@row("`backward_prefetch`", "built in, one unit ahead; `set_modules_to_backward_prefetch([…])` for more")
def backward_prefetch(x):
    _, at_relu, all_of_them = gathers_at_relu(x, wrapped(toy()))
    return at_relu == all_of_them, "the first layer is fetched before its turn in backward"


@row("`forward_prefetch`", "`set_modules_to_forward_prefetch([…])`")
def forward_prefetch(x):
    model = wrapped(toy())
    without, _, _ = gathers_at_relu(x, wrapped(toy()))
    model[0].set_modules_to_forward_prefetch([model[2]])
    ahead, _, _ = gathers_at_relu(x, model)
    return ahead > without, f"{ahead} units gathered when the first layer has computed, else {without}"


@row(
    "`no_sync()`",
    "`set_requires_gradient_sync(False)`. **Trap:** it does not end with a block; call it with `True` before the last micro-batch",
)
def no_sync(x):
    model, alone = wrapped(toy()), toy()
    model.set_requires_gradient_sync(False)
    waits = []
    for _ in range(2):
        model(x).sum().backward()
        waits.append(model[0].weight.grad is None)
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    # Every rank has the same x, so the mean over ranks equals each rank's gradient.
    (3 * alone(x.cpu()).sum()).backward()
    same = torch.allclose(model[0].weight.grad.full_tensor().cpu(), alone[0].weight.grad)
    return all(waits) and same, "nothing reduced after two backwards; the sum of all three after the next"


# Working with a sharded model: load, clip, save, inspect


@row("`sync_module_states`", "`set_model_state_dict(…, broadcast_from_rank0=True)`, or one seed for all")
def sync_module_states(x):
    model, rank = wrapped(toy()), torch.distributed.get_rank()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp.set_model_state_dict(model, toy().to(x.device).state_dict() if rank == 0 else {}, options=options)
    return torch.equal(model[0].weight.full_tensor().cpu(), toy()[0].weight.cpu()), "rank 0's values on all ranks"


@row(
    "`clip_grad_norm_()`",
    "`torch.nn.utils.clip_grad_norm_(model.parameters(), …)`, which returns a DTensor: `.full_tensor()`",
)
def clip_grad_norm(x):
    model, alone = wrapped(toy()), toy()
    norms = []
    for one, data in ((model, x), (alone, x)):
        one(data).sum().backward()
        norms.append(nn.utils.clip_grad_norm_(one.parameters(), 1.0))
    norm = norms[0].full_tensor()
    return isinstance(norms[0], DTensor) and torch.allclose(
        norm, norms[1]
    ), f"norm {norm:.3f}, in one process {norms[1]:.3f}"


@row("`state_dict_type(SHARDED_STATE_DICT)`", "`model.state_dict()`")
def sharded_state_dict(x):
    values = wrapped(toy()).state_dict().values()
    return all(isinstance(value, DTensor) for value in values), f"{len(values)} DTensors"


@row(
    "`state_dict_type(FULL_STATE_DICT)`",
    "`get_model_state_dict(…)` with `full_state_dict=True`, whole on every rank; with `cpu_offload=True` too, on rank 0 alone",
)
def full_state_dict(x):
    model, weight, rank = wrapped(toy()), toy()[0].weight.cpu(), torch.distributed.get_rank()
    on_all_ranks, on_rank_0 = (
        dcp.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=alone))
        for alone in (False, True)
    )
    there = torch.equal(on_rank_0["0.weight"], weight) if rank == 0 else not on_rank_0
    return there and torch.equal(on_all_ranks["0.weight"].cpu(), weight), "whole on all ranks; then on rank 0 alone"


@row("`optim_state_dict()`", "`get_optimizer_state_dict(model, optimizer)`")
def optim_state_dict(x):
    model = wrapped(toy())
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    exp_avg = dcp.get_optimizer_state_dict(model, optimizer)["state"]["0.weight"]["exp_avg"]
    return exp_avg.placements == (Shard(0),), "moments by parameter name, each a DTensor"


@row("`summon_full_params()`", "`unshard()` … `reshard()`; to read one, `full_tensor()`")
def summon_full_params(x):
    model = wrapped(toy())
    model[0].unshard()
    whole = not isinstance(model[0].weight, DTensor)
    model[0].reshard()
    return whole and isinstance(model[0].weight, DTensor), "whole in between, a DTensor after"
