# SPDX-License-Identifier: BSD-3-Clause
"""Trials of how gradients are reduced: when, among whom, by what they are divided, and what is retained."""

import torch
import torch.distributed as dist
from labkit.measuring import process_groups
from labkit.measuring.trace import local
from labkit.training.fsdp2_internals import ReduceScatter
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from proofs.knob_trials.bench import (
    HEAD,
    LAYER,
    LAYERS,
    batch_of,
    gradient,
    linear,
    mesh_of,
    planned,
    raised,
    sharded,
    step,
    trace,
    traffic,
    trial,
    watch,
)


def only_last(name: str):
    """Return a function for ``step``'s ``before``: call a method with whether it is the last micro-batch."""
    return lambda model, is_last: getattr(model, name)(is_last)


# When


@trial("FSDPModule.set_requires_gradient_sync", "True for the last of 2 micro-batches")
def sync_last(me):
    found = trace(me, sharded(me), 2, lambda *of: step(*of, before=only_last("set_requires_gradient_sync")))
    return planned(me.world_size, micro_batches=2, sync="last"), found.summary


@trial("FSDPModule.set_requires_gradient_sync", "True for both micro-batches")
def sync_every(me):
    return planned(me.world_size, micro_batches=2), trace(me, sharded(me), 2).summary


@trial("FSDPModule.set_requires_all_reduce", "True for the last of 2 micro-batches, 2 × 2 ranks", ranks=4)
def all_reduce_last(me):
    """Each micro-batch is reduced among the shards, and its result waits for the other replica."""
    model = sharded(me, mesh=mesh_of(me, 2, 2))
    found = trace(me, model, 2, lambda *of: step(*of, before=only_last("set_requires_all_reduce")))
    sizes = {LAYER: LAYERS, HEAD: 1}
    twice = {size: 2 * count for size, count in sizes.items()}
    predicted = traffic(
        all_gather={LAYER: 4 * LAYERS, HEAD: 2},
        reduce_scatter=twice,
        all_reduce={size // 2: count for size, count in sizes.items()},
    )
    model.set_requires_all_reduce(False)
    x, y = batch_of(me)
    F.nll_loss(model(x), y).backward()
    present = sum(p.grad is not None for p in model.parameters())
    return predicted | {"gradients before the all-reduce": 0}, found.traffic | {
        "gradients before the all-reduce": present
    }


def _backward_alone(me, prepare, parameters: list | None = None):
    """Return the model and the ``Traced`` of one backward.

    Args:
        me: this rank.
        prepare: prepare(model) runs before.
        parameters: a list for the sharded parameters: between, a module may have others.
    """
    model = sharded(me)
    trace(me, model)
    prepare(model)
    if parameters is not None:
        parameters.extend(model.parameters())
    x, y = batch_of(me)
    return model, watch(model, lambda: F.nll_loss(model(x), y).backward())


def by_hand(model):
    """Leave the end of backward to the caller."""
    model.set_manual_backward_finalization(True)


def reductions(traced) -> int:
    """Return how many reduce-scatters there were."""
    return sum(count for kind, count in traced.traffic.items() if kind.startswith("reduce-scatter"))


@trial("FSDPModule.set_is_last_backward", "False")
def not_the_last(me):
    """The last unit's packed gradient stays: that of layers[0], whose backward ends with the root's."""
    _, found = _backward_alone(me, lambda model: model.set_is_last_backward(False))
    return {"packed gradients left": LAYER}, {"packed gradients left": found.snapshots[-1]["reduce-scatter"]}


@trial("FSDPModule.set_manual_backward_finalization", "True")
def manual(me):
    """Two units wait for finalize_backward, the first layer and the root: their input needs no gradient."""
    model, found = _backward_alone(me, by_hand)
    measured = {"reduced by backward": reductions(found)}
    measured["reduced by finalize_backward"] = reductions(watch(model, model.finalize_backward))
    return {"reduced by backward": LAYERS - 1, "reduced by finalize_backward": 2}, measured


@trial("FSDPModule.finalize_backward", "not called before an optimizer step")
def not_finalized(me):
    """Nothing refuses: the optimizer skips the parameters whose gradients were not reduced."""
    parameters = []
    _backward_alone(me, by_hand, parameters)
    before = [local(p.detach()).clone() for p in parameters]
    torch.optim.SGD(parameters, lr=0.1).step()
    moved = [not torch.equal(old, local(p.detach())) for old, p in zip(before, parameters, strict=True)]
    return {"weights that the step changes": [False, *[True] * (LAYERS - 1), False]}, {
        "weights that the step changes": moved
    }


@trial("GradientReductionHandle.wait", "of finalize_backward(async_op=True)")
def finalized_later(me):
    """Until wait(), forward is refused, and the packed gradient of the last unit, the root, stays."""
    model, _ = _backward_alone(me, by_hand)
    x, _ = batch_of(me)
    handles = []
    pending = watch(model, lambda: handles.append(model.finalize_backward(async_op=True)))
    refused = raised(lambda: model(x))
    handles[0].wait()
    accepted = raised(lambda: model(x))
    names = ("packed gradients left", "forward before wait()", "forward after wait()")
    predicted = (HEAD, "RuntimeError", "nothing")
    measured = (pending.snapshots[-1]["reduce-scatter"], refused, accepted)
    return dict(zip(names, predicted, strict=True)), dict(zip(names, measured, strict=True))


# By what gradients are divided. Each rank's has (rank + 1) × scale in every element.


def ranks_sum(me) -> int:
    """Return 1 + 2 + … up to the number of ranks."""
    return me.world_size * (me.world_size + 1) // 2


@trial("FSDPModule.set_gradient_divide_factor", "not called: the number of ranks", ranks=4)
def mean(me):
    return {"gradient": ranks_sum(me) / 4}, {"gradient": gradient(me, linear())}


@trial("FSDPModule.set_gradient_divide_factor", "1.0, with gloo")
def sum_with_gloo(me):
    """A factor is NCCL's PREMUL_SUM, which gloo does not have."""
    model = linear()
    model.set_gradient_divide_factor(1.0)
    return {"raises": "RuntimeError"}, {"raises": raised(lambda: gradient(me, model))}


def summed(model):
    """Let a unit sum gradients instead of averaging them, with gloo, too."""
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    return model


@trial("FSDPModule.set_gradient_divide_factor", "1.0, with set_force_sum_reduction_for_comms(True)", ranks=4)
def sum_of_ranks(me):
    return {"gradient": ranks_sum(me)}, {"gradient": gradient(me, summed(linear()))}


@trial(
    "FSDPModule.set_gradient_divide_factor", "1.0, loss over the global number of tokens: 1, 2, 3, 4 tokens", ranks=4
)
def global_tokens(me):
    """A rank with k tokens, each of gradient k. The mean over tokens is not the mean of the ranks' means."""
    tokens = me.rank + 1
    of_all = sum(k for k in range(1, 5))
    measured = {
        "mean over all tokens": gradient(me, summed(linear()), rows=tokens, scale=1 / of_all),
        "mean of the ranks' means": gradient(me, linear(), rows=tokens, scale=1 / tokens),
    }
    predicted = {
        "mean over all tokens": sum(k * k for k in range(1, 5)) / of_all,
        "mean of the ranks' means": sum(range(1, 5)) / 4,
    }
    return predicted, {name: round(value, 6) for name, value in measured.items()}


@trial("FSDPModule.set_gradient_divide_factor", "on the root alone, of two units")
def factor_of_one_unit(me):
    """Divide factors are not recursive: the inner unit still averages."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.eye_(model[0].weight)
    model.append(nn.Linear(4, 4, bias=False))
    nn.init.eye_(model[1].weight)
    fully_shard(model[0], mesh=mesh_of(me))
    summed(fully_shard(model, mesh=mesh_of(me)))
    model(torch.full((1, 4), me.rank + 1.0)).sum().backward()
    names = ("inner unit", "root")
    measured = [local(layer.weight.grad).flatten()[0].item() for layer in model]
    return dict(zip(names, (1.5, 3.0), strict=True)), dict(zip(names, measured, strict=True))


@trial(
    "FSDPModule.set_reduce_scatter_divide_factor",
    "2.0: deprecated, the same as set_gradient_divide_factor(2.0)",
    ranks=4,
)
def old_name(me):
    model = linear()
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_divide_factor(2.0)
    return {"gradient": ranks_sum(me) / 2}, {"gradient": gradient(me, model)}


# Who reduces, and how


class Spy(ReduceScatter):
    """Reduce as PyTorch does, and note the operation."""

    def __init__(self):
        self.operations = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.operations.append("SUM" if op == dist.ReduceOp.SUM else "AVG" if op == dist.ReduceOp.AVG else "other")
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


@trial("FSDPModule.set_force_sum_reduction_for_comms", "False, and True", ranks=4)
def only_sums(me):
    """The reduction sums instead of averaging; the division is an operator of its own. Gradients are equal."""
    measured = {}
    for enable in (False, True):
        model, spy = linear(), Spy()
        model.set_custom_reduce_scatter(spy)
        model.set_force_sum_reduction_for_comms(enable)
        value = gradient(me, model)
        measured[", ".join(spy.operations)] = value
    return {"AVG": ranks_sum(me) / 4, "SUM": ranks_sum(me) / 4}, measured


class ByAllReduce(ReduceScatter):
    """Reduce by an all-reduce, of which each rank takes its part."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


@trial("FSDPModule.set_custom_reduce_scatter", "an all-reduce, of which each rank takes its part", ranks=4)
def by_all_reduce(me):
    model = linear()
    model.set_custom_reduce_scatter(ByAllReduce())
    found, value = {}, []
    found = watch(model, lambda: value.append(gradient(me, model))).traffic
    size = 4 * 4 * 4
    return traffic(all_gather={size: 1}, all_reduce={size: 1}) | {"gradient": 2.5}, found | {"gradient": value[0]}


@trial("FSDPModule.set_all_reduce_hook", "doubles what it is given", ranks=4)
def hook(me):
    """It runs once in each reduction, with this rank's shard, before gradients of earlier micro-batches are added."""
    model, sizes = linear(), []

    def double(reduced):
        sizes.append(reduced.nbytes)
        reduced *= 2

    model.set_all_reduce_hook(double)
    gradient(me, model)
    return {"gradient": 4 * 2.5, "bytes": [16, 16]}, {"gradient": gradient(me, model), "bytes": sizes}


@trial("FSDPModule.set_separate_reduce_scatter_group", "True, on the root and all below")
def separate_group(me):
    model = sharded(me)
    before = process_groups.count()
    model.set_separate_reduce_scatter_group()
    found = {"new process groups": process_groups.count() - before}
    return planned(me.world_size) | {"new process groups": 1}, trace(me, model).summary | found


@trial("FSDPModule.set_separate_reduce_scatter_group", "True, on one unit after another")
def group_of_each_unit(me):
    """Units share a group only within one call, even if they share their mesh."""
    model = sharded(me)
    before = process_groups.count()
    for unit in (*model.layers, model):
        unit.set_separate_reduce_scatter_group(recurse=False)
    return {"new process groups": LAYERS + 1}, {"new process groups": process_groups.count() - before}


# What is reduced, and what is retained


class Unused(nn.Module):
    """Two layers in one unit; forward takes the first ``used`` of them."""

    def __init__(self, used: int):
        super().__init__()
        self.layers, self.used = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2)), used

    def forward(self, x):
        return sum(layer(x) for layer in list(self.layers)[: self.used])


def _unused(me, used: int, reduce: bool) -> dict:
    model = fully_shard(Unused(used), mesh=mesh_of(me))
    if reduce:
        model.set_reduce_scatter_unused_params(True)
    found = watch(model, lambda: model(torch.full((1, 4), me.rank + 1.0)).sum().backward()).traffic
    found.pop(f"all-gather of {2 * 64}")
    grads = [layer.weight.grad for layer in model.layers]
    return found | {"second gradient": "none" if grads[1] is None else local(grads[1]).flatten()[0].item()}


@trial("FSDPModule.set_reduce_scatter_unused_params", "not called; a layer that no rank uses")
def unused(me):
    return traffic(reduce_scatter={64: 1}) | {"second gradient": "none"}, _unused(me, 1, False)


@trial("FSDPModule.set_reduce_scatter_unused_params", "True; a layer that no rank uses")
def unused_reduced(me):
    """Zeros are reduced for it, and its gradient is zero instead of None: an optimizer with weight decay changes it."""
    return traffic(reduce_scatter={128: 1}) | {"second gradient": 0.0}, _unused(me, 1, True)


@trial("FSDPModule.set_reduce_scatter_unused_params", "True; a layer that only rank 1 uses")
def used_by_one_rank(me):
    """Rank 1's gradient is 2, rank 0 adds zero."""
    return traffic(reduce_scatter={128: 1}) | {"second gradient": 1.0}, _unused(me, 1 + me.rank, True)


def _highest_retained(me, buffers: int) -> int:
    model = sharded(me)
    if buffers > 1:
        model.set_reduce_scatter_max_input_buffers(buffers)
    return trace(me, model).highest("reduce-scatter")


@trial("FSDPModule.set_reduce_scatter_max_input_buffers", "1, the default; 2; 3")
def buffers(me):
    """With the packed gradients of so many layers, there is one layer's own gradient, and the head's until the end."""
    predicted = {str(n): (n + 1) * LAYER + HEAD for n in (1, 2, 3)}
    return predicted, {str(n): _highest_retained(me, n) for n in (1, 2, 3)}


@trial("FSDPModule.set_reduce_scatter_max_input_buffers", "3: the peak")
def peak_with_buffers(me):
    model = sharded(me)
    model.set_reduce_scatter_max_input_buffers(3)
    return planned(me.world_size, reduce_buffers=3), trace(me, model).summary


@trial("FSDPModule.set_reduce_scatter_max_input_buffers", "3, called after the first forward")
def buffers_too_late(me):
    """The limit is read once, as the first forward begins: later calls change nothing, and nothing says so."""
    model = sharded(me)
    trace(me, model)
    model.set_reduce_scatter_max_input_buffers(3)
    return {"highest": 2 * LAYER + HEAD}, {"highest": trace(me, model).highest("reduce-scatter")}
