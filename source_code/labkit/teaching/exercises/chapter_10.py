"""Exercises of chapter 10, many nodes."""

from labkit.teaching.exercises import Do, Predict, unanswered

B = 3.4  # MB of parameters in 10.1


def reference_groups(ranks: int, shards: int):
    """What 10.2 asks for."""
    rows = [list(range(first, first + shards)) for first in range(0, ranks, shards)]
    return rows, [list(column) for column in zip(*rows, strict=True)]


def judge_groups(groups) -> str:
    for ranks, shards in ((4, 2), (8, 4), (8, 2), (6, 3), (4, 4), (4, 1)):
        given = groups(ranks, shards)
        if unanswered(given):
            return "not answered yet"
        where = f"groups({ranks}, {shards})"
        try:
            shard, replicate = ([list(group) for group in kind] for kind in given)
        except (TypeError, ValueError):
            return f"not quite: {where}: return two lists of groups, those that share a model first"
        rows, columns = reference_groups(ranks, shards)
        if (sorted(map(sorted, shard)), sorted(map(sorted, replicate))) == (rows, columns):
            continue
        if (sorted(map(sorted, shard)), sorted(map(sorted, replicate))) == (columns, rows):
            return f"not quite: {where}: the two are swapped: {rows[0]} share a model"
        return f"not quite: {where}: {_difference(shard, replicate, rows, columns, ranks)}"
    return "right"


def _difference(shard, replicate, rows, columns, ranks) -> str:
    for name, given, right in (("shard", shard, rows), ("replicate", replicate, columns)):
        members = sorted(rank for group in given for rank in group)
        if members != list(range(ranks)):
            return f"every rank is in one {name} group, but yours hold the ranks {members}"
        if wrong := [group for group in given if sorted(group) not in right]:
            why = "ranks in a row share a model, as they are on one node" if name == "shard" else "one from each row"
            return f"{wrong[0]} is no {name} group: {why}"
    return "the groups differ"


EXERCISES = {
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
    "10.2": Do(
        title="the groups of a mesh",
        level=2,
        minutes=8,
        judge=judge_groups,
        hint="Write the ranks in rows of `shards`: 0 1 / 2 3. A row shares a model. A column holds the same part of it.",
        solution='''
def groups(ranks, shards):
    """Rows of a grid share a model; its columns hold the same part. Ranks in a row are on one node."""
    rows = [list(range(first, first + shards)) for first in range(0, ranks, shards)]
    return rows, [list(column) for column in zip(*rows)]
''',
    ),
    "10.3": Predict(
        title="the speed at which HSDP overtakes DDP",
        level=3,
        minutes=8,
        answer=(120 - 80) / (0.120 - 0.080) * 8,
        unit="Mbit/s",
        slips={
            "a byte is 8 bits: links are sold by the bit": (120 - 80) / (0.120 - 0.080),
            "that is where HSDP's bytes alone take as long as its steps' difference": 80 / (0.120 - 0.080) * 8,
            "that is where DDP's bytes alone take as long as the steps' difference": 120 / (0.120 - 0.080) * 8,
            "their bytes differ, not add up": (120 + 80) / (0.120 - 0.080) * 8,
        },
        hint="A step takes a + bytes / rate. Set DDP's and HSDP's equal, and solve for the rate. Then bytes to bits.",
        solution="""
# 0.080 s + 120 MB / rate = 0.120 s + 80 MB / rate: what HSDP saves in bytes, over what it costs besides
rate = (120 - 80) / (0.120 - 0.080)  # MB/s
answer = 8 * rate  # Mbit/s
""",
    ),
}
