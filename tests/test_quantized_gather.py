# SPDX-License-Identifier: BSD-3-Clause
"""Weights gathered in one byte per element: the bytes counted, the losses near fp32's, and float8 through a byte all-gather."""

import contextlib
import dataclasses

import gpt_fsdp
import pytest
import torch
from forked import by_value
from labkit.measuring.trace import StepTrace
from labkit.running import launch, notebook_ranks
from labkit.training import models, text
from labkit.training.quantized_gather import ByteAllGather, Float8Gathered, Int8Gathered, quantize_gathers
from planner import predict
from planner.models import shapes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HERE = launch.Cluster(launcher="local")
KINDS = {"fp32": None, "int8": Int8Gathered, "float8": Float8Gathered}
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
STEPS, TRACED = 12, (2, 3)


def train(me, kind, precision):
    """Losses of this rank, and what the tracer counts in a step: {(kind, bytes): count}, and bytes of the parameters."""
    config = gpt_fsdp.Config(precision=precision, batch_size=2, seq_len=16, lr=3e-3, max_steps=STEPS)
    model = gpt_fsdp.unsharded(config)
    models.init_weights(model, config.seed)
    if kind:
        quantize_gathers(model.blocks, kind)
    gpt_fsdp.fsdp2(model, config, me)
    optimizer = gpt_fsdp.make_optimizer(model, config)
    trace, losses = StepTrace(model, optimizer, me.device), []
    for number, batch in enumerate(gpt_fsdp.training_batches(text.load(me.device).train, config, me, range(STEPS))):
        with trace if number in TRACED else contextlib.nullcontext():
            losses += gpt_fsdp.train_step(model, optimizer, *batch, config)
    counted = {(collective, size): count for (collective, size, _), count in trace.collectives.items()}
    return torch.stack(losses).tolist(), counted, trace.timeline()[0]["parameters"]


def gather_alone(me, kind, comm):
    """The unsharded weight that a unit computes with, and the shards' weight; or the error of the all-gather."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 6, bias=False)
    weight = layer.weight.detach().clone() * torch.logspace(-3, 2, 6)[:, None]  # rows of different sizes
    layer.weight.data.copy_(weight)
    quantize_gathers([layer], kind)
    fully_shard(layer, mesh=init_device_mesh("cpu", (me.world_size,)))
    if comm:
        layer.set_custom_all_gather(comm)
    try:
        return layer(torch.eye(8)).T.detach(), weight
    except RuntimeError as error:
        return str(error)


def everything(me):
    shapes.GPT_SHAPES["tiny"] = dataclasses.replace(shapes.GPT_SHAPES["tiny"], **SIZES)
    found = {(name, precision): train(me, KINDS[name], precision) for name in KINDS for precision in ("fp32", "bf16")}
    found["int8 alone"] = gather_alone(me, Int8Gathered, None)
    found["float8, bytes"] = gather_alone(me, Float8Gathered, ByteAllGather())
    found["float8, as it is"] = gather_alone(me, Float8Gathered, None)
    return found


@pytest.fixture(scope="module")
def results():
    return notebook_ranks.on_ranks(by_value(everything), ranks=2, cluster=HERE, timeout=100)


def of_blocks(counted, kind="all-gather"):
    """(Bytes, count) of the blocks' collective, which is the most frequent of its kind."""
    return max(((size, count) for (of, size), count in counted.items() if of == kind), key=lambda one: one[1])


@pytest.fixture(scope="module")
def block():
    """(Elements of a block's matrices, their rows, elements of its norms)."""
    shape = dataclasses.replace(shapes.GPT_SHAPES["tiny"], **SIZES)
    with torch.device("meta"):
        parameters = list(models.Block(shape).parameters())
    matrices = [p for p in parameters if p.ndim == 2]
    norms = sum(p.numel() for p in parameters) - sum(p.numel() for p in matrices)
    return sum(p.numel() for p in matrices), sum(len(p) for p in matrices), norms, len(matrices)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_byte_per_element_is_gathered(precision, results, block):
    """Norms stay in the format of the computation; int8 has a scale for each row."""
    elements, rows, norms, _ = block
    itemsize = {"fp32": 4, "bf16": 2}[precision]
    expected = {"fp32": itemsize * elements, "int8": elements + 4 * rows, "float8": elements}
    for name, size in expected.items():
        gathered, count = of_blocks(results[0][name, precision][1])
        assert (gathered, count) == (size + itemsize * norms, 2 * SIZES["num_hidden_layers"]), name


def test_float8_needs_the_largest_element_of_each_matrix(results, block):
    *_, matrices = block
    scales = results[0]["float8", "fp32"][1]["all-reduce", 4]
    assert scales == 2 * SIZES["num_hidden_layers"] * matrices
    assert ("all-reduce", 4) not in results[0]["int8", "fp32"][1]


def test_gradients_are_reduced_as_before(results):
    reduced = {of_blocks(results[0][name, "fp32"][1], "reduce-scatter") for name in KINDS}
    assert len(reduced) == 1


@pytest.mark.parametrize(("name", "tolerance"), [("int8", 5e-3), ("float8", 2e-2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_stay_near_those_of_whole_weights(name, tolerance, precision, results):
    for rank in results:
        exact, quantized = rank["fp32", precision][0], rank[name, precision][0]
        assert exact[-1] < exact[0] - 1
        assert quantized == pytest.approx(exact, rel=tolerance) and quantized != exact


def test_the_tracer_sees_the_weights_in_their_wrappers(results):
    """They are stored in fp32, whatever is gathered."""
    sizes = {results[0][name, "fp32"][2] for name in KINDS}
    plan = predict.Plan(predict.networks.gpt(dataclasses.replace(shapes.GPT_SHAPES["tiny"], **SIZES), 2, 16), ranks=2)
    assert sizes == {plan.persistent()["parameters", "parameters"]}


def test_a_scale_for_each_row_keeps_small_rows(results):
    """One for each matrix does not: rows differ by a factor of 100,000 here, and float8's exponent has 4 bits."""
    gathered, weight = results[0]["int8 alone"]
    assert ((gathered - weight).abs() <= weight.abs().amax(1, keepdim=True) / 254 * 1.001).all()
    gathered, weight = results[0]["float8, bytes"]
    assert torch.allclose(gathered[-1], weight[-1], rtol=2**-4) and not torch.allclose(gathered[0], weight[0], rtol=0.2)


def test_gloo_gathers_no_float8_but_its_bytes(results):
    assert "scalar type" in results[0]["float8, as it is"]
    assert results[0]["float8, bytes"][0].shape == (6, 8)
