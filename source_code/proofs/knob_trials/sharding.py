# SPDX-License-Identifier: BSD-3-Clause
"""Trials of fully_shard's arguments: what is a unit, among which ranks it is sharded, and along which dimension."""

import functools

import torch
from labkit.measuring import process_groups
from labkit.measuring.trace import local
from labkit.training import fsdp2_internals
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from proofs.knob_trials.bench import (
    HEAD,
    LAYER,
    LAYERS,
    WEIGHTS,
    Net,
    agree,
    batch_of,
    blueprint,
    installed,
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

UNITS = LAYERS + 1


@trial("fully_shard: module", "each layer, then the root")
def layers_and_root(me):
    return planned(me.world_size), trace(me, sharded(me)).summary


@trial("fully_shard: module", "the root alone")
def root_alone(me):
    model = fully_shard(Net(), mesh=mesh_of(me))
    return planned(me.world_size, blueprint(wrapped=False)), trace(me, model).summary


@trial("fully_shard: module", "[layers[2], layers[3]] as a list: one unit")
def one_unit_of_two_layers(me):
    model, mesh = Net(), mesh_of(me)
    for unit in (model.layers[0], model.layers[1], [model.layers[2], model.layers[3]], model):
        fully_shard(unit, mesh=mesh)
    return planned(me.world_size, blueprint(pair=2)), trace(me, model).summary


@trial("fully_shard: mesh", "one dimension of 4 ranks", ranks=4)
def one_dimension(me):
    return planned(4), trace(me, sharded(me)).summary


@trial("fully_shard: mesh", "2 replicas × 2 shards", ranks=4)
def two_dimensions(me):
    return planned(4, replicas=2), trace(me, sharded(me, mesh=mesh_of(me, 2, 2))).summary


@trial("fully_shard: mesh", "none given for any unit: the groups of all ranks", ranks=4)
def no_mesh(me):
    model = Net()
    before = process_groups.count()
    for unit in (*model.layers, model):
        fully_shard(unit)
    return {"new process groups": 0}, {"new process groups": process_groups.count() - before}


@trial("fully_shard: reshard_after_forward", "not given: True, except for the root", ranks=4)
def default(me):
    return planned(4), trace(me, sharded(me)).summary


def _root_gathered_again(prediction: dict) -> dict:
    return prediction | {f"all-gather of {HEAD}": 2}


@trial("fully_shard: reshard_after_forward", "True for the root, too", ranks=4)
def true_for_the_root(me):
    return _root_gathered_again(planned(4)), trace(me, sharded(me, reshard_after_forward=True)).summary


@trial("fully_shard: reshard_after_forward", "False", ranks=4)
def false(me):
    prediction, found = planned(4, reshard="false"), trace(me, sharded(me, reshard_after_forward=False)).summary
    if installed() < (2, 15):  # 2.11 frees a gather's buffer later in forward, whose end is then the peak
        del prediction["peak"], found["peak"]
    return prediction, found


@trial("fully_shard: reshard_after_forward", "2, on 4 ranks", ranks=4)
def two(me):
    mesh = mesh_of(me)
    before = process_groups.count()
    model = sharded(me, mesh=mesh, reshard_after_forward=2)
    found = {"new process groups": process_groups.count() - before}
    prediction = _root_gathered_again(planned(4, reshard="2")) | {"new process groups": 2 * UNITS}
    return prediction, trace(me, model).summary | found


# Placement

GATHERS, REDUCTIONS = 2 * LAYERS * LAYER + HEAD, WEIGHTS  # bytes of a step's


@trial("fully_shard: shard_placement_fn", "lambda p: Shard(1)")
@trial("fully_shard: shard_placement_fn", "lambda p: Shard(1), on 4 ranks", ranks=4)
def second_dimension(me):
    """Gathers are copied once more, to be put together along the dimension; gradients, too, to be cut along it."""
    usual = trace(me, sharded(me)).allocated
    model = sharded(me, shard_placement_fn=lambda p: Shard(1))
    found = trace(me, model)
    copies = {"copied in a step": GATHERS + REDUCTIONS}
    return planned(me.world_size, shard_dim=1) | copies, found.summary | {"copied in a step": found.allocated - usual}


@trial("fully_shard: shard_placement_fn", "Shard(1), where 32 columns are not divisible by 3", ranks=3)
def uneven_second_dimension(me):
    found = raised(lambda: fully_shard(Net(), mesh=mesh_of(me), shard_placement_fn=lambda p: Shard(1)))
    return {"raises": "NotImplementedError"}, {"raises": found}


@trial("fully_shard: shard_placement_fn", "Shard(0), where 16 rows are not divisible by 3", ranks=3)
def uneven_first_dimension(me):
    """The shard is padded: the last rank stores fewer rows, and communicates as many."""
    model = fully_shard(Net(), mesh=mesh_of(me))
    padded = LAYERS * 11 * 32 * 4 * 3 + 6 * 32 * 4 * 3
    rows = (11, 11, 10)[me.rank] * LAYERS + (6, 6, 4)[me.rank]
    predicted = {"shards": rows * 32 * 4} | traffic(all_gather={padded: 1}, reduce_scatter={padded: 1})
    found = trace(me, model)
    return predicted, {"shards": sum(local(p).nbytes for p in model.parameters())} | found.traffic


def _experts(me):
    """Return a model whose layers are sharded among 2 of 4 ranks, and whose head among all, in one unit."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "expert"))["expert"]
    everyone, head = mesh_of(me), (16, 32)
    placement = fsdp2_internals.placement_on(pairs, Shard(0))
    return fully_shard(Net(), mesh=everyone, shard_placement_fn=lambda p: None if p.shape == head else placement)


@trial("ShardPlacementResult.placement", "Shard(0) on a mesh of its own", ranks=4)
def placement_on_a_mesh(me):
    found = trace(me, _experts(me))
    sizes = {LAYERS * LAYER: 1, HEAD: 1}
    predicted = {"between steps": LAYERS * LAYER // 2 + HEAD // 4}
    return predicted | traffic(all_gather=sizes, reduce_scatter=sizes), {"between steps": found.between} | found.traffic


@trial("ShardPlacementResult.mesh_info", "2 of 4 ranks: gradients", ranks=4)
def gradients_on_a_mesh(me):
    """The two pairs of ranks never exchange these gradients: whole, they are equal within a pair only."""
    model = _experts(me)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch_of(me)])
    words = ("layers equal on all ranks", "head equal on all ranks")
    whole = model.layers[0].weight.full_tensor(), model.head.weight.full_tensor()
    return dict(zip(words, (False, True), strict=True)), dict(zip(words, map(agree, whole), strict=True))


@trial("fully_shard: ignored_params", "{layers[0].weight}")
def ignored(me):
    model = Net()
    kept = model.layers[0].weight
    sharded(me, model, ignored_params={kept})
    found, ranks = trace(me, model), me.world_size
    sizes = {LAYER: LAYERS - 1, HEAD: 1}
    predicted = {"between steps": LAYER + (WEIGHTS - LAYER) // ranks, "its weights equal on all ranks": False}
    predicted |= traffic(all_gather=sizes | {LAYER: 2 * (LAYERS - 1)}, reduce_scatter=sizes)
    agrees = agree(kept.detach())
    return predicted, {"between steps": found.between, "its weights equal on all ranks": agrees} | found.traffic


# A mesh with further dimensions: parameters are DTensors on it


@functools.cache
def _mesh(names: tuple[str, str]):
    """Return one mesh for all trials: fully_shard asks whether it is the DTensors' own, not whether it is equal."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def _spmd(placements: dict[str, object], **dims):
    """Shard a network on a mesh of 2 × 2, and return (bytes of this rank's shards, the traffic of gathering it)."""
    from torch.distributed.fsdp import DataParallelMeshDims  # not in every version

    mesh, model = _mesh(tuple(placements)), Net()
    for module in (*model.layers, model.head):
        weight = distribute_tensor(module.weight.detach(), mesh, list(placements.values()))
        module.weight = torch.nn.Parameter(weight)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    shards = sum(local(p.detach()).nbytes for p in model.parameters())
    return {"between steps": shards} | watch(model, model.unshard).traffic


TENSOR = {"dp": Replicate(), "tp": Shard(0)}
DATA = {"a": Replicate(), "b": Replicate()}


@trial("fully_shard: dp_mesh_dims", "tensor-parallel weights, sharded along dp", ranks=4)
def beside_tensor_parallelism(me):
    return {"between steps": WEIGHTS // 4} | traffic(all_gather={WEIGHTS // 2: 1}), _spmd(TENSOR, shard="dp")


@trial("DataParallelMeshDims.shard", 'a tuple of names: ("a", "b")', ranks=4)
def two_names(me):
    return {"between steps": WEIGHTS // 4} | traffic(all_gather={WEIGHTS: 1}), _spmd(DATA, shard=("a", "b"))


@trial("DataParallelMeshDims.replicate", 'replicate="a", shard="b": HSDP', ranks=4)
def replicated_and_sharded(me):
    return {"between steps": WEIGHTS // 2} | traffic(all_gather={WEIGHTS: 1}), _spmd(DATA, replicate="a", shard="b")


@trial("DataParallelMeshDims.replicate", 'replicate=("a", "b") alone: DDP', ranks=4)
def replicated(me):
    return {"between steps": WEIGHTS}, _spmd(DATA, replicate=("a", "b"))
