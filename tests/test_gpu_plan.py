"""The planner's GPU column says what PyTorch's own code says, run with a GPU's operators on tensors without memory."""

from dataclasses import asdict, replace
from itertools import takewhile

import pytest
import trial
from forked import forked
from labkit.measuring import gpu_operators
from planner import attention, networks, predict
from planner.shapes import GPT_SHAPES, GPTShape

HERE = gpu_operators.VERSION
BEFORE_GROUPED = (2, 14)  # a PyTorch whose memory-efficient attention takes no grouped heads
LLAMA = replace(GPT_SHAPES["llama3-8b"], layers=2)
LARGE_LLAMA = replace(GPT_SHAPES["llama3-70b"], layers=5)
UNGROUPED = GPTShape(layers=2, width=64, heads=4, kv_heads=4, hidden=96)
# Long sequences and little else: here attention's backward is the peak, and with it what it allocates inside.
NARROW = GPTShape(layers=2, width=128, heads=4, kv_heads=2, hidden=32, vocabulary=16)
UNEVEN = GPTShape(layers=2, width=96, heads=4, kv_heads=2, hidden=32, vocabulary=16)  # heads and tiles must be padded


def gpt(ranks=4, shape=None, torch=HERE, workspaces=True, **options):
    return {"lab": "gpt", "ranks": ranks, "shape": shape, "torch": torch, "workspaces": workspaces, "options": options}


def mnist(ranks=4, **options):
    return {"lab": "mnist", "ranks": ranks, "torch": HERE, "workspaces": True, "options": {"batch_size": 9} | options}


LONG = {"batch_size": 1, "seq_len": 8192, "precision": "bf16"}
TRIED = [
    # MNIST
    *(mnist(1, strategy="single", precision=precision) for precision in ("fp32", "bf16", "fp64")),
    *(mnist(strategy=s, wrap=w) for s in ("fsdp1", "fsdp2") for w in ("unit", "size")),
    *(mnist(3, strategy=strategy, precision="fp64", dropout=False) for strategy in ("fsdp1", "fsdp2")),
    *(mnist(8, strategy=strategy, precision="bf16", batch_size=64) for strategy in ("fsdp1", "fsdp2")),
    mnist(64, wrap="size", sharding="grad-op", batch_size=64),
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
    gpt(4, torch=BEFORE_GROUPED),
    gpt(4, torch=BEFORE_GROUPED, recompute="selective", strategy="fsdp1"),
    # Other shapes
    *(gpt(2, UNGROUPED, precision=precision, seq_len=40) for precision in ("fp32", "fp64")),
    gpt(2, UNGROUPED, torch=BEFORE_GROUPED, seq_len=40),
    *(gpt(2, NARROW, seq_len=2048, precision=p, recompute="full", workspaces=w) for p, w in (("bf16", True), ("bf16", False), ("fp32", True))),
    *(gpt(2, UNEVEN, seq_len=500, precision=precision, recompute="full") for precision in ("bf16", "fp32")),
    gpt(2, UNEVEN, seq_len=500, precision="fp64"),
    *(gpt(8, LLAMA, recompute=recompute, **LONG) for recompute in ("selective", "full")),
    gpt(64, LARGE_LLAMA, recompute="full", reshard_after_forward="8", **LONG),
]  # fmt: skip


def name_of(one) -> str:
    shape = next((name for name, value in globals().items() if value is one.get("shape") and value), "")
    options = [f"{k}={v}" for k, v in one["options"].items()]
    return " ".join([one["lab"], str(one["ranks"]), shape, ".".join(map(str, one["torch"])), *options])


def simulated(tried: list[dict], cudnn: bool = False) -> list[dict]:
    """In a process of its own: one after the other."""
    import imagine

    found = []
    for one in tried:
        gpu = gpu_operators.GpuOperators(one["torch"], cudnn)
        shape = {"shape": one["shape"]} if one["lab"] == "gpt" else {}
        step = getattr(imagine, one["lab"])
        found.append(step(one["ranks"], gpu=gpu, workspaces=one["workspaces"], **shape, **one["options"]))
    return found


def planned(one: dict) -> predict.Plan:
    import gpt_fsdp
    import mnist_fsdp

    config = {"gpt": gpt_fsdp, "mnist": mnist_fsdp}[one["lab"]].Config(**one["options"])
    record = {"script": f"{one['lab']}_fsdp.py", "ranks": one["ranks"], "device": "cuda", "config": asdict(config)}
    plan = predict.plan_of(record | {"batch_size": config.batch_size})
    if shape := one.get("shape"):
        network = networks.gpt(shape, config.batch_size, config.seq_len, config.recompute, config.lora)
        plan = replace(plan, blueprint=network)
    return replace(plan, torch=one["torch"], workspaces=one["workspaces"])


@pytest.fixture(scope="module")
def simulations():
    return forked(simulated, TRIED, timeout=300)


def peaks(moments) -> dict[str, int]:
    """The highest of (phase, bytes) in forward, backward and the optimizer."""
    highest = {}
    for phase, size in moments:
        highest[phase] = max(size, highest.get(phase, 0))
    return highest


def phase_of(place: str) -> str:
    words = {"start": "start", "optimizer": "optimizer", "backward": "backward"}
    return next((phase for word, phase in words.items() if place.startswith(word)), "forward")


@pytest.mark.parametrize("number", range(len(TRIED)), ids=lambda number: name_of(TRIED[number]))
def test_the_plan_for_a_gpu_is_what_a_gpus_operators_do(simulations, number):
    plan, found = planned(TRIED[number]), simulations[number]
    # A simulation's first step is traced nowhere, so that its losses are not there in the second.
    losses = plan.micro_batches * plan.itemsize
    predicted = peaks((phase_of(place), size) for place, (size, _) in plan.timeline().items())
    until_optimizer = takewhile(lambda moment: moment[0] != "optimizer", found["timeline"])
    measured = peaks((phase, sum(sizes) + losses) for phase, *sizes in until_optimizer)
    assert max(predicted.values()) == pytest.approx(sum(found["peak"].values()) + losses, rel=1e-4)
    for phase in ("forward", "backward"):
        assert predicted[phase] == pytest.approx(measured[phase], rel=1e-4), phase
    kept = predict.by_category(plan.persistent())
    assert {category: found["start"][category] for category in kept} == kept
    assert trial.counted(found["traffic"]) == trial.counted(plan.traffic())


def test_it_is_tried_with_enough_and_different_things():
    assert len(TRIED) >= 30
    options = [one["options"] for one in TRIED]
    assert {o.get("precision", "fp32") for o in options} == {"fp32", "bf16", "fp64"}
    assert {"selective", "full"} <= {o.get("recompute") for o in options}
    kernels = set()
    for one in TRIED:
        if one["lab"] == "gpt":
            shape = one["shape"] or GPT_SHAPES["tiny"]
            itemsize = {"bf16": 2, "fp64": 8}.get(one["options"].get("precision"), 4)
            kernels.add(attention.kernel(True, itemsize, shape.kv_heads < shape.heads, one["torch"]))
    assert kernels == {"flash", "efficient", "math"}
