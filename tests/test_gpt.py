# SPDX-License-Identifier: BSD-3-Clause
"""The transformer lab's parts: how it starts, what it sends and keeps, its record, its checkpoints, its refusals."""

import dataclasses
import json
import math
import os
import shutil
import sys
from functools import partial
from unittest import mock

import cloudpickle
import gpt_fsdp
import pytest
import torch
from commands import assert_about, call, refused, script, ways
from forked import forked
from labkit.measuring import meters, records, simulate
from labkit.measuring.trace import local
from labkit.running import launch, notebook_ranks, options, preflight, ranks
from labkit.running.lab import Lab
from labkit.running.ranks import Rank
from labkit.training import checkpoints, models, shards, text
from planner import predict
from planner.models import flops, shapes
from planner.models.shapes import GPT_SHAPES
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode

HERE = launch.Cluster(launcher="local")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import this file


def on_ranks(function, *arguments, count):
    return notebook_ranks.on_ranks(function, *arguments, ranks=count, cluster=HERE, timeout=600)


def run(**given):
    return launch.run(
        "gpt_fsdp.py", cluster=HERE, quiet=True, on_progress=lambda *_: None, timeout=200, **{"ranks": 2} | given
    )


def plain(config):
    """The model without the meta device and without any strategy, with its first values."""
    model = models.GPT(config.shape).to(config.dtype)
    if config.lora:
        models.add_lora(model, config.lora)
    gpt_fsdp.init_weights(model, config.seed)
    return model


# Starting

STARTS = {
    "ddp": {"strategy": "ddp"},
    "fsdp1": {"strategy": "fsdp1"},
    "fsdp1 tied": {"strategy": "fsdp1", "tied": True},
    "fsdp1 frozen base": {"strategy": "fsdp1", "lora": 2},
    "fsdp2": {},
    "fsdp2 tied": {"tied": True},
    "fsdp2 frozen base": {"lora": 2},  # fewer rows in an adapter than there are ranks
    "fsdp2 kept": {"reshard_after_forward": "false", "cpu_offload": True, "prefetch": 2},
    "fsdp2 float64, recomputed": {"precision": "fp64", "recompute": "full"},
    "fsdp2 2x2": {"mesh": "2x2"},
    "fsdp1 2x2": {"mesh": "2x2", "strategy": "fsdp1"},
    "fsdp1 apart": {"wrap": "blocks+embeddings", "strategy": "fsdp1"},
    "fsdp2 apart, in bf16": {"wrap": "blocks+embeddings", "precision": "bf16", "weights": "bf16"},
}


SMALL_BLOCKS = (
    1000  # so that a matrix of so small a model is drawn in many blocks, which no rank's rows begin or end with
)


def started(me, names):
    """{name: (whole values, placements, shapes of this rank's parts)} of the model as each configuration starts."""
    models.DRAWN_AT_ONCE, found = SMALL_BLOCKS, {}
    for name in names:
        model, _ = gpt_fsdp.build(gpt_fsdp.Config(**STARTS[name]), me)
        state = get_model_state_dict(model)  # FSDP's as DTensors; DDP's is whole
        whole = {n: value.full_tensor() if isinstance(value, DTensor) else value for n, value in state.items()}
        whole = whole if me.rank == 0 else None  # of which all have the same
        placements = {n: str(getattr(p, "placements", None)) for n, p in model.named_parameters()}
        parts = {n: tuple(local(p).shape) for n, p in model.named_parameters()}
        found[name] = whole, placements, parts
    return found


# On 3 ranks, which cut the model's rows unevenly, except where it takes 4; and each strategy once on 4, which cut them evenly.
ON_FOUR = ("ddp", "fsdp1", "fsdp2", *(name for name in STARTS if "2x2" in name))
STARTED = {4: ON_FOUR, 3: [name for name in STARTS if "2x2" not in name]}


@pytest.fixture(scope="module")
def starts(selected):
    """{(name, ranks): what ``started`` found on each rank}"""
    found = {}
    for count, names in STARTED.items():
        names = selected(names)
        every = on_ranks(started, names, count=count)
        found |= {(name, count): [of_rank[name] for of_rank in every] for name in names}
    return found


@pytest.mark.long
@pytest.mark.parametrize(("name", "count"), [(name, count) for count, names in STARTED.items() for name in names])
def test_initial_weights_are_the_same_bitwise(name, count, starts, monkeypatch):
    """With and without the meta device, for every strategy, on any number of ranks."""
    monkeypatch.setattr(models, "DRAWN_AT_ONCE", SMALL_BLOCKS)
    expected = plain(gpt_fsdp.Config(**STARTS[name])).state_dict()
    values, _, _ = starts[name, count][0]
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[parameter], expected[parameter]) for parameter in expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "count"), [(n, count) for count, names in STARTED.items() for n in names if n.startswith("fsdp2")]
)
def test_every_parameter_is_placed_as_its_strategy_says(name, count, starts):
    placed = "(Replicate(), Shard(dim=0))" if "2x2" in name else "(Shard(dim=0),)"
    shards = 2 if "2x2" in name else count
    whole = {n: p.shape for n, p in plain(gpt_fsdp.Config(**STARTS[name])).named_parameters()}
    for rank, (_, placements, parts) in enumerate(starts[name, count]):
        assert set(placements.values()) == {placed}
        for parameter, shape in whole.items():
            rows = [len(part) for part in torch.empty(shape[0]).chunk(shards)] + [0] * shards
            assert parts[parameter] == (rows[rank % shards], *shape[1:])


@pytest.mark.parametrize("options", [{}, {"lora": 2}, {"tied": True}, {"mesh": "1x1"}], ids=str)
def test_every_parameter_is_sharded(options, world_of_one):
    model, _ = gpt_fsdp.build(gpt_fsdp.Config(**options), world_of_one)
    assert {getattr(parameter, "placements", "whole") for parameter in model.parameters()} == {(Shard(0),)}


def test_validation_needs_no_more_memory_than_training(world_of_one, monkeypatch):
    """On some numbers of ranks the sequences do not divide evenly: a batch of them must not be larger for it."""
    monkeypatch.setattr(gpt_fsdp.dist, "all_reduce", lambda _: None)
    tokens, passes, losses = torch.arange(4000).to(torch.uint8), {}, {}

    def model(inputs):
        passes[world, rank].append(len(inputs))
        return torch.zeros(*inputs.shape, 256)

    for world, size in ((3, 1), (3, 4), (5, 3), (1, 8)):
        config = gpt_fsdp.Config(batch_size=size, seq_len=8, strategy="single")
        for rank in range(world):
            passes[world, rank] = []
            me = dataclasses.replace(world_of_one, rank=rank, world_size=world)
            losses[world, rank] = gpt_fsdp.evaluate(model, tokens, config, me)
        assert max(max(passes[world, rank]) for rank in range(world)) <= size
        assert len({len(passes[world, rank]) for rank in range(world)}) == 1  # each is a collective
        assert sum(losses[world, rank] for rank in range(world)) == pytest.approx(math.log(256))


def test_what_is_not_initialised_is_noticed(world_of_one):
    """A layer of a kind that ``init_weights`` does not know, or any other way of leaving one out."""
    model = models.GPT(gpt_fsdp.Config().shape)
    gpt_fsdp.init_weights(model, 1)
    model.blocks[2].scale = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"not initialized: blocks\.2\.scale"):
        gpt_fsdp.init_weights(model, 1)


def test_initial_weights_are_what_they_should_be():
    values = dict(plain(gpt_fsdp.Config(lora=2)).named_parameters())
    for name, value in values.items():
        if "norm" in name or name.endswith(".up"):
            assert torch.all(value == ("norm" in name)), name
        else:
            assert value.std().item() == pytest.approx(0.02, rel=0.15), name
    assert not torch.equal(values["blocks.0.attention.key.weight"], values["blocks.1.attention.key.weight"])
    other = dict(plain(gpt_fsdp.Config(seed=2)).named_parameters())
    assert not torch.equal(values["head.weight"], other["head.weight"])
    # Adapters change no name, and no value, of what they adapt.
    assert torch.equal(values["head.weight"], dict(plain(gpt_fsdp.Config()).named_parameters())["head.weight"])


def test_initial_weights_of_a_matrix_are_drawn_in_blocks_that_differ():
    """The head of this shape is drawn in four blocks, the last one smaller, and none repeats another."""
    head = models.Head(1000, 210, bias=False)
    models.init_weights(head, seed=1)
    blocks = head.weight.detach().split(models.DRAWN_AT_ONCE // 1000)
    assert [len(block) for block in blocks] == [65, 65, 65, 15]
    for number, block in enumerate(blocks):
        assert block.std().item() == pytest.approx(0.02, rel=0.02)
        assert not any(torch.equal(block[:15], other[:15]) for other in blocks[:number])


def drawn_by_rank_0(ranks, preset):
    """[elements of each draw] when rank 0 of so many initializes its part; the model is on the meta device throughout."""
    simulate.join(ranks)
    config = gpt_fsdp.Config(preset=preset)
    with torch.device("meta"):
        model = models.GPT(config.shape)
    gpt_fsdp.fsdp2(model, config, Rank(0, 0, ranks, "here", torch.device("cpu"), "fake"))
    drawn = []
    with mock.patch.object(torch.Tensor, "normal_", lambda tensor, **_: drawn.append(tensor.numel()) or tensor):
        models.init_weights(model, config.seed, shards.part_of)
    return drawn


@pytest.mark.long
def test_a_rank_draws_the_initial_weights_of_its_rows_only():
    """Otherwise each of 64 ranks would draw 70 billion elements, and hold an embedding of four gigabytes meanwhile."""
    drawn = forked(drawn_by_rank_0, 64, "llama3-70b")
    parameters = 70_553_706_496
    assert parameters / 64 < sum(drawn) < parameters / 60
    assert max(drawn) <= models.DRAWN_AT_ONCE


def test_adapters_begin_as_the_frozen_model():
    adapted, base = plain(gpt_fsdp.Config(lora=2)), plain(gpt_fsdp.Config())
    tokens = torch.arange(32)[None]
    assert torch.equal(adapted(tokens), base(tokens))
    adapted(tokens).sum().backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None}
    sides = {f"{layer}.{side}" for layer in ("query", "value") for side in ("down", "up")}
    assert trained == {f"blocks.{i}.attention.{side}" for i in range(4) for side in sides}


# The text


def test_text_is_in_two_parts_and_a_target_is_the_next_byte():
    data = text.load(torch.device("cpu"))
    assert len(data.validation) == pytest.approx(len(data.train) / 9, rel=1e-4)
    assert b"assert" in bytes(data.train.tolist())
    inputs, targets = text.sequences(data.train, torch.tensor([[0, 7]]), 5)
    assert inputs.shape == targets.shape == (1, 2, 5)
    assert torch.equal(inputs[0, 1], data.train[7:12].long())
    assert torch.equal(targets[0, 1], data.train[8:13].long())


def test_a_step_draws_the_same_sequences_for_any_number_of_readers():
    tokens = torch.zeros(1000, dtype=torch.uint8)
    eight, four = (text.starts(tokens, 100, count, seed=1, step=3) for count in (8, 4))
    assert torch.equal(eight[:4], four)
    assert not torch.equal(text.starts(tokens, 100, 8, seed=1, step=4), eight)
    assert max(text.starts(tokens, 998, 50, seed=1, step=0)) == 1  # the last sequence ends with the text


# What is sent, and what is kept

SENT_BY_FOUR = {
    "ddp": {"strategy": "ddp"},
    "fsdp1 kept": {"strategy": "fsdp1", "reshard_after_forward": "false"},
    "freed": {},
    "kept": {"reshard_after_forward": "false"},
    "by pairs": {"reshard_after_forward": "2"},
    "2x2": {"mesh": "2x2"},
}
SENT_BY_TWO = {
    "freed by two": {},
    "every": {"accumulate": 3},
    "last": {"accumulate": 3, "sync": "last"},
    "ddp every": {"accumulate": 3, "strategy": "ddp"},
    "ddp last": {"accumulate": 3, "sync": "last", "strategy": "ddp"},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "prefetch": {"prefetch": 3},
    "frozen": {"lora": 4},
    "bf16": {"precision": "bf16"},
}


def measured(me, configurations):
    found = {}
    gpt_fsdp.VALIDATION_SEQUENCES = me.world_size  # one each: the validation is not looked at here
    meters.TRACED_STEPS = range(1, 4)  # sooner, but not in the step in which DDP rebuilds its buckets
    for name, given in configurations.items():
        config = gpt_fsdp.Config(max_steps=meters.TRACED_STEPS[-1] + 1, batch_size=2, seq_len=64, **given)
        found[name] = gpt_fsdp.train(config, me)
    return found


COMPARED = ("freed", "kept", "by pairs", "freed by two", "selective", "full", "prefetch", "frozen")


@pytest.fixture(scope="module")
def steps(selected):
    """{name: rank 0's measurements}"""
    of_rank0 = {}
    for count, configurations in ((4, SENT_BY_FOUR), (2, SENT_BY_TWO)):
        names = {*COMPARED, *selected(configurations)}
        few = {name: given for name, given in configurations.items() if name in names}
        of_rank0 |= on_ranks(measured, few, count=count)[0]
    return of_rank0


BLOCKS, ROOT = 4 * 196_864, 2 * 256 * 128 + 128  # parameters of tiny's units


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ddp", {"all-reduce": BLOCKS + ROOT}),
        ("ddp every", {"all-reduce": 3 * (BLOCKS + ROOT)}),
        ("ddp last", {"all-reduce": BLOCKS + ROOT}),
        ("fsdp1 kept", {"all-gather": BLOCKS + ROOT, "reduce-scatter": BLOCKS + ROOT}),
        ("freed", {"all-gather": 2 * BLOCKS + ROOT, "reduce-scatter": BLOCKS + ROOT}),
        ("kept", {"all-gather": BLOCKS + ROOT, "reduce-scatter": BLOCKS + ROOT}),
        ("by pairs", {"all-gather": 2 * BLOCKS + ROOT, "reduce-scatter": BLOCKS + ROOT}),
        ("2x2", {"all-gather": 2 * BLOCKS + ROOT, "reduce-scatter": BLOCKS + ROOT, "all-reduce": (BLOCKS + ROOT) / 2}),
        ("every", {"all-gather": 3 * (2 * BLOCKS + ROOT), "reduce-scatter": 3 * (BLOCKS + ROOT)}),
        ("last", {"all-gather": 3 * (2 * BLOCKS + ROOT), "reduce-scatter": BLOCKS + ROOT}),
        ("full", {"all-gather": 2 * BLOCKS + ROOT, "reduce-scatter": BLOCKS + ROOT}),
        ("prefetch", {"all-gather": 2 * BLOCKS + ROOT, "reduce-scatter": BLOCKS + ROOT}),
        ("bf16", {"all-gather": BLOCKS + ROOT / 2, "reduce-scatter": BLOCKS + ROOT}),
    ],
)
def test_numbers_sent_in_a_step(name, expected, steps):
    """In fp32 numbers: bf16 gathers half as many bytes, and reduces in fp32."""
    sent = dict.fromkeys(expected, 0)
    for entry in steps[name]["traffic"]:
        sent[entry["kind"]] += entry["count"] * entry["bytes"] / 4
    assert sent == pytest.approx(expected, rel=1e-3)


def at_peak(result):
    return result["memory"]["peak"]


@pytest.mark.long
def test_what_recomputing_keeps(steps):
    none, selective, full = (at_peak(steps[name])["activations"] for name in ("freed by two", "selective", "full"))
    assert full < selective < none


@pytest.mark.long
def test_what_prefetching_keeps(steps):
    assert at_peak(steps["prefetch"])["all-gather"] > at_peak(steps["freed by two"])["all-gather"]


@pytest.mark.long
def test_what_keeping_gathered_parameters_keeps(steps):
    """All of them, when the last block has arrived in a buffer and been copied out of it."""
    assert at_peak(steps["kept"])["all-gather"] == pytest.approx(4 * (BLOCKS + ROOT + BLOCKS / 4), rel=0.01)
    assert at_peak(steps["freed"])["all-gather"] == pytest.approx(4 * (2 * BLOCKS / 4 + ROOT), rel=0.01)
    # Halves of the blocks but the last two, beside what "freed" has
    pairs = at_peak(steps["by pairs"])["all-gather"] - at_peak(steps["freed"])["all-gather"]
    assert pairs == pytest.approx(4 * BLOCKS / 4 / 2 * 3, rel=0.01)
    assert at_peak(steps["by pairs"])["activations"] == at_peak(steps["freed"])["activations"]


@pytest.mark.long
def test_what_a_frozen_base_saves(steps):
    frozen, trained = (steps[name]["memory"]["start"] for name in ("frozen", "freed by two"))
    assert frozen["parameters"] > trained["parameters"]
    assert frozen["optimizer state"] < trained["optimizer state"] / 50


@pytest.mark.long
def test_a_record_has_the_peak_of_every_rank(steps):
    for name, result in steps.items():
        assert len(result["memory"]["peak_by_rank"]) == (4 if name in SENT_BY_FOUR else 2), name


# A run and its record


@pytest.fixture(scope="module")
def record():
    return run(max_steps=20, batch_size=4, seq_len=64, lr=3e-3, clip=1.0)


@pytest.mark.parametrize(("options", "units"), [({}, 5), ({"wrap": "blocks+embeddings"}, 7)])
def test_units_are_counted(options, units, world_of_one):
    assert shards.count_units(gpt_fsdp.build(gpt_fsdp.Config(**options), world_of_one)[0]) == units


@pytest.mark.long
def test_it_learns(record):
    losses = record["losses"]
    assert losses[0] == pytest.approx(torch.tensor(256.0).log().item(), rel=0.02)  # nothing known yet
    assert losses[-1] < 0.65 * losses[0]
    assert record["validation_loss"] == pytest.approx(losses[-1], rel=0.1)


@pytest.mark.long
def test_record_says_what_was_measured(record):
    assert record["script"] == "gpt_fsdp.py"
    assert record["data"] == {
        "name": "pydoc-topics",
        "train": len((data := text.load(torch.device("cpu"))).train),
        "test": len(data.validation),
    }
    assert (record["batch_size"], record["units"], record["first_step"], len(record["losses"])) == (4, 5, 0, 20)
    assert record["tokens_per_second"] == pytest.approx(record["time"]["samples_per_second"] * 64)
    # Samples are sequences: 4 on each of 2 ranks in the time of a step.
    step, rate = record["time"]["step"], record["time"]["samples_per_second"]
    # Half of the steps took the median or longer; all together no longer than the run.
    assert step["median"] / 2 <= 8 / rate <= record["time"]["elapsed"] / step["steps"]
    speed = record["matmul_ceiling_fraction"]
    assert speed["peak_of"].startswith("measured matmul ceiling of ")
    assert speed["peak_flops"] > 1e9
    used = record["tokens_per_second"] * record["flops_per_token"] / 2
    assert speed["value"] == pytest.approx(used / speed["peak_flops"])
    assert 0 < speed["value"] < 1
    assert record["mfu"] is None  # a CPU's data sheet says no such thing
    assert record["memory"]["peak"]["activations"] > 0


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_that_pytorch_counts(tied):
    config, length = gpt_fsdp.Config(tied=tied), 32
    model, shape = plain(config), config.shape
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(2, length, dtype=torch.long)).sum().backward()
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    of_matrices = flops.per_token(shape, 0) - 6 * norms
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == of_matrices * 2 * length
    attention = flops.per_token(shape, length) - flops.per_token(shape, 0)
    assert attention == 12 * 4 * 128 * length


def test_flops_of_a_frozen_base_lack_its_gradients():
    frozen, trained = (flops.per_token(GPT_SHAPES["tiny"], 0, r) for r in (1, None))
    assert frozen == pytest.approx(trained * 4 / 6, rel=0.01)


def test_run_too_short_to_measure():
    short = run(max_steps=2)
    assert short["memory"] is None
    assert short["tokens_per_second"] is None
    assert short["flops_per_token"] > 0 and short["matmul_ceiling_fraction"] is short["mfu"] is None


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5e12),
        ("NVIDIA GB300", "bf16", None),
    ],
)
def test_mfu_is_a_share_of_the_data_sheets_peak(name, precision, peak, monkeypatch, world_of_one):
    """And the other share one of what a matmul reaches, on any device."""
    me = dataclasses.replace(world_of_one, device=torch.device("cuda"), world_size=4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(meters, "ceiling", lambda dtype, me: {"peak_flops": 1e14, "peak_of": str(dtype)})
    found = meters.utilization(8e3, 1e10, precision, me)  # 2e13 operations per second on each of 4 ranks
    assert found["matmul_ceiling_fraction"]["value"] == pytest.approx(0.2)
    assert found["matmul_ceiling_fraction"]["peak_of"] == str(meters.DTYPES[precision])
    if peak is None:
        assert found["mfu"] is None
    else:
        assert found["mfu"]["value"] == pytest.approx(2e13 / peak) and found["mfu"]["peak_flops"] == peak


@pytest.mark.parametrize("value", [0.4, None])
def test_an_earlier_records_share_of_the_ceiling_is_read_by_its_new_name(value, tmp_path):
    speed = {"peak_flops": 1e11, "peak_of": "measured matmul ceiling", "value": value}
    path = launch.SOURCE / "results" / "reference" / "tiny-intel-xeon-2-cores" / "1-fsdp2.json"
    record = json.loads(path.read_text()) | {"model_flops_utilisation": {"flops_per_token": 7} | speed}
    records.write(tmp_path / "run.json", record)
    loaded = records.load(tmp_path / "run.json")
    assert (loaded["flops_per_token"], loaded["matmul_ceiling_fraction"]) == (7, speed if value else None)
    assert "model_flops_utilisation" not in loaded


def compiled_and_eager(me, backend):
    """Two blocks, as a third one is compiled like the second; on one rank, as what is compiled sends nothing."""
    torch.compile = partial(torch.compile, backend=backend)  # in this process, which ends with the test
    shapes.GPT_SHAPES["tiny"] = dataclasses.replace(shapes.GPT_SHAPES["tiny"], num_hidden_layers=2)
    given = {"max_steps": meters.FIRST_TIMED_STEP + 2, "batch_size": 2, "seq_len": 16, "recompute": "selective"}
    runs = [gpt_fsdp.train(gpt_fsdp.Config(compile=compiled, **given), me) for compiled in (True, False)]
    return [*runs, torch._dynamo.utils.counters["stats"]["unique_graphs"]]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_compute_the_same_or_say_what_is_missing(backend):
    """aot_eager runs the graphs from which Inductor, the default, compiles C++ for half a minute."""
    if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        with pytest.raises(launch.RunFailed, match="--compile needs a C"):
            run(compile=True)
        return
    compiled, eager, graphs = on_ranks(compiled_and_eager, backend, count=1)[0]
    assert graphs > 0
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    assert compiled["traffic"] == eager["traffic"]
    assert compiled["memory"] is None  # a compiled step cannot be watched storage by storage
    assert compiled["time"]["step"]["steps"] == 2


# Checkpoints

SAVED = {
    "ddp": {"strategy": "ddp"},
    "fsdp1": {"strategy": "fsdp1", "tied": True},
    "fsdp1 frozen base": {"strategy": "fsdp1", "lora": 2},
    "fsdp2": {"recompute": "full"},
    "fsdp2 tied": {"tied": True, "optimizer": "momentum"},
    "fsdp2 frozen base": {"lora": 2},
}
WHOLE, SAVED_AT = 4, 2


def quick():
    """Here the losses are asked for, which a small model has, too."""
    meters.TRACED_STEPS, gpt_fsdp.VALIDATION_SEQUENCES = range(0), 4
    shapes.GPT_SHAPES["tiny"] = dataclasses.replace(
        shapes.GPT_SHAPES["tiny"], hidden_size=32, intermediate_size=96, num_hidden_layers=2
    )


def saved_config(name, me, **given):
    return gpt_fsdp.Config(seq_len=16, batch_size=8 // me.world_size, precision="fp64", **SAVED[name], **given)


def train_and_save(me, folder, names):
    """The losses of uninterrupted runs, which save after steps 2 and 4."""
    quick()
    losses = {}
    for name in names:
        kept = {"checkpoint": f"{folder}/{name}", "checkpoint_every": SAVED_AT, "max_steps": WHOLE}
        losses[name] = gpt_fsdp.train(saved_config(name, me, **kept), me)["losses"]
    return losses


def resume_all(me, folder, names):
    quick()
    results = {}
    for name in names:
        config = saved_config(name, me, checkpoint=f"{folder}/{name}", resume=True, max_steps=WHOLE)
        results[name] = gpt_fsdp.train(config, me)
    return results


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, selected):
    folder, names = tmp_path_factory.mktemp("checkpoints"), selected(SAVED)
    for name in names:
        (folder / name).mkdir()
    whole = on_ranks(train_and_save, folder, names, count=4)[0]
    written = {name: sorted(p.name for p in (folder / name).glob("step-*")) for name in names}
    for name in names:
        shutil.rmtree(folder / name / written[name][-1])  # as if the run had ended before it
    return whole, written, on_ranks(resume_all, folder, names, count=2)[0]


@pytest.mark.long
@pytest.mark.parametrize("name", SAVED)
def test_resumed_run_follows_the_uninterrupted_one(name, resumed):
    """Saved by 4 ranks, continued by 2."""
    whole, written, results = resumed
    assert written[name] == ["step-000002", "step-000004"]
    assert results[name]["first_step"] == SAVED_AT
    assert len(results[name]["losses"]) == WHOLE - SAVED_AT
    assert results[name]["losses"] == pytest.approx(whole[name][SAVED_AT:], rel=1e-10)


# Every way of starting it under Slurm; torchrun starts the same ``main`` in test_gpt_zero.py, and computes the same in
# test_launch.py

LAB = "gpt_fsdp.py --mesh 2x2 --precision fp64 --seq-len 16 --batch-size 2 --max-steps 6"
WAYS = {
    "srun, one task": f"srun -p gpu -N 1 --gres=gpu:4 python {LAB}",
    "srun, a task per rank": f"srun -p gpu -N 2 --ntasks-per-node=2 --gres=gpu:2 python {LAB}",
}


@pytest.fixture(scope="module")
def losses_of_four():
    return run(ranks=4, mesh="2x2", precision="fp64", seq_len=16, batch_size=2, max_steps=6)["losses"]


@pytest.mark.long
@pytest.mark.parametrize("way", ways(WAYS))
def test_every_way_computes_the_same(way, losses_of_four, tmp_path, slurm):
    path = tmp_path / "run.json"
    done = call("bash", "-c", f"{WAYS[way]} --record {path}", env=slurm, cwd=launch.SOURCE, timeout=120)
    assert done.returncode == 0, done.stderr
    assert records.load(path)["ranks"] == 4
    assert records.load(path)["losses"] == pytest.approx(losses_of_four, rel=1e-10)


# What a user gets wrong (and bad_input.py)


@pytest.mark.parametrize(
    "given",
    [{"strategy": "single"}, {"strategy": "ddp"}, {"strategy": "fsdp2", "mesh": "2x2"}, {"recompute": "full"}],
    ids=str,
)
def test_refused_with_the_planners_figure(given, monkeypatch, world_of_one):
    me = dataclasses.replace(world_of_one, world_size=1 if given.get("strategy") == "single" else 4)
    config = gpt_fsdp.Config(preset="small", **given)
    plan = Lab(device="cpu").plan("gpt_fsdp.py", preset="small", ranks=me.world_size, **given)
    needed = predict.total(plan.peak()[1])
    monkeypatch.setattr(meters, "free_memory_of_a_rank", lambda *_: needed)
    preflight.refuse_if_too_big(config, me)
    monkeypatch.setattr(meters, "free_memory_of_a_rank", lambda *_: needed - 1)
    with refused(f"{needed / 2**30:.1f} GiB", f"{me.world_size} ranks"):
        preflight.refuse_if_too_big(config, me)


def test_refused_for_what_stays_where_the_peak_is_not_predicted(monkeypatch, world_of_one):
    me = dataclasses.replace(world_of_one, world_size=4)
    kept = 16 * sum(p.numel() for p in plain(gpt_fsdp.Config()).parameters())  # with two moments and DDP's buckets
    monkeypatch.setattr(meters, "free_memory_of_a_rank", lambda *_: kept - 1)
    with refused("--preset tiny", "--strategy ddp", "4 ranks"):
        preflight.refuse_if_too_big(gpt_fsdp.Config(strategy="ddp", precision="bf16"), me)


def test_ranks_of_a_node_share_its_memory(world_of_one, monkeypatch):
    def everyone(every, mine):
        every[:] = [("a", 600.0), ("a", 600.0), ("a", 500.0), ("b", 120.0)]

    monkeypatch.setattr(meters.dist, "all_gather_object", everyone)
    assert meters.free_memory_of_a_rank(world_of_one, torch.device("cpu")) == 120.0


def test_device_without_bf16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    me = ranks.Rank(0, 0, 1, "here", torch.device("cuda", 0), "nccl")
    with refused("Tesla T4", "bf16", "--precision fp32"):
        preflight.check(gpt_fsdp.Config(precision="bf16"), me)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden_size": 100, "num_attention_heads": 8}, ("100", "8 heads")),
        ({"hidden_size": 24, "num_attention_heads": 8, "num_key_value_heads": 8}, ("3", "odd")),
        ({"num_key_value_heads": 3}, ("4 heads", "3")),
    ],
)
def test_shapes_that_cannot_be(sizes, said):
    with refused(*said):
        dataclasses.replace(GPT_SHAPES["tiny"], **sizes)


def test_nothing_left_to_train_and_a_damaged_checkpoint(tmp_path):
    lab = ["gpt_fsdp.py", "--strategy", "single", "--max-steps", "2", "--checkpoint", tmp_path]
    assert script(*lab).returncode == 0
    again = script(*lab, "--resume")
    assert again.returncode == 2
    assert_about(again.stderr, "step 2 of 2")
    saved = checkpoints.latest(tmp_path)
    for part in saved.glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:100])
    damaged = script(*lab, "--resume")
    assert damaged.returncode == 2
    assert_about(damaged.stderr, saved, "damaged", "__0_0.distcp", "100 bytes")


def test_help_is_a_page_a_learner_can_read(capsys):
    with pytest.raises(SystemExit) as exit_:
        options.parse(gpt_fsdp.Config, gpt_fsdp.__doc__, ["--help"])
    assert exit_.value.code == 0
    page = capsys.readouterr().out
    assert "python gpt_fsdp.py --ranks 4 --mesh 2x2" in page
    assert "--tied, --no-tied" in page


def test_a_resumed_run_trains_at_the_rate_it_is_given(world_of_one, monkeypatch, tmp_path):
    """The optimizer's saved state has the old one in it."""
    real, rates = gpt_fsdp.train_step, []

    def watched(model, optimizer, *about):
        rates.extend(group["lr"] for group in optimizer.param_groups)
        return real(model, optimizer, *about)

    monkeypatch.setattr(gpt_fsdp, "train_step", watched)
    common = {"strategy": "single", "checkpoint": str(tmp_path), "seq_len": 8, "batch_size": 1}
    gpt_fsdp.train(gpt_fsdp.Config(max_steps=1, lr=1e-3, **common), world_of_one)
    gpt_fsdp.train(gpt_fsdp.Config(max_steps=2, lr=1e-4, resume=True, **common), world_of_one)
    assert rates == [1e-3, 1e-4]
