# SPDX-License-Identifier: BSD-3-Clause
"""The planner's GPU column says what PyTorch's own code says, run with a GPU's operators on tensors without memory."""

import random
from dataclasses import asdict, replace
from itertools import dropwhile, takewhile

import gpt_fsdp
import mnist_fsdp
import plan
import pytest
import torch
from forked import forked
from labkit.measuring import gpu_operators, trace
from labkit.running import lab
from labkit.training.models import Net
from planner import predict
from planner.cli import commands
from planner.models import networks
from planner.models.shapes import GPT_SHAPES, GPTShape
from planner.ops import attention
from planner.ops.autograd import Autograd
from planner.parallel import pinned
from planner.step.plan import STEP_COUNTER
from planner.step.simulation import Step
from proofs import memory as memory_proof
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LABS = {"gpt": gpt_fsdp, "mnist": mnist_fsdp}
HERE = gpu_operators.VERSION
BEFORE_GROUPED = (2, 14)  # a PyTorch whose memory-efficient attention takes no grouped heads
LLAMA = replace(GPT_SHAPES["llama3-8b"], num_hidden_layers=2)
LARGE_LLAMA = replace(GPT_SHAPES["llama3-70b"], num_hidden_layers=5)
UNGROUPED = GPTShape(
    num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, intermediate_size=96
)
# Long sequences and little else: here attention's backward is the peak, and with it what it allocates inside.
NARROW = GPTShape(
    num_hidden_layers=2,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=32,
    vocab_size=16,
)
# Many short sequences: the matrices are small, and the copy of what math attention returns is the peak.
SHORT = GPTShape(
    num_hidden_layers=2,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=8,
    vocab_size=8,
)
UNEVEN = GPTShape(
    num_hidden_layers=2,
    hidden_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=32,
    vocab_size=16,
)  # heads and tiles must be padded
EIGHT_BLOCKS = replace(GPT_SHAPES["tiny"], num_hidden_layers=8)
MANY_WORDS = replace(GPT_SHAPES["tiny"], num_hidden_layers=1, vocab_size=6000)  # here the logits are the peak


def gpt(ranks=4, shape=None, version=HERE, workspaces=True, **options):
    return {
        "lab": "gpt",
        "ranks": ranks,
        "shape": shape,
        "torch": version,
        "workspaces": workspaces,
        "options": options,
    }


def mnist(ranks=4, **options):
    return {"lab": "mnist", "ranks": ranks, "torch": HERE, "workspaces": True, "options": {"batch_size": 9} | options}


LONG = {"batch_size": 1, "seq_len": 8192, "precision": "bf16"}
TRIED = [
    # MNIST
    *(mnist(1, strategy="single", precision=precision) for precision in ("fp32", "bf16", "fp64")),
    *(mnist(strategy=s, wrap=w) for s in ("fsdp1", "fsdp2") for w in ("unit", "size")),
    *(mnist(3, strategy=strategy, precision="fp64", dropout=False) for strategy in ("fsdp1", "fsdp2")),
    *(mnist(8, strategy=strategy, precision="bf16", batch_size=64) for strategy in ("fsdp1", "fsdp2")),
    mnist(1, strategy="single", precision="bf16", batch_size=64),
    mnist(64, wrap="size", reshard_after_forward="false", batch_size=64),
    mnist(1, wrap="size", strategy="fsdp2", batch_size=1),  # here Adadelta's step is the peak
    # The tiny GPT
    *(gpt(precision=p, recompute=r) for p in ("fp32", "bf16", "fp64") for r in ("none", "selective", "full")),
    *(gpt(strategy="fsdp1", precision=p, recompute="full") for p in ("fp32", "bf16")),
    *(gpt(1, strategy="single", precision=p, tied=True) for p in ("fp32", "bf16")),
    *(gpt(2, optimizer=optimizer) for optimizer in ("adamw-fused", "adamw-for-loop", "momentum")),
    *(gpt(precision="bf16", reshard_after_forward=keep) for keep in ("false", "2")),
    gpt(64, precision="bf16", mesh="8x8", seq_len=96),
    gpt(6, mesh="2x3", accumulate=3, sync="last"),
    gpt(5, precision="bf16", lora=4, recompute="full"),
    gpt(5, precision="fp64", lora=4),
    gpt(4, version=BEFORE_GROUPED),
    gpt(4, version=BEFORE_GROUPED, recompute="selective", strategy="fsdp1"),
    # Other shapes
    *(gpt(2, UNGROUPED, precision=precision, seq_len=40) for precision in ("fp32", "fp64")),
    gpt(2, UNGROUPED, version=BEFORE_GROUPED, seq_len=40),
    gpt(2, replace(NARROW, num_key_value_heads=4), seq_len=2048, recompute="full"),
    gpt(2, SHORT, precision="fp64", seq_len=8, batch_size=256, recompute="full"),
    *(gpt(2, NARROW, seq_len=2048, precision=p, recompute="full", workspaces=w) for p, w in (("bf16", True), ("bf16", False), ("fp32", True))),
    *(gpt(2, UNEVEN, seq_len=500, precision=precision, recompute="full") for precision in ("bf16", "fp32")),
    gpt(2, UNEVEN, seq_len=500, precision="fp64"),
    *(gpt(8, LLAMA, recompute=recompute, **LONG) for recompute in ("selective", "full")),
    gpt(64, LARGE_LLAMA, recompute="full", reshard_after_forward="8", **LONG),
    # What people choose besides
    *(gpt(precision=p, recompute="alternate") for p in ("fp32", "bf16", "fp64")),
    gpt(8, LLAMA, recompute="alternate", **LONG),
    gpt(8, EIGHT_BLOCKS, precision="bf16", recompute="selective", recompute_every=3, lora=4),
    *(gpt(8, EIGHT_BLOCKS, strategy=s, recompute="full", recompute_every=2) for s in ("fsdp1", "fsdp2")),
    gpt(1, strategy="single", precision="bf16", weights="bf16", optimizer="sgd"),
    *(gpt(strategy=s, precision="bf16", weights="bf16", optimizer="adamw-fused") for s in ("fsdp1", "fsdp2")),
    *(gpt(1, MANY_WORDS, strategy="single", precision=p, loss_chunks=4, optimizer="sgd") for p in ("fp32", "bf16", "fp64")),
    *(gpt(3, MANY_WORDS, strategy=s, precision="bf16", loss_chunks=4) for s in ("fsdp1", "fsdp2")),
    gpt(8, LLAMA, recompute="full", loss_chunks=8, **LONG),
    *(gpt(3, MANY_WORDS, strategy=s, precision="bf16", wrap="blocks+embeddings", loss_chunks=4) for s in ("fsdp1", "fsdp2")),
    *(gpt(3, MANY_WORDS, strategy=s, wrap="blocks+embeddings", reshard_after_forward="false") for s in ("fsdp1", "fsdp2")),
    gpt(8, LLAMA, recompute="full", wrap="blocks+embeddings", loss_chunks=8, weights="bf16", **LONG),
]  # fmt: skip


def name_of(one) -> str:
    shape = next((name for name, value in globals().items() if value is one.get("shape") and value), "")
    options = [f"{k}={v}" for k, v in one["options"].items()]
    return " ".join([one["lab"], str(one["ranks"]), shape, ".".join(map(str, one["torch"])), *options])


def simulated(tried: list[dict], cudnn: bool = False) -> list[dict]:
    """In a process of its own: one after the other."""
    from labkit.running import simulated_lab

    found = []
    for one in tried:
        gpu = gpu_operators.GpuOperators(one["torch"], cudnn)
        lab = LABS[one["lab"]]
        shape = {"shape": one["shape"]} if one.get("shape") else {}
        config = type("OfThatShape", (lab.Config,), shape)(**one["options"])
        found.append(simulated_lab.step(lab, config, one["ranks"], gpu, one["workspaces"]))
    return found


def planned(one: dict) -> predict.Plan:
    config = LABS[one["lab"]].Config(**one["options"])
    record = {"script": f"{one['lab']}_fsdp.py", "ranks": one["ranks"], "device": "cuda", "config": asdict(config)}
    plan = predict.plan_of(record | {"batch_size": config.batch_size})
    if shape := one.get("shape"):
        network = networks.gpt(
            shape,
            config.batch_size,
            config.seq_len,
            config.recompute,
            config.lora,
            recompute_every=config.recompute_every,
            loss_chunks=config.loss_chunks,
            wrap_embeddings=config.wraps_embeddings,
        )
        plan = replace(plan, blueprint=network)
    return replace(plan, torch=one["torch"], workspaces=one["workspaces"])


DRAWN = len(TRIED) // 3  # so many of those tried: all of them take a minute


@pytest.fixture(scope="module")
def simulations(seed, selected):
    """{number: (one of TRIED, its simulated step)}, drawn."""
    drawn, numbers = random.Random(seed).sample(TRIED, DRAWN), selected(range(DRAWN))
    found = forked(simulated, [drawn[number] for number in numbers], timeout=600)
    return {number: (drawn[number], step) for number, step in zip(numbers, found, strict=True)}


@pytest.mark.long
@pytest.mark.parametrize("number", range(DRAWN))
def test_the_plan_for_a_gpu_is_what_a_gpus_operators_do(simulations, number):
    one, found = simulations[number]
    print(name_of(one))
    plan = planned(one)
    # A simulation's first step is traced nowhere, so that its losses are not there in the second.
    losses = plan.micro_batches * plan.loss_itemsize
    assert predict.total(plan.peak()[1]) == sum(found["peak"].values()) + losses
    kept = predict.by_category(plan.persistent())
    assert {category: found["start"][category] for category in kept} == kept
    assert memory_proof.counted(found["traffic"]) == memory_proof.counted(plan.traffic())
    # Of forward and optimizer, too, the highest moment; in forward, to which moment a number belongs may differ.
    before_backward = takewhile(lambda moment: moment[0] != "backward", found["timeline"])
    forward = max(sum(sizes) for _, *sizes in before_backward) + losses
    places = ("forward", "loss")
    predicted = max(size for place, (size, _) in plan.timeline().items() if place.startswith(places))
    assert plan.micro_batches > 1 or predicted == pytest.approx(forward, abs=2 * plan.itemsize)
    size, terms = plan.timeline()["optimizer"]
    if ("temporary", "intermediate results") in terms:
        assert size == max(sum(sizes) for phase, *sizes in found["timeline"] if phase == "optimizer") + losses


GROUPED = replace(UNGROUPED, num_key_value_heads=2)
ONE_RANK = {"strategy": "single", "seq_len": 40, "workspaces": False}
ONE_AFTER_THE_OTHER = [
    gpt(1, shape, precision=p, **ONE_RANK) for shape in (UNGROUPED, GROUPED) for p in ("fp32", "bf16", "fp64")
]


@pytest.mark.long
def test_all_highs_of_a_blocks_backward_come_in_their_order(monkeypatch):
    """Not only the step's: so each operator's backward makes what it should when it should, whichever is the peak."""
    for one, found in zip(ONE_AFTER_THE_OTHER, forked(simulated, ONE_AFTER_THE_OTHER), strict=True):
        plan = planned(one)
        moments = [(phase, sum(sizes) + plan.itemsize) for phase, *sizes in found["timeline"]]
        real = highs(dropwhile(lambda moment: moment[0] != "backward", moments))
        simulated_bytes = []
        with monkeypatch.context() as patch:
            patch.setattr(Autograd, "count", noting(simulated_bytes, Autograd.count))
            Step(plan, first=False).run()
        expected = highs(takewhile(lambda moment: moment[0] != "backward of block 0", since_backward(simulated_bytes)))
        assert len(expected) > 20
        assert expected == real[: len(expected)], name_of(one)


def noting(moments: list, count):
    """Return an ``Autograd.count`` that writes down (phase, bytes) each time."""

    def counted(tape, term, size):
        count(tape, term, size)
        moments.append((tape.phase, tape.total))

    return counted


def since_backward(moments):
    """From the first of those moments (phase, bytes) on that is one of backward."""
    return dropwhile(lambda moment: not moment[0].startswith("backward"), moments)


def highs(moments) -> list[int]:
    """The bytes of those moments that are above the one before and not below the one after."""
    sizes = [size for _, size in moments]
    triples = zip(sizes, sizes[1:], sizes[2:], strict=False)
    return [here for before, here, after in triples if before < here >= after]


def test_it_is_tried_with_enough_and_different_things():
    assert len(TRIED) >= 30
    options = [one["options"] for one in TRIED]
    assert {o.get("precision", "fp32") for o in options} == {"fp32", "bf16", "fp64"}
    assert {"selective", "full"} <= {o.get("recompute") for o in options}
    assert {kernel_of(one) for one in TRIED if one["lab"] == "gpt"} == {"flash", "efficient", "math"}


def kernel_of(one: dict) -> str:
    shape = one["shape"] or GPT_SHAPES["tiny"]
    itemsize = {"bf16": 2, "fp64": 8}.get(one["options"].get("precision"), 4)
    return attention.kernel(True, itemsize, shape.num_key_value_heads < shape.num_attention_heads, one["torch"])


@pytest.mark.long
def test_cudnns_attention_keeps_what_flash_attention_does():
    """But for 8 bytes of random state per layer. What cuDNN allocates inside, only a GPU can show."""
    tried = gpt(4, precision="bf16", workspaces=False)
    (found,) = forked(simulated, [tried], True)
    plan = planned(tried)
    predicted = predict.total(plan.peak()[1])
    layers = GPT_SHAPES["tiny"].num_hidden_layers
    assert predicted - sum(found["peak"].values()) == 8 * layers + plan.itemsize


# What is chosen for a GPU


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("call", ["rms_norm(x, (64,), weight, 1e-5)", "dropout(x, 0.5)", "dropout(x, 0.0)"])
def test_tensors_that_claim_to_lie_on_a_gpu_are_given_the_same(call, dtype):
    """Forward, where PyTorch itself chooses for them: the new tensors' sizes and formats."""

    def made(device):
        x = torch.empty(2, 3, 64, dtype=getattr(torch, dtype), device=device, requires_grad=True)
        names = {"x": x, "weight": x.new_empty(64).requires_grad_()}
        with New() as new:
            eval(f"F.{call}", {"F": torch.nn.functional} | names)
        return sorted(new.tensors)

    with FakeTensorMode():
        on_gpu = made("cuda")
        with gpu_operators.GpuOperators():
            assert made("cpu") == on_gpu
    assert bool(on_gpu) == ("0.0" not in call)


class New(TorchDispatchMode):
    """Notes (shape, format) of each tensor that an operator makes."""

    def __enter__(self):
        self.tensors = []
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if not operator.is_view:
            self.tensors += [(tuple(t.shape), str(t.dtype)) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        return result


@pytest.mark.parametrize("make", [torch.optim.Adadelta, torch.optim.AdamW])
def test_a_devices_meter_leaves_out_counters_in_the_cpus_memory_and_so_does_the_plan(make):
    """ "meta" stands for the GPU: a device that is not the CPU, on which steps run here."""
    model = Net().to("meta")
    optimizer = make(model.parameters())
    images, labels = torch.zeros(2, 1, 28, 28, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")

    def step():
        torch.nn.functional.nll_loss(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    meter = trace.StepTrace(model, optimizer, torch.device("meta"))
    with meter:
        step()
    name = {torch.optim.Adadelta: "adadelta", torch.optim.AdamW: "adamw"}[make]
    plan = predict.Plan(networks.mnist(2), "single", optimizer=name, on_gpu=True)
    kept = predict.by_category(plan.persistent())
    assert {category: meter.timeline()[0][category] for category in kept} == kept


def default_of_fsdp2():
    """(fused?, foreach?) of FSDP2's parameters, in a process of its own: by PyTorch's types, and in a simulation."""
    from unittest import mock

    from labkit.measuring import simulate
    from torch.distributed.fsdp import fully_shard
    from torch.optim import optimizer as optimizers

    simulate.join(2)
    parameters = list(fully_shard(torch.nn.Linear(4, 4)).parameters())
    on_gpu = mock.patch.object(optimizers, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    defaults = []
    for context in (on_gpu, gpu_operators.GpuOperators()):
        with context:
            defaults.append(optimizers._default_to_fused_or_foreach(parameters, False))
    return defaults


def test_on_a_gpu_an_optimizer_updates_dtensors_at_once():
    """Not asked of the plan, which shares this assumption with the simulation, but of PyTorch's own list of types."""
    assert forked(default_of_fsdp2) == [(False, True)] * 2


def test_a_fused_optimizers_counters_lie_on_the_gpu():
    def counters(optimizer):
        plan = predict.Plan(networks.mnist(2), "single", optimizer=optimizer, on_gpu=True)
        return plan.persistent().get(("optimizer state", "step counters"), 0)

    assert counters("adamw-fused") == 4 * 8 and counters("adamw") == 0


def test_what_flash_attention_allocates_inside_its_backward():
    """2 sequences of 100 tokens, 4 heads of 40 numbers in bf16, of which pairs share keys and values."""
    query, key = torch.empty(2, 4, 100, 40, dtype=torch.bfloat16), torch.empty(2, 2, 100, 40, dtype=torch.bfloat16)
    padded, sums = 2 * 4 * 128 * 64 * 4, 2 * 4 * 128 * 4
    a_head_each = 2 * (2 * 4 * 100 * 40 * 2)
    name = "aten::_scaled_dot_product_flash_attention_backward"
    assert gpu_operators.workspace(name, (None, query, key)) == padded + sums + a_head_each
    assert gpu_operators.workspace(name, (None, query, query)) == padded + sums


def test_a_records_prediction_leaves_out_what_its_meters_cannot_see():
    about = {"script": "gpt_fsdp.py", "ranks": 2, "device": "cuda", "config": asdict(gpt_fsdp.Config())}
    assert not predict.plan_of(about).workspaces
    older, newer = (predict.plan_of(about | {"versions": {"torch": v}}) for v in ("2.14.1+cu130", "2.15.0+cu132"))
    name = ("activations", "block: attention: weights")
    assert name in older.peak()[1] and name not in newer.peak()[1]


def test_plans_are_for_the_pytorch_that_is_here(monkeypatch):
    monkeypatch.setattr(lab, "version", lambda name: "2.14.1+cu130")
    assert lab.Lab(device="cuda").plan("gpt_fsdp.py").torch == (2, 14)
    here = tuple(map(int, torch.__version__.split(".")[:2]))
    assert plan.plan_from_options(plan.Config()).torch == commands.installed_torch() == here


def test_where_there_is_no_pytorch_the_newest_is_planned_for(monkeypatch):
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    assert commands.installed_torch.__wrapped__() == predict.Plan.torch


HOST = ("parameters", "gradients", "optimizer state")
OFFLOADED = [
    gpt(8, MANY_WORDS, cpu_offload=True, precision="bf16", recompute=how, loss_chunks=chunks, batch_size=size)
    for how, chunks, size in (("full", 4, 16), ("none", 1, 2))
]


@pytest.mark.long
def test_with_offload_the_device_has_what_the_host_has_not():
    """Simulated, all of it lies in one memory: on the device's side is what is none of HOST, until the optimizer steps."""
    for one, found in zip(OFFLOADED, forked(simulated, OFFLOADED), strict=True):
        plan = planned(one)
        device = [
            sum(size for name, size in zip(trace.CATEGORIES, sizes, strict=True) if name not in HOST)
            for phase, *sizes in found["timeline"]
            if phase != "optimizer"
        ]
        assert predict.total(plan.peak()[1]) == max(device) + plan.loss_itemsize
        in_one = replace(plan, offload=False)
        assert predict.total(plan.peak()[1]) < predict.total(in_one.peak()[1])
        host, kept = predict.by_category(plan.host_memory()), predict.by_category(in_one.persistent())
        padding = plan.host_memory()["parameters", pinned.ROUNDING]
        assert {name: host[name] - padding for name in HOST[:2]} == dict.fromkeys(HOST[:2], kept["parameters"])
        counters = STEP_COUNTER * len(plan.optimizer_numels)
        assert host["optimizer state"] == kept["optimizer state"] + counters
