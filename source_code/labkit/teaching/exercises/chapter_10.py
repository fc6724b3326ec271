"""Exercises of chapter 10, many nodes."""

from functools import cache
from itertools import product
from typing import NamedTuple

from planner import predict
from planner.timing import cost

from labkit.running.lab import Lab
from labkit.teaching.exercises import Do, Predict, unanswered

B = 3.4  # MB of parameters in 10.1


class Way(NamedTuple):
    """How a step is made. The ranks are a mesh of replicas × shards; each rank's sequences go in micro-batches.

    kept: whether gathered parameters wait from forward to backward. sync: after which micro-batch the gradients are
    reduced, "every" or "last". peak: GiB on a rank, by the planner.
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


SEQUENCES = 4  # of a step, on each rank
LLAMA = {"preset": "llama3-8b", "seq_len": 8192, "precision": "bf16", "recompute": "full"}
CLUSTERS = [(2, 8, 60), (2, 8, 50), (4, 8, 110), (16, 8, 110), (16, 8, 60), (16, 8, 50)]  # nodes, ranks on each, GiB


def settings(way: Way) -> dict:
    """The way in gpt_fsdp.py's words."""
    return {
        "mesh": f"{way.replicas}x{way.shards}",
        "batch_size": SEQUENCES // way.micro_batches,
        "accumulate": way.micro_batches,
        "reshard_after_forward": str(not way.kept).lower(),
        "sync": way.sync,
    }


def plan_of(way: Way, device: str = "cuda", **model):
    """What the planner says of the way. model: gpt_fsdp.py's other options (default: Llama 3 8B in bf16)."""
    ranks = way.shards * way.replicas
    return Lab(ranks=ranks, device=device).plan("gpt_fsdp.py", **(model or LLAMA), **settings(way))


@cache
def ways(nodes: int, per_node: int, device: str = "cuda", **model) -> list[Way]:
    """All ways that 10.0 chooses from: a model is shared by all ranks, or by those of a node."""
    found = []
    for shards, micro, kept in product((nodes * per_node, per_node), (1, 2, 4), (False, True)):
        for sync in ("every", "last") if micro > 1 else ("last",):
            way = Way(shards, nodes * per_node // shards, micro, kept, sync, 0.0)
            peak = predict.total(plan_of(way, device, **model).peak()[1])
            found.append(way._replace(peak=peak / 2**30))
    return found


def gigabytes(way: Way, per_node: int) -> float:
    """What leaves a node in a step with Llama 3 8B, in GB (1000³): by the planner, with rings as NCCL's."""
    plan = plan_of(way)
    return cost.inter_node_bytes(plan.traffic(), plan, per_node) / 1e9


def law(way: Way, nodes: int, per_node: int, gather=2, reduce=4) -> float:
    """Bytes per parameter that leave a node in a step. gather, reduce: bytes of a number that is gathered or reduced."""
    reductions = way.micro_batches if way.sync == "every" else 1
    if way.replicas > 1:
        return 2 * reduce * reductions * (nodes - 1) / nodes
    gathers = way.micro_batches * (1 if way.kept else 2)
    return (gather * gathers + reduce * reductions) * (1 - 1 / (nodes * per_node))


def _gathered_by_replicas(way, nodes, per_node) -> float:
    gathers = way.micro_batches * (1 if way.kept else 2) if way.replicas > 1 else 0
    return law(way, nodes, per_node) + 2 * gathers


SLIPS = {  # what went wrong, in words: the law that this leads to
    "With replicas, gathers stay within a node: only the all-reduce leaves it": _gathered_by_replicas,
    "Hybrid sharding does not always send least: gathers are in bf16, 2 bytes, reductions in fp32, 4, and an all-reduce "
    "sends its bytes twice": lambda *about: law(*about, gather=4),
    "Each micro-batch gathers again, where all ranks share one model": lambda way, *about: law(
        way if way.sync == "every" else way._replace(micro_batches=1), *about
    ),
    'With sync "every" the gradients are reduced after each micro-batch': lambda way, *about: law(
        way._replace(sync="last"), *about
    ),
    "The fewest bytes are asked for, not the least memory": lambda way, *about: way.peak,
}


def judge_choice(choose) -> str:
    chosen = []
    for nodes, per_node, limit in CLUSTERS:
        offered = ways(nodes, per_node)
        given = choose(list(offered), nodes, per_node, limit)
        if unanswered(given):
            return "not answered yet"
        if given not in offered:
            return f"not quite: return one of the ways that choose is given; {given!r} is none"
        chosen.append(given)
    for (nodes, per_node, limit), given in zip(CLUSTERS, chosen, strict=True):
        where = f"{nodes} nodes of {per_node}, {limit} GiB: yours is {given}"
        if given.peak > limit:
            return f"not quite: {where}. Its peak is {given.peak:.0f} GiB"
        sent, least = (gigabytes(way, per_node) for way in (given, _least(law, nodes, per_node, limit)))
        if sent > 1.001 * least:
            return f"not quite: {where}. {sent:.1f} GB leave a node; another way that fits sends {least:.1f}{_slip(chosen)}"
    return "right"


def _least(law, nodes, per_node, limit) -> Way:
    fitting = [way for way in ways(nodes, per_node) if way.peak <= limit]
    return min(fitting, key=lambda way: law(way, nodes, per_node))


def _slip(chosen) -> str:
    """The cause, if a wrong law leads to ways that cost by it what the chosen ones do, on every cluster."""
    for slip, wrong in SLIPS.items():
        by_it = [
            (wrong(way, nodes, per_node), wrong(_least(wrong, nodes, per_node, limit), nodes, per_node))
            for way, (nodes, per_node, limit) in zip(chosen, CLUSTERS, strict=True)
        ]
        if all(mine <= 1.001 * least for mine, least in by_it):
            return f". {slip}"
    return ""


EXERCISES = {
    "10.0": Do(
        title="the least bytes out of a node that fit",
        level=3,
        minutes=15,
        judge=judge_choice,
        hint="Write what leaves a node per parameter, in bytes. Shared by all ranks (replicas 1): each micro-batch gathers\n"
        "once or twice, 2 bytes, and each reduction sends 4, all times (W − 1)/W. Replicas: only the all-reduce leaves.",
        solution="""
def choose(ways, nodes, per_node, limit):
    def leaves(way):
        reductions = 1 if way.sync == "last" else way.micro_batches
        if way.replicas > 1:  # gathers stay at home; an all-reduce of fp32 gradients, two passes of 4 bytes
            return 2 * 4 * reductions * (nodes - 1) / nodes
        gathers = way.micro_batches * (1 if way.kept else 2)  # in bf16, again for each micro-batch
        W = nodes * per_node
        return (2 * gathers + 4 * reductions) * (W - 1) / W

    return min((way for way in ways if way.peak <= limit), key=leaves)
""",
    ),
    "10.1": Predict(
        title="HSDP on four nodes of two",
        level=1,
        minutes=4,
        answer=2 * 3 / 4 * B,
        unit="MB",
        slips={
            "that is two nodes: of four replicas an all-reduce sends 2 × 3/4": B,
            "that is DDP on eight ranks in one ring, 2 × 7/8": 2 * 7 / 8 * B,
            "that is one of the two rings: both leave the node, each with half of the parameters": 2 * 3 / 4 * B / 2,
            "each ring reduces half of the parameters, not all of them": 2 * 2 * 3 / 4 * B,
            "that is full sharding on eight ranks": 3 * 7 / 8 * B,
        },
        hint="Two rings of four ranks leave a node, one for each of its ranks. What does a ring of n send over one edge\n"
        "to all-reduce a tensor? And how large is that tensor, if two ranks share the model?",
        solution="""
# Only the all-reduce of the shards leaves a node. Two ranks share a model, so a shard is half of it,
# and each of the node's two ranks has a ring of its own to the other three nodes.
parameters, n, shards = 3.4, 4, 2
each_ring = 2 * (n - 1) / n * (parameters / shards)
answer = shards * each_ring
""",
    ),
}
