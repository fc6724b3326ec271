"""Chapter 15: its exercises judge fairly, its verdicts fail when what it claims is broken."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked import by_value
from labkit.teaching.exercises import check

from notebooks import run_broken


def mlp(reduces=True, divides=False, gathers=False):
    """A function for 15.3, right but for what is said."""

    def function(x, up, down):
        hidden = F.relu(F.linear(x, up))
        if gathers:
            dist.all_gather([torch.empty_like(hidden) for _ in range(2)], hidden)
        part = F.linear(hidden, down)
        if reduces:
            dist.all_reduce(part)
        return part / 2 if divides else part

    return function


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (mlp(), "right"),
        (mlp(reduces=False), "that is this rank's part of a sum over the ranks"),
        (mlp(divides=True), "that is the mean of the ranks' parts"),
        (mlp(gathers=True), "it took 2 collectives; one is enough"),
        (lambda x, up, down: x @ up.T, "has a result of shape (5, 4), and (5, 6) is wanted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_layers_are_told_their_first_difference(function, said, capsys):
    by_value(mlp)
    check("15.3", function)
    assert said in capsys.readouterr().out


def test_columns_that_do_not_belong_to_the_rows_are_noticed():
    """Each rank then takes hidden numbers that another has computed: the parts add up to something else."""
    lines = run_broken("15", {"down.chunk(me.world_size, dim=1)[me.rank]": "down.chunk(me.world_size, dim=1)[0]"},
                       until="numbers of 30", skip=("asked(", "few, many"))  # fmt: skip
    (line,) = lines
    assert line.startswith("FAIL  numbers of 30") and "measured 30" in line


@pytest.mark.long
def test_gradients_that_are_not_divided_twice_are_noticed():
    """The chapter says that SGD shows it, and AdamW does not."""
    skip = (
        "few, many",
        "numbers of 30",
        "of_plans",
        "trained(",
        "ran[",
        "schedules",
        "matrix",
        "guide(",
        "alone(",
        "MICRO_BATCHES",
    )
    breaks = {
        "scale_grads=twice": "scale_grads=False",
        'CASES = [("gpipe", 4), ("gpipe", 8), ("1f1b", 8)]': "CASES = []",
        "real = lab.on_ranks(computed, MICRO_BATCHES, ranks=2)[0]": "",
    }
    lines = run_broken("15", breaks, until='apart["sgd"] >', skip=skip)
    assert [line.split("  ")[0] for line in lines] == ["FAIL", "PASS"]
