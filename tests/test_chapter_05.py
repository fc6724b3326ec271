"""Chapter 05: its verdicts fail when its units are not made, its exercises judge fairly, its predictions hold."""

import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch
from labkit.running.lab import Lab
from labkit.teaching.exercises import chapter_05, check
from planner import predict
from planner.models import networks
from planner.models.shapes import GPT_SHAPES
from planner.step.plan import Plan
from planner.timing import cost
from torch import nn

from notebooks import run_broken

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import this file


@pytest.mark.long
def test_the_peak_does_not_move_without_the_unit():
    lines = run_broken(
        "05",
        {'wrap="size", batch_size=32': 'wrap="unit", batch_size=32'},
        until="what wrapping fc1 alone takes off",
        skip=("fsdp1_units", "train(", "ran[", "gpt_fsdp.py", "persistent", "plans"),
    )
    failed = [line for line in lines if line.startswith("FAIL")]
    assert "peak of a rank with fc1 apart" in failed[0]
    assert "what wrapping fc1 alone takes off the peak" in failed[1]


@pytest.mark.long
def test_units_that_are_not_made_are_noticed():
    """No block is a unit where each should be; and where embedding and head should be too, each block alone is."""
    breaks = {
        "for block in model.blocks:": "for block in []:",
        '    "your units": wrap,': '    "your units": blocks_together,',
    }
    lines = run_broken("05", breaks, until="what a step adds")
    for claim in ("peak with a block a unit", "peak of your units"):
        assert any(line.startswith("FAIL") and claim in line for line in lines), lines


def one_unit(model, shard):
    shard(model)


def blocks_only(model, shard):
    for block in model.blocks:
        shard(block)
    shard(model)


def root_first(model, shard):
    shard(model)
    for block in model.blocks:
        shard(block)


def no_root(model, shard):
    for part in (model.embedding, *model.blocks, model.head):
        shard(part)


def blocks_norm_and_head(model, shard):
    for part in (*model.blocks, [model.norm, model.head]):
        shard(part)
    shard(model)


def no_root_at_all(model, shard):
    for part in (model.embedding, *model.blocks, model.norm, model.head):
        shard(part)


def all_kept(model, shard):
    for part in (model.embedding, *model.blocks, model.head):
        shard(part, reshard_after_forward=False)
    shard(model)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (one_unit, "all parameters are gathered at once"),
        (blocks_only, "the root has 4.0 MiB of parameters, gathered throughout backward"),
        (root_first, "blocks.0 comes after model"),
        (no_root, "norm.weight is in no unit"),
        (no_root_at_all, "end with shard(model)"),
        (blocks_norm_and_head, "the root has 2.0 MiB of parameters"),
        (all_kept, "10.0 MiB of parameters stay gathered after forward"),
    ],
)
def test_units_are_told_why_they_do_not_fit(wrap, said, capsys):
    check("05.0", wrap)
    assert said in capsys.readouterr().out


def trained(me, configs):
    """The peak and the number of units of each configuration, by the lab script's functions."""
    import mnist_fsdp
    from labkit.measuring.meters import TRACED_STEPS, Meter
    from labkit.running.progress import Progress
    from labkit.training.models import Net

    found = []
    for options in configs:
        config = mnist_fsdp.Config(**options)
        model = mnist_fsdp.parallelize(Net(), config, me)
        optimizer = torch.optim.Adadelta(model.parameters())
        meter = Meter(model, optimizer, me.device, progress=Progress(me, 6))
        for images, labels in meter.watch([(torch.rand(8, 1, 28, 28), torch.arange(8))] * (TRACED_STEPS[-1] + 1)):
            mnist_fsdp.train_step(model, optimizer, images, labels, config)
        found.append((sum(meter.summary(8)["memory"]["peak"].values()), len(mnist_fsdp.units(model))))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp1", 2), ("fsdp2", 3)])
def test_the_peak_of_every_cut_is_the_arithmetic(strategy, ranks):
    configs = [
        {"strategy": strategy, "reshard_after_forward": reshard, "wrap": "size", "min_num_params": threshold}
        for reshard in ("true", "false")
        for threshold in (100, 1_000, 10_000, 100_000, 2_000_000)
    ]
    found = Lab(launcher="local", device="cpu").on_ranks(trained, configs, ranks=ranks)[0]
    for options, (peak, units) in zip(configs, found, strict=True):
        cut = {"min_num_params": options["min_num_params"]}
        keep = {"reshard_after_forward": options["reshard_after_forward"]}
        _, terms = predict.peak(options["strategy"], "size", ranks, 8, **keep, **cut)
        assert peak == pytest.approx(predict.total(terms), abs=8), options  # the lab's loop keeps a loss more
        assert units == len(predict.units_of("size", **cut)), options


def llama(apart=False, one=False):
    """The plan of Llama 3 8B on 32 GPUs, one sequence of 4096 tokens per rank in bf16, blocks recomputed."""
    blueprint = networks.gpt(
        GPT_SHAPES["llama3-8b"], batch_size=1, seq_len=4096, recompute="full", wrap_embeddings=apart
    )
    if one:
        blueprint = replace(blueprint, modules=tuple(replace(each, wrapped=False) for each in blueprint.modules))
    return Plan(blueprint, "fsdp2", 32, optimizer="adamw-fused", precision="bf16", on_gpu=True, workspaces=True)


def test_embedding_and_head_apart_take_the_embedding_off_a_planned_llama():
    blocks, apart = (predict.total(llama(apart).peak()[1]) for apart in (False, True))
    assert blocks - apart == pytest.approx(2 * 128_256 * 4096, rel=0.01)  # the embedding in bf16


@pytest.mark.parametrize("cut", [{"one": True}, {}, {"apart": True}])
def test_what_a_planned_llama_sends_hides_unless_it_is_one_unit(cut):
    """Over links as fast as published, at two fifths of an H100's published peak."""
    time = cost.step_time(llama(**cut), 8, cost.LINKS["nvlink"], cost.NETWORKS["infiniband"], flops=0.4 * 989e12)
    share = time["exposed"] / time["communication"]
    assert share == pytest.approx(1) if "one" in cut else share < 0.5


def large(model, min_num_params, least=0):
    """Every module that is large, whatever was taken inside it."""
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_modules()}
    return {name for name, size in sizes.items() if name and size >= min_num_params + least}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (large, "inside it are units"),
        (partial(large, least=1), "'0' is a unit, but missing from your set"),
        (
            lambda m, n: {name for name, child in m.named_children() if len(list(child.parameters()))},
            "it has 11 parameters",
        ),
        (lambda m, n: {""} | chapter_05.reference_units(m, n), "leave it out of the set"),
        (lambda m, n: chapter_05.reference_units(m, n) | ({"blocks"} if hasattr(m, "blocks") else set()), "no forward"),
        (lambda m, n: {"fc1"}, "no module of that name"),
        (lambda m, n: m.nothing, "raises AttributeError"),
    ],
)
def test_a_wrong_policy_hears_why(wrong, said, capsys):
    check("05.3", wrong)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "threshold", [1, 20, 50, 100, 250, 400, 10_000, 60_000, 100_000, 150_000, 300_000, 1_000_000, 10_000_000]
)
def test_the_exercise_asks_for_what_pytorch_does(threshold):
    from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

    class Unit(nn.Module):
        def __init__(self, module, **_):
            super().__init__()
            self.module = module

    with torch.device("meta"):
        blocks = (nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 64), nn.LayerNorm(64)) for _ in range(4))
        model = nn.Sequential(nn.Embedding(256, 128), nn.ModuleList(blocks), nn.Linear(128, 10))
    expected = chapter_05.reference_units(model, threshold)
    policy = partial(size_based_auto_wrap_policy, min_num_params=threshold)
    _recursive_wrap(model, policy, Unit, ignored_modules=set(), ignored_params=set(), only_wrap_children=True)
    found = {n.replace(".module", "") for n, m in model.named_modules() if isinstance(m, Unit)}
    assert found == expected
