# SPDX-License-Identifier: BSD-3-Clause
"""Muon: the three ways equal one process, each collective and the peak are as planned, and its momentum survives."""

import dataclasses
import json
import shutil
from itertools import chain

import gpt_fsdp
import plan
import pytest
import torch
import torch.distributed as dist
from forked import by_value
from labkit import UserError
from labkit.measuring import meters, trace
from labkit.running import launch, notebook_ranks, options
from labkit.training import muon
from mesh_runs import measure_with_losses, resized
from planner.models import shapes
from planner.parallel import muon as planned
from planner.step import simulation
from planner.step.plan import Plan
from planner.timing import cost
from proofs import memory

HERE = launch.Cluster(launcher="local")
# Matrices that are tall, wide, and square, and whose rows 4 ranks cannot share evenly
UNEVEN = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 50}
UNEVEN |= {"num_hidden_layers": 1}
WIDE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1}  # the optimizer's step has the peak
SEQUENCES = 4
FP64, BF16, PURE = {"precision": "fp64"}, {"precision": "bf16"}, {"precision": "bf16", "weights": "bf16"}
HYBRID = {"mesh": "2x2"}

CASES = {
    1: {
        "single": (UNEVEN, {"strategy": "single"} | FP64),
        "single, fp32": (WIDE, {"strategy": "single"}),
        "fsdp2, dtensor": (WIDE, {"optimizer": "muon-dtensor"}),
    },
    2: {
        "ddp": (UNEVEN, {"strategy": "ddp"} | FP64),
        "owner": (UNEVEN, FP64),
        "gather, kept after forward": (UNEVEN, {"optimizer": "muon-gather", "reshard_after_forward": "false"} | FP64),
        "owner, wide, bf16": (WIDE, BF16),
        "dtensor, wide": (WIDE, {"optimizer": "muon-dtensor"}),
        "owner, wide, bf16 weights": (WIDE, PURE),
        "gather, wide, bf16 weights": (WIDE, {"optimizer": "muon-gather"} | PURE),
    },
    4: {
        "owner": (UNEVEN, FP64 | {"clip": 10.0}),
        "gather": (UNEVEN, FP64 | {"optimizer": "muon-gather", "wrap": "blocks+embeddings"}),
        "dtensor": (UNEVEN, FP64 | {"optimizer": "muon-dtensor"}),
        "owner, replicas": (UNEVEN, FP64 | HYBRID),
        "gather, replicas": (UNEVEN, FP64 | HYBRID | {"optimizer": "muon-gather"}),
    },
}
ALL = [(ranks, name) for ranks, cases in CASES.items() for name in cases]


def as_run(ranks: int, name: str) -> dict:
    """The options of a case, with a batch that all ranks together share."""
    _, given = CASES[ranks][name]
    batch = SEQUENCES // ranks // given.get("accumulate", 1)
    return {"optimizer": "muon", "seq_len": 8, "batch_size": batch, "lr": 0.02, "weight_decay": 0.3} | given


def run_all(me, folder):
    """{case: (its losses, what was measured)} of this number of ranks, and "resumed": what ``resumed`` returns."""
    results = {}
    for name, (size, _) in CASES[me.world_size].items():
        with resized(**size):
            results[name] = measure_with_losses(me, as_run(me.world_size, name))
    if me.world_size < 4:
        results["resumed"] = resumed(me, folder)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{ranks: what ``run_all`` found}; two ranks write the checkpoints, and one reads them after them."""
    folder = str(tmp_path_factory.mktemp("muon") / "saved")
    return {
        n: notebook_ranks.on_ranks(by_value(run_all), folder, ranks=n, cluster=HERE, timeout=240)[0] for n in (2, 1, 4)
    }


@pytest.fixture
def small(monkeypatch):
    """Set the sizes of the model that --preset tiny names."""

    def resize(size: dict):
        monkeypatch.setitem(shapes.GPT_SHAPES, "tiny", dataclasses.replace(shapes.GPT_SHAPES["tiny"], **size))

    return resize


def planned_run(ranks: int, name: str) -> Plan:
    return memory.planned({"script": "gpt_fsdp.py", "ranks": ranks, "config": as_run(ranks, name)})


@pytest.mark.parametrize(("ranks", "name"), [each for each in ALL if "fp64" in CASES[each[0]][each[1]][1].values()])
def test_losses_are_those_of_one_process(ranks, name, results):
    reference, losses = results[1]["single"][0], results[ranks][name][0]
    assert len(losses) == memory.STEPS and reference[-1] < reference[0]
    assert losses == pytest.approx(reference, rel=1e-9)


@pytest.mark.parametrize(("ranks", "name"), ALL)
def test_each_collective_is_as_planned(ranks, name, small, results):
    small(CASES[ranks][name][0])
    keys = ("kind", "bytes", "dimension", "count")
    found = [tuple(each[key] for key in keys) for each in results[ranks][name][1]["traffic"]]
    assert sorted(map(str, found)) == sorted(
        str(tuple(each[k] for k in keys)) for each in planned_run(ranks, name).traffic()
    )
    exchanged = [each for each in found if each[0] == "all-to-all"]
    assert bool(exchanged) == (name.startswith("owner"))


@pytest.mark.parametrize(("ranks", "name"), ALL)
def test_memory_is_as_planned(ranks, name, small, results):
    """To the byte: what persists, the optimizer's step, and the whole step."""
    small(CASES[ranks][name][0])
    found, of_run = results[ranks][name][1]["memory"], planned_run(ranks, name)
    assert sum(found["start"].values()) - found["start"]["activations"] == sum(of_run.persistent().values())
    in_optimizer = max(sum(moment) for phase, *moment in found["timeline"] if phase == "optimizer")
    assert in_optimizer == of_run.timeline()["optimizer"][0]
    assert trace.total(found["peak"]) == sum(of_run.peak()[1].values())


def test_the_optimizers_step_has_the_peak_of_some_runs(results):
    """Else the test above would say less."""
    assert {results[ranks][name][1]["memory"]["peak_phase"] for ranks, name in ALL} == {"optimizer", "backward"}


# The optimizer itself


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_one_process_computes_what_torch_does(shape):
    """To the last bit, as the same operators run."""
    torch.manual_seed(1)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    settings = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9}
    pair = (
        muon.Muon([ours], owner_computes=True, dtype=torch.bfloat16, **settings),
        torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings),
    )
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in pair:
            optimizer.step()
        assert torch.equal(ours, theirs)
    assert torch.equal(pair[0].state[ours]["momentum_buffer"], pair[1].state[theirs]["momentum_buffer"])


def test_newton_schulz_makes_singular_values_nearly_equal():
    matrix = torch.randn(20, 30, dtype=torch.float64)
    singular = torch.linalg.svdvals(muon.newton_schulz(matrix.clone()))
    assert torch.linalg.svdvals(matrix).max() / torch.linalg.svdvals(matrix).min() > 5
    assert 0.6 < singular.min() and singular.max() < 1.3


@pytest.mark.parametrize("tied", [False, True])
def test_muon_updates_the_blocks_matrices_and_adamw_the_rest(tied, world_of_one):
    config = gpt_fsdp.Config(optimizer="muon", strategy="single", decay_1d=False, tied=tied)
    model, optimizer, _ = gpt_fsdp.prepare(config, world_of_one)
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_muon, *by_adamw = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    assert len(by_muon) == 7 * config.shape.num_hidden_layers
    assert all(name.startswith("blocks.") and "norm" not in name for name in by_muon)
    assert sorted(chain(by_muon, *by_adamw)) == sorted(names.values())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.01, 0.0]


def test_a_round_has_matrices_of_about_equal_cost():
    blocks = [(64, 64), (256, 64), (32, 64), (64, 256)] * 3
    found = planned.rounds(blocks, 4)
    assert sorted(chain(*found)) == list(range(12)) and [len(members) for members in found] == [4, 4, 4]
    costs = [[planned.newton_schulz_flops(blocks[index]) for index in members] for members in found]
    assert all(each == sorted(each, reverse=True) for each in [[*chain(*costs)], *costs])
    assert len(set(costs[0])) == 1


# Checkpoints


def resumed(me, folder):
    """On two ranks the losses of a run, then of what resumes in its middle; on one those of what resumes there, too."""
    meters.TRACED_STEPS = range(0)
    common = {"optimizer": "muon", "precision": "fp64", "seq_len": 8, "max_steps": 4, "lr": 0.02}
    common |= {"batch_size": SEQUENCES // me.world_size, "strategy": "fsdp2" if me.world_size > 1 else "single"}
    config = gpt_fsdp.Config(**common, checkpoint=folder, checkpoint_every=2, resume=True)
    losses = []
    for _ in range(me.world_size):
        with resized(**UNEVEN):
            losses.append(gpt_fsdp.train(config, me)["losses"])
        dist.barrier()
        if me.rank == 0:
            shutil.rmtree(f"{folder}/step-000004")
        dist.barrier()
    return losses


def test_momentum_is_saved_and_resumed_on_another_number_of_ranks(results):
    (whole, again), (alone,) = results[2]["resumed"], results[1]["resumed"]
    assert len(whole) == 4 and again == whole[2:]
    assert alone == pytest.approx(whole[2:], rel=1e-9)


# Plans (what does not go together is in bad_input.py)


@pytest.mark.parametrize("way", planned.WAYS)
def test_a_plan_prints_the_command_that_runs_it(way):
    words = ["--optimizer", way, "--ranks", "4", "--precision", "bf16"]
    answer = json.loads(plan.answer(dataclasses.replace(options.parse(plan.Config, "", words), json=True)))
    assert answer["command"].startswith("python gpt_fsdp.py") and f"--optimizer {way}" in answer["command"]


def test_planned_time_has_newton_schulz_and_what_it_exchanges():
    """Nothing hides either: they come after backward."""
    link = cost.Link(bandwidth=1e9, latency=0.0, source="")
    times = {}
    for optimizer in ("adamw", "muon", "muon-gather"):
        of_run = gpt_fsdp.Config(preset="small", optimizer=optimizer).plan(4, on_gpu=False)
        times[optimizer] = cost.step_time(of_run, 8, link, link, flops=1e12)
    for way in ("muon", "muon-gather"):
        of_run = gpt_fsdp.Config(preset="small", optimizer=way).plan(4, on_gpu=False)
        exchanged = sum(3 / 4 * size * n for (_, size, *_), n in planned.collectives(of_run).items()) / 1e9
        computed = planned.step_flops(of_run) / 1e12
        for which in ("serial", "overlapped"):
            assert times[way][which] - times["adamw"][which] == pytest.approx(computed + exchanged)
        assert times[way]["compute"] - times["adamw"]["compute"] == pytest.approx(computed)


def test_of_an_all_to_all_what_leaves_a_node_is_for_ranks_on_others():
    of_run = gpt_fsdp.Config(optimizer="muon").plan(4, on_gpu=False)
    collective = {"kind": "all-to-all", "bytes": 400, "dimension": "shard"}
    sent = {node_size: cost.ring_bytes(collective, of_run, node_size) for node_size in (1, 2, 3, 4)}
    assert [sent[size]["node"] for size in (1, 2, 3, 4)] == [300, 400, 300, 0]
    assert all(each["rank"] == 300 and each["steps"] == 3 for each in sent.values())


def test_what_torch_cannot_update_is_refused(small, monkeypatch):
    small(UNEVEN)
    config = gpt_fsdp.Config(optimizer="muon-dtensor")
    with pytest.raises(UserError, match="on a 36x36 matrix that 64 ranks shard"):
        config.plan(64, on_gpu=False)
    assert config.plan(12, on_gpu=False).traffic()
    with pytest.raises(UserError, match="replicas is not predicted"):
        dataclasses.replace(config, mesh="2x4").plan(8, on_gpu=False)


def test_lion_keeps_one_moment_of_adamws_two():
    """It is planned only, by its authors' code: momentum and gradient with their factors, their sum, the last update."""
    lion, adamw = (
        plan.plan_from_options(options.parse(plan.Config, "", ["--optimizer", o])) for o in ("lion", "adamw")
    )
    state = {name: size for (category, name), size in lion.persistent().items() if category == "optimizer state"}
    assert state == {"momentum": adamw.persistent()["optimizer state", "first moments"]}
    assert simulation.optimizer_temporary("lion", [10, 7, 20]) == 7 + 3 * 20
    assert simulation.optimizer_temporary("lion", []) == 0


@pytest.mark.parametrize(("ranks", "layers"), [(4, 1), (4, 4), (3, 2), (64, 1)])
def test_what_ranks_send_is_what_the_owners_split_sizes_say(ranks, layers, small):
    """Whole rounds and partly empty ones, rows that are shared evenly and not, more ranks than matrices."""
    small(UNEVEN | {"num_hidden_layers": layers})
    of_run = gpt_fsdp.Config(optimizer="muon").plan(ranks, on_gpu=False)
    sent = 0
    for members in planned.rounds(planned.matrices(of_run), ranks):
        shapes_ = [planned.matrices(of_run)[index] for index in members]
        for me in range(ranks):
            there = sum(planned.shard_rows(rows, ranks)[me] * columns for rows, columns in shapes_)
            kept = planned.shard_rows(shapes_[me][0], ranks)[me] * shapes_[me][1] if me < len(shapes_) else 0
            back = shapes_[me][0] * shapes_[me][1] if me < len(shapes_) else 0
            sent += planned.BF16 * (there + back - 2 * kept)
    assert planned.sent_bytes(of_run) == pytest.approx(sent / ranks)


@pytest.mark.parametrize("way", planned.WAYS)
def test_what_is_sent_is_less_than_the_larger_buffers_only_where_a_round_is_partly_empty(way):
    """28 matrices fill the rounds of 4 ranks, and not that of 32."""
    for ranks in (4, 32):
        of_run = gpt_fsdp.Config(optimizer=way).plan(ranks, on_gpu=False)
        calls = [(dict(zip(planned.KEY, key, strict=True)), n) for key, n in planned.collectives(of_run).items()]
        larger = sum(n * cost.ring_bytes(call, of_run, 8)["rank"] for call, n in calls)
        assert (planned.sent_bytes(of_run) == pytest.approx(larger)) == (way != "muon" or ranks == 4)


def test_owners_compute_less_and_exchange_less():
    """At the largest size: the operations of one rank, and the bytes that it sends and receives."""
    plans = {way: gpt_fsdp.Config(preset="1b", optimizer=way).plan(8, on_gpu=True) for way in planned.WAYS}
    gathered, owned, by_torch = (plans[way] for way in ("muon-gather", "muon", "muon-dtensor"))
    assert planned.step_flops(gathered) == pytest.approx(8 * planned.step_flops(owned))
    assert planned.step_flops(owned) < planned.step_flops(by_torch) < planned.step_flops(gathered)
    moved = {way: sum(n * size for (_, size, *_), n in planned.collectives(p).items()) for way, p in plans.items()}
    assert moved["muon"] == moved["muon-gather"] / 4  # two all-to-alls of a matrix for eight all-gathers
    assert moved["muon-dtensor"] > 5 * moved["muon-gather"]
