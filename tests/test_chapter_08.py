"""Chapter 08: its verdicts fail when precision or recomputation is not what it says, its exercises judge fairly."""

from math import ceil

import pytest
import torch
from forked import by_value
from labkit.teaching.exercises import check
from labkit.teaching.exercises.chapter_08 import SHAPES, all_but_down, reference_kept, the_labs
from planner import predict
from planner.models import networks, shapes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from notebooks import run_broken

# The cells that need a run
NEED_A_RUN = ("lab.run(", "lab.on_ranks(", "total(", "about_guess(g", "claims", "trained", "most(full", "trials")

# What is broken: text → replacement, up to which cell, without which cells, and the claims that must then fail
BREAKS = {
    "the first run recomputes": (
        {'precision="fp32", max': 'precision="fp32", recompute="full", max'},
        "NBVAL_CHECK_OUTPUT",
        (),
        ["peak of a rank in fp32"],
    ),
    "more ranks divide nothing": (
        {'"batch_size": 1, "max_steps": 4}': '"batch_size": 1, "max_steps": 4, "strategy": "ddp"}'},
        "activations over everything else, 8 ranks",
        (),
        ["activations over everything else, 8 ranks"],
    ),
    "the run in bf16 is one in fp32": (
        {'precision="bf16", max': 'precision="fp32", max'},
        "gathered in a step, bf16",
        ("about_guess(g", "by_ranks"),
        ["gathered in a step, bf16"],
    ),
    "nothing is recomputed": (
        {'recompute="full", max': 'recompute="none", max'},
        "activations at their most, full",
        ("by_ranks", "trained", "def losses", "bf16 = lab.run", 'bf16["memory"]'),
        ["activations at their most, full"],
    ),
    "weights are frozen": (
        {
            "    model = GPT(shape)\n    for block in model.blocks:\n        gpt_fsdp": (
                "    model = GPT(shape)\n    gpt_fsdp.models.add_lora(model, 4)\n"
                "    for block in model.blocks:\n        gpt_fsdp"
            ),
        },
        "operations with full recomputation",
        NEED_A_RUN,
        ["operations with full recomputation, over those without"],
    ),
    "no dropout": (
        {"dropout(x, 0.1)": "dropout(x, 0.0)"},
        "random state not preserved",
        (*NEED_A_RUN, "counted", "crossing"),
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
        sizes = shapes.GPTShape(
            layers, shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size
        )
        plan = predict.Plan(networks.gpt(sizes, batch_size=8, seq_len=64), "fsdp2", 2, precision=precision)
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
        (all_of_them, "4 blocks, n = 2: block 1 is recomputed; recompute only 0, n, 2n"),
        (from_the_last, "block 0 saves all its tensors"),
        (without_gradients, "gets no gradient"),
        (twice_as_much, "the gradient of the input differs"),
        (late_binding, "differs"),
        (lambda blocks, n: blocks.nothing, "raises AttributeError"),
        (lambda blocks, n: nn.ModuleList(blocks), "block 0 saves all its tensors"),
    ],
)
def test_a_wrong_recomputation_hears_why(wrong, said, capsys):
    check("08.2", wrong)
    assert said in capsys.readouterr().out


MM = torch.ops.aten.mm.default


def products_only(operator, arguments, shape):
    return operator is MM and arguments[0].shape[-1] != shape.intermediate_size


def some_products(operator, arguments, shape):
    return all_but_down(operator, arguments, shape) and not (
        operator is MM and arguments[1].shape[-1] == shape.intermediate_size
    )


def norms_too(operator, arguments, shape):
    return all_but_down(operator, arguments, shape) or operator is torch.ops.aten.silu.default


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (the_labs, "as with the lab's policy: which result is not needed for any gradient"),
        (products_only, "backward recomputes attention, 1 times"),
        (some_products, "backward recomputes a matmul, 2 times"),
        (norms_too, "save only results that are expensive to recompute"),
        (lambda *given: given[3], "raises IndexError"),
    ],
)
def test_a_wrong_policy_hears_why(wrong, said, capsys):
    check("08.3", wrong)
    assert said in capsys.readouterr().out


def all_sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def all_blocks(model, mesh, excess, kept, given):
    all_of_them(model.blocks, 1)
    all_sharded(model, mesh)


def the_last_blocks(model, mesh, excess, kept, given):
    all_of_them(model.blocks[-ceil(excess / (kept - given)) :], 1)
    all_sharded(model, mesh)


def input_forgotten(model, mesh, excess, kept, given):
    """As if the input were saved too."""
    all_of_them(model.blocks[: ceil(excess / kept)], 1)
    all_sharded(model, mesh)


def one_unit(model, mesh, excess, kept, given):
    all_of_them(model.blocks[: ceil(excess / (kept - given))], 1)
    fully_shard(model, mesh=mesh)


def half_the_output(model, mesh, excess, kept, given):
    for block in model.blocks[: ceil(excess / (kept - given))]:
        forward = recomputed(block)
        block.forward = lambda *inputs, forward=forward: forward(*inputs) / 2
    all_sharded(model, mesh)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (all_blocks, "blocks [0, 1, 2, 3, 4] recomputed the peak is"),
        (all_blocks, "1 of them are enough"),
        (the_last_blocks, "backward starts with the last block and needs its tensors at once"),
        (input_forgotten, "recompute more of them"),
        (one_unit, "make each block a unit"),
        (half_the_output, "differs"),
    ],
)
def test_a_wrong_choice_of_blocks_hears_why(wrong, said, capsys):
    check("08.0", by_value(wrong))
    assert said in capsys.readouterr().out
