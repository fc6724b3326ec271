# SPDX-License-Identifier: BSD-3-Clause
"""The pipeline lab trains as one process does, in the order that the planner says.

What each stage needs, and sends, is on trial with all other predictions: test_predict.py.
"""

import contextlib
import io

import gpt_fsdp
import gpt_pipeline
import plan as plan_command
import pytest
from forked import by_value
from labkit.measuring import meters, pipeline_timeline
from labkit.running import launch, notebook_ranks, options
from planner.cli import commands
from planner.parallel import pipeline

HERE = launch.Cluster(launcher="local")
STEPS, A_LEG = 4, 2
LEGS = [(4, "stages"), (4, "stages"), (4, "fsdp2"), (4, "stages"), (2, "stages")]  # on how many ranks, and how
COMMON = {"max_steps": STEPS, "seq_len": 8, "device": "cpu", "batch_size": 4, "accumulate": 4, "precision": "fp64"}
CLIPPED = COMMON | {"recompute": "full", "clip": 0.4}  # below most of the norms that occur


def train_all(me, folder):
    """{key: what ``gpt_fsdp.train`` returns}, and what the stages computed in which order."""
    meters.TRACED_STEPS = range(0)  # here the losses are asked for
    gpt_fsdp.VALIDATION_SEQUENCES = 2 * COMMON["batch_size"]
    with contextlib.redirect_stdout(io.StringIO()):
        if me.world_size == 1:
            alone = {"clipped": CLIPPED, "plain": COMMON | {"max_steps": A_LEG * len(LEGS)}}
            return {
                name: gpt_fsdp.train(gpt_fsdp.Config(**given, strategy="single"), me) for name, given in alone.items()
            }
        legs = {number: leg(me, number, folder) for number, (ranks, _) in enumerate(LEGS) if ranks == me.world_size}
        if me.world_size == 2:
            return legs
        labs = gpt_pipeline.prepare, gpt_pipeline.compute_loss
        return legs | {
            "clipped": gpt_fsdp.train(gpt_pipeline.Config(**CLIPPED), me, *labs),
            "plain": gpt_fsdp.train(gpt_pipeline.Config(**COMMON | {"max_steps": 2 * A_LEG}), me, *labs),
            "orders": {schedule: order_of(me, schedule, 6) for schedule in pipeline.SCHEDULES},
        }


def leg(me, number: int, folder: str) -> dict:
    """The next steps of the one run that all legs share; each goes on from the checkpoint of the leg before."""
    options = COMMON | {"max_steps": A_LEG * (number + 1), "checkpoint": folder, "resume": number > 0}
    if LEGS[number][1] == "fsdp2":  # as many sequences per step, shared by the ranks
        return gpt_fsdp.train(gpt_fsdp.Config(**options | {"accumulate": 2, "batch_size": 2}), me)
    return gpt_fsdp.train(gpt_pipeline.Config(**options), me, gpt_pipeline.prepare, gpt_pipeline.compute_loss)


def order_of(me, schedule: str, micro_batches: int) -> list:
    """[what each stage computed in a step, in order] as the stages of a pipeline that only waits have noted it."""
    step = pipeline_timeline.record_waiting(me, schedule, micro_batches, 0.0)
    assert 0 < pipeline_timeline.idle_share(step) < 1
    assert pipeline.idle_share(schedule, pipeline_timeline.seconds(step)) <= pipeline_timeline.idle_share(
        step
    )  # handing over takes time
    return [[(note["action"], note["micro_batch"]) for note in lane] for lane in step]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{ranks: [what ``train_all`` returned on each]}"""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return {
        ranks: notebook_ranks.on_ranks(by_value(train_all), folder, ranks=ranks, cluster=HERE, timeout=300)
        for ranks in (1, 4, 2)  # the last leg is that of two
    }


def losses(result: dict) -> list[float]:
    return [*result["losses"], result["validation_loss"]]


@pytest.mark.long
def test_recomputed_and_clipped_its_losses_are_those_of_one_process(results):
    """On each rank. The plain schedules are in the matrix (test_parity.py)."""
    reference = losses(results[1][0]["clipped"])
    assert len(reference) == STEPS + 1 and reference[-1] < reference[0]
    assert reference[:STEPS] != results[1][0]["plain"]["losses"][:STEPS]  # the norm allowed is exceeded
    for result in results[4]:
        assert losses(result["clipped"]) == pytest.approx(reference, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(LEGS)))
def test_each_leg_goes_on_as_if_nothing_had_happened(number, results):
    """From stages to the same stages, to ranks that share every block, back to stages, and to fewer of them.

    On each rank: every stage has its parameters, their moments and the optimizer's options. A leg's first loss shows
    the parameters, the second what the optimizer has made of them.
    """
    reference = results[1][0]["plain"]["losses"][number * A_LEG : (number + 1) * A_LEG]
    for result in results[LEGS[number][0]]:
        assert result[number]["first_step"] == number * A_LEG
        assert result[number]["losses"] == pytest.approx(reference, rel=1e-9)


@pytest.mark.long
def test_resumed_by_the_same_stages_not_a_bit_differs(results):
    for result in results[4]:
        assert result[0]["losses"] + result[1]["losses"] == result["plain"]["losses"]


@pytest.mark.long
@pytest.mark.parametrize("schedule", pipeline.SCHEDULES)
def test_stages_compute_in_the_order_that_the_planner_says(schedule, results):
    found = results[4][0]["orders"][schedule]
    assert found == [pipeline.order(schedule, 4, stage, 6) for stage in range(4)]


def test_the_orders_are_those_of_the_papers():
    def letters(*about):
        return " ".join(f"{action[0].upper()}{number}" for action, number in pipeline.order(*about))

    assert letters("gpipe", 2, 0, 3) == "F0 F1 F2 B0 B1 B2"
    assert letters("1f1b", 3, 0, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert letters("1f1b", 3, 1, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert letters("1f1b", 3, 2, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"


@pytest.mark.parametrize("schedule", pipeline.SCHEDULES)
@pytest.mark.parametrize("stages, micro_batches", [(1, 3), (2, 2), (2, 8), (4, 4), (4, 9), (8, 16)])
def test_the_bubble_is_what_the_orders_leave_empty(schedule, stages, micro_batches):
    lengths = {"forward": 1.0, "backward": 2.0}
    seconds = {
        (stage, action, number): length
        for stage in range(stages)
        for action, length in lengths.items()
        for number in range(micro_batches)
    }
    assert pipeline.idle_share(schedule, seconds) == pytest.approx(pipeline.bubble(stages, micro_batches))


def test_a_slower_stage_lets_the_other_wait_longer():
    """By hand: forwards of 1 s and 3 s, backwards of 2 s and 6 s: 12 s busy of 2 x (1 + 3 + 6 + 2)."""
    seconds = {(0, "forward", 0): 1, (1, "forward", 0): 3, (1, "backward", 0): 6, (0, "backward", 0): 2}
    for schedule in pipeline.SCHEDULES:
        assert pipeline.idle_share(schedule, seconds) == 0.5
    # Of two micro-batches the slow stage gets the second while it still has the first: 24 s of 2 x (1 + 18 + 2).
    twice = {(stage, action, number): s for (stage, action, _), s in seconds.items() for number in (0, 1)}
    for schedule in pipeline.SCHEDULES:
        assert pipeline.idle_share(schedule, twice) == pytest.approx(1 - 24 / 42)


@pytest.mark.parametrize(
    "layers, stages, sizes", [(4, 4, [1] * 4), (8, 3, [3, 3, 2]), (5, 1, [5]), (7, 4, [2, 2, 2, 1])]
)
def test_blocks_are_split_evenly_and_none_is_lost(layers, stages, sizes):
    parts = pipeline.split_blocks(layers, stages)
    assert [len(part) for part in parts] == sizes
    assert [block for part in parts for block in part] == list(range(layers))


def peaks(schedule: str, micro_batches: int) -> list[int]:
    words = (
        f"--ranks 4 --mesh pipeline=4 --schedule {schedule} --accumulate {micro_batches} --batch-size 1 --seq-len 512"
    )
    asked = options.parse(plan_command.Config, "", words.split())
    return plan_command.describe(asked, plan_command.plan_from_options(asked))["stages"]


def test_only_under_gpipe_the_micro_batches_pile_up(monkeypatch):
    # PyTorch 2.11 has a place for all that a step receives, whatever the schedule.
    monkeypatch.setattr(commands, "installed_torch", lambda: (2, 15))
    assert all(more > 1.5 * less for less, more in zip(peaks("gpipe", 8), peaks("gpipe", 16), strict=True))
    few, many = peaks("1f1b", 8), peaks("1f1b", 16)
    assert all(more < 1.02 * less for less, more in zip(few[:-1], many[:-1], strict=True))
    assert few[0] > few[1] > few[2]  # the earlier a stage, the more micro-batches it has begun
    inputs = 8 * 512 * 128 * 4  # bytes: those of the micro-batches that are more
    assert many[-1] - few[-1] == pytest.approx(inputs, rel=0.05)  # the losses keep them


def test_a_plans_page_shows_the_stages_and_the_bubble():
    words = "--preset llama3-8b --batch-size 1 --seq-len 8192 --precision bf16 --recompute full --ranks 8 --mesh pipeline=8 --accumulate 16"
    page = plan_command.answer(options.parse(plan_command.Config, "", words.split()))
    assert "llama3-8b, 8 stages (1f1b) on 8 ranks" in page and "8,030,261,248 parameters" in page
    assert "the pipeline's bubble" in page
    assert "peaks of the stages" in page
