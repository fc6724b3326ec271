# SPDX-License-Identifier: BSD-3-Clause
"""A slow rank is named from the times of its calls: on a mesh, with clocks that differ, and no rank that pauses once."""

import random
from itertools import product

import pytest
from labkit.measuring import stragglers
from labkit.measuring.flight_recorder import Call, Dump, Group, Line

FLAT = [Group("0", "everyone", (0, 1, 2, 3))]
MESH = [
    Group("1", "shard", (0, 1)),
    Group("2", "shard", (2, 3)),
    Group("3", "replicate", (0, 2)),
    Group("4", "replicate", (1, 3)),
]
PAIR = [Group("0", "everyone", (0, 1))]
STEPS = 20


def simulated(groups, own, clocks=(0, 0, 0, 0), close: float | None = 1e-4) -> dict[int, Dump]:
    """Return the records of ranks that work ``own(rank, step)`` seconds before a step's collective in each group.

    clocks: seconds by which each rank's clock is ahead. close: seconds until two more collectives follow, if any do.
    """
    now, order = dict.fromkeys(range(4), 0.0), dict.fromkeys(range(4), 0)
    calls = {rank: {} for group in groups for rank in group.ranks}
    for step, group, last in product(range(STEPS), groups, (False, True, True)):
        if last and close is None:
            continue
        for rank in group.ranks:
            now[rank] += close if last else own(rank, step)
            created, line = int((now[rank] + clocks[rank]) * 1e9), Line("train.py", 7, group.label)
            call = Call("all_reduce", ((), ()), ((), ()), "completed", True, order[rank], created, (line,))
            calls[rank].setdefault(group, {})[len(calls[rank].get(group, {})) + 1] = call
            order[rank] += 1
        now |= dict.fromkeys(group.ranks, max(now[rank] for rank in group.ranks))
    return {rank: Dump(of, [], cut=False, last=order[rank] - 1) for rank, of in calls.items()}


def noisy(slow: dict, seed: int = 0):
    """Return own times of 10 ms, more or less, and ``slow`` times as much on some ranks."""
    rng = random.Random(seed)
    return lambda rank, step: 0.01 * rng.uniform(0.9, 1.1) * slow.get(rank, 1)


@pytest.mark.parametrize("clocks", [(0, 0, 0, 0), (0, 5, 0, 0), (-3, 0, 0.2, 0), (0, 0, -60, 0)], ids=str)
@pytest.mark.parametrize("groups", [FLAT, MESH], ids=["flat", "mesh"])
@pytest.mark.parametrize("rank", range(4))
def test_the_slow_rank_is_named_whatever_the_clocks_say(rank, groups, clocks):
    found = stragglers.find(simulated(groups, noisy({rank: 3}), clocks))
    assert found and found.rank == rank
    others = [time for other, time in found.own.items() if other != rank]
    assert max(others) < found.own[rank] / 2


def test_without_the_correction_of_clocks_another_rank_is_named(monkeypatch):
    monkeypatch.setattr(stragglers, "_clock_offsets", lambda dumps: dict.fromkeys(dumps, 0))
    found = stragglers.find(simulated(FLAT, noisy({2: 3}), (0, 5, 0, 0)))
    assert not found or found.rank != 2


def test_a_rank_that_is_a_third_slower_is_named_and_equal_ranks_are_not():
    assert stragglers.find(simulated(FLAT, noisy({1: 1.33}))).rank == 1
    for seed in range(20):
        assert stragglers.find(simulated(MESH, noisy({}, seed))) is None


def test_two_pauses_make_no_straggler_and_a_third_does():
    def own(pauses):
        return lambda rank, step: 5.0 if rank == 3 and step in pauses else 0.01

    assert stragglers.find(simulated(FLAT, own({4, 9}))) is None
    assert stragglers.find(simulated(FLAT, own({4, 9, 14}))).rank == 3


def test_of_two_ranks_one_must_be_clearly_slower():
    assert stragglers.find(simulated(PAIR, noisy({0: 1.6}))) is None
    assert stragglers.find(simulated(PAIR, noisy({0: 3}))).rank == 0


def test_a_run_of_one_rank_or_without_calls_has_no_straggler():
    assert stragglers.find({}) is None
    assert stragglers.find({0: Dump({}, [], cut=False, last=0)}) is None


def test_a_slow_rank_that_may_be_a_clock_that_is_ahead_is_not_named():
    """Where much work precedes every collective, the calls do not tell the one from the other."""
    assert stragglers.find(simulated(FLAT, noisy({2: 3}), (0, 0, 5, 0), close=None)) is None
