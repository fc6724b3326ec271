# SPDX-License-Identifier: BSD-3-Clause
"""Offloaded block inputs: the losses stay, the bytes that cross are counted, and the device's side is predicted."""

import dataclasses
from unittest import mock

import gpt_fsdp
import pytest
import torch
from forked import by_value
from labkit.measuring.counted_offload import CountedBus
from labkit.running import launch, notebook_ranks
from planner import predict
from planner.models import networks
from planner.models.shapes import GPT_SHAPES
from planner.parallel import pinned
from proofs import memory as memory_proof
from torch.autograd.graph import saved_tensors_hooks

HERE = launch.Cluster(launcher="local")
RECOMPUTED = {"recompute": "full", "batch_size": 2, "seq_len": 32, "optimizer": "sgd"}  # the peak is in backward
CASES = {
    "fsdp2, bf16, micro-batches": {"precision": "bf16", "accumulate": 3, "wrap": "blocks+embeddings"},
    "fsdp2, fp64, adapters": {"precision": "fp64", "lora": 4, "recompute_every": 2},
    "fsdp1, long": {"strategy": "fsdp1", "seq_len": 128, "loss_chunks": 4},
}


def configured(case: dict) -> dict:
    return {"script": "gpt_fsdp.py", "ranks": 2, "config": RECOMPUTED | case | {"offload_activations": True}}


def trained(me, cases: list[dict]) -> list[dict]:
    """Each case with its inputs copied out of the tracer's sight."""
    found = []
    for case in cases:
        crossed = []

        def elsewhere(pin_memory, crossed=crossed):
            assert not pin_memory
            crossed.append(CountedBus())
            return saved_tensors_hooks(crossed[-1].down, crossed[-1].up)

        with mock.patch.object(torch.autograd.graph, "save_on_cpu", elsewhere):
            [outside] = memory_proof.measure(me, [configured(case)])
        bytes_ = {way: sum(each.bytes[way] for each in crossed) for way in ("down", "up")}
        found.append({"outside": outside, "bytes": bytes_})
    return found


@pytest.fixture(scope="module")
def found(selected):
    names = selected(CASES)
    run = notebook_ranks.on_ranks(
        by_value(trained), [CASES[name] for name in names], ranks=2, cluster=HERE, timeout=300
    )
    return dict(zip(names, run[0], strict=True))


def peak(measured) -> int:
    return sum(measured["memory"]["peak"].values())


def plans(case: dict) -> tuple[predict.Plan, predict.Plan]:
    """Plan of the lab on the CPU, and of a CPU's kernels with the inputs of blocks in another memory."""
    plan = memory_proof.planned(configured(case))
    options = gpt_fsdp.Config(**RECOMPUTED | case)
    network = networks.gpt(
        options.shape,
        options.batch_size,
        options.seq_len,
        options.recompute,
        options.lora,
        recompute_every=options.recompute_every,
        loss_chunks=options.loss_chunks,
        wrap_embeddings=options.wraps_embeddings,
        offload_activations=True,
    )
    return plan, dataclasses.replace(plan, blueprint=network)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_where_inputs_leave_the_devices_memory_its_peak_is_predicted(name, found):
    in_one, on_device = plans(CASES[name])
    assert peak(found[name]["outside"]) == predict.total(on_device.peak()[1]) < predict.total(in_one.peak()[1])


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_that_cross_are_those_that_the_cpu_stores(name, found):
    plan = plans(CASES[name])[1]
    each = plan.host_memory()["activations", "inputs of blocks"] * plan.micro_batches
    assert found[name]["bytes"] == {"down": each * memory_proof.STEPS, "up": each * memory_proof.STEPS}


def test_interior_blocks_that_are_not_simulated_offload_their_inputs_too():
    """Each block further adds nothing to the activations on the device."""
    shapes = [dataclasses.replace(GPT_SHAPES["tiny"], num_hidden_layers=layers) for layers in (6, 30)]
    networks_ = [networks.gpt(shape, 2, 32, "full", offload_activations=True) for shape in shapes]
    plans = [predict.Plan(network, ranks=2) for network in networks_]
    short, long = (predict.by_category(plan.timeline()["backward of the loss"][1])["activations"] for plan in plans)
    assert short == long
    blocks = {plan.host_memory()["activations", "inputs of blocks"] for plan in plans}
    assert max(blocks) == 5 * min(blocks)


def test_pinned_memory_is_rounded_to_powers_of_two():
    assert [pinned.allocated(size) for size in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]
    options = {"batch_size": 3, "seq_len": 1024, "recompute": "full", "offload_activations": True, "cpu_offload": True}
    config = gpt_fsdp.Config(**options)
    on_gpu, on_cpu = (predict.transformer_plan(config, 3, on_gpu=gpu) for gpu in (True, False))
    host, sizes = on_gpu.host_memory(), [4 * numel for numel in on_gpu.optimizer_numels]
    assert host["parameters", pinned.ROUNDING] == sum(map(pinned.allocated, sizes)) - sum(sizes) > 0
    assert host["gradients", pinned.ROUNDING] == host["parameters", pinned.ROUNDING]
    one = 3 * 1024 * config.shape.hidden_size * 4
    layers = config.shape.num_hidden_layers
    assert host["activations", pinned.ROUNDING] == layers * (pinned.allocated(one) - one) > 0
    assert on_cpu.host_memory() == {}


def test_a_rank_of_a_tensor_group_stores_its_part_of_the_tokens():
    """The CPU has what the GPU's peak has less."""
    options = {"mesh": "shard=2,tensor=2", "batch_size": 1, "seq_len": 4096, "recompute": "full"}
    stored, host = [], {}
    for offload in (False, True):
        plan = predict.transformer_plan(gpt_fsdp.Config(**options, offload_activations=offload), 4, on_gpu=True)
        stored.append(predict.by_category(plan.timeline()["backward of the loss"][1])["activations"])
        host = plan.host_memory()
    inputs = host["activations", "inputs of blocks"]
    one = 4096 // 2 * plan.blueprint.boundary_numel // 4096 * plan.compute_itemsize
    assert inputs == one * gpt_fsdp.Config().shape.num_hidden_layers
    assert 0.7 * inputs < stored[0] - stored[1] <= inputs
