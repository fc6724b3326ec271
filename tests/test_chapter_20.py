# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 20: its exercises judge fairly, its verdicts fail when what it claims is broken."""

import pytest
import torch
import torch.distributed as dist
from answers import altered
from forked import by_value
from labkit.teaching.exercises import chapter_20, check

from notebooks import run_broken


def ring(*breaks):
    return altered("20.0", *breaks)


RIGHT = ring()


def once_more(query, key, value, me, attend, pass_on):
    """Right, with an exchange too many."""
    output = RIGHT(query, key, value, me, attend, pass_on)
    pass_on(key, me)
    return output


AVERAGED = "output = (log_sum - total).exp()[..., None] * output + (part_sum - total).exp()[..., None] * part"
RINGS = {
    "average": (ring((AVERAGED, "output = (output + part) / 2")), "rank 1 has another output than one process: its"),
    "all visible": (ring(("if step > me.rank:", "if False:")), "rank 0 has another output than one process: it has"),
    "not causal": (ring(("key, value, True", "key, value, False")), "rank 0 has another output than one process: it"),
    "sums forgotten": (ring(("        log_sum = total\n", "")), "rank 2 has another output than one process: its"),
    "a part missing": (ring(("range(1, me.world_size)", "range(1, 2)")), "rank 2 has another output"),
    "one too many": (once_more, "the output is right, but keys and values are passed on 4 times; 3 are enough"),
    "transposed": (
        ring(("return output", "return output.mT")),
        "rank 0 returns the shape (1, 2, 4, 8) instead of (1, 2",
    ),
}


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_is_told_its_first_difference(name, capsys):
    by_value(once_more)  # and with it whatever this file has
    function, said = RINGS[name]
    check("20.0", function)
    assert said in capsys.readouterr().out


def heads_by_gathering(x, me):
    """Every rank gets all heads, and keeps some."""
    parts = [torch.empty_like(x) for _ in range(me.world_size)]
    dist.all_gather(parts, x)
    return torch.cat(parts, 2).chunk(me.world_size, 1)[me.rank]


INTERLEAVED = ("torch.cat(received.unbind(), 2)", "torch.stack(received.unbind(), 3).flatten(2, 3)")
HEADS = {
    "gathered": (heads_by_gathering, "an all-gather brings every rank all of them"),
    "joined as heads": (altered("20.1", ("received.unbind(), 2", "received.unbind(), 1")), "rank 0 returns the shape"),
    "interleaved": (altered("20.1", INTERLEAVED), "rank 0 has other elements"),
}


@pytest.mark.parametrize("name", HEADS)
def test_an_exchange_of_heads_is_told_its_first_difference(name, capsys):
    by_value(heads_by_gathering)
    function, said = HEADS[name]
    check("20.1", function)
    assert said in capsys.readouterr().out


def mean_of_mine(losses, counted, me):
    return losses[counted].mean()


LOSSES = {
    "mean of means": (mean_of_mine, "on the ranks, the loss of rank 2 is nan"),
    "not scaled": (altered("20.2", (" * me.world_size", "")), "it is 0.25 times as long as it should be"),
    "of my tokens": (altered("20.2", ("    dist.all_reduce(total)  # of all ranks\n", "")), "it is 4 times as long"),
    "padding too": (altered("20.2", ("(losses * counted).sum()", "losses.sum()")), "with [8, 5, 0, 2] counted tokens"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_told_its_first_difference(name, capsys):
    by_value(mean_of_mine)
    function, said = LOSSES[name]
    check("20.2", function)
    assert said in capsys.readouterr().out


def test_the_solution_of_20_3_is_what_the_planner_says():
    """The solution counts by hand."""
    names = {}
    exec(chapter_20.EXERCISES["20.3"].solution, names)
    assert names["answer"] == pytest.approx(chapter_20.HIDING)


@pytest.mark.breaks
def test_a_ring_that_merges_nothing_is_noticed():
    broken = {
        'yours_or_ours("20.0", ring_attention)': "own_part",
        "def differences(": "def own_part(query, key, value, me, attend, pass_on):\n"
        "    return attend(query, key, value, True)[0]\n\n\ndef differences(",
    }
    lines = run_broken("20", broken, until="def differences", only=("c20-01", "c20-02", "c20-09", "c20-13"))
    assert [line.split(":")[0] for line in lines] == ["FAIL  ring attention against one process"]


@pytest.mark.breaks
def test_orders_and_forms_that_are_not_what_is_claimed_are_noticed():
    """Both orders are the natural one; every rank takes the first tokens."""
    broken = {"me.rank, me.world_size, order)": 'me.rank, me.world_size, "natural")', "tokens=2048": "tokens=256"}
    broken |= {"mine = context.positions(64 // me.world_size)": "mine = torch.arange(64 // me.world_size)"}
    broken |= {"sequences.attention_times(": "(lambda *_: None)(", "alone['hardware']": "''"}
    cells = ("c20-01", "c20-02", "c20-15", "c20-17", "c20-18", "c20-19", "c20-21", "c20-22", "c20-23")
    lines = run_broken("20", broken, until="one_layer, ranks=ranks", only=cells)
    assert [line[:4] for line in lines[:2]] == ["PASS", "FAIL"]
    verdicts = {line.split(": ")[1]: line[:4] for line in lines[3:]}
    assert verdicts == {"bytes sent": "PASS", "results and gradients, difference": "FAIL"}


@pytest.mark.breaks
def test_positions_that_are_right_are_noticed():
    """The mistake is repaired, so there is nothing to see."""
    broken = {"model.positions = torch.arange": "pass", "losses_of, SPLIT)": "losses_of, SPLIT[:1])"}
    lines = run_broken("20", broken, until="def from_zero", only=("c20-01", "c20-02", "c20-15", "c20-34", "c20-36"))
    assert [line[:4] for line in lines] == ["PASS", "FAIL", "PASS"]
