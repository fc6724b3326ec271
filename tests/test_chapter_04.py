"""Chapter 04: its verdicts can fail, its exercises judge."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked import by_value
from labkit.teaching.exercises import check
from planner import predict
from torch.distributed.fsdp import fully_shard

from notebooks import run_broken

# What is broken, and the claims that must then fail
BREAKS = {
    "not sharded at all": ({'"mnist_fsdp.py", strategy="fsdp2"': '"mnist_fsdp.py", strategy="ddp"'}, ["between steps"]),
    "not one unit, and a layer forgotten in the arithmetic": (  # which are of different quantities
        {
            'strategy="fsdp2", batch': 'strategy="fsdp2", wrap="size", batch',
            "4 * (128 * 9217 + 10 * 129)": "4 * 128 * 9217",
        },
        ["peak of FSDP2", "whole gradients"],
    ),
}
TABLES = ("constructed", "held", "learned", "together")


@pytest.mark.long
def test_another_batch_is_noticed():
    breaks = {"mine = slice(None) if": "mine = slice(0, 1) if"}
    lines = run_broken("04", breaks, until="largest difference of the losses", skip=("held", "pandas"))
    assert lines[-1].startswith("FAIL  largest difference of the losses"), lines


@pytest.mark.long
@pytest.mark.parametrize("case", BREAKS)
def test_verdicts_can_fail(case):
    breaks, claims = BREAKS[case]
    breaks = breaks | {"assert terms ==": "terms =="}
    lines = run_broken("04", breaks, until="between steps, {kind}", skip=(*TABLES, "walk"))
    for claim in claims:
        assert any(line.startswith("FAIL") and claim in line for line in lines), lines


@pytest.mark.long
def test_floor_can_be_missed():
    breaks = {
        "floor = 4 * P": "floor = 2 * 4 * P",
        "for ranks in {2, 3} - {lab.ranks}": "for ranks in ()",  # nor FSDP1: four ranks of FSDP2 are enough
        'fsdp1 = lab.run("mnist_fsdp.py"': 'fsdp1 = dict(script="mnist_fsdp.py"',
    }
    lines = run_broken("04", breaks, until="at_least=floor", skip=(*TABLES, "walk", "between steps, {kind}"), ranks=4)
    assert all(line.startswith("FAIL") for line in lines if "lowest" in line) and "lowest" in lines[-1]


def test_no_number_of_ranks_brings_the_planned_peak_below_the_floor():
    """What one unit has whole on every rank, and the activations: the figure's dashed line, on ranks nobody started."""
    terms = predict.peak("fsdp2", "unit", 4, 32)[1]
    floor = 4 * predict.numel(predict.SHAPES)
    floor += sum(terms[name] for name in ("reduce-scatter", "activations", "temporary"))
    sizes = (2, 3, 4, 8, 16, 32, 64, 127, 128)
    peaks = {ranks: predict.total(predict.peak("fsdp2", "unit", ranks, 32)[1]) for ranks in sizes}
    assert min(peaks.values()) > floor
    assert peaks[127] > peaks[3]  # two rows each of fc1's 128, so that the gathered whole has 254


def answered(number, answer, capsys):
    check(number, answer)
    return capsys.readouterr().out


WRONG = [
    ("04.2", lambda rank, world, rows: (rank * (rows // world), (rank + 1) * (rows // world)), "10 rows on 4 ranks"),
    ("04.2", lambda rank, world, rows: (rank * -(-rows // world), (rank + 1) * -(-rows // world)), "that is 1"),
    ("04.2", lambda rank, world, rows: (rank, rows, world), "not quite"),
    ("04.3", lambda tensors, rank, world: torch.cat([t.flatten() for t in tensors]).chunk(world)[rank], "padding"),
    ("04.3", lambda tensors, rank, world: torch.cat([t.chunk(world)[rank].flatten() for t in tensors]), "not quite"),
    ("04.3", lambda tensors, rank, world: 1 / 0, "ZeroDivisionError"),
]


@pytest.mark.parametrize(("number", "wrong", "words"), WRONG)
def test_wrong_function_is_told_what_is_wrong(number, wrong, words, capsys):
    said = answered(number, wrong, capsys)
    assert "not quite" in said and words in said


def loop(model, batches, optimizer, mesh, call=None, clips=True, clears=True, averages=True):
    """The loop of 04.0, right but for what is said."""
    losses = []
    for inputs, labels in batches:
        loss = F.cross_entropy((call or model)(inputs), labels)
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if clears:
            optimizer.zero_grad()
        mean = loss.detach().clone()
        if averages:
            dist.all_reduce(mean)
            mean /= mesh.size()
        losses.append(mean.item())
    return losses


def sharded(model, mesh, inner=False):
    """The optimizer of a model that is sharded now."""
    if inner:
        fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch.optim.SGD(model.parameters(), lr=0.5)


def optimizer_first(model, batches, mesh):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fully_shard(model, mesh=mesh)
    return loop(model, batches, optimizer, mesh)


def local_loss(model, batches, mesh):
    return loop(model, batches, sharded(model, mesh), mesh, averages=False)


def submodules(model, batches, mesh):
    return loop(model, batches, sharded(model, mesh, inner=True), mesh)


def forward_directly(model, batches, mesh):
    return loop(model, batches, sharded(model, mesh), mesh, call=model.forward)


def not_clipped(model, batches, mesh):
    return loop(model, batches, sharded(model, mesh), mesh, clips=False)


def never_cleared(model, batches, mesh):
    return loop(model, batches, sharded(model, mesh), mesh, clears=False)


def not_sharded(model, batches, mesh):
    return loop(model, batches, torch.optim.SGD(model.parameters(), lr=0.5), mesh)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (optimizer_first, "was the optimizer made after fully_shard?"),
        (local_loss, "the loss of this rank's batch, not the mean over the ranks"),
        (submodules, "module 2 is a separate unit"),
        (forward_directly, "FSDP gathers when the model is called"),
        (not_clipped, "the gradient's norm was not clipped"),
        (never_cleared, "the gradients of the previous step were not cleared"),
        (not_sharded, "fully_shard was not called"),
    ],
)
def test_a_training_loop_is_told_its_first_difference(wrong, words, capsys):
    by_value(loop)  # and with it whatever this file has
    said = answered("04.0", wrong, capsys)
    assert "not quite" in said and words in said
