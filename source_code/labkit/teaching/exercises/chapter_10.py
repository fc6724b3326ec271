# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 10, many nodes."""

import math
from functools import cache
from itertools import product
from typing import NamedTuple

from planner import predict
from planner.timing import cost
from torch.distributed.device_mesh import DeviceMesh

from labkit.running.lab import Lab
from labkit.teaching.exercises import Do, on_ranks, unanswered


class Way(NamedTuple):
    """Configuration of a step. The ranks form a mesh of replicas × shards; each rank's sequences are split into micro-batches.

    kept: whether gathered parameters stay gathered from forward to backward (read by the learner's ``choose``). sync:
    when gradients are reduced, after "every" or the "last" micro-batch. peak: GiB per rank, predicted by the planner.
    """

    shards: int
    replicas: int
    micro_batches: int
    kept: bool
    sync: str
    peak: float

    def __str__(self):
        what = "kept" if self.kept else "freed"
        return f"{self.replicas} × {self.shards}, micro-batches {self.micro_batches}, {what}, sync {self.sync}"


SEQUENCES = 4  # per step and rank
LLAMA = {"preset": "llama3-8b", "seq_len": 8192, "precision": "bf16", "recompute": "full"}
CLUSTERS = [(2, 8, 60), (2, 8, 50), (4, 8, 110), (16, 8, 110), (16, 8, 60), (16, 8, 50)]  # nodes, ranks on each, GiB


def settings(way: Way) -> dict:
    """Return the options of gpt_fsdp.py for this way."""
    return {
        "mesh": f"{way.replicas}x{way.shards}",
        "batch_size": SEQUENCES // way.micro_batches,
        "accumulate": way.micro_batches,
        "reshard_after_forward": str(not way.kept).lower(),
        "sync": way.sync,
    }


def plan_of(way: Way, device: str = "cuda", **model):
    """Return the plan of a way. model: other options of gpt_fsdp.py (default: Llama 3 8B in bf16)."""
    ranks = way.shards * way.replicas
    return Lab(ranks=ranks, device=device).plan("gpt_fsdp.py", **(model or LLAMA), **settings(way))


@cache
def ways(nodes: int, per_node: int, device: str = "cuda", **model) -> list[Way]:
    """List all ways that 10.0 chooses from: the model is sharded over all ranks, or over the ranks of a node."""
    result = []
    for shards, micro, kept in product((nodes * per_node, per_node), (1, 2, 4), (False, True)):
        for sync in ("every", "last") if micro > 1 else ("last",):
            way = Way(shards, nodes * per_node // shards, micro, kept, sync, 0.0)
            peak = predict.total(plan_of(way, device, **model).peak()[1])
            result.append(way._replace(peak=peak / 2**30))
    return result


def gigabytes(way: Way, per_node: int) -> float:
    """Predict the GB (1000³ bytes) that leave a node per step of Llama 3 8B, with ring algorithms."""
    plan = plan_of(way)
    return cost.inter_node_bytes(plan.traffic(), plan, per_node) / 1e9


def law(way: Way, nodes: int, per_node: int, gather=2, reduce=4) -> float:
    """Return the bytes per parameter that leave a node in a step. gather, reduce: bytes per gathered or reduced element."""
    reductions = way.micro_batches if way.sync == "every" else 1
    if way.replicas > 1:
        return 2 * reduce * reductions * (nodes - 1) / nodes
    gathers = way.micro_batches * (1 if way.kept else 2)
    return (gather * gathers + reduce * reductions) * (1 - 1 / (nodes * per_node))


def _gathered_by_replicas(way, nodes, per_node) -> float:
    gathers = way.micro_batches * (1 if way.kept else 2) if way.replicas > 1 else 0
    return law(way, nodes, per_node) + 2 * gathers


SLIPS = {  # {description of a mistake: the formula that results from it}
    "With replicas, all-gathers stay within a node: only the all-reduce leaves it": _gathered_by_replicas,
    "Hybrid sharding does not always send the fewest bytes: all-gathers are in bf16 (2 bytes), reductions in fp32 (4 bytes), "
    "and an all-reduce sends its bytes twice": lambda *about: law(*about, gather=4),
    "Each micro-batch gathers again if the model is sharded over all ranks": lambda way, *about: law(
        way if way.sync == "every" else way._replace(micro_batches=1), *about
    ),
    'With sync "every" the gradients are reduced after each micro-batch': lambda way, *about: law(
        way._replace(sync="last"), *about
    ),
    "Minimize the bytes sent, not the memory": lambda way, *about: way.peak,
}


def judge_choice(choose) -> str:
    chosen = []
    for nodes, per_node, limit in CLUSTERS:
        offered = ways(nodes, per_node)
        way_chosen = choose(list(offered), nodes, per_node, limit)
        if unanswered(way_chosen):
            return "not answered yet"
        if way_chosen not in offered:
            return f"not quite: return one of the ways passed to choose; {way_chosen!r} is not one of them"
        chosen.append(way_chosen)
    for (nodes, per_node, limit), way_chosen in zip(CLUSTERS, chosen, strict=True):
        where = f"{nodes} nodes of {per_node}, {limit} GiB: yours is {way_chosen}"
        if way_chosen.peak > limit:
            return f"not quite: {where}. Its peak is {way_chosen.peak:.0f} GiB"
        sent, least = (gigabytes(way, per_node) for way in (way_chosen, _least(law, nodes, per_node, limit)))
        if sent > 1.001 * least:
            return f"not quite: {where}. {sent:.1f} GB leave a node; another way that fits sends {least:.1f} GB{_slip(chosen)}"
    return "right"


def _least(law, nodes, per_node, limit) -> Way:
    fitting = [way for way in ways(nodes, per_node) if way.peak <= limit]
    return min(fitting, key=lambda way: law(way, nodes, per_node))


def _slip(chosen) -> str:
    """Return the mistake whose formula explains the choice on every cluster, or ""."""
    for slip, wrong in SLIPS.items():
        by_it = [
            (wrong(way, nodes, per_node), wrong(_least(wrong, nodes, per_node, limit), nodes, per_node))
            for way, (nodes, per_node, limit) in zip(chosen, CLUSTERS, strict=True)
        ]
        if all(mine <= 1.001 * least for mine, least in by_it):
            return f". {slip}"
    return ""


# 10.1: a mesh for ranks that lie on nodes in any order

PLACES = {  # {how six ranks lie: the node of each}
    "dealt to two nodes in turn": "ABABAB",
    "four on one node and two on another": "ABAABA",
    "five on one node and one on another": "AAAAAB",
}


def _built(me, node_mesh) -> list:
    """Return for each of PLACES what ``node_mesh`` built on this rank: (names, rows), what else it is, or None."""
    found = []
    for nodes in PLACES.values():
        mesh = node_mesh(me, nodes[me.rank])
        if isinstance(mesh, DeviceMesh):
            mesh = mesh.mesh_dim_names, mesh.mesh.tolist()
        elif not unanswered(mesh):
            mesh = repr(mesh)
        found.append(None if unanswered(mesh) else mesh)
    return found


def judge_mesh(node_mesh) -> str:
    of_ranks = on_ranks(_built, node_mesh, ranks=len(next(iter(PLACES.values()))))
    if all(mesh is None for found in of_ranks for mesh in found):
        return "not answered yet"
    for (where, nodes), of_place in zip(PLACES.items(), zip(*of_ranks, strict=True), strict=True):
        for rank, mesh in enumerate(of_place):
            if mesh != of_place[0]:
                return f"not quite: six ranks, {where}: rank {rank} builds {mesh}, rank 0 {of_place[0]}; all must build the same"
        if difference := mesh_differs(nodes, of_place[0]):
            return f"not quite: six ranks, {where}: {difference}"
    return "right"


def mesh_differs(nodes: str, mesh) -> str | None:
    """Return what is wrong with a mesh, or None.

    Args:
        nodes: the node of each rank.
        mesh: (its dimensions' names, its rows), or what was returned instead.
    """
    if not isinstance(mesh, tuple):
        return f"node_mesh should return a DeviceMesh, not {mesh}"
    names, rows = mesh
    if names != ("replicate", "shard"):
        return f'the dimensions are named {names}; fully_shard replicates along the first: ("replicate", "shard")'
    if missing := sorted(set(range(len(nodes))) - {rank for row in rows for rank in row}):
        return f"rank {missing[0]} is in no row"
    for row in rows:
        if len(on := sorted({nodes[rank] for rank in row})) > 1:
            return f"row {row} spans the nodes {' and '.join(on)}: its all-gathers cross the network"
    longest = math.gcd(*(nodes.count(node) for node in set(nodes)))
    if len(rows[0]) < longest:
        return f"rows of {len(rows[0])} stay within nodes, but so do rows of {longest}, with smaller shards"
    return None


EXERCISES = {
    "10.0": Do(
        title="the least bytes out of a node that fit",
        level=3,
        minutes=18,
        judge=judge_choice,
        hint="Write a formula for the bytes per parameter that leave a node. With replicas 1, each micro-batch gathers once or\n"
        "twice (2 bytes), and each reduction sends 4, all times (W − 1)/W. With replicas, only the all-reduce leaves.",
        solution="""
def choose(ways, nodes, per_node, limit):
    def leaves(way):
        reductions = 1 if way.sync == "last" else way.micro_batches
        if way.replicas > 1:  # all-gathers stay within the node; an all-reduce of fp32 gradients takes two passes of 4 bytes
            return 2 * 4 * reductions * (nodes - 1) / nodes
        gathers = way.micro_batches * (1 if way.kept else 2)  # in bf16, again for each micro-batch
        W = nodes * per_node
        return (2 * gathers + 4 * reductions) * (W - 1) / W

    return min((way for way in ways if way.peak <= limit), key=leaves)
""",
    ),
    "10.1": Do(
        title="rows that stay within nodes",
        level=2,
        minutes=12,
        judge=judge_mesh,
        hint="Gather all names with dist.all_gather_object, as check_mesh does, and list the ranks of each node. All rows of a mesh\n"
        "have one length, and a node's ranks must fill whole rows: which lengths are possible for nodes of 4 and 2 ranks, or\n"
        "of 5 and 1? DeviceMesh(me.device.type, rows, mesh_dim_names=(…)) takes rows in any order of ranks.",
        solution="""
import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

def node_mesh(me, node):
    nodes = [None] * me.world_size
    dist.all_gather_object(nodes, node)  # so that every rank computes the same rows
    ranks_of = {}
    for rank, name in enumerate(nodes):
        ranks_of.setdefault(name, []).append(rank)
    # A row's length must divide the number of ranks of every node: the longest is their greatest common divisor.
    length = math.gcd(*map(len, ranks_of.values()))
    rows = [ranks[i : i + length] for ranks in ranks_of.values() for i in range(0, len(ranks), length)]
    return DeviceMesh(me.device.type, rows, mesh_dim_names=("replicate", "shard"))
""",
    ),
}
