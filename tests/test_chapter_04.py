# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 04: its verdicts can fail, its exercises judge."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked import by_value
from labkit.teaching.exercises import check
from labkit.teaching.exercises.chapter_04 import EXERCISES
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
TABLES = ("constructed", "held", "learned", "together", "peak_and_time")
SHORT = {"batch, steps = 32, 27": "batch, steps = 32, 6"}  # the time is not judged


@pytest.mark.breaks
def test_another_batch_is_noticed():
    breaks = {"mine = slice(None) if": "mine = slice(0, 1) if"}
    lines = run_broken("04", breaks, until="largest difference of the losses", skip=("held", "pandas"))
    assert lines[-1].startswith("FAIL  largest difference of the losses"), lines


@pytest.mark.breaks
@pytest.mark.parametrize("case", BREAKS)
def test_verdicts_can_fail(case):
    breaks, claims = BREAKS[case]
    breaks = SHORT | breaks | {"assert terms ==": "terms =="}
    lines = run_broken("04", breaks, until="between steps, {kind}", skip=(*TABLES, "walk"))
    for claim in claims:
        assert any(line.startswith("FAIL") and claim in line for line in lines), lines


@pytest.mark.breaks
@pytest.mark.parametrize("ranks", [2, 4])
def test_claim_fails_at_8_images(ranks):
    """DDP's peak is then in the optimizer, whose temporaries FSDP saves, too; and FSDP1's where it packs gradients."""
    breaks = {"batch, steps = 32, 27": "batch, steps = 8, 6"}
    lines = run_broken("04", breaks, until="between steps, {kind}", skip=(*TABLES, "walk"), ranks=ranks)
    for claim in ("saved at the peak", "FSDP1's peak against FSDP2's"):
        assert any(line.startswith(f"FAIL  {claim}") for line in lines), lines
    assert any(line.startswith("PASS  peak of FSDP2") for line in lines), lines  # which is planned for any batch


@pytest.mark.breaks
def test_a_layer_in_a_unit_of_its_own_is_noticed():
    breaks = SHORT | {
        "for ranks in {2, 3} - {lab.ranks}": "for ranks in {2}",
        'ranks=ranks, strategy="fsdp2"': 'ranks=ranks, wrap="size", strategy="fsdp2"',
        'fsdp1 = lab.run("mnist_fsdp.py"': 'fsdp1 = dict(script="mnist_fsdp.py"',  # FSDP2 is enough
    }
    skip = (*TABLES, "walk", "between steps, {kind}")
    lines = run_broken("04", breaks, until="of these peaks from the plan", skip=skip, ranks=4)
    assert lines[-1].startswith("FAIL  largest difference of these peaks")


def test_no_number_of_ranks_brings_the_planned_peak_below_the_floor():
    """What one unit has whole on every rank, and the activations: the figure's dashed line, on ranks nobody started."""
    terms = predict.peak("fsdp2", "unit", 4, 32)[1]
    floor = 4 * predict.numel(predict.SHAPES)
    floor += sum(terms[name] for name in ("reduce-scatter", "activations", "temporary"))
    sizes = (2, 3, 4, 8, 16, 32, 64, 127, 128, 256)
    peaks = {ranks: predict.total(predict.peak("fsdp2", "unit", ranks, 32)[1]) for ranks in sizes}
    assert min(peaks.values()) > floor
    assert peaks[127] > peaks[3]  # two rows each of fc1's 128, so that the gathered whole has 254
    assert round(peaks[256] / 2**20, 1) == 31.8 and round(peaks[3] / 2**20, 1) == 30.0  # as the chapter says


def answered(number, answer, capsys):
    check(number, answer)
    return capsys.readouterr().out


def at_peak(ddp, ranks):
    """04.1, right."""
    names = {}
    exec(EXERCISES["04.1"].solution, names)
    return names["at_peak"](ddp, ranks)


def but(term, size):
    """04.1, right but for one term."""
    return lambda ddp, ranks: at_peak(ddp, ranks) | {term: size(ddp, ranks)}


WRONG = [
    ("04.2", lambda rank, world, rows: (rank * (rows // world), (rank + 1) * (rows // world)), "10 rows on 4 ranks"),
    ("04.2", lambda rank, world, rows: (rank * -(-rows // world), (rank + 1) * -(-rows // world)), "that is 1"),
    ("04.2", lambda rank, world, rows: (rank, rows, world), "not quite"),
    ("04.1", lambda ddp, ranks: {term: size / ranks for term, size in ddp.items()}, "gradients, "),
    ("04.1", lambda ddp, ranks: at_peak(ddp, 4), "on 2 ranks"),
    ("04.1", but("parameters", lambda ddp, ranks: 0), "parameters, 0.00 MiB on 2 ranks, is too small"),
    ("04.1", but("gradients", lambda ddp, ranks: ddp["gradients"] / ranks), "reduced to a shard yet"),
    ("04.1", but("optimizer state", lambda ddp, ranks: ddp["optimizer state"]), "is too large"),
    ("04.1", but("activations", lambda ddp, ranks: ddp["activations"] / ranks), "own batch"),
    ("04.1", but("temporary", lambda ddp, ranks: float("nan")), "temporary, nan MiB"),
    ("04.1", but("all-gather", lambda ddp, ranks: ddp["parameters"] / ranks), "gathered as a whole"),
    ("04.1", but("reduce-scatter", lambda ddp, ranks: ddp["parameters"]), "reduce-scatter, 4.58 MiB"),
    ("04.1", but("all-reduce buckets", lambda ddp, ranks: ddp["all-reduce buckets"]), "FSDP has none"),
    ("04.1", but("buckets", lambda ddp, ranks: 0), "'buckets' is no term"),
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
