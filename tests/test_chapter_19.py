# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 19: its exercises judge fairly, its verdicts fail when what it claims is broken."""

import pytest
import torch
from forked import by_value
from labkit.teaching.exercises import chapter_19, check

from notebooks import run_broken


def dispatched(rows, counts, exchange, me):
    own = len(counts) // me.world_size
    equal = [own] * me.world_size
    arriving = exchange(counts, equal, equal).view(me.world_size, own)
    sends, receives = counts.view(me.world_size, own).sum(1).tolist(), arriving.sum(1).tolist()
    received = exchange(rows, sends, receives)
    expert = torch.arange(own).repeat(me.world_size).repeat_interleave(arriving.flatten())
    order = expert.argsort(stable=True)
    return received[order], arriving.sum(0), (order, sends, receives)


def by_rank(rows, counts, exchange, me):
    """Rows stay in the order in which they arrive."""
    received, arriving, (order, sends, receives) = dispatched(rows, counts, exchange, me)
    return received[order.argsort()], arriving, (torch.arange(len(order)), sends, receives)


def own_counts(rows, counts, exchange, me):
    """Counts are this rank's, not those of its experts."""
    received, _, way_back = dispatched(rows, counts, exchange, me)
    own = len(counts) // me.world_size
    return received, counts[me.rank * own : (me.rank + 1) * own], way_back


def stays(rows, counts, exchange, me):
    """Nothing is exchanged."""
    sizes = counts.view(me.world_size, -1).sum(1).tolist()
    return rows, counts.view(me.world_size, -1).sum(0), (torch.arange(len(rows)), sizes, sizes)


def wrong_way_back(rows, counts, exchange, me):
    """The order of the way back is sorted twice."""
    received, arriving, (order, sends, receives) = dispatched(rows, counts, exchange, me)
    return received, arriving, (order.argsort(), sends, receives)


def without_asking(rows, counts, exchange, me):
    """Each rank is assumed to send as many rows as this one."""
    sends = counts.view(me.world_size, -1).sum(1).tolist()
    return exchange(rows, sends, sends), counts, (torch.arange(len(rows)), sends, sends)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (dispatched, ": right"),
        (by_rank, "all rows of the first expert must come first"),
        (own_counts, "its experts have [6, 3] rows, not [3, 0]"),
        (stays, "gets 13 rows instead of 9"),
        (wrong_way_back, "do not lead the outputs back to their rows"),
        (without_asking, "a rank raises ValueError: rank 0 sends 3 rows to rank 1, which expects 0"),
        (lambda rows, counts, exchange, me: None, "not answered yet"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_dispatch_is_told_its_first_difference(function, said, capsys):
    by_value(dispatched)  # and with it whatever this file has
    check("19.0", function)
    assert said in capsys.readouterr().out


def greedy(tokens, ranks):
    names = {}
    exec(chapter_19.EXERCISES["19.1"].solution, names)
    return names["place"](tokens, ranks)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (greedy, ": right"),
        (lambda tokens, ranks: [each * ranks // len(tokens) for each in range(len(tokens))], "are possible"),
        (lambda tokens, ranks: [each % ranks for each in range(len(tokens))], "are possible"),
        (lambda tokens, ranks: [0] * (len(tokens) - 1) + [ranks - 1], "equally many experts"),
        (lambda tokens, ranks: list(range(len(tokens))), "return one rank, from 0 to 1"),
    ],
)
def test_a_placement_is_told_its_first_difference(place, said, capsys):
    check("19.1", place)
    assert said in capsys.readouterr().out


def norm_of(groups):
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group]).full_tensor() for group in groups]
    return torch.linalg.vector_norm(torch.stack(norms))


def one_norm(groups, max_norm):
    norm = norm_of(groups)
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def each_mesh(groups, max_norm):
    norms = [torch.nn.utils.clip_grad_norm_(group, max_norm) for group in groups]
    return norms[0]


def not_scaled(groups, max_norm):
    return norm_of(groups)


def own_shards(groups, max_norm):
    """The norm of this rank's shards only."""
    local = [parameter.grad.to_local() for group in groups for parameter in group]
    norm = torch.nn.utils.get_total_norm(local)
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


@pytest.mark.parametrize(
    ("clip", "said"),
    [
        (one_norm, ": right"),
        (each_mesh, "dense gradients are scaled by"),
        (not_scaled, "the norm is right; gradients are scaled by 1.000"),
        (own_shards, "not quite"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_clipping_is_told_its_first_difference(clip, said, capsys):
    by_value(norm_of)
    check("19.2", clip)
    assert said in capsys.readouterr().out


def test_the_solution_of_19_3_counts_as_its_answer_does(capsys):
    names = {}
    exec(chapter_19.EXERCISES["19.3"].solution, names)
    check("19.3", names["answer"])
    assert ": right" in capsys.readouterr().out
    check("19.3", chapter_19.break_even(exchanges=4))
    assert "recomputation repeats dispatch and combine, too" in capsys.readouterr().out


BY_HAND = ("c19-01", "c19-04", "c19-06", "c19-07", "c19-13", "c19-15", "c19-17", "c19-17b")


@pytest.mark.breaks
def test_outputs_that_return_in_another_order_are_noticed():
    broken = {
        "outputs[order.argsort()]": "outputs",
        'verdict("operations per token"': '(lambda *_, **__: None)("operations"',
    }
    lines = run_broken("19", broken, until="never", only=BY_HAND)
    assert len(lines) == 4 and all(line.startswith("FAIL  ") for line in lines)


@pytest.mark.breaks
def test_a_router_that_is_not_summed_is_noticed():
    lines = run_broken("19", {"dist.all_reduce(mine[1].grad)": "None"}, until="never", only=BY_HAND)
    assert [line[:31] for line in lines if line.startswith("FAIL")] == ["FAIL  gradients of the router, "]


@pytest.mark.breaks
def test_a_lab_that_clips_each_mesh_by_its_own_norm_is_noticed():
    """Of the lab's norms the last one, of the experts, takes the place of the whole one."""
    only = ("c19-01", "c19-27", "c19-39", "c19-40")
    broken = {'"each": each, "lab": None': '"each": each, "lab": lambda *about: each(*about)[-1]'}
    broken |= {"ran = list(": "ran = None and list("}
    lines = run_broken("19", broken, until="never", only=only)
    assert [line.split(":")[0] for line in lines if line.startswith("FAIL")] == ["FAIL  lab", "FAIL  lab"]
