"""Chapter 08: its verdicts fail when precision or recomputation is not what it says, its exercises judge fairly."""

import pytest
import torch
from labkit.teaching.exercises import check
from labkit.teaching.exercises.chapter_08 import SHAPES, reference_kept
from planner import networks, predict, shapes
from torch import nn
from torch.utils.checkpoint import checkpoint

from notebooks import run_broken

# What is broken: text → replacement, up to which cell, without which cells, and the claims that must then fail
BREAKS = {
    "the first run recomputes": (
        {'precision="fp32", max_steps=6': 'precision="fp32", recompute="full", max_steps=6'},
        "NBVAL_CHECK_OUTPUT",
        (),
        ["peak of a rank in fp32", "activations over everything else at the peak"],
    ),
    "the run in bf16 is one in fp32": (
        {'precision="bf16", max_steps=6': 'precision="fp32", max_steps=6'},
        "gathered in a step, bf16",
        ("about_guess(g",),
        ["gathered in a step, bf16"],
    ),
    "nothing is recomputed": (
        {'recompute="full", max_steps=6': 'recompute="none", max_steps=6'},
        "activations at their most, full",
        ("trained", "def losses", "bf16 = lab.run", 'bf16["memory"]'),
        ["activations at their most, full"],
    ),
    "no dropout": (
        {"dropout(x, 0.1)": "dropout(x, 0.0)"},
        "random state not preserved",
        # the cells that need a run
        (
            "lab.run(",
            "lab.on_ranks(",
            "total(",
            "about_guess(g",
            "claims",
            "trained",
            "most(full",
            "counted",
            "crossing",
        ),
        ["gradient's relative error, random state not preserved"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("what", BREAKS)
def test_verdicts_can_fail(what):
    breaks, until, skip, claims = BREAKS[what]
    lines = run_broken("08", breaks, until=until, skip=skip)
    failed = [line for line in lines if line.startswith("FAIL")]
    assert len(failed) == len(claims)
    for line, claim in zip(failed, claims, strict=True):
        assert claim in line


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_block_keeps_what_the_predictor_says(shape, precision):
    kept = []
    for layers in (2, 3):  # each block more adds what one block keeps
        sizes = shapes.GPTShape(layers, shape.width, shape.heads, shape.kv_heads, shape.hidden)
        plan = predict.Plan(networks.gpt(sizes, batch=8, length=64), "fsdp2", 2, precision=precision)
        _, terms = plan.timeline()["backward"]
        kept.append(predict.by_category(terms)["activations"])
    itemsize = {"fp32": 4, "bf16": 2}[precision]
    assert kept[1] - kept[0] == 8 * 64 * reference_kept(shape, itemsize)


# Functions that are wrong


def recomputed(block):
    """A block's forward, through checkpoint."""
    forward = block.forward
    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


def all_of_them(blocks, n):
    for block in blocks:
        block.forward = recomputed(block)


def from_the_last(blocks, n):
    for number, block in enumerate(blocks):
        if number % n == n - 1:
            block.forward = recomputed(block)


def without_gradients(blocks, n):
    for block in blocks[::n]:
        block.forward = torch.no_grad()(block.forward)


def twice_as_much(blocks, n):
    """Recomputes, and changes what is computed."""
    for block in blocks[::n]:
        forward = recomputed(block)
        block.forward = lambda *inputs, forward=forward: 2 * forward(*inputs)


def late_binding(blocks, n):
    for number, block in enumerate(blocks):
        if number % n == 0:
            forward = block.forward
            block.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)  # noqa: B023


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (all_of_them, "4 blocks, n = 2: block 1 is recomputed; only 0, n, 2n"),
        (from_the_last, "block 0 keeps all its tensors"),
        (without_gradients, "gets no gradient"),
        (twice_as_much, "the gradient of what came in differs"),
        (late_binding, "differs"),
        (lambda blocks, n: blocks.nothing, "raises AttributeError"),
        (lambda blocks, n: nn.ModuleList(blocks), "block 0 keeps all its tensors"),
    ],
)
def test_a_wrong_recomputation_hears_why(wrong, said, capsys):
    check("08.2", wrong)
    assert said in capsys.readouterr().out


def kept_per_token(shape, itemsize, norm_itemsize=4, sums=True, roots=2, kv=None, inner=4, more=0):
    """The right formula, and the ways to get it wrong."""
    d = shape.width
    kv = d // shape.heads * shape.kv_heads if kv is None else d
    norms = 2 * norm_itemsize * 2 * d + roots * norm_itemsize
    return (
        norms
        + itemsize * (2 * d + 2 * d + 2 * kv + inner * shape.hidden + more * d)
        + (norm_itemsize * shape.heads if sums else 0)
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "right"),
        ({"sums": False}, "attention keeps a log-sum-exp"),
        ({"roots": 0}, "each of the two norms keeps 1/rms"),
        ({"kv": "as wide as queries"}, "keys and values are narrower"),
        ({"inner": 3}, "four tensors are kept"),
        ({"more": 2}, "the results of output and down are not kept"),
        ({"norm_itemsize": None}, "in bf16 the norms and the log-sum-exp stay in fp32"),
    ],
)
def test_a_wrong_formula_hears_why(wrong, said, capsys):
    def answer(shape, itemsize):
        if "norm_itemsize" in wrong:
            return kept_per_token(shape, itemsize, norm_itemsize=itemsize)
        return kept_per_token(shape, itemsize, **wrong)

    check("08.3", answer)
    assert said in capsys.readouterr().out
