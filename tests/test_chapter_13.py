"""Chapter 13: its exercises judge fairly, its verdicts fail when what it claims is broken."""

import pytest
import torch.distributed as dist
from forked import by_value
from labkit.teaching.exercises import check

from notebooks import run_broken


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
        (in_order, "assign the largest tensor first"),
        (in_turn, "the rank with the fewest elements"),
        (lambda sizes, ranks: [list(range(len(sizes)))], "return a list for each rank"),
        (lambda sizes, ranks: [[0]] * ranks, "must be in exactly one list"),
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
        (to_owner(frees=False), "still holds one, so it saves no memory"),
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


def failed(lines):
    return [line.split(":")[0].removeprefix("FAIL  ") for line in lines if line.startswith("FAIL")]


@pytest.mark.long
def test_a_stage_that_shares_nothing_is_noticed():
    """Each stage's record is that of DDP with plain AdamW."""
    ours = 'runs["torch", stage] = lab.run("gpt_zero.py", stage=str(stage), **SMALL)'
    ddp = """record = lab.run("gpt_zero.py", stage="0", **SMALL) if stage == 0 else record
    runs["torch", stage] = {**record, "config": {**record["config"], "stage": str(stage)}}"""
    assert failed(run_broken("13", {ours: ddp})) == [
        "torch, stage 1",
        "torch, stage 2",
        "torch, stage 3",
        "torch, from stage 0 to 1",
        "stage 3 against the paper's 12 bytes per parameter, split by 4",
    ]


@pytest.mark.long
def test_clipping_that_is_not_forgotten_is_noticed():
    breaks = {
        ' if name != "gradient_clipping"}': "}",
        'predict.plan_of(runs["torch", 1])': 'lab.plan("gpt_zero.py", stage="1")',
    }
    others = ("lab.run(", "under_deepspeed(", "between_steps(runs", "parts(", "saved(")
    lines = run_broken("13", breaks, "clipping left to its default", others)
    assert failed(lines) == ["clipping left to its default"]


@pytest.mark.long
def test_without_deepspeed_pytorch_alone_is_shown():
    absent = {"    deepspeed_zero.check()": '    raise UserError("DeepSpeed is not installed")'}
    lines = run_broken("13", absent, until="no cell has this")
    assert len(lines) > 10
    assert all(line.startswith("PASS  ") and "deepspeed" not in line for line in lines)
