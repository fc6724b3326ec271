# SPDX-License-Identifier: BSD-3-Clause
"""Trials of FSDP1's constructor: what each argument changes, next to its counterpart in FSDP2."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn import functional as F

from proofs.knob_trials.bench import (
    BATCH,
    CPU,
    HEAD,
    LAYER,
    LAYERS,
    WEIGHTS,
    WIDTH,
    Chain,
    Net,
    agree,
    batch_of,
    mesh_of,
    order_of,
    planned,
    raised,
    trace,
    traffic,
    trial,
    watch,
)

BF16, FP32 = torch.bfloat16, torch.float32


def wrapped(model=None, **options) -> nn.Module:
    """Wrap each layer of a ``Net``, then the root."""
    model = model or Net()
    layers = set(model.layers)
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in layers)
    return FullyShardedDataParallel(model, **{"auto_wrap_policy": policy, "device_id": CPU} | options)


def plan(me, **options) -> dict:
    """Return ``planned`` for FSDP1."""
    return planned(me.world_size, strategy="fsdp1", **options)


@trial("FullyShardedDataParallel: auto_wrap_policy", "each layer a unit")
def units(me):
    return plan(me), trace(me, wrapped()).summary


@trial("FullyShardedDataParallel: auto_wrap_policy", "None: one unit")
def one_unit(me):
    found = trace(me, wrapped(auto_wrap_policy=None))
    return {"between steps": WEIGHTS // me.world_size} | traffic(
        all_gather={WEIGHTS: 1}, reduce_scatter={WEIGHTS: 1}
    ), {"between steps": found.between} | found.traffic


# Strategies


@trial("FullyShardedDataParallel: sharding_strategy", "not given", ranks=4)
@trial("ShardingStrategy.FULL_SHARD", "FULL_SHARD", ranks=4)
def full_shard(me):
    return plan(me), trace(me, wrapped()).summary


@trial("ShardingStrategy.SHARD_GRAD_OP", "SHARD_GRAD_OP", ranks=4)
def shard_grad_op(me):
    found = trace(me, wrapped(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))
    return plan(me, reshard="false"), found.summary


@trial("ShardingStrategy.NO_SHARD", "NO_SHARD", ranks=4)
def no_shard(me):
    found = trace(me, wrapped(sharding_strategy=ShardingStrategy.NO_SHARD))
    predicted = {"between steps": WEIGHTS} | traffic(all_reduce={LAYER: LAYERS, HEAD: 1})
    return predicted, {"between steps": found.between} | found.traffic


@trial("ShardingStrategy.HYBRID_SHARD", "HYBRID_SHARD, 2 × 2 ranks", ranks=4)
@trial("FullyShardedDataParallel: device_mesh", "2 × 2 ranks, with HYBRID_SHARD", ranks=4)
def hybrid_shard(me):
    found = trace(me, wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh_of(me, 2, 2)))
    return plan(me, replicas=2), found.summary


@trial("ShardingStrategy._HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2, 2 × 2 ranks", ranks=4)
def hybrid_zero2(me):
    found = trace(me, wrapped(sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2, device_mesh=mesh_of(me, 2, 2)))
    return plan(me, replicas=2, reshard="false"), found.summary


@trial("FullyShardedDataParallel: process_group", "the rank's pair, of 4 ranks", ranks=4)
def group(me):
    """Sharded among two, and reduced among two: the pairs train apart."""
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    model = wrapped(process_group=pairs[me.rank // 2])
    found = trace(me, model)
    with FullyShardedDataParallel.summon_full_params(model):
        equal = agree(model.head.weight.detach())
    predicted = {"between steps": WEIGHTS // 2, "weights equal on all ranks": False}
    predicted |= traffic(all_gather={LAYER: 2 * LAYERS, HEAD: 1}, reduce_scatter={LAYER: LAYERS, HEAD: 1})
    return predicted, {"between steps": found.between, "weights equal on all ranks": equal} | found.traffic


# Order


def chain(**options):
    """Return a ``Chain`` in FSDP1: a, b, and c are units, and the root has d."""
    model = Chain()
    some = {model.a, model.b, model.c}
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in some)
    return FullyShardedDataParallel(model, **{"auto_wrap_policy": policy, "device_id": CPU} | options)


FORWARD = "gather d, gather a, forward a, gather b, forward b, gather c, forward c, forward d"
AHEAD = "gather d, gather a, gather b, forward a, gather c, forward b, forward c, forward d"
# The root's reduction is the last: its parameters were made views of its flat one before all else in forward.
PRE = "gather c, backward d, gather b, backward c, reduce c, gather a, backward b, reduce b, backward a, reduce a, reduce d"
POST = "backward d, gather c, backward c, gather b, reduce c, backward b, gather a, reduce b, backward a, reduce a, reduce d"
NONE = "backward d, gather c, backward c, reduce c, gather b, backward b, reduce b, gather a, backward a, reduce a, reduce d"


@trial("BackwardPrefetch.BACKWARD_PRE", "the default")
@trial("FullyShardedDataParallel: backward_prefetch", "not given")
def backward_pre(me):
    return {"order": f"{FORWARD}, {PRE}"}, {"order": order_of(chain(), 2)}


@trial("BackwardPrefetch.BACKWARD_POST", "BACKWARD_POST")
def backward_post(me):
    model = chain(backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    return {"order": f"{FORWARD}, {POST}"}, {"order": order_of(model, 2)}


def _later(me, **how):
    """As a gradient is computed, no other unit is gathered. So the peak moves from layers[1] to layers[0].

    There, one more shard is reduced, and the gradients of the layer's input and output are gone.
    """
    prediction = plan(me)
    prediction["peak"] += LAYER // me.world_size - 2 * BATCH * WIDTH * 4 - LAYER
    return prediction, trace(me, wrapped(**how)).summary


@trial("BackwardPrefetch.BACKWARD_POST", "BACKWARD_POST: a step's memory")
@trial("BackwardPrefetch.BACKWARD_POST", "BACKWARD_POST: a step's memory, on 4 ranks", ranks=4)
def backward_post_memory(me):
    return _later(me, backward_prefetch=BackwardPrefetch.BACKWARD_POST)


@trial("FullyShardedDataParallel: backward_prefetch", "None: a step's memory")
def backward_none_memory(me):
    return _later(me, backward_prefetch=None)


@trial("FullyShardedDataParallel: backward_prefetch", "None")
def backward_none(me):
    return {"order": f"{FORWARD}, {NONE}"}, {"order": order_of(chain(backward_prefetch=None), 2)}


@trial("FullyShardedDataParallel: forward_prefetch", "True, in the first step")
def forward_prefetch_first(me):
    """The order of the units is known from the second step on."""
    return {"order": f"{FORWARD}, {PRE}"}, {"order": order_of(chain(forward_prefetch=True), 1)}


# A unit's parameters become views of its flat one before the unit before it computes; so autograd, which runs what was made
# last first, takes the flat gradient after that unit's backward.
LATE = "gather c, backward d, gather b, backward c, gather a, backward b, reduce c, backward a, reduce b, reduce a, reduce d"


@trial("FullyShardedDataParallel: forward_prefetch", "True, in the second step")
def forward_prefetch(me):
    return {"order": f"{AHEAD}, {LATE}"}, {"order": order_of(chain(forward_prefetch=True), 2)}


@trial("FullyShardedDataParallel: forward_prefetch", "True: a step's memory")
@trial("FullyShardedDataParallel: forward_prefetch", "True: a step's memory, on 4 ranks", ranks=4)
def forward_prefetch_memory(me):
    """At the peak, one more unit is gathered, and one more gradient is whole, not this rank's shard of it."""
    prediction = plan(me)
    prediction["peak"] += 2 * LAYER - LAYER // me.world_size
    return prediction, trace(me, wrapped(forward_prefetch=True)).summary


@trial("FullyShardedDataParallel: limit_all_gathers", "False, on a CPU")
def no_limit(me):
    """It makes the CPU wait for the GPU's stream; a CPU has none."""
    return plan(me), trace(me, wrapped(limit_all_gathers=False)).summary


# Construction


@trial("FullyShardedDataParallel: use_orig_params", "False, the default")
def flat(me):
    """The optimizer sees one flat parameter in each unit."""
    model = wrapped(use_orig_params=False)
    names = sorted({name.rpartition(".")[2] for name, _ in model.named_parameters()})
    return plan(me) | {"names": ["_flat_param"]}, trace(me, model).summary | {"names": names}


@trial("FullyShardedDataParallel: use_orig_params", "True")
def original(me):
    """The flat parameters' gradients survive zero_grad(): they are freed as the next forward begins."""
    prediction = plan(me)
    prediction["between steps"] += WEIGHTS // me.world_size
    model = wrapped(use_orig_params=True)
    names = sorted({name.rpartition(".")[2] for name, _ in model.named_parameters()})
    return prediction | {"names": ["weight"]}, trace(me, model).summary | {"names": names}


@trial("FullyShardedDataParallel: use_orig_params", "True, with layers[0].weight frozen")
def frozen(me):
    """One unit has a frozen and a trained weight: with flat parameters only this way. A whole unit's gradient is reduced."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[0].weight.requires_grad_(False)
    refused = raised(lambda: FullyShardedDataParallel(model, device_id=CPU, use_orig_params=False))
    model = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    found = watch(model, lambda: model(torch.ones(2, 8)).sum().backward()).traffic
    size = 2 * 8 * 8 * 4
    return traffic(all_gather={size: 1}, reduce_scatter={size: 1}) | {"False": "ValueError"}, found | {"False": refused}


@trial("FullyShardedDataParallel: sync_module_states", "False; each rank has weights of its own")
def no_sync_of_states(me):
    """Each rank cuts its shard out of its own weights: of the head, rank 0's half has zeros, rank 1's ones."""
    model = Net()
    nn.init.constant_(model.head.weight, me.rank)
    model = wrapped(model, use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model):
        measured = model.head.weight.sum().item()
    return {"sum of the head's elements": HEAD / 4 / 2}, {"sum of the head's elements": measured}


@trial("FullyShardedDataParallel: sync_module_states", "True, on a CPU")
def sync_of_states(me):
    return {"raises": "ValueError"}, {"raises": raised(lambda: wrapped(sync_module_states=True))}


@trial("FullyShardedDataParallel: param_init_fn", "to_empty and ones, of a model on the meta device")
def init(me):
    def ones(module):
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    with torch.device("meta"):
        model = Net()
    model = wrapped(model, param_init_fn=ones)
    shards = sum(parameter.sum().item() for parameter in model.parameters())
    return {"sum of this rank's shards": WEIGHTS / 4 / me.world_size}, {"sum of this rank's shards": shards}


@trial("FullyShardedDataParallel: device_id", 'torch.device("cpu"), and none where there is no GPU')
def device(me):
    """Without it, FSDP1 refuses where it finds no GPU."""
    measured = {"a CPU": raised(wrapped), "none": raised(lambda: wrapped(device_id=None))}
    return {"a CPU": "nothing", "none": "RuntimeError"}, measured


@trial("FullyShardedDataParallel: ignored_modules", "[layers[0]]")
@trial("FullyShardedDataParallel: ignored_states", "[layers[0]]")
def ignored(me):
    """Whole, and trained by each rank on its own."""
    model = Net()
    kept = model.layers[0].weight
    model = wrapped(model, ignored_states=[model.layers[0]])
    found = trace(me, model)
    sizes = {LAYER: LAYERS - 1, HEAD: 1}
    predicted = {"between steps": LAYER + (WEIGHTS - LAYER) // me.world_size, "its weights equal on all ranks": False}
    predicted |= traffic(all_gather={LAYER: 2 * (LAYERS - 1), HEAD: 1}, reduce_scatter=sizes)
    return predicted, {
        "between steps": found.between,
        "its weights equal on all ranks": agree(kept.detach()),
    } | found.traffic


@trial("FullyShardedDataParallel: cpu_offload", "CPUOffload(False)")
def no_offload(me):
    return plan(me), trace(me, wrapped(cpu_offload=CPUOffload(False))).summary


@trial("CPUOffload.offload_params", "True, where there is no GPU")
def offload(me):
    """It always pins memory."""
    x, y = batch_of(me)

    def code():
        model = wrapped(cpu_offload=CPUOffload(True))
        F.nll_loss(model(x), y).backward()

    return {"raises": "RuntimeError"}, {"raises": raised(code)}


@trial("FullyShardedDataParallel.no_sync", "for the first of 2 micro-batches")
def no_sync(me):
    def run(model, optimizer, batches):
        losses = []
        with model.no_sync():
            losses.append(F.nll_loss(model(batches[0][0]), batches[0][1]))
            losses[-1].backward()
        losses.append(F.nll_loss(model(batches[1][0]), batches[1][1]))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return plan(me, micro_batches=2, sync="last"), trace(me, wrapped(), 2, run).summary
