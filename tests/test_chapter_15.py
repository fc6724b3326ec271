"""Chapter 15: its exercises judge fairly, its verdicts fail when what it claims is broken."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked import by_value
from labkit.measuring.differences import largest_difference
from labkit.running.lab import Lab
from labkit.teaching.exercises import check

from notebooks import FOLDER, code_cells, read, run_broken


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
        (mlp(reduces=False), "that is this rank's partial sum"),
        (mlp(divides=True), "that is the mean of the ranks' partial sums"),
        (mlp(gathers=True), "it took 2 collectives; one is enough"),
        (lambda x, up, down: x @ up.T, "has a result of shape (5, 4) instead of (5, 6)"),
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
                       until="sum of the ranks' parts", skip=("asked(", "few, many"))  # fmt: skip
    (line,) = lines
    assert line.startswith("FAIL  largest difference of the sum of the ranks' parts")


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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_an_optimizer_alone_sums_what_is_partial(kind):
    """As the chapter says of tensor parallelism without fully_shard."""
    by_value(by_an_optimizer)
    for placed, apart, moved in Lab(launcher="local", device="cpu").on_ranks(by_an_optimizer, kind, ranks=2):
        assert "Partial" in placed and apart < 1e-12 < 1e-3 < moved


@pytest.mark.long
def test_gradients_that_are_not_divided_twice_are_noticed():
    """The chapter says that SGD shows it, and AdamW does not."""
    skip = (
        "few, many",
        "sum of the ranks' parts",
        "of_plans",
        "trained(",
        "ran[",
        "schedules",
        "matrix",
        "live",
        "guide(",
        "ways that fit",
        "MICRO_BATCHES",
    )
    breaks = {
        "scale_grads=twice": "scale_grads=False",
        'CASES = [("gpipe", 4), ("gpipe", 8), ("1f1b", 8)]': "CASES = []",
        "real = lab.on_ranks(computed, MICRO_BATCHES, ranks=2)[0]": "",
    }
    lines = run_broken("15", breaks, until='apart["sgd"], at_least', skip=skip)
    assert [line.split("  ")[0] for line in lines] == ["FAIL", "PASS"]


@pytest.mark.long
def test_the_guide_answers_as_the_page_says(capsys):
    """Of plans, no measurement: the page prints them without a verdict."""
    sources = [cell.source for cell in code_cells(read(next(FOLDER.glob("15_*.ipynb"))))]
    names = {}
    for text in ("def asked(", "def candidates(", "def guide(", "guesses = {", "small = guide("):
        source = next(source for source in sources if text in source)
        exec(source.partition("long = {}")[0], names)  # without the table for long sequences
    fit = {size: [name for fits, _, name, *_ in names[size] if fits] for size in ("small", "huge")}
    assert "FSDP2" in fit["small"]
    assert fit["huge"] and all("tensor" in name and name.endswith("in turn") for name in fit["huge"])
    assert names["large"][0][1] / names["slow"][0][1] > 3
