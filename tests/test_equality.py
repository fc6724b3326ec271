# SPDX-License-Identifier: BSD-3-Clause
"""Every way of sharing the work computes the same training: the losses of N ranks are those of one process.

Shown in float64, where rounding stays too small to flip a ReLU or a max-pool, so that the paths never part.
In fp32 a different order of summation is enough to make them part after some steps; there only runs that
compute in the same order agree bitwise, and any run's first step agrees closely.

Starting ranks takes longer than a few steps: all that so many ranks train, they train one after the other. And the
network is narrow, since what is tested does not depend on its width.
"""

import functools

import few_digits
import pytest
from forked import by_value
from labkit.measuring.differences import largest_difference
from labkit.running import launch, notebook_ranks

STEPS, SAVED_AT = 6, 3
TRAIN = 64  # digits: 5 steps of 12, so that 6 steps go on in a second epoch, and 3 end in the middle of one
TEST = 53  # which neither 2 nor 3 ranks can share evenly
SAME = {"data": "mnist-5k", "dropout": False, "global_batch_size": 12, "max_steps": STEPS}
RUNGS = {
    "ddp": {"strategy": "ddp"},
    "fsdp1": {"strategy": "fsdp1"},
    "fsdp1 by size": {"strategy": "fsdp1", "wrap": "size"},
    "fsdp1 kept": {"strategy": "fsdp1", "wrap": "size", "reshard_after_forward": "false"},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2 by size": {"strategy": "fsdp2", "wrap": "size"},
    "fsdp2 kept": {"strategy": "fsdp2", "wrap": "size", "reshard_after_forward": "false"},
    "fsdp2 offloaded": {"strategy": "fsdp2", "wrap": "size", "cpu_offload": True},
}
# Three ranks have uneven shards; more show nothing else. Keeping the gathered parameters is no rung of its own: two show it.
CASES = [(rung, ranks) for ranks in (2, 3) for rung in RUNGS if ranks == 2 or "kept" not in rung]
BF16 = ["ddp", "fsdp1 by size", "fsdp2", "fsdp2 by size"]


def jobs(ranks: int, folder) -> dict:
    """{name: options} of what that many ranks train, in this order."""
    if ranks == 1:
        return {(precision, "single"): {"strategy": "single", "precision": precision} for precision in ("fp64", "fp32")}
    found = {("fp64", rung): RUNGS[rung] | {"precision": "fp64"} for rung, count in CASES if count == ranks}
    saved = RUNGS["fsdp2 by size"] | {"precision": "fp64", "checkpoint": f"{folder}/fp64"}
    if ranks == 3:
        found |= {"resumed": saved | {"resume": True}}
    if ranks == 2:
        found |= {"saved": saved | {"max_steps": SAVED_AT}}
        found |= {("fp32", rung): RUNGS[rung] for rung in RUNGS}
        found |= {("bf16", rung): RUNGS[rung] | {"precision": "bf16", "max_steps": 2} for rung in BF16}
        dropout, kept = RUNGS["fsdp2"] | {"dropout": True}, {"checkpoint": f"{folder}/dropout"}
        found |= {"dropout": dropout, "dropout, saved": dropout | kept | {"max_steps": SAVED_AT}}
        found |= {"dropout, resumed": dropout | kept | {"resume": True}}
    return found


narrow = by_value(few_digits.narrow)


def train_all(me, jobs):
    """{name: what mnist_fsdp.py's training returns, on few digits}."""
    import mnist_fsdp
    from labkit.measuring import meters
    from labkit.training import datasets

    narrow()
    meters.TRACED_STEPS = range(0)  # tracing takes much of a short run's time, and here the losses are asked for
    whole = datasets.load(SAME["data"])
    train, test = ([tensor[:count] for tensor in whole.tensors()] for count in (TRAIN, TEST))
    datasets.load = lambda name: datasets.Digits(name, *train[:2], *test[2:])
    results = {}
    for name, options in jobs.items():
        config = mnist_fsdp.Config(**SAME | options)
        results[name] = mnist_fsdp.train(config, me)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A function: {name: result} of so many ranks, trained when first asked for."""
    folder, here = tmp_path_factory.mktemp("checkpoints"), launch.Cluster(launcher="local")

    @functools.cache
    def of(ranks):
        if ranks == 3:
            of(2)  # saves what three resume
        return notebook_ranks.on_ranks(
            by_value(train_all), jobs(ranks, folder), ranks=ranks, cluster=here, timeout=300
        )[0]

    return of


@pytest.mark.parametrize(
    ("rung", "ranks"), [pytest.param(*case, marks=pytest.mark.long) if case[1] > 2 else case for case in CASES]
)
def test_losses_follow_one_process(rung, ranks, results):
    result, reference = results(ranks)["fp64", rung], results(1)["fp64", "single"]
    assert len(result["losses"]) == STEPS
    assert largest_difference(result["losses"], reference["losses"], relative=True) < 1e-10
    # The test set is seen once, whole, also where it cannot be shared evenly.
    assert result["accuracy"] == reference["accuracy"]
    assert result["accuracy"]["total"] == TEST
    assert result["test_loss"] == pytest.approx(reference["test_loss"], rel=1e-10)


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung != "ddp"])
def test_fp32_two_ranks_agree_bitwise(rung, results):
    assert results(2)["fp32", rung]["losses"] == results(2)["fp32", "ddp"]["losses"]


@pytest.mark.parametrize("rung", RUNGS)
def test_fp32_first_step_agrees_with_one_process(rung, results):
    first, reference = (result["losses"][0] for result in (results(2)["fp32", rung], results(1)["fp32", "single"]))
    assert abs(first - reference) < 1e-6 * reference


@pytest.mark.long
def test_resumed_run_follows_the_uninterrupted_one(results):
    """Saved by 2 ranks in the middle of an epoch, continued on 3: losses as if nothing had happened."""
    resumed, reference = results(3)["resumed"], results(1)["fp64", "single"]
    assert resumed["first_step"] == SAVED_AT
    assert largest_difference(resumed["losses"], reference["losses"][SAVED_AT:], relative=True) < 1e-10


def test_resume_draws_the_same_dropout(results):
    """With dropout too: on the same ranks, a stopped and resumed run is bitwise the uninterrupted one."""
    whole, resumed = results(2)["dropout"], results(2)["dropout, resumed"]
    assert resumed["first_step"] == SAVED_AT
    rest = slice(SAVED_AT, None)
    assert resumed["losses"] == whole["losses"][rest] != results(2)["fp32", "fsdp2"]["losses"][rest]


@pytest.mark.parametrize("rung", BF16)
def test_bf16_trains_close_to_fp32(rung, results):
    """bf16 keeps 8 bits of a number's fraction: its first loss is fp32's to a few thousandths."""
    first, reference = (results(2)[precision, rung]["losses"][0] for precision in ("bf16", "fp32"))
    assert first != reference
    assert first == pytest.approx(reference, rel=0.01)
