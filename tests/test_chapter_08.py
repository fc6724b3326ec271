# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 08: its verdicts fail when precision or recomputation is not what it says, its exercises judge fairly."""

from math import ceil

import pytest
import torch
from answers import altered
from forked import by_value
from labkit.teaching.exercises import check
from labkit.teaching.exercises.chapter_08 import SHAPES, all_but_down, reference_kept, the_labs
from labkit.teaching.exercises.int8_gather import PackedGather
from planner import predict
from planner.models import networks, shapes
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from notebooks import run_broken

SETUP = ("cell-01", "cell-02", "cell-04", "cell-05", "cell-07")
WITHOUT_A_RUN = {'fp32 = lab.run("gpt_fsdp.py", precision="fp32", max_steps=4)': "fp32 = None"}
ON_ONE_RANK_ONLY = {"for n in (1, 2, 4, 8)}": "for n in (1,)}"}

# What is broken: text → replacement, the cells that run, and the claims that must then fail
BREAKS = {
    "more ranks divide nothing": (
        {'one_sequence = {"batch_size": 1}': 'one_sequence = {"batch_size": 1, "strategy": "ddp"}'},
        (*SETUP, "more-ranks", "more-ranks-verdict"),
        ["activations over everything else, 8 ranks"],
    ),
    "the run in bf16 is one in fp32": (
        ON_ONE_RANK_ONLY | {'precision="bf16", max_steps=4)\ntitle': 'precision="fp32", max_steps=4)\ntitle'},
        (*SETUP, "more-ranks", "cell-19", "cell-25", "cell-33"),
        ["gathered in a step, bf16"],
    ),
    "nothing is recomputed": (
        ON_ONE_RANK_ONLY | {'recompute="full", max_steps=4)\nmore': 'recompute="none", max_steps=4)\nmore'},
        (*SETUP, "more-ranks", "cell-19", "cell-25", "cell-43", "cell-47"),
        ["activations at their most, full"],
    ),
    "nothing is rounded at random": (
        WITHOUT_A_RUN
        | ON_ONE_RANK_ONLY
        | {'stochastic": ("fp32", half, BF16AdamW)': 'stochastic": ("fp32", half, to_nearest)'}
        | {"fp32['hardware']": "'CPU'", "fp32['data']['name']": "'text'", "activation_plots.losses": "print"},
        (*SETUP, "more-ranks", "formats-run", "cell-37"),
        ["from fp32's, bf16 weights, stochastic", "weights changed by any step", "loss difference of bf16 weights"],
    ),
    "weights are frozen": (
        WITHOUT_A_RUN | {"    if lora:\n        add_lora(model, lora)\n": "    add_lora(model, 4)\n"},
        (*SETUP, "cell-50", "cell-51"),
        [*(f"operations, recomputation {name}" for name in ("none", "selective", "full")), "all weights trained"],
    ),
    "the base is trained": (
        WITHOUT_A_RUN | {"        add_lora(model, lora)\n": "        pass\n"},
        (*SETUP, "cell-50", "cell-51"),
        ["LoRA: full over none"],
    ),
    "each rank looks at its own shard": (
        WITHOUT_A_RUN | {"[overflow(me, each) for": "[overflow(me, True) for"},
        (*SETUP, "fp16-predict", "fp16-verdict"),
        ["ranks that skip the step"],
    ),
    "no dropout": (
        WITHOUT_A_RUN | {"dropout(x, 0.1)": "dropout(x, 0.0)"},
        (*SETUP, "cell-41", "cell-70", "cell-75"),
        ["gradient's relative error, random state not preserved"],
    ),
}


@pytest.mark.breaks
@pytest.mark.parametrize("what", BREAKS)
def test_verdicts_can_fail(what):
    breaks, only, claims = BREAKS[what]
    lines = run_broken("08", breaks, until="no cell", only=only)
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


def all_of_them(blocks):
    for block in blocks:
        block.forward = recomputed(block)


# The solution of 08.2 with a slip: (text, replacement), and what it is told
SLIPS = [
    (("(needs_gradient + trained)", "(trained + trained)"), "all weights trained, nothing recomputed"),
    (("if recompute and needs_gradient", "if recompute"), "the first two blocks frozen, full recomputation"),
    (("needs_gradient = needs_gradient or trained", "needs_gradient = trained"), "nothing recomputed"),
    (("total, needs_gradient = 0, False", "total, needs_gradient = 0, True"), "all weights trained"),
]


@pytest.mark.parametrize(("slip", "said"), SLIPS, ids=[said for _, said in SLIPS])
def test_a_wrong_count_of_operations_hears_where(slip, said, capsys):
    check("08.2", altered("08.2", slip))
    out = capsys.readouterr().out
    assert "not quite" in out and said in out


def packing(pack, unpack):
    """A PackedGather with these functions."""
    return type("Packing", (PackedGather,), {"pack": staticmethod(pack), "unpack": staticmethod(unpack)})


def by_its_maximum(shard):
    """One scale for a whole shard, which is not gathered."""
    return ((shard * 127 / shard.abs().max()).round().to(torch.int8),)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (packing(lambda shard: (shard,), lambda whole: whole), "gathered as 100% of them"),
        (packing(lambda shard: (shard.half(),), lambda whole: whole.float()), "gathered as 50% of them"),
        (packing(by_its_maximum, lambda numbers: numbers / 127), "are off by"),
        (packing(lambda shard: (shard[:1],), lambda whole: whole), "unpack returns (2, 128)"),
        (packing(lambda shard: None, lambda *gathered: None), "not answered yet"),
    ],
)
def test_a_wrong_packing_hears_why(wrong, said, capsys):
    check("08.1", wrong)
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


def all_blocks(model, mesh, excess, kept, given, most):
    all_of_them(model.blocks)
    all_sharded(model, mesh)


def the_last_blocks(model, mesh, excess, kept, given, most):
    all_of_them(model.blocks[-ceil(excess / (kept - given)) :])
    all_sharded(model, mesh)


def input_forgotten(model, mesh, excess, kept, given, most):
    """As if the input were saved too."""
    all_of_them(model.blocks[: ceil(excess / kept)])
    all_sharded(model, mesh)


def one_unit(model, mesh, excess, kept, given, most):
    all_of_them(model.blocks[: ceil(excess / (kept - given))])
    fully_shard(model, mesh=mesh)


def never_refuses(model, mesh, excess, kept, given, most):
    all_of_them(model.blocks[: ceil(excess / (kept - given))])
    all_sharded(model, mesh)


def half_the_output(model, mesh, excess, kept, given, most):
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
        (never_refuses, "raise ValueError"),
    ],
)
def test_a_wrong_choice_of_blocks_hears_why(wrong, said, capsys):
    check("08.0", by_value(wrong))
    assert said in capsys.readouterr().out
