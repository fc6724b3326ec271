"""Chapter 13: its exercises judge fairly, its verdicts fail when what it claims is broken."""

import pytest
import torch.distributed as dist
from forked import by_value
from labkit.teaching.exercises import check


def in_order(sizes, ranks):
    """The mistake of taking the tensors as they come."""
    parts = [[] for _ in range(ranks)]
    for number, _ in enumerate(sizes):
        min(parts, key=lambda part: sum(sizes[n] for n in part)).append(number)
    return parts


def in_turn(sizes, ranks):
    ordered = sorted(range(len(sizes)), key=lambda n: -sizes[n])
    return [ordered[rank::ranks] for rank in range(ranks)]


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        (in_order, "the largest tensor goes first"),
        (in_turn, "the rank that has least"),
        (lambda sizes, ranks: [list(range(len(sizes)))], "a list for each rank is wanted"),
        (lambda sizes, ranks: [[0]] * ranks, "belongs into one list and no other"),
    ],
)
def test_a_partition_is_told_its_first_difference(partition, said, capsys):
    check("13.2", partition)
    assert said in capsys.readouterr().out


def to_owner(sums=dist.reduce, divides=True, frees=True):
    """A function for 13.3, right but for what is said."""

    def function(parameter, owner, me):
        sums(parameter.grad, owner)
        if divides:
            parameter.grad /= me.world_size
        if frees and me.rank != owner:
            parameter.grad = None

    return function


def everybody(gradient, owner):
    dist.all_reduce(gradient)


def nobody_has_one(parameter, owner, me):
    parameter.grad = None


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (to_owner(), "right"),
        (to_owner(divides=False), "the owner has the sum, not the mean"),
        (to_owner(frees=False), "still keeps one, so nothing is saved there"),
        (to_owner(sums=everybody), "all_reduce brings the mean to every rank"),
        (to_owner(sums=lambda gradient, owner: None), "the owner has not the mean of all ranks'"),
        (nobody_has_one, "the owner has none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hook_is_told_its_first_difference(function, said, capsys):
    by_value(nobody_has_one)  # and with it whatever this file has
    check("13.3", function)
    assert said in capsys.readouterr().out
