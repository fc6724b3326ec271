# SPDX-License-Identifier: BSD-3-Clause
"""Tensor parallelism with FSDP2 on a mesh: the losses of one process, where each parameter lies, what is sent and kept.

Starting ranks takes as long as several runs: one launch for each number of ranks makes all that is looked at here.
"""

import dataclasses
import tempfile
from unittest import mock

import gpt_fsdp
import pytest
import torch
from commands import refused
from forked import by_value
from labkit.running import launch, notebook_ranks, options
from labkit.training import models
from mesh_runs import BLOCKS, SAVED_AT, STEPS, losses_of, resized
from planner import predict
from planner.models import networks, shapes
from planner.timing import cost
from proofs import memory as memory_proof

pytestmark = pytest.mark.long
SEQUENCES = 8
FP64 = {"precision": "fp64"}
CLIPPED = FP64 | {"clip": 0.4, "tied": True}  # below most of the norms that occur
GRID, TENSOR, REPLICAS = ({"mesh": mesh} for mesh in ("shard=2,tensor=2", "tensor=2", "replicate=2,tensor=2"))
SMALL_BLOCKS = 1000  # elements drawn at once: initial weights in blocks that no rank's rows begin or end with
# Plain meshes are in the matrix (test_parity.py).
TRAINED = {
    1: {"plain": FP64, "clipped": CLIPPED},
    2: {"clipped": CLIPPED | TENSOR | {"recompute": "full"}},
    4: {
        "plain": FP64 | GRID | {"recompute": "selective", "accumulate": 2, "sync": "last"},
        "clipped": CLIPPED | REPLICAS,
    },
}
# Its traffic is looked at by dimension; more of its kind is on trial (test_predict.py).
MEASURED = {"script": "gpt_fsdp.py", "ranks": 4, "config": {"batch_size": 3, "seq_len": 20} | GRID}


def whole_and_local(me):
    """{name: (placements, shape of this rank's part, the whole)} of each parameter on a mesh, as training starts."""
    with mock.patch.object(models, "DRAWN_AT_ONCE", SMALL_BLOCKS):
        model, _ = gpt_fsdp.build(gpt_fsdp.Config(**GRID), me)
    return {
        name: (str(parameter.placements), tuple(parameter.to_local().shape), parameter.full_tensor())
        for name, parameter in model.named_parameters()
    }


def everything(me, folder):
    """What is looked at: see the tests."""
    on_four = {}
    if me.world_size == 4:
        with resized(**BLOCKS):
            on_four = {"measured": memory_proof.measure(me, [MEASURED])[0], "started": whole_and_local(me)}
    return on_four | losses_of(me, TRAINED[me.world_size], SEQUENCES, folder)


@pytest.fixture(scope="module")
def found():
    """{ranks: what ``everything`` found}; four ranks write the checkpoint, and two read it after them."""
    here = launch.Cluster(launcher="local")
    with tempfile.TemporaryDirectory() as folder:
        return {
            ranks: notebook_ranks.on_ranks(by_value(everything), folder, ranks=ranks, cluster=here, timeout=300)
            for ranks in (1, 4, 2)
        }


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in (2, 4) for name in TRAINED[ranks]])
def test_losses_are_those_of_one_process(ranks, name, found):
    reference = found[1][0]["losses"][name]
    assert len(reference) == STEPS + 1
    assert reference[-1] < reference[0]
    assert found[ranks][0]["losses"][name] == pytest.approx(reference, rel=1e-9)


# Along (shard, tensor): columns of a weight (out, in) are its rows, dimension 0, which FSDP then cuts once more.
COLUMNS = "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
ROWS = "(Shard(dim=0), Shard(dim=1))"
NORM = "(Shard(dim=0), Replicate())"


def test_every_parameter_lies_where_the_plan_says(found, blocks):
    whole = models.GPT(shapes.GPT_SHAPES["tiny"])
    with mock.patch.object(models, "DRAWN_AT_ONCE", SMALL_BLOCKS):
        gpt_fsdp.init_weights(whole, gpt_fsdp.Config().seed)
    for rank in range(4):
        started = found[4][rank]["started"]
        assert started.keys() == dict(whole.named_parameters()).keys()
        for name, parameter in whole.named_parameters():
            placements, shape, value = started[name]
            rows, *columns = parameter.shape
            if "norm" in name:
                assert (placements, shape) == (NORM, (rows // 2,))
            elif name.endswith(("output.weight", "down.weight")):
                assert (placements, shape) == (ROWS, (rows // 2, columns[0] // 2))
            else:
                assert (placements, shape) == (COLUMNS, (rows // 4, *columns))
            assert torch.equal(value, parameter), name


def by_dimension(traffic):
    return {(entry["kind"], entry["bytes"], entry["dimension"]): entry["count"] for entry in traffic}


def test_memory_is_the_planners_and_traffic_in_each_dimension(found, blocks):
    measured = found[4][0]["measured"]
    row = memory_proof.compare(MEASURED, measured)
    assert row["persistent equal"]
    assert abs(row["difference"]) < 0.0002
    assert by_dimension(measured["traffic"]) == by_dimension(memory_proof.planned(MEASURED).traffic())


def test_traffic_by_hand(found, blocks):
    """FSDP's collectives carry parts of parameters, and tensor parallelism's whole activations."""
    sent = by_dimension(found[4][0]["measured"]["traffic"])
    activation = 4 * 3 * 20 * 128
    # Two a block, and one for the embedding or the head; backward turns each into the other
    assert (
        sent["all-gather", activation, "tensor"] == sent["reduce-scatter", activation, "tensor"] == 2 * (2 * blocks + 1)
    )
    half_a_block = 4 * (2 * 128 + (2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128) // 2)  # and both norms whole
    assert sent["all-gather", half_a_block, "shard"] == 2 * blocks
    assert sent["reduce-scatter", half_a_block, "shard"] == blocks
    assert sent["all-reduce", 4 * 128, "tensor"] == 2 * blocks + 1  # the norms' gradients
    # Of the loss: no rank ever has the logits of the whole vocabulary
    assert sent["all-reduce", 4 * 3 * 20, "tensor"] == 3


def test_checkpoint_resumes_under_plain_fsdp(found):
    """One written by four ranks on a mesh of shards and tensor groups has whole parameters in it, which two read."""
    reference = found[1][0]["losses"]["plain"]
    assert found[2][0]["resumed"] == pytest.approx(reference[SAVED_AT:], rel=1e-9)


def parsed(words):
    return options.parse(gpt_fsdp.Config, "", words)


def test_what_cannot_be_split_evenly():
    shape = shapes.GPT_SHAPES["tiny"]
    shape.check_tensor_parallel(2, 16)
    with refused("385 intermediate"):
        dataclasses.replace(shape, intermediate_size=385).check_tensor_parallel(2, 16)
    with refused("fsdp2", "ddp"):
        predict.Plan(networks.gpt(shape, 1, 16, tp_degree=2), "ddp", ranks=2)


def test_on_nodes_a_tensor_group_stays_inside():
    """llama3-8b on 8 nodes of 8: gathered activations do not leave a node, and FSDP's parameters do."""
    network = networks.gpt(shapes.GPT_SHAPES["llama3-8b"], 1, 8192, "full", tp_degree=8)
    plan = predict.Plan(network, ranks=64, precision="bf16")
    assert network.numel == networks.gpt(shapes.GPT_SHAPES["llama3-8b"], 1, 8192).numel
    sent = {(c["kind"], c["dimension"]): cost.ring_bytes(c, plan, 8) for c in plan.traffic()}
    assert sent["all-gather", "tensor"]["node"] == 0
    # Eight groups of shards, each with a rank on every node
    assert sent["all-gather", "shard"]["node"] == 8 * sent["all-gather", "shard"]["rank"]


def test_nothing_hides_what_a_tensor_group_sends():
    """The next product waits for it, while FSDP gathers ahead: with next to no network between nodes, that decides."""
    shape, nvlink = shapes.GPT_SHAPES["llama3-8b"], cost.LINKS["nvlink"]
    network = networks.gpt(shape, 1, 8192, "full", tp_degree=8)
    times = cost.step_time(predict.Plan(network, ranks=8, precision="bf16"), 8, nvlink, nvlink, flops=4e14)
    assert times["overlapped"] == pytest.approx(times["compute"] + times["communication"])
    alone = predict.Plan(networks.gpt(shape, 1, 8192, "full"), ranks=8, precision="bf16")
    times = cost.step_time(alone, 8, nvlink, nvlink, flops=4e14)
    # What is left is the root's: gathered before all else, reduced after
    assert times["overlapped"] < times["compute"] + 0.15 * times["communication"]
