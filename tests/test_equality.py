"""Every way of sharing the work computes the same training: the losses of N ranks are those of one process.

Shown in float64, where rounding stays too small to flip a ReLU or a max-pool, so that the paths never part.
In fp32 a different order of summation is enough to make them part after some steps; there only runs that
compute in the same order agree bitwise, and any run's first step agrees closely.
"""

import functools

import pytest
from labkit import launch

HERE = launch.Cluster(launcher="local")
STEPS = 50
COMMON = {
    "data": "mnist-5k",
    "dropout": False,
    "global_batch_size": 48,
    "cluster": HERE,
    "quiet": True,
    "on_progress": lambda *_: None,
    "timeout": 240,
}
RUNGS = {
    "ddp": {"strategy": "ddp"},
    "fsdp1": {"strategy": "fsdp1"},
    "fsdp1 by size": {"strategy": "fsdp1", "wrap": "size"},
    "fsdp1 grad-op": {"strategy": "fsdp1", "wrap": "size", "sharding": "grad-op"},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2 by size": {"strategy": "fsdp2", "wrap": "size"},
    "fsdp2 grad-op": {"strategy": "fsdp2", "wrap": "size", "sharding": "grad-op"},
    "fsdp2 offloaded": {"strategy": "fsdp2", "wrap": "size", "cpu_offload": True},
}


@functools.cache
def run(rung: str, ranks: int, precision: str, steps: int) -> dict:
    options = {"strategy": "single"} if rung == "single" else RUNGS[rung]
    return launch.run("mnist_fsdp.py", ranks=ranks, precision=precision, max_steps=steps, **COMMON, **options)


def worst(record: dict, reference: dict) -> float:
    """The largest relative difference of two runs' losses."""
    pairs = zip(record["losses"], reference["losses"], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


# Keeping the gathered parameters is no rung of its own: two ranks show it.
CASES = [(rung, ranks) for ranks in (2, 3, 4) for rung in RUNGS if ranks == 2 or "grad-op" not in rung]


@pytest.mark.parametrize(("rung", "ranks"), CASES)
def test_losses_follow_one_process(rung, ranks):
    record, reference = run(rung, ranks, "fp64", STEPS), run("single", 1, "fp64", STEPS)
    assert len(record["losses"]) == STEPS
    assert worst(record, reference) < 1e-10
    # The test set is seen once, whole, also where its 1,000 images cannot be shared evenly.
    assert record["accuracy"] == reference["accuracy"]
    assert record["accuracy"]["total"] == 1000


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung != "ddp"])
def test_fp32_two_ranks_agree_bitwise(rung):
    assert run(rung, 2, "fp32", STEPS)["losses"] == run("ddp", 2, "fp32", STEPS)["losses"]


@pytest.mark.parametrize("rung", RUNGS)
def test_fp32_first_step_agrees_with_one_process(rung):
    first, reference = run(rung, 2, "fp32", STEPS)["losses"][0], run("single", 1, "fp32", 1)["losses"][0]
    assert abs(first - reference) < 1e-6 * reference


def test_resumed_run_follows_the_uninterrupted_one(tmp_path):
    """Saved by 4 ranks in the middle of an epoch, continued on 2: losses as if nothing had happened."""
    common = COMMON | {"strategy": "fsdp2", "wrap": "size", "precision": "fp64", "checkpoint": tmp_path}
    launch.run("mnist_fsdp.py", ranks=4, max_steps=20, **common)
    resumed = launch.run("mnist_fsdp.py", ranks=2, resume=True, max_steps=STEPS, **common)
    reference = run("single", 1, "fp64", STEPS)
    assert resumed["first_step"] == 20
    assert worst(resumed, reference | {"losses": reference["losses"][20:]}) < 1e-10


def test_resume_draws_the_same_dropout(tmp_path):
    """With dropout too: on the same ranks, a stopped and resumed run is bitwise the uninterrupted one."""
    common = COMMON | {"strategy": "fsdp2", "dropout": True, "ranks": 2}
    whole = launch.run("mnist_fsdp.py", max_steps=12, **common)
    launch.run("mnist_fsdp.py", max_steps=7, checkpoint=tmp_path, **common)
    resumed = launch.run("mnist_fsdp.py", max_steps=12, checkpoint=tmp_path, resume=True, **common)
    assert resumed["losses"] == whole["losses"][7:]


@pytest.mark.parametrize("rung", ["ddp", "fsdp1 by size", "fsdp2", "fsdp2 by size"])
def test_bf16_trains_close_to_fp32(rung):
    """bf16 keeps 8 bits of a number's fraction: its first loss is fp32's to a few thousandths."""
    first, reference = (run(rung, 2, precision, STEPS)["losses"][0] for precision in ("bf16", "fp32"))
    assert first != reference
    assert first == pytest.approx(reference, rel=0.01)
