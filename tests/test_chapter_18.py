# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 18: its exercises judge fairly, its verdicts fail when what it claims is broken."""

import pytest
import torch
import torch.distributed as dist
from forked import by_value
from labkit.teaching.exercises import chapter_18, check
from planner.parallel import muon

from notebooks import run_broken


def by_gathering(shards, shapes, me):
    """Every rank gets every matrix, and keeps one."""
    for number, (shard, shape) in enumerate(zip(shards, shapes, strict=True)):
        received = shard.new_empty(shape)
        dist.all_gather_into_tensor(received, shard)
        if number == me.rank:
            mine = received
    return mine


def exchanged(shards, shapes, me):
    mine = shapes[me.rank]
    received = shards[0].new_empty(mine)
    sent = torch.cat([shard.flatten() for shard in shards])
    sizes = [mine.numel() // me.world_size] * me.world_size
    dist.all_to_all_single(received.view(-1), sent, sizes, [shard.numel() for shard in shards])
    return received


def own_rows(shards, shapes, me):
    return shards[me.rank]


def transposed(shards, shapes, me):
    return exchanged(shards, shapes, me).T


def reversed_rows(shards, shapes, me):
    return exchanged(shards, shapes, me).flip(0)


def equal_parts(shards, shapes, me):
    """Without split sizes."""
    received = shards[0].new_empty(shapes[me.rank])
    dist.all_to_all_single(received.view(-1), torch.cat([shard.flatten() for shard in shards]))
    return received


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (exchanged, ": right"),
        (by_gathering, "an all-gather brings each one to every rank"),
        (own_rows, "returns the shape (2, 3) instead of (8, 3)"),
        (transposed, "returns the shape (3, 8) instead of (8, 3)"),
        (reversed_rows, "has other elements: in which order do the ranks' rows arrive?"),
        (equal_parts, "a rank raises"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_an_exchange_is_told_its_first_difference(function, said, capsys):
    by_value(own_rows)  # and with it whatever this file has
    check("18.0", function)
    assert said in capsys.readouterr().out


def in_order(shapes, ranks):
    return [list(range(len(shapes)))[begin : begin + ranks] for begin in range(0, len(shapes), ranks)]


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        (muon.rounds, ": right"),
        (in_order, "the ranks wait for"),
        (lambda shapes, ranks: [[*range(len(shapes))]], "at most one matrix for each of the 2 ranks"),
        (lambda shapes, ranks: [[0]], "must be in exactly one round"),
    ],
)
def test_rounds_are_told_their_first_difference(rounds, said, capsys):
    check("18.1", rounds)
    assert said in capsys.readouterr().out


def test_the_solution_of_18_2_is_what_the_planner_says(capsys):
    """The solution counts by hand."""
    names = {}
    exec(chapter_18.EXERCISES["18.2"].solution, names)
    check("18.2", names["answer"])
    assert ": right" in capsys.readouterr().out


@pytest.mark.breaks
def test_a_muon_that_computes_shard_by_shard_is_noticed():
    """The exchange is left out: each rank orthogonalizes its own rows of its matrix."""
    broken = {"mine = newton_schulz(to_owner(shards, shapes, me))": "mine = newton_schulz(shards[me.rank])"}
    broken |= {"newton_schulz(matrices[me.rank]))": "newton_schulz(matrices[me.rank])[: len(mine)])"}
    lines = run_broken("18", broken, until="differences(me, to_owner)", skip=("step_once",))
    assert [line.split(":")[0] for line in lines] == ["FAIL  owners' results against one process"]


@pytest.mark.breaks
def test_a_matrix_that_is_not_cut_by_columns_is_noticed():
    lines = run_broken(
        "18", {"return Shard(1)": "return Shard(0)"}, until="by_columns", only=("c18-01", "c18-02", "c18-07", "c18-25")
    )
    assert len(lines) == 3 and all(line.startswith("FAIL  64 × ") for line in lines)
