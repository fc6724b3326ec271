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


EXERCISES = {
    "10.0": Do(
        title="the least bytes out of a node that fit",
        level=3,
        minutes=15,
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
    "10.1": Predict(
        title="HSDP on four nodes of two",
        level=1,
        minutes=4,
        answer=2 * 3 / 4 * B,
        unit="MB",
        slips={
            "that is for two nodes: with four replicas, an all-reduce sends 2 × 3/4": B,
            "that is DDP on eight ranks in one ring, 2 × 7/8": 2 * 7 / 8 * B,
            "that is one of the two rings: both leave the node, each with half of the parameters": 2 * 3 / 4 * B / 2,
            "each ring reduces half of the parameters, not all of them": 2 * 2 * 3 / 4 * B,
            "that is full sharding on eight ranks": 3 * 7 / 8 * B,
        },
        hint="Two rings of four ranks leave a node, one for each of its ranks. How much does a ring of n send over one edge\n"
        "to all-reduce a tensor? And how large is that tensor, if the model is sharded over two ranks?",
        solution="""
# Only the all-reduce of the shards leaves a node. The model is sharded over two ranks, so a shard is half of it,
# and each of the node's two ranks is in its own ring with the other three nodes.
parameters, n, shards = 3.4, 4, 2
each_ring = 2 * (n - 1) / n * (parameters / shards)
answer = shards * each_ring
""",
    ),
}
