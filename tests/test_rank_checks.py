# SPDX-License-Identifier: BSD-3-Clause
"""The first value that is not finite, and replicas that differ, are named on real ranks, and nothing where all is well."""

import torch
import torch.distributed as dist
from forked import by_value
from labkit.measuring import rank_checks
from labkit.running import launch, notebook_ranks
from torch import nn


def on_ranks(function, ranks: int) -> list:
    by_value(function)
    return notebook_ranks.on_ranks(function, ranks=ranks, cluster=launch.Cluster(launcher="local"), timeout=60)


def origins(me):
    """Return, per case, what the ranks find: nothing, one rank, two ranks later than one, and all ranks at once."""
    answers = []
    for bad in ({}, {1: 2}, {0: 3, 1: 3, 2: 1}, {0: 2, 1: 2, 2: 2}):
        check = rank_checks.FirstNonFinite("cpu")
        for step in range(5):
            late = bool(bad) and step > min(bad.values())  # it has spread
            value = torch.inf if bad.get(me.rank) == step else torch.nan if late else 1.0
            check.see(step, torch.ones(3), torch.tensor(value))
        try:
            check.raise_if_any()
            answers.append("")
        except rank_checks.NotFinite as error:
            answers.append(str(error))
    return answers


def test_the_rank_and_the_step_where_a_nan_began_are_named_on_every_rank():
    by_rank = on_ranks(origins, 3)
    assert (
        by_rank[0]
        == by_rank[1]
        == by_rank[2]
        == [
            "",
            "the first value that is not finite was at step 2 on rank 1",
            "the first value that is not finite was at step 1 on rank 2",
            "the first value that is not finite was at step 2 on all ranks at once, so look at the weights",
        ]
    )


def flipped(me):
    """Return what is said of equal replicas; of a bit flipped on rank 2; and of a pair of which one has flipped."""
    torch.manual_seed(0)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    answers = []
    for dtype, rank, group in [
        (torch.float32, None, None),
        (torch.float32, 2, None),
        (torch.bfloat16, 0, None),
        (torch.float32, 3, pairs[me.rank // 2]),
    ]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)
        if me.rank == rank:
            bits = model[1].weight.detach().view(rank_checks.INTEGERS[model[1].weight.element_size()])
            bits.view(-1)[3] ^= 1
        try:
            rank_checks.raise_if_replicas_differ(model, group)
            answers.append("")
        except rank_checks.ReplicasDiffer as error:
            answers.append(str(error))
    return answers


def test_one_flipped_bit_is_found_and_of_a_pair_nobody_knows_whose():
    by_rank = on_ranks(flipped, 4)
    assert all(answers == by_rank[0] for answers in by_rank)
    assert by_rank[0] == [
        "",
        "rank 2 holds other bits than 3 replicas: 1.weight",
        "rank 0 holds other bits than 3 replicas: 1.weight",
        "ranks 2, 3 hold different bits, and there is no majority: 1.weight",
    ]
