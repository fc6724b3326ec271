# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 15: its exercises judge fairly, its verdicts fail when what it claims is broken."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked import by_value
from labkit.measuring.differences import largest_difference
from labkit.running.lab import Lab
from labkit.teaching.exercises import check
from labkit.teaching.exercises.chapter_15 import EXERCISES

from notebooks import FOLDER, code_cells, read, run_broken

IMPORTS, PLANS = ("cell-01", "cell-02", "cell-12"), ("cell-17", "cell-18")
BREAK = ("cell-61p", "cell-62", "cell-64")


def mlp(reduces=True, divides=False, gathers=False):
    """A function for 15.1, right but for what is said."""

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
        (mlp(reduces=False), "that is this rank's partial sum"),
        (mlp(divides=True), "that is the mean of the ranks' partial sums"),
        (mlp(gathers=True), "it took 2 collectives; one is enough"),
        (lambda x, up, down: x @ up.T, "has a result of shape (5, 4) instead of (5, 6)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_layers_are_told_their_first_difference(function, said, capsys):
    by_value(mlp)
    check("15.1", function)
    assert said in capsys.readouterr().out


def test_columns_that_do_not_belong_to_the_rows_are_noticed():
    """Each rank then takes hidden numbers that another has computed: the parts add up to something else."""
    lines = run_broken("15", {"down.chunk(me.world_size, dim=1)[me.rank]": "down.chunk(me.world_size, dim=1)[0]"},
                       until="sum of the parts", only=IMPORTS)  # fmt: skip
    (line,) = lines
    assert line.startswith("FAIL  largest difference of the sum of the parts")


@pytest.mark.parametrize(
    ("number", "break_it", "said"),
    [
        ("15.2", "", "right"),
        ("15.2", "attention_plan = lambda right=attention_plan: right() | {'attention.value': None}", "raises"),
        (
            "15.2",
            "attention_plan = lambda r=attention_plan: r() | {'attention.output': RowwiseParallel()}",
            "on a rank",
        ),
        ("15.3", "", "right"),
        ("15.3", "right = stage_of\ndef stage_of(*a):\n    p = right(*a)\n    p.whole = a[0]\n    return p", "is on 2"),
        ("15.3", "forward = Part.forward\nPart.forward = lambda self, x: forward(self, x) * 1.01", "differs"),
    ],
    ids=lambda value: value if value and value[0].isdigit() else "",
)
def test_plans_and_stages_are_told_their_first_difference(number, break_it, said, capsys):
    names = {"__name__": "__main__"}
    exec(EXERCISES[number].solution + break_it, names)
    function = names["attention_plan" if number == "15.2" else "stage_of"]
    check(number, function)
    assert said in capsys.readouterr().out


def by_an_optimizer(me, kind):
    """How far a norm whose gradients are terms of a sum is, after three steps, from the same in one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    x, weights = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).double(), []
    for split in (False, True):
        torch.manual_seed(0)
        layers = torch.nn.RMSNorm(8), torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)
        model, mine = torch.nn.Sequential(*layers).double(), x
        if split:
            plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
            plan["2"] = RowwiseParallel(output_layouts=Shard(1))
            model = parallelize_module(model, init_device_mesh("cpu", (me.world_size,)), plan)
            mine = x.chunk(me.world_size, 1)[me.rank].contiguous()
        optimizer = kind(model.parameters(), lr=1e-3)
        for _ in range(3):
            model(mine).square().sum().backward()
            placed = str(getattr(model[0].weight.grad, "placements", ""))
            optimizer.step()
            optimizer.zero_grad()
        weights.append(getattr(model[0].weight, "full_tensor", lambda weight=model[0].weight: weight)().detach())
    return placed, largest_difference(*weights), largest_difference(weights[0], torch.ones_like(weights[0]))


def by_optimizers(me):
    return {kind.__name__: by_an_optimizer(me, kind) for kind in (torch.optim.AdamW, torch.optim.SGD)}


def test_an_optimizer_alone_sums_what_is_partial():
    """As the chapter says of tensor parallelism without fully_shard."""
    for found in Lab(launcher="local", device="cpu").on_ranks(by_value(by_optimizers), ranks=2):
        for name, (placed, apart, moved) in found.items():
            assert "Partial" in placed and apart < 1e-12 < 1e-3 < moved, name


@pytest.mark.breaks
def test_mistakes_that_are_not_made_are_noticed():
    """The chapter says that SGD shows both, and AdamW not the second."""
    breaks = {
        "return torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)": "return correct(model, config)",
        "    def own_norm(model, config):": "    correct = gpt_pipeline.clip\n\n    def own_norm(model, config):",
        "scale_grads=True": "scale_grads=False",
        # Of these runs the losses are looked at: no step is traced, and none validated on more than it takes.
        "    sizes = {": "    from labkit.measuring import meters\n\n    meters.TRACED_STEPS = range(0)\n"
        "    gpt_pipeline.gpt_fsdp.VALIDATION_SEQUENCES = 1\n    sizes = {",
        '"accumulate": 8': '"accumulate": 4',
    }
    lines = run_broken("15", breaks, until='"twice"], at_most', only=IMPORTS + PLANS + BREAK, ranks=4)
    assert [line.split("  ")[0] for line in lines[1:]] == ["FAIL", "PASS", "FAIL", "PASS"]


def test_more_gathers_than_one_for_each_unit_are_noticed():
    """Parameters that are freed after each forward are gathered for every micro-batch; another loss has other gradients."""
    breaks = {
        "reshard_after_forward=reshard)": "reshard_after_forward=True)",
        "4, mean_loss)": "4, lambda *a: 1.01 * mean_loss(*a))",
        "if way.name in NAMES": "if False",
    }
    only = (*IMPORTS, *PLANS, "cell-45g", "cell-45a", "cell-45c", "cell-53")
    lines = run_broken("15", breaks, only=only, until="gathers of a unit", ranks=4)
    assert [line.split("  ")[0] for line in lines[-4:]] == ["FAIL", "FAIL", "FAIL", "PASS"]


@pytest.mark.long
def test_the_guide_names_only_what_fits():
    """Of plans, no measurement: the page prints them without a verdict."""
    sources = {cell.id: cell.source for cell in code_cells(read(next(FOLDER.glob("15_*.ipynb"))))}
    names = {}
    for cell, end in {"cell-01": "\0", "cell-07": "\nprint(", "cell-56p": "\0", "cell-56": "\0"}.items():
        exec(sources[cell].partition(end)[0], names)
    rows = {tuple(question.items()): names["guide"](**question) for _, question in names["guesses"]}
    for answer, _, _, _, needs in (row for found in rows.values() for row in found):
        assert (answer == "fits") == (needs <= 80)
    small, large, slow = rows.values()
    assert any(row[0] == "tight" for row in large)
    assert small[0][2] == "FSDP2" and large[0][2:4] == ("FSDP2 8 × tensor 8, one by one", "none")
    assert 3 < large[0][1] / slow[0][1] < 4
