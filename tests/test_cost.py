# SPDX-License-Identifier: BSD-3-Clause
"""A step's time: what hides behind what, by hand; what is computed; what a collective takes."""

import dataclasses
from collections import Counter

import pytest
from planner import predict
from planner.models import flops, networks
from planner.models.shapes import GPT_SHAPES
from planner.timing import cost, overlap

TINY = GPT_SHAPES["tiny"]
TWO_BLOCKS = networks.gpt(dataclasses.replace(TINY, num_hidden_layers=2), 1, 64)
IN_FORWARD, IN_BACKWARD = [0, 1, 1, 1], [0, 2, 2, 2]  # seconds of embedding, block 0, block 1, head: 9 in all


@pytest.fixture
def by_hand(monkeypatch):
    """streams(plan, {kind: seconds}) after a step in which modules compute for as long as is said above."""

    def streams(plan, seconds, stream=lambda call: "network", blocking=False, embedding=0):
        computing = [(embedding, 0), *zip(IN_FORWARD[1:], IN_BACKWARD[1:], strict=True)]
        monkeypatch.setattr(overlap, "module_flops", lambda plan: computing)
        return overlap.simulate(plan, lambda call: (stream(call), seconds[call["kind"]]), 9.0 + embedding, blocking, 1)

    return streams


def fsdp2(**options):
    return predict.Plan(TWO_BLOCKS, "fsdp2", **{"ranks": 4} | options)


ONE = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 1.0}
THREE = {kind: 3.0 for kind in ONE}


def test_fsdp_exposes_what_has_nothing_to_hide_behind(by_hand):
    """Exposed: the root's gather, block 0's beside the embedding, which computes nothing; block 0's reduction and the
    root's. Hidden: block 1's gather (2 to 3), both in backward (5 to 6, 7 to 8), block 1's reduction (9 to 10)."""
    done = by_hand(fsdp2(), ONE)
    assert len(done.calls) == 8
    assert done.now == 11 and done.end == 13
    # With parameters kept there are two gathers less, both of which were hidden
    kept = by_hand(fsdp2(reshard="false"), ONE)
    assert len(kept.calls) == 6 and kept.end == 13


def test_what_a_slow_network_cannot_hide_queues_up(by_hand):
    """Gathers end at 3, 6, 9; 14, 17; reductions at 20, 23, 26: after the second the network never rests."""
    assert by_hand(fsdp2(), THREE).end == 26


def test_gathering_two_ahead_keeps_a_slow_network_busy(by_hand):
    """The embedding computes from 3 to 8, block 0 is gathered from 3 to 6. One unit ahead, block 1's gather begins when
    block 0 does, at 8, and its forward at 11; two ahead, they begin at 6 and 9, and so all that follows two earlier."""
    one, two = (by_hand(fsdp2(prefetch=ahead), THREE, embedding=5) for ahead in (1, 2))
    assert [call["kind"] for call in two.calls] == [call["kind"] for call in one.calls]
    assert (one.end, two.end) == (28, 26)
    # Without the wait for the embedding the link is never idle in forward, and there is nothing to gain
    assert {by_hand(fsdp2(prefetch=ahead), THREE).end for ahead in (1, 2)} == {26}


def test_under_gloo_fsdp_hides_nothing(by_hand):
    assert by_hand(fsdp2(), ONE, blocking=True).end == 9 + 8
    assert by_hand(fsdp2(reshard="false"), THREE, blocking=True).end == 9 + 6 * 3


def test_links_within_a_node_and_the_network_work_side_by_side(by_hand):
    """HSDP: reduce-scatters end at 10, 12, 13 within nodes, the all-reduces behind them at 13, 16, 19 between them."""

    def stream(call):
        return "network" if call["kind"] == "all-reduce" else "link"

    plan = fsdp2(replicas=2)
    assert by_hand(plan, ONE | {"all-reduce": 3.0}, stream).end == 19
    assert by_hand(plan, ONE | {"all-reduce": 3.0}).end > 19  # on one stream they queue


@pytest.mark.parametrize("blocking", [False, True])
def test_ddp_hides_all_buckets_but_the_last(by_hand, monkeypatch, blocking):
    """Forward ends at 3, the head's backward at 5, block 1's at 7; half of block 0's gradients are there at 8."""
    plan = predict.Plan(TWO_BLOCKS, "ddp", 4)
    embedding, block, _, head = (
        4 * sum(map(lambda shape: shape[0] * (shape[1] if shape[1:] else 1), module.parameters.values()))
        for module in TWO_BLOCKS.modules
    )
    monkeypatch.setattr(overlap, "ddp_buckets", lambda plan: [head + 3 * block // 2, block // 2 + embedding])
    assert by_hand(plan, ONE, blocking=blocking).end == 10
    assert by_hand(plan, THREE, blocking=blocking).end == 14
    waits = predict.Plan(TWO_BLOCKS, "ddp", 4, micro_batches=2, sync="last")
    assert len(by_hand(waits, ONE).calls) == 2


PLANS = {
    "one process": {"strategy": "single"},
    "ddp": {"strategy": "ddp", "ranks": 4},
    "zero1": {"strategy": "zero1", "ranks": 4},
    "fsdp1": {"strategy": "fsdp1", "ranks": 4},
    "fsdp1, hybrid": {"strategy": "fsdp1", "ranks": 4, "replicas": 2},
    "fsdp2": {"ranks": 3},
    "fsdp2, kept": {"ranks": 4, "reshard": "false"},
    "fsdp2, a part in 2 kept": {"ranks": 4, "reshard": "2"},
    "fsdp2, hybrid, ahead": {"ranks": 4, "replicas": 2, "prefetch": 2},
    "fsdp2, bf16": {"ranks": 4, "precision": "bf16"},
}


@pytest.mark.parametrize("accumulated", [{}, {"micro_batches": 3}, {"micro_batches": 3, "sync": "last"}])
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_a_step_that_is_walked_through_sends_what_the_plan_says(options, accumulated):
    for network in (
        networks.gpt(TINY, 2, 64, "full"),
        networks.gpt(TINY, 2, 64, wrap_embeddings=True),  # FSDP's root has nothing of its own
        networks.mnist(8, min_num_params=300),
    ):
        plan = predict.Plan(network, **options | accumulated)
        done = overlap.simulate(plan, lambda call: ("network", 0.0), 1.0, False, plan.micro_batches)
        walked, planned = Counter(), Counter()
        for c in done.calls:
            walked[tuple(sorted(c.items(), key=str))] += 1
        for c in plan.traffic():
            planned[tuple(sorted(((k, v) for k, v in c.items() if k != "count"), key=str))] += c["count"]
        assert walked == planned


@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize("seconds", [0.01, 0.3])
def test_of_many_micro_batches_the_rest_take_as_long_as_the_last(monkeypatch, sync, seconds):
    plan = predict.Plan(TWO_BLOCKS, "fsdp2", 4, micro_batches=9, sync=sync)
    short = overlap.step_end(plan, lambda call: ("network", seconds), 9.0)
    monkeypatch.setattr(overlap, "MAX_SIMULATED_MICRO_BATCHES", 100)
    assert short == pytest.approx(overlap.step_end(plan, lambda call: ("network", seconds), 9.0))


def test_a_step_takes_from_overlapped_to_in_turn():
    nvlink, network = cost.LINKS["nvlink"], cost.NETWORKS["ethernet"]
    for strategy in ("ddp", "zero1", "deepspeed-1", "deepspeed-3", "fsdp1", "fsdp2"):
        plan = predict.Plan(networks.gpt(GPT_SHAPES["llama3-8b"], 1, 8192, "full"), strategy, 16, precision="bf16")
        times = cost.step_time(plan, 8, nvlink, network, 4e14)
        assert times["compute"] < times["overlapped"] < times["serial"], strategy
        assert times["serial"] == pytest.approx(times["compute"] + times["communication"])
        assert times["exposed"] == pytest.approx(times["overlapped"] - times["compute"])
        assert 0 < times["exposed"] < times["communication"]


def test_gloo_waits_for_fsdp_and_passes_more():
    nvlink, network = cost.LINKS["nvlink"], cost.NETWORKS["ethernet"]
    sharded, replicated = (predict.Plan(networks.gpt(TINY, 8, 128), s, 4) for s in ("fsdp2", "ddp"))
    ring, gloo = (cost.step_time(sharded, 2, nvlink, network, 1e12, backend) for backend in ("ring", "gloo"))
    assert gloo["communication"] > ring["communication"] and gloo["exposed"] == pytest.approx(gloo["communication"])
    times = cost.step_time(replicated, 2, nvlink, network, 1e12, "gloo")
    assert times["exposed"] < times["communication"]


# What is computed


def gpt(size="llama3-8b", recompute="none", **options):
    network = networks.gpt(GPT_SHAPES[size], 1, 8192, recompute, **options)
    return predict.Plan(network, "fsdp2", options.get("tp_degree", 1), precision="bf16", on_gpu=True)


def test_the_model_attends_to_all_and_hardware_to_what_came_before():
    """By hand: Llama 3 8B, 8192 tokens; 32 blocks of 218,112,000 parameters, a head of 128256 × 4096, the last norm."""
    multiplied, matrix = 32 * 218_112_000 + 128_257 * 4096, 32 * 4096 * 8192
    assert flops.model_flops(gpt()) == 8192 * (6 * multiplied + 12 * matrix)
    assert flops.hardware_flops(gpt()) == pytest.approx(8192 * (6 * multiplied + 6 * matrix), rel=1e-12)
    # All blocks once more, but not the head; a forward is a third of a step
    again = 8192 * (2 * 32 * 218_112_000 + 2 * matrix)
    assert flops.hardware_flops(gpt(recompute="full")) == pytest.approx(flops.hardware_flops(gpt()) + again, rel=1e-12)
    assert flops.model_flops(gpt(recompute="full")) == flops.model_flops(gpt())
    assert flops.hardware_flops(gpt(recompute="selective")) == flops.hardware_flops(
        gpt()
    )  # no product is computed again


def test_a_gpu_without_a_fused_kernel_computes_the_masked_half_too():
    plan = predict.Plan(networks.gpt(TINY, 2, 64), "single", precision="fp64", on_gpu=True)
    assert flops.hardware_flops(plan) == pytest.approx(flops.model_flops(plan))
    assert flops.hardware_flops(dataclasses.replace(plan, on_gpu=False)) < flops.model_flops(plan)


def test_parts_add_up():
    """Of a tensor group, of a pipeline, of micro-batches; adapters leave out the gradients of what is frozen."""
    whole = gpt("1b")
    assert flops.hardware_flops(gpt("1b", tp_degree=4)) == pytest.approx(flops.hardware_flops(whole) / 4)
    untied = dataclasses.replace(GPT_SHAPES["1b"], tie_word_embeddings=False)
    stages = [networks.gpt(untied, 1, 8192, blocks=blocks) for blocks in (range(7), range(7, 16))]
    parts = [dataclasses.replace(whole, blueprint=stage) for stage in stages]
    assert sum(map(flops.hardware_flops, parts)) == pytest.approx(flops.hardware_flops(whole))
    assert flops.hardware_flops(dataclasses.replace(whole, micro_batches=3)) == 3 * flops.hardware_flops(whole)
    adapted = gpt("1b", lora=8)
    assert 0.6 < flops.hardware_flops(adapted) / flops.hardware_flops(whole) < 0.75
    (_, forward, *_, last) = flops.module_flops(whole)
    assert forward[1] == pytest.approx(2 * forward[0]) and last[1] == pytest.approx(2 * last[0])


def test_utilisation_of_model_and_hardware():
    plan = gpt(recompute="full")
    shares = cost.utilization(plan, seconds=2.0, peak=1e15)
    assert shares["MFU"] == flops.model_flops(plan) / 2e15 and shares["HFU"] == flops.hardware_flops(plan) / 2e15
    compute = cost.step_time(plan, 8, cost.LINKS["nvlink"], cost.NETWORKS["ethernet"], flops=4e14)["compute"]
    assert cost.utilization(plan, compute, 1e15)["HFU"] == pytest.approx(0.4)


# What a collective takes


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_of_a_hybrid_mesh_the_norm_is_summed_within_a_node(strategy):
    """16 ranks, 2 replicas of 8 shards on nodes of 8: --clip adds up along the shards, gradients along the replicas."""
    plan = predict.Plan(networks.gpt(TINY, 1, 64), strategy, 16, replicas=2, clip=True)
    unclipped = {(c["bytes"], c["ranks"]) for c in dataclasses.replace(plan, clip=False).traffic()}
    reduced = [c for c in plan.traffic() if c["kind"] == "all-reduce"]
    (norm,) = (c for c in reduced if (c["bytes"], c["ranks"]) not in unclipped)
    gradients = [c for c in reduced if c is not norm]
    for recorded in (False, True):  # a record says neither of FSDP1's dimensions, nor how many ranks took part
        seen = [{k: v for k, v in c.items() if k != "ranks" or not recorded} for c in (norm, *gradients)]
        sent, *others = (cost.ring_bytes(c, plan, 8) for c in seen)
        assert sent == {"rank": 2 * 7 / 8 * norm["bytes"], "node": 0, "steps": 2 * 7}
        # A node has one rank of each of the eight pairs of replicas.
        assert [other["node"] for other in others] == [8 * c["bytes"] for c in gradients]
        link, network = cost.Link(1e9, 1e-6, ""), cost.Link(1e9, 1.0, "")
        assert (
            cost.collective_seconds(seen[0], plan, 8, link, network)
            < 1e-3
            < 1
            < cost.collective_seconds(seen[1], plan, 8, link, network)
        )


@pytest.mark.parametrize(
    ("kind", "backend", "ranks", "latency"),
    [
        ("all-gather", "ring", 8, 7),
        ("all-gather", "ring", 16, 1500),
        ("reduce-scatter", "ring", 16, 1500),
        ("reduce-scatter", "gloo", 16, 3000),
        ("all-reduce", "ring", 16, 3000),
    ],
)
def test_latency_counts_once_a_step_of_the_ring_over_the_slowest_link(kind, backend, ranks, latency):
    plan = predict.Plan(networks.gpt(TINY, 1, 64), "fsdp2", ranks)
    near, far = cost.Link(1e9, 1.0, ""), cost.Link(1e9, 100.0, "")
    call = {"kind": kind, "bytes": 1, "ranks": ranks, "dimension": "shard"}
    assert cost.collective_seconds(call, plan, 8, near, far, backend) == pytest.approx(latency)


def test_what_stays_within_a_node_leaves_the_network_to_others(monkeypatch):
    """Each call of HSDP is on the stream of the slowest link that it crosses."""
    streams = {}
    monkeypatch.setattr(
        cost.overlap,
        "step_end",
        lambda plan, timed, *_, **__: streams.update({c["kind"]: timed(c)[0] for c in plan.traffic()}) or 0.0,
    )
    plan = predict.Plan(networks.gpt(TINY, 1, 64), "fsdp2", 16, replicas=2)
    cost.step_time(plan, 8, cost.LINKS["nvlink"], cost.NETWORKS["ethernet"], 1e12)
    assert streams == {"all-gather": "link", "reduce-scatter": "link", "all-reduce": "network"}
