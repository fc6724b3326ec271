# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 13: its exercises judge fairly, its verdicts fail when what it claims is broken."""

from dataclasses import asdict

import answers
import gpt_zero
import pytest
import torch.distributed as dist
from commands import refused
from forked import by_value
from labkit.teaching.exercises import chapter_13, check
from labkit.teaching.exercises.chapter_13 import EXERCISES
from planner import predict

from notebooks import run_broken


def to_owner(sums=dist.reduce, divides=True, frees=True):
    """A function for 13.2, right but for what is said."""

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
    check("13.2", function)
    assert said in capsys.readouterr().out


def settings(**more):
    """The solution of 13.3 with some settings changed; those that are None are left out."""
    zero = answers.altered("13.3")() | more
    return {name: value for name, value in zero.items() if value is not None}


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 2}, "the stage is 2"),
        (settings(reduce_bucket=1), "no setting 'reduce_bucket'"),
        pytest.param(settings(), "right", marks=pytest.mark.long),
        pytest.param(settings(reduce_bucket_size=None), "kept may be at most 8.5", marks=pytest.mark.long),
        pytest.param(settings(stage3_prefetch_bucket_size=None), "peak may be at most 14", marks=pytest.mark.long),
        pytest.param(settings(stage3_prefetch_bucket_size=0), "all-gathers may be at most 20", marks=pytest.mark.long),
    ],
    ids=["stage", "misspelled", "right", "bucket", "prefetched", "one by one"],
)
def test_settings_are_told_the_first_limit_they_miss(zero, said, capsys):
    check("13.3", lambda: zero)
    assert said in capsys.readouterr().out


def test_stage_3_pays_from_where_both_stages_keep_the_same():
    """By the planner's terms, for a model of that many parameters."""
    numel, ranks = EXERCISES["13.1"].answer * 1e9, chapter_13.RANKS
    both = 12 * numel / ranks  # master parameters and moments
    stage_2, stage_3 = 2 * numel + both, 4 * numel / ranks + both + 2 * chapter_13.BUCKET
    assert stage_2 == pytest.approx(stage_3)


def test_other_settings_of_deepspeed_are_not_planned():
    record = {"script": "gpt_zero.py", "ranks": 4, "device": "cpu", "zero_optimization": {"stage": 3}}
    with refused("settings of gpt_zero.py"):
        predict.plan_of(record | {"config": asdict(gpt_zero.Config(engine="deepspeed"))})


def failed(lines):
    return [line.split(":")[0].removeprefix("FAIL  ") for line in lines if line.startswith("FAIL")]


# What the verdicts need of the notebook: the first cells, then the runs
FIRST = ("cell-01", "cell-02", "cell-03", "cell-08", "cell-10", "cell-11")


@pytest.mark.breaks
def test_a_stage_that_shares_nothing_is_noticed():
    """Each stage's record is that of DDP with plain AdamW."""
    ddp = """found = lab.on_ranks(gpt_zero.train_several, [SMALL | {"stage": "0"}])[0] * 4
    found = [{**record, "config": {**record["config"], "stage": str(n)}} for n, record in enumerate(found)]"""
    breaks = {
        "found = lab.on_ranks(gpt_zero.train_several, options, timeout=300)[0]": ddp,
        "DEEPSPEED = True": "DEEPSPEED = False",
    }
    lines = run_broken("13", breaks, only=(*FIRST, "cell-20", "cell-23", "cell-26", "cell-26a"))
    assert failed(lines) == [
        "PyTorch, 0 → 1",
        "PyTorch",  # kept, and the peak, against the plan
        "PyTorch",
    ]


@pytest.mark.breaks
def test_deepspeed_that_saves_what_the_formula_says_is_noticed():
    """Stage 3 without its buffers is a record in which they are not counted: the headline's verdicts must fail."""
    free = """start = {name: size for name, size in start.items() if name not in ("reduce-scatter", "gradients")}
    return sum(start.values())"""
    breaks = {
        "return sum(start.values())": free,
        ", **more}": "}",
    }
    cells = (*FIRST, "cell-20", "cell-23", "cell-26", "cell-26a")
    lines = run_broken("13", breaks, until="no cell has this", only=cells)
    wrong = failed(lines)
    assert "DeepSpeed, 2 → 3" in wrong and "DeepSpeed by default, stage 3" in wrong


@pytest.mark.breaks
def test_clipping_that_is_not_forgotten_is_noticed():
    breaks = {' if key != "gradient_clipping"}': "}", "in list(runs.items())[1:]": "in []"}
    lines = run_broken("13", breaks, only=("cell-01", "cell-02", "cell-03", "cell-42", "cell-43"))
    assert failed(lines) == ["clipping left to its default"]


@pytest.mark.breaks
def test_without_deepspeed_pytorch_alone_is_shown():
    absent = {"    deepspeed_zero.check()": '    raise UserError("DeepSpeed is not installed")'}
    lines = run_broken("13", absent, until="no cell has this")
    assert len(lines) > 8
    assert all(line.startswith("PASS  ") and "DeepSpeed" not in line for line in lines)
