# SPDX-License-Identifier: BSD-3-Clause
"""Plans for the sweeps of claims: transformers on GPUs, their memory, traffic, and time. Imports no torch."""

from dataclasses import replace
from math import fsum

from planner import gpus, predict
from planner.models import networks
from planner.models.shapes import GPT_SHAPES, GPTShape
from planner.step.plan import Plan
from planner.timing import cost

GIB = 2**30
# LLaMA's largest (arXiv:2302.13971, table 2); its feed-forward layer has 2/3 · 4 · 8,192 elements, rounded up
LLAMA_65B = GPTShape(
    num_hidden_layers=80,
    hidden_size=8192,
    num_attention_heads=64,
    num_key_value_heads=64,
    intermediate_size=22016,
    vocab_size=32000,
)
SHAPES = GPT_SHAPES | {"llama-65b": LLAMA_65B}
NVLINK, NODE = cost.LINKS["nvlink"], 8  # GPUs of a node


def plan(model="llama3-8b", tokens=4096, *, layers=None, recompute="none", tensor=1, lora=None, **fields) -> Plan:
    """Plan a transformer's step on GPUs, with one sequence per rank.

    Args:
        model: a name in ``SHAPES``.
        tokens: of the sequence.
        layers: how many instead of the model's.
        recompute: one of ``networks.RECOMPUTE``.
        tensor: ranks that split every weight.
        lora: rank of adapters; then the base is frozen.
        fields: of ``Plan``; by default FSDP2 on 8 ranks with bf16 mixed precision. One rank is one process.
    """
    shape = SHAPES[model] if layers is None else replace(SHAPES[model], num_hidden_layers=layers)
    fields = {"strategy": "fsdp2", "ranks": 8, "precision": "bf16", "on_gpu": True} | fields
    if fields["ranks"] == 1:
        fields["strategy"] = "single"
    network = networks.gpt(shape, 1, tokens, recompute, lora, tp_degree=tensor)
    return Plan(network, **fields)


def in_one_unit(found: Plan) -> Plan:
    """Return the plan with every module in the root's unit."""
    modules = (replace(module, wrapped=False, grouped_with_next=False) for module in found.blueprint.modules)
    return replace(found, blueprint=replace(found.blueprint, modules=tuple(modules)))


def peak(found: Plan) -> int:
    """Return the peak of a step, in bytes."""
    return predict.total(found.peak()[1])


def kept(found: Plan) -> int:
    """Return what a rank stores from step to step, in bytes."""
    return predict.total(found.persistent())


def parameter_bytes(found: Plan) -> int:
    """Return the bytes of all parameters as they are stored."""
    return sum(sum(unit.shard_numels()) for unit in replace(found, strategy="single", ranks=1).unit_sizes) * (
        found.itemsize
    )


def activations(found: Plan) -> int:
    """Return the most bytes of activations in any phase of a step."""
    phases = (terms for _, terms in found.timeline().values())
    # The planner counts a unit's shards, cast before the gather, among them; these are sharded.
    names = [{term: size for term, size in terms.items() if "shard, cast" not in term[1]} for terms in phases]
    return max(predict.by_category(terms).get("activations", 0) for terms in names)


def state_share(found: Plan) -> float:
    """Return which share of the peak the model's state is: what DDP would keep on a rank, and whole gradients."""
    replicated = replace(found, strategy="ddp", ranks=max(2, found.ranks), replicas=1, reshard="true")
    return kept(replicated) / peak(replicated)


def sent(found: Plan, backend: str = "ring") -> float:
    """Return the bytes that a rank sends in a step, by the law of rings.

    Args:
        found: the plan.
        backend: "ring", as NCCL's rings, or "gloo", which makes a reduce-scatter from an all-reduce.
    """
    return sent_by(found.traffic(), found, backend)


def sent_by(traffic: list[dict], found: Plan, backend: str = "ring") -> float:
    """Return the bytes that a rank sends for these collectives: a plan's, or those of a record."""
    return fsum(each["count"] * cost.ring_bytes(each, found, found.ranks, backend)["rank"] for each in traffic)


def leaving(found: Plan) -> float:
    """Return the bytes that leave a node of 8 ranks in a step."""
    return cost.inter_node_bytes(found.traffic(), found, NODE)


def attained(found: Plan) -> float:
    """Return the operations per second that an H100 attains in the plan's precision."""
    return gpus.GPUS["h100"].flops[found.precision] * cost.EFFICIENCY


def step(found: Plan, gigabytes: float, node: int = NODE, backend: str = "ring") -> dict:
    """Return the seconds of a step on H100s, as ``cost.step_time`` has them.

    Args:
        found: the plan.
        gigabytes: per second that leave a node, in one direction.
        node: ranks per node.
        backend: see ``sent``.
    """
    network = cost.Link(gigabytes * 1e9, cost.NETWORKS["infiniband"].latency, "swept")
    return cost.step_time(found, node, NVLINK, network, attained(found), backend)


def grid(**axes) -> tuple[dict, ...]:
    """Return all combinations of values: grid(a=[1, 2], b=[3]) has {"a": 1, "b": 3} and {"a": 2, "b": 3}."""
    found = [{}]
    for name, values in axes.items():
        found = [setting | {name: value} for setting in found for value in values]
    return tuple(found)
