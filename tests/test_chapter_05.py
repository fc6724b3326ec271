# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 05: its verdicts fail when its units are not made, its exercises judge fairly, its predictions hold."""

import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch
from labkit.running.lab import Lab
from labkit.teaching.exercises import chapter_05, check
from labkit.training.models import GPT
from planner import predict
from planner.models import networks
from planner.step.plan import Plan
from torch import nn

from notebooks import run_broken

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import this file


MNIST = ("lab.run(", "runs[", "runs.items")  # in its cells, which the GPT's do not need


@pytest.mark.breaks
def test_the_peak_does_not_move_without_the_unit():
    lines = run_broken("05", {"wrap=wrap, batch_size=32": 'wrap="unit", batch_size=32'}, until="units by size lower")
    failed = [line for line in lines if line.startswith("FAIL")]
    assert "peak of FSDP2 by size" in failed[-2]
    assert "units by size lower FSDP2's peak by" in failed[-1]


@pytest.mark.breaks
def test_units_that_are_not_made_are_noticed():
    """No block is a unit where each should be; and where embedding and head should be too, each block alone is."""
    breaks = {"for block in model.blocks:": "for block in []:", "    chosen: wrap,": "    chosen: blocks_together,"}
    lines = run_broken("05", breaks, until="memory that a step adds, as", skip=MNIST)
    for claim in ("peak with one block per unit", "peak of the chosen units"):
        assert any(line.startswith("FAIL") and claim in line for line in lines), lines


@pytest.mark.breaks
def test_the_headline_fails_with_more_tokens_than_it_names():
    lines = run_broken("05", {"TOKENS = 16": "TOKENS = 128"}, until="memory that a step adds, as", skip=MNIST)
    (claim,) = [line for line in lines if "memory that a step adds" in line]
    assert claim.startswith("FAIL"), lines
    assert all(line.startswith("PASS") for line in lines if "peak with one block per unit" in line), lines


def share(tokens, ranks, batch=1):
    """What a step of the chapter's GPT adds with the course's units, as a share of one unit's."""

    def plan(one):
        network = networks.gpt(chapter_05.SHAPE, batch_size=batch, seq_len=tokens, wrap_embeddings=not one)
        if one:
            network = replace(network, modules=tuple(replace(each, wrapped=False) for each in network.modules))
        return Plan(network, "fsdp2", ranks, optimizer="adamw-fused", on_gpu=False, workspaces=False)

    persists = predict.total(plan(one=True).persistent())
    units, one = (predict.total(plan(one).peak()[1]) - persists for one in (False, True))
    return units / one


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_headline_holds_at_16_tokens_and_no_more_at_128(ranks):
    assert share(16, ranks) < 0.5 < share(128, ranks) < share(512, ranks) < share(2048, ranks)
    assert share(512, ranks) > 0.85


@pytest.mark.parametrize("ranks", [2, 4])
def test_batch_and_length_count_by_their_product(ranks):
    assert share(16, ranks, batch=8) == pytest.approx(share(128, ranks), rel=0.01)


@pytest.mark.parametrize(("images", "helps"), [(8, False), (64, True)])
def test_units_by_size_help_fsdp1_at_many_images_only(images, helps):
    one, by_size = (predict.total(predict.peak("fsdp1", wrap, 4, images)[1]) for wrap in ("unit", "size"))
    assert (by_size < one) is helps


def test_as_many_units_are_not_the_same_units():
    """100,000 and 150,000 make eleven units of the chapter's GPT, root included, but only the second are its blocks."""
    with torch.device("meta"):
        model = GPT(chapter_05.SHAPE)
    ends = {"embedding", "head"}
    found = {n: chapter_05.reference_units(model, n) - ends for n in (40_000, 100_000, 150_000, 200_000)}
    assert len(found[40_000]) == 32
    assert found[100_000] == {f"blocks.{i}.feed_forward" for i in range(8)}
    assert found[150_000] == {f"blocks.{i}" for i in range(8)}
    assert found[200_000] == set()


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
    check("05.2", wrong)
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
