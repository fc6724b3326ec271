# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 00: wrap by size, and count the bytes of live tensors."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from labkit.teaching.exercises import Do, on_ranks, unanswered
from labkit.training.models import Net

# threshold: the units of Net; 1,290 is fc2's number of parameters
UNITS = {20_000: {"root", "fc1"}, 1_290: {"root", "conv2", "fc1", "fc2"}, 10_000_000: {"root"}}


def _gradients(model, images) -> dict:
    """Return {name: full gradient} of this rank's images, summed up."""
    model(images).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}


def _compared(me, wrap) -> dict:
    """Return {threshold: (units, names of parameters whose gradient is not the ranks' mean)}."""
    mesh = init_device_mesh(me.device.type, (me.world_size,))
    results = {}
    for threshold in UNITS:
        torch.manual_seed(0)
        model, replica = Net(dropout=False).double(), Net(dropout=False).double()
        replica.load_state_dict(model.state_dict())
        torch.manual_seed(me.rank)
        images = torch.rand(2, 1, 28, 28, dtype=torch.float64)
        wrap(model, mesh, threshold)
        units = {name or "root" for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        if not units and not results:  # with the first threshold, some layer is large enough
            return {}
        expected, wrong = _gradients(replica, images), []
        for name, gradient in _gradients(model, images).items():
            dist.all_reduce(expected[name], op=dist.ReduceOp.SUM)
            if not torch.allclose(gradient, expected[name] / me.world_size):
                wrong.append(name)
        results[threshold] = units, wrong
    return results


def _judge_wrap(wrap) -> str:
    results, *_ = on_ranks(_compared, wrap, ranks=2)
    if not results:
        return "not answered yet"
    for threshold, (units, wrong) in results.items():
        expected = UNITS[threshold]
        if "root" not in units:
            return f"not quite: the model itself is no unit, so nobody shards {', '.join(sorted(wrong))} or averages it"
        if units != expected:
            cause = "fc2 has exactly 1,290 parameters" if threshold == 1_290 else "count the elements of each child"
            names = [", ".join(sorted(each)) for each in (units, expected)]
            return f"not quite: with a threshold of {threshold:,} the units are {names[0]}, not {names[1]}: {cause}"
        if wrong:
            return f"not quite: the gradients of {', '.join(wrong)} are not the mean over the ranks"
    return "right"


def _cases():
    """Yield (description, tensors, bytes of their storages, the likely mistake behind another result)."""
    x, y = torch.ones(100, 10), torch.ones(100, 10)
    yield "one tensor of 1,000 float32", [x], 4000, "elements × bytes per element"
    yield "1,000 elements in bfloat16", [x.bfloat16()], 2000, "not every element takes 4 bytes: read it from the tensor"
    yield "two tensors of the same shape", [x, y], 8000, "equal in size is not the same storage"
    yield "a tensor and a view of all of it", [x, x.view(-1)], 4000, "they share one storage, which counts once"
    yield "one row of a tensor", [x[0]], 4000, "a view keeps the whole storage alive, not only what it shows"
    yield "two halves of one tensor", [x[:50], x[50:]], 4000, "they start at different offsets of the same storage"
    yield "one element expanded to 1,000", [torch.ones(1).expand(1000)], 4, "the storage holds one element only"


def _judge_live_bytes(live_bytes) -> str:
    for case, tensors, expected, cause in _cases():
        result = live_bytes(tensors)
        if unanswered(result):
            return "not answered yet"
        if result != expected:
            return f"not quite: {case} occupy {expected:,} bytes, your function returns {result:,}: {cause}"
    return "right"


EXERCISES = {
    "00.0": Do(
        title="wrap by size",
        level=2,
        minutes=5,
        judge=_judge_wrap,
        hint="A loop over model.children(); for each, the sum of p.numel() over its parameters(); fully_shard(child, "
        "mesh=mesh) if it is large enough. After the loop, fully_shard(model, mesh=mesh) takes the rest.",
        solution="""
# Children first: fully_shard(model) takes all parameters below it that no unit has taken yet.
from torch.distributed.fsdp import fully_shard


def wrap(model, mesh, min_num_params):
    for child in model.children():
        if sum(p.numel() for p in child.parameters()) >= min_num_params:
            fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)
""",
    ),
    "00.1": Do(
        title="live bytes",
        level=2,
        minutes=8,
        judge=_judge_live_bytes,
        hint="Ignore the shapes. Call tensor.untyped_storage() on each tensor: a storage has data_ptr() and nbytes(). "
        "Count each storage once.",
        solution="""
# Storages occupy memory; tensors are views of them. Several tensors may share a storage, and a view of a single row
# keeps the whole storage alive. Two storages are the same if they start at the same address.
def live_bytes(tensors):
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
""",
    ),
}
