# SPDX-License-Identifier: BSD-3-Clause
"""ZeRO as the planner has it (planner/parallel/zero.py), without running it: parts, terms, records. On trial: test_predict.py."""

from dataclasses import asdict, replace

import gpt_zero
import pytest
from commands import refused
from planner import predict
from planner.models import networks
from planner.models.shapes import GPT_SHAPES
from planner.parallel import zero
from planner.step.plan import STEP_COUNTER
from planner.timing import cost

TINY = networks.gpt(GPT_SHAPES["tiny"], batch_size=2, seq_len=16)
DEEPSPEED = ("deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3")


def test_whole_parameters_go_to_the_rank_that_has_least():
    assert zero.partition_parameters([3, 5, 3, 4, 3], ranks=2) == [[5, 3], [4, 3, 3]]
    assert zero.partition_parameters([7], ranks=2) == [[7], []]


@pytest.mark.parametrize("ranks", [3, 4, 64])
def test_each_parameter_has_one_rank_with_its_moments(ranks):
    plans = [predict.Plan(TINY, "zero1", ranks, rank=rank) for rank in range(ranks)]
    moments = [plan.persistent()["optimizer state", "first moments"] for plan in plans]
    assert sum(moments) == 4 * TINY.numel
    assert moments[plans[0].for_peak_rank().rank] == max(moments)
    for plan in plans:
        plan.peak()  # also of a rank that has nothing to update


@pytest.mark.parametrize("strategy", DEEPSPEED)
def test_what_deepspeed_keeps_is_what_the_paper_counts_and_named_extras(strategy):
    """In bf16: 2 bytes per parameter, 2 per gradient that stays, 12 for moments and master parameters. 4 ranks divide it all."""
    stage = int(strategy[-1])
    kept = predict.Plan(TINY, strategy, 4, precision="bf16").persistent()
    tensors = TINY_TENSORS if stage == 0 else 1
    assert kept.pop(("optimizer state", "step counters")) == tensors * STEP_COUNTER
    bucket = kept.pop(("reduce-scatter", "bucket"), 0)
    assert bucket == (2 * BLOCK if stage == 3 else 0)
    norm = kept.pop(("temporary", "norm of the last gradient"), 0)  # one number, which the engine remembers
    assert norm == {0: 0, 1: 4, 2: 4, 3: 8}[stage]
    between_steps = 2 if stage == 3 else 0  # the other stages free their gradients
    assert predict.total(kept) == cost.model_state(TINY.numel, 4, stage, sizes=(2, between_steps, 12))


TINY_TENSORS = sum(len(module.parameters) for module in TINY.modules)
BLOCK = next(unit.numel() for unit in predict.Plan(TINY, "fsdp2", 4).make_units() if unit.kind == "block")


def test_in_fp32_deepspeed_keeps_the_parameters_twice_but_for_stage_0():
    for strategy in DEEPSPEED:
        kept = predict.Plan(TINY, strategy, 4).persistent()
        assert (("optimizer state", "master parameters in fp32") in kept) == (strategy != "deepspeed-0")


def test_deepspeeds_bucket_is_the_one_gpt_zero_sets():
    config = gpt_zero.Config(engine="deepspeed")
    assert zero.bucket_numel(predict.Plan(TINY, "deepspeed-2", 2)) == BLOCK
    assert gpt_zero.settings(config, BLOCK)["zero_optimization"]["reduce_bucket_size"] == BLOCK


def test_every_stage_1_here_sends_half_as_much_again_as_the_paper():
    """It counts a reduce-scatter and a gathering: 2 of the model. Here gradients are all-reduced, with both engines."""
    model = 4 * TINY.numel
    for strategy in ("zero1", "deepspeed-1", "deepspeed-2"):
        plan = predict.Plan(TINY, strategy, 4)
        sent = sum(c["count"] * cost.ring_bytes(c, plan, 4)["rank"] for c in plan.traffic())
        assert sent == pytest.approx(3 * model * 3 / 4, rel=1e-4), strategy


@pytest.mark.parametrize("strategy", DEEPSPEED)
def test_collectives_of_many_micro_batches_are_counted_without_walking_through_all(strategy):
    counts = []
    for micro_batches in (1, 2, 3, 40):
        plan = predict.Plan(TINY, strategy, 4, micro_batches=micro_batches)
        counts.append({(c["kind"], c["bytes"]): c["count"] for c in plan.traffic()})
    one, two, three, forty = counts
    for key in one:
        assert three[key] - two[key] == two[key] - one[key] == (forty[key] - one[key]) / 39
    each = {kind for kind, size in one if two[kind, size] > one[kind, size]}
    assert each == {
        "deepspeed-2": {"all-reduce"},
        "deepspeed-3": {"all-gather", "reduce-scatter"},
    }.get(strategy, set())


def test_the_last_rank_of_stage_2_needs_more_than_the_first():
    """The gradients of its part come first, when nearly all activations are still there."""
    first = predict.Plan(networks.gpt(GPT_SHAPES["tiny"], 3, 33), "deepspeed-2", 2)
    last = replace(first, rank=1)
    assert predict.total(last.peak()[1]) > predict.total(first.peak()[1])
    assert first.for_peak_rank() == last


def record(**options) -> dict:
    return {"script": "gpt_zero.py", "ranks": 4, "device": "cpu", "config": asdict(gpt_zero.Config(**options))}


def test_a_record_says_which_strategy_it_was():
    torch = [predict.plan_of(record(stage=stage)) for stage in "0123"]
    assert [plan.strategy for plan in torch] == ["ddp", "zero1", "fsdp2", "fsdp2"]
    assert [plan.reshard for plan in torch[2:]] == ["false", "true"]
    assert [predict.plan_of(record(stage=stage, engine="deepspeed")).strategy for stage in "0123"] == list(DEEPSPEED)
    for stage in "0123":
        for plan in (record(stage=stage, accumulate=3), record(stage=stage, accumulate=3, engine="deepspeed")):
            assert predict.plan_of(plan).reductions == (1 if stage in "01" else 3)


def test_what_is_not_predicted_says_so():
    with refused("--cpu-offload"):
        predict.plan_of(record(engine="deepspeed", cpu_offload=True))


def test_terms_that_are_seldom_a_peak_are_in_the_timeline():
    """Buffers that traces of real steps show, in moments that another outdoes: with SGD, the step has none of its own."""

    def terms(strategy, place, precision="fp32"):
        plan = predict.Plan(TINY, strategy, 4, precision=precision, optimizer="sgd")
        return {name: size for (_, name), size in plan.timeline()[place][1].items()}

    part = TINY.numel // 4
    last = "backward of embedding"
    assert terms("deepspeed-0", last)["gradients, flattened"] == 4 * TINY.numel
    for strategy in ("deepspeed-1", "deepspeed-2", "deepspeed-3"):
        step = terms(strategy, "optimizer", "bf16")
        assert step["gradients of this rank's part, flat"] == 2 * part
        assert step["gradients of this rank's part, in fp32"] == 4 * part
    assert terms("deepspeed-3", "backward of block 3")["packed gradients"] > 0


@pytest.mark.parametrize(
    ("strategy", "formats", "norms"),
    [
        ("ddp", {}, 0),  # each rank has all gradients
        ("fsdp1", {}, 1),
        ("fsdp1", {"precision": "bf16", "weights": "bf16"}, 1),  # the norm is in fp32 all the same
        ("deepspeed-0", {}, 1),  # the mean of the ranks' norms, which are equal
        ("deepspeed-0", {"precision": "bf16"}, 0),
    ],
)
def test_clipping_sends_four_bytes_where_ranks_must_agree(strategy, formats, norms):
    network = networks.gpt(GPT_SHAPES["tiny"], 2, 16)
    sent = [
        sum(c["count"] for c in predict.Plan(network, strategy, 4, clip=clip, **formats).traffic() if c["bytes"] == 4)
        for clip in (False, True)
    ]
    assert sent == [0, norms]
