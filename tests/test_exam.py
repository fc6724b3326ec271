# SPDX-License-Identifier: BSD-3-Clause
"""The exam: every task of many seeds is solved with the course's means, wrong answers are named, and reports can be rechecked.

The seeds are 25 of the first 200; ``make nightly`` takes the other ones in turn.
"""

import csv
import io
import json
import math
import re
from functools import cache
from itertools import product

import diagnose_hang
import exam
import plan
import pytest
from labkit import UserError
from labkit.exam import choosing, finding, losses, papers, plans, predicting, tasks, verdicts
from labkit.measuring.trace import CATEGORIES
from planner import predict
from planner.cli import commands
from planner.cli.commands import plan_from_options
from proofs import diagnosis, memory

SEEDS, TRIED = 200, 25  # planning what the tasks of a seed ask for takes a quarter of a second
MISTAKES_TO_DISTINGUISH = 5


@pytest.fixture(scope="module")
def seeds(seed) -> range:
    first = 1 + (seed - 1) * TRIED % SEEDS
    return range(first, first + TRIED)


@pytest.fixture(scope="module")
def drawn(seeds):
    return {seed: tasks.draw(seed) for seed in seeds}


@pytest.fixture
def planned_anew(monkeypatch):
    """What has been planned before does not serve this test; it is kept for the next."""
    monkeypatch.setattr(plans, "_plan", cache(plans._plan.__wrapped__))


@pytest.fixture(scope="module")
def seven():
    return tasks.draw(7)


# The course's means: the planner, by its command and its functions; the diagnosis; what chapter 16 reads off losses


def figures_of(one: dict) -> tuple[int, int]:
    """Return the (peak, traffic) that the planner states. That it is the learner's planner, is tested below."""
    planned = plans.plan_of(one)
    return predict.total(planned.peak()[1]), sum(c["count"] * c["bytes"] for c in planned.traffic())


def predicted(task) -> dict:
    return {
        name: size / verdicts.UNITS[unit]
        for name, size, unit in zip(task.fields, figures_of(task.one), task.units, strict=True)
    }


def named(report: str) -> dict:
    kind, ranks = diagnosis.named(report)
    return {"fault": "healthy" if kind == diagnosis.NOTHING else kind, "rank": ranks[0] if ranks else None}


def read_off_losses(text: str) -> dict:
    """Read the fault off the losses, as chapter 16 does."""
    rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(io.StringIO(text))]
    training, seen = ([[row[f"{what} {r}"] for r in range(4)] for row in rows] for what in ("training", "validation"))
    for step, (mine, theirs) in enumerate(zip(training, seen, strict=True)):
        if any(map(math.isnan, mine)):
            return {"fault": "bad sample", "step": step, "rank": [*map(math.isnan, mine)].index(True)}
        if len({*theirs}) > 1:
            odd = next(rank for rank in range(4) if theirs.count(theirs[rank]) == 1)
            return {"fault": "flipped bit", "step": step, "rank": odd}
    if all(len({*of_step}) == 1 for of_step in training):
        return {"fault": "same batches"}
    curve = [of_step[0] for of_step in seen]
    if len({*curve}) == 1:
        return {"fault": "no update"}
    if len({*curve}) < len(curve):
        return {"fault": "older checkpoint", "step": next(s for s in range(len(curve)) if curve[s] in curve[:s])}
    return {"fault": "high learning rate" if max(curve) > 2 * curve[0] else "healthy"}


def read_off_profile(text: str, task) -> dict:
    """Plan the run with each fault, and return the one whose peak has the profile's categories."""
    rows = [[int(row[name]) for name in CATEGORIES] for row in csv.DictReader(io.StringIO(text))]
    peak = max(rows, key=sum)

    def off(fault: str) -> float:
        _, *sizes = max(planned_timeline(json.dumps(task.run_with(fault))), key=lambda row: sum(row[1:]))
        return sum(abs(mine - theirs) for mine, theirs in zip(sizes, peak, strict=True))

    return {"fault": min(finding.PROFILES, key=off)}


def fitting(task) -> dict:
    """Search for a choice that fits, as a sweep does: what saves most memory first."""
    ranks = task.one["ranks"]
    every = (
        choosing.CHOICES
        | {"mesh": choosing.meshes(ranks), "strategy": ("fsdp2",), "precision": ("bf16",)}
        | task.allowed
    )
    order = [reversed(every[name]) if name != "mesh" else every[name] for name in choosing.CHOICES]
    for values in product(*order):
        options = dict(zip(choosing.CHOICES, values, strict=True))
        try:
            needs = choosing.needs(choosing.configured(task.one, options))
        except UserError:
            continue
        sizes = [size / verdicts.UNITS[unit] for size, unit in zip(needs, task.units, strict=True)]
        if sizes[0] <= task.memory and sizes[1] <= task.traffic:
            return options
    raise AssertionError(f"nothing fits: {task}")


def solved(task, texts: dict, drill: dict) -> dict:
    """Return the answer to a task. texts: its evidence; drill: {task: what the diagnosis says of its records}."""
    text = texts.get(f"task-{task.number:02}.csv")
    if isinstance(task, predicting.Predict):
        return predicted(task)
    if isinstance(task, finding.Hang):
        return drill[task.number]
    if isinstance(task, finding.Loss):
        return read_off_losses(text)
    return read_off_profile(text, task) if isinstance(task, finding.Memory) else fitting(task)


@cache
def planned_timeline(one: str) -> list[list]:
    """Return a memory profile as a run would have it, but planned: one is measured below. one: a configuration, as JSON."""
    timeline = memory.planned(json.loads(one)).timeline()
    sums = [(phase, predict.by_category(terms)) for phase, (_, terms) in timeline.items()]
    return [[phase, *(of.get(name, 0) for name in CATEGORIES)] for phase, of in sums]


def in_the_drill(task) -> dict:
    """Return what the diagnosis has said of a real run with the task's fault, in the drill's committed record."""
    wanted = {"kind": task.kind, "layout": task.layout, "rank": task.rank, "step": task.step}
    rows = [row for row in finding.drill_rows() if wanted.items() <= row.items()]
    assert rows, task
    return {
        "fault": "healthy" if rows[0]["named"] == diagnosis.NOTHING else rows[0]["named"],
        "rank": (rows[0]["ranks_named"] or [None])[0],
    }


def test_every_task_of_many_seeds_is_solved_with_the_courses_means(drawn):
    for seed, of_seed in drawn.items():
        texts = papers.evidence(of_seed, {8: planned_timeline(json.dumps(of_seed[7].run_with(of_seed[7].fault)))})
        drill = {number: in_the_drill(of_seed[number - 1]) for number in (5, 6)}
        answers = {str(task.number): solved(task, texts, drill) for task in of_seed}
        assert answers["7"]["fault"] == of_seed[6].fault.kind and answers["8"]["fault"] == of_seed[7].fault  # they show
        found = papers.judge(of_seed, json.loads(json.dumps(answers)))
        assert [verdict for verdict in found if not verdict.right] == [], seed


def test_no_two_consecutive_seeds_share_a_task_and_a_seed_gives_the_same_ones(seeds, drawn, seven, planned_anew):
    for seed in seeds[:-1]:
        assert [one.number for one, other in zip(drawn[seed], drawn[seed + 1], strict=True) if one == other] == []
    assert len({tasks.digest(of_seed) for of_seed in drawn.values()}) == len(seeds)
    assert tasks.digest(tasks.draw(7)) == tasks.digest(seven)
    assert [tasks.kind_of(task.number) for task in seven] == [kind for kind in tasks.KINDS for _ in range(4)]


def test_a_seed_gives_the_same_tasks_under_another_pytorch(monkeypatch, seven, planned_anew):
    monkeypatch.setattr(commands, "installed_torch", lambda: (2, 11))
    assert {plans.plan_of(task.one).torch for task in seven[:4]} == {predict.Plan.torch}
    assert tasks.digest(tasks.draw(7)) == tasks.digest(seven)


def test_the_seeds_draw_every_fault_and_no_default_fits_a_budget(drawn):
    for number, every in ((5, finding.HANGS), (6, finding.HANGS)):
        assert {of_seed[number - 1].kind for of_seed in drawn.values()} == {*every}
    assert {of_seed[6].fault.kind for of_seed in drawn.values()} == {*losses.FAULTS}
    assert {of_seed[7].fault for of_seed in drawn.values()} == {*finding.PROFILES}
    for of_seed in drawn.values():
        for task in of_seed[8:]:
            verdict = task.judge(choosing.DEFAULTS, None)
            assert not verdict.right and verdict.mistakes[0] != "not a choice", task


def test_no_choice_fits_every_budget(drawn):
    """What saves memory in every way, with any mesh, and parameters freed or kept, fits some of a task's budgets only."""
    for number in range(9, 13):
        fits = [[] for _ in range(4)]
        for of_seed in drawn.values():
            task = of_seed[number - 1]
            for place, one in enumerate(
                choosing.saving(task.one, {"mesh": choosing.meshes(task.one["ranks"])} | task.allowed)
            ):
                needs = choosing.needs(one)
                limits = [
                    most * verdicts.UNITS[unit]
                    for most, unit in zip((task.memory, task.traffic), task.units, strict=True)
                ]
                fits[place].append(needs[0] <= limits[0] and needs[1] <= limits[1])
        assert max(sum(some) / len(some) for some in fits if some) < 0.8, (number, [sum(some) for some in fits])


def test_the_courses_commands_print_what_the_judge_expects(seeds, drawn):
    """plan.py's, as a learner types it; of the small ones, what proofs/memory.py compares with its measurements."""
    for seed in seeds[::10]:
        for task in drawn[seed][:2]:
            planned = memory.planned(task.one)
            found = predict.total(planned.peak()[1]), sum(c["count"] * c["bytes"] for c in planned.traffic())
            assert answered(task, found).right, task
        for task in drawn[seed][2:4]:
            shown = json.loads(plan.answer(plan.Config(ranks=task.one["ranks"], json=True, **task.one["config"])))
            found = shown["peak"], sum(c["count"] * c["bytes"] for c in shown["traffic"])
            assert answered(task, found).right, task


def answered(task, sizes: tuple):
    """Judge a prediction of (peak, traffic), in bytes."""
    rows = zip(task.fields, sizes, task.units, strict=True)
    return task.judge({name: size / verdicts.UNITS[unit] for name, size, unit in rows}, None)


# Wrong answers

LARGE = {"preset": "llama3-8b", "strategy": "fsdp2", "wrap": "blocks", "batch_size": 1, "seq_len": 4096}
LARGE |= {"precision": "bf16", "recompute": "full", "accumulate": 2, "sync": "every", "reshard_after_forward": "true"}
TASK = predicting.Predict(3, {"script": plans.PLANNED, "ranks": 16, "config": LARGE})


def planned_terms() -> dict:
    return predict.by_category(plan_from_options(plan.Config(ranks=16, **LARGE)).peak()[1])


def without(category: str):
    return lambda peak: peak - planned_terms()[category]


def other(**changes):
    """The figures of another configuration."""
    return figures_of(TASK.one | {"config": LARGE | changes})


WRONG_PEAKS = {
    "no answer": lambda peak: None,
    "not a number": lambda peak: math.nan,
    "wrong unit": lambda peak: peak * 2**30 / 1e9,  # GB
    "the sum of all ranks": lambda peak: peak * 16,
    "optimizer state forgotten": without("optimizer state"),
    "gathered parameters forgotten": without("all-gather"),
    "activations forgotten": without("activations"),
    "computed for fp32": lambda peak: other(precision="fp32")[0],
    "more than 5 % off": lambda peak: peak * 1.06,
}
WRONG_TRAFFIC = {
    "no answer": lambda traffic: "",
    "not a number": lambda traffic: "a lot",
    "wrong unit": lambda traffic: traffic * 1e9 / 2**30,  # GiB
    "divided by the ranks": lambda traffic: traffic / 16,
    "only one micro-batch": lambda traffic: other(accumulate=1)[1],
    "backward's all-gathers forgotten": lambda traffic: other(reshard_after_forward="false")[1],
    "counted once for each rank": lambda traffic: traffic * 16,
    "twice the traffic": lambda traffic: traffic * 2,
    "more than 5 % off": lambda traffic: traffic * 1.06,
}


def scaled(value, unit: str):
    return value / verdicts.UNITS[unit] if isinstance(value, (int, float)) else value


@pytest.mark.parametrize("mistake", [*WRONG_PEAKS])
def test_a_wrong_peak_is_named(mistake):
    right = predicted(TASK)
    peak, _ = figures_of(TASK.one)
    verdict = TASK.judge(right | {"peak_GiB": scaled(WRONG_PEAKS[mistake](peak), "GiB")}, None)
    assert (verdict.right, verdict.mistakes) == (False, (mistake,))
    assert len(WRONG_PEAKS) >= MISTAKES_TO_DISTINGUISH and TASK.judge(right, None).right


@pytest.mark.parametrize("mistake", [*WRONG_TRAFFIC])
def test_wrong_traffic_is_named(mistake):
    _, traffic = figures_of(TASK.one)
    verdict = TASK.judge(predicted(TASK) | {"traffic_GB": scaled(WRONG_TRAFFIC[mistake](traffic), "GB")}, None)
    assert (verdict.right, verdict.mistakes) == (False, (mistake,))


def test_persistent_memory_that_is_not_divided_is_named():
    plan_ = plan_from_options(plan.Config(ranks=16, **LARGE))
    whole = figures_of(TASK.one)[0] + 15 * predict.total(plan_.persistent())
    verdict = TASK.judge(predicted(TASK) | {"peak_GiB": whole / 2**30}, None)
    assert verdict.mistakes == ("not divided by the ranks",)


FORMS = [  # of 1,536.5 MiB, as learners type it
    (1536.5, ""),
    ("1536.5", ""),
    ("1,536.5", ""),  # as plan.py prints
    ("1.5365e3", ""),
    ("1536.5 MiB", ""),
    ("1.5005GiB", ""),
    (" 1.611 gb ", ""),
    ("1,611,136,000 bytes", ""),
    ("", "no answer"),
    (" ", "no answer"),
    (None, "no answer"),
    ("1536,5", "not a number"),
    ("1536.5 MiB/s", "not a number"),
    ("1536.5 furlongs", "not a number"),
    ("MiB", "not a number"),
    ("nan", "not a number"),
    ("inf MiB", "not a number"),
    (-1536.5, "not a number"),
    (True, "not a number"),
    ([1536.5], "not a number"),
    (1.5005, "wrong unit"),  # GiB
    ("1.5005 MiB", "wrong unit"),
    ("1536.5 GiB", "wrong unit"),
    (1_611_137_024, "wrong unit"),  # bytes, as --json prints
    (1_611_137, "wrong unit"),  # KB
]


@pytest.mark.parametrize(("given", "mistake"), FORMS, ids=str)
def test_a_number_may_have_thousands_separated_and_a_unit(given, mistake):
    found, sentence = verdicts.of_number("peak", "MiB", given, 1536.5 * 2**20, dict)
    assert found == mistake
    if mistake == "not a number":
        assert repr(given) in sentence  # the learner sees what was read


@pytest.mark.parametrize("share", [0.951, 1.049, 0.949, 1.051])
def test_five_percent_are_allowed(share):
    answer = {name: value * share for name, value in predicted(TASK).items()}
    assert TASK.judge(answer, None).right == (abs(share - 1) < 0.05)


def test_a_run_counts_more_than_the_plan():
    """What is measured is the truth where the judge has run it."""
    task = predicting.Predict(2, {"script": "gpt_fsdp.py", "ranks": 2, "config": {"strategy": "ddp"}})
    answer = predicted(task)
    measured = {
        "memory": {"peak": {"parameters": 2 * figures_of(task.one)[0]}},
        "traffic": [{"count": 1, "bytes": figures_of(task.one)[1]}],
    }
    assert task.judge(answer, None).right
    verdict = task.judge(answer, measured)
    assert not verdict.right and verdict.judged_by == "run"


HANG = finding.Hang(5, "stuck outside", "ddp", 2, 3)
LOSS = finding.Loss(7, 11, losses.Fault("bad sample", 2, 9))
CONFIG = {"preset": "tiny", "strategy": "fsdp2", "wrap": "blocks", "batch_size": 3, "seq_len": 48, "precision": "bf16"}
CONFIG |= {"recompute": "full", "accumulate": 2, "sync": "every", "reshard_after_forward": "true"}
MEMORY = finding.Memory(8, {"script": "gpt_fsdp.py", "ranks": 4, "config": CONFIG}, "no recomputation")
WRONG_FAULTS = [
    (HANG, {"fault": "stuck outside", "rank": 2}, ()),
    (HANG, {"fault": " Stuck Outside ", "rank": "2"}, ()),
    (HANG, {"fault": "stuck_outside", "rank": 2.0}, ()),
    (HANG, {"fault": None, "rank": 2}, ("no answer",)),
    (HANG, {"fault": "gremlins", "rank": 2}, ("not a choice",)),
    (HANG, {"fault": ["killed"], "rank": 2}, ("not a choice",)),
    (HANG, {"fault": "stuck outside", "rank": 1}, ("right fault, wrong rank",)),
    (HANG, {"fault": "stuck outside", "rank": None}, ("no answer",)),
    (HANG, {"fault": "stuck outside", "rank": 4}, ("not a choice",)),
    (HANG, {"fault": "stuck outside", "rank": 2.5}, ("not a choice",)),
    (HANG, {"fault": "stuck outside", "rank": "nan"}, ("not a choice",)),
    (HANG, {"fault": "killed", "rank": 2}, ("right rank, wrong fault",)),
    (HANG, {"fault": "killed", "rank": 0}, ("wrong fault",)),
    (HANG, {"fault": "healthy"}, ("fault overlooked",)),
    (finding.Hang(5, "healthy", "ddp", 2, 3), {"fault": "killed", "rank": 2}, ("false alarm",)),
    (finding.Hang(5, "healthy", "ddp", 2, 3), {"fault": "healthy"}, ()),
    (LOSS, {"fault": "bad sample", "rank": 2, "step": 9}, ()),
    (LOSS, {"fault": "bad sample", "rank": 0, "step": 9}, ("right fault, wrong rank",)),
    (LOSS, {"fault": "bad sample", "rank": 2, "step": 10}, ("right fault, wrong step",)),
    (LOSS, {"fault": "bad sample", "rank": 0, "step": 8}, ("right fault, wrong rank and step",)),
    (LOSS, {"fault": "flipped bit", "rank": 2, "step": 9}, ("right rank and step, wrong fault",)),
    (LOSS, {"fault": "older checkpoint", "step": 3}, ("wrong fault",)),
    (LOSS, {"fault": "bad sample", "rank": 2, "step": 24}, ("not a choice",)),
    (LOSS, {"fault": "healthy"}, ("fault overlooked",)),
    (finding.Loss(7, 11, losses.Fault("healthy")), {"fault": "same batches"}, ("false alarm",)),
    (MEMORY, {"fault": "no recomputation"}, ()),
    (MEMORY, {"fault": "fp32"}, ("wrong fault",)),
    (MEMORY, {"fault": "healthy"}, ("fault overlooked",)),
    (finding.Memory(8, MEMORY.one, "healthy"), {"fault": "fp32"}, ("false alarm",)),
    (MEMORY, {}, ("no answer",)),
]


@pytest.mark.parametrize(("task", "answer", "mistakes"), WRONG_FAULTS, ids=lambda value: str(value)[:60])
def test_a_wrong_fault_is_named(task, answer, mistakes):
    verdict = task.judge(answer)
    assert (verdict.right, verdict.mistakes) == (not mistakes, mistakes)
    assert len({mistakes for _, _, mistakes in WRONG_FAULTS}) > MISTAKES_TO_DISTINGUISH


def test_a_sentence_on_a_wrong_fault_helps_and_does_not_give_the_fault_away():
    assert "0 to 3" in HANG.judge({"fault": "killed", "rank": 4}).sentence
    assert "0 to 23" in LOSS.judge({"fault": "bad sample", "rank": 2, "step": -1}).sentence
    for task, answer, mistakes in WRONG_FAULTS:
        true = getattr(task, "kind", None) or getattr(task.fault, "kind", task.fault)
        if mistakes and true not in ("healthy", answer.get("fault")) and mistakes != ("not a choice",):
            assert true not in task.judge(answer).sentence, answer
    for fault in finding.PROFILES:  # what differs most, in a row and a column of the evidence
        verdict = MEMORY.judge({"fault": fault})
        assert verdict.right or re.match(
            rf"row (start|forward|backward|optimizer), .* ({'|'.join(CATEGORIES)}) ", verdict.sentence
        )


def test_two_faults_with_the_same_profile_are_both_right():
    """Evidence that cannot tell two faults apart must not be held against the learner."""
    same = finding.Memory(8, MEMORY.one | {"config": CONFIG | {"recompute": "none"}}, "healthy")
    assert same.judge({"fault": "no recomputation"}).right and not same.judge({"fault": "fp32"}).right


GIVEN = {"script": plans.PLANNED, "ranks": 16, "config": {"preset": "llama3-8b", "batch_size": 1, "seq_len": 4096}}
BUDGET = choosing.Choose(11, GIVEN, 40.0, 64.0, {"weights": ("fp32",)})
FITS = choosing.DEFAULTS | {"precision": "bf16", "recompute": "full", "loss_chunks": 8}
WRONG_CHOICES = [
    ({}, ()),
    ({"wrap": "blocks+embeddings"}, ()),
    ({"reshard_after_forward": True}, ()),  # as JSON has it
    ({"loss_chunks": "8"}, ()),
    ({"loss_chunks": 8.0}, ()),
    ({"strategy": " FSDP2", "precision": "BF16"}, ()),
    ({"mesh": "null"}, ()),
    ({"mesh": ""}, ()),
    ({"mesh": "2X8"}, ()),
    ({"recompute": "none", "loss_chunks": 1, "precision": "fp32"}, ("does not fit", "too much traffic")),
    ({"strategy": "ddp"}, ("does not fit",)),
    ({"precision": "fp32"}, ("too much traffic",)),
    ({"weights": "bf16"}, ("against the rules",)),
    ({"mesh": "3x8"}, ("cannot be combined",)),
    ({"mesh": 2}, ("not a choice",)),
    ({"mesh": "pipeline=4"}, ("not a choice",)),
    ({"recompute": "some"}, ("not a choice",)),
    ({"loss_chunks": True}, ("not a choice",)),
    ({"loss_chunks": 2}, ("not a choice",)),
    ({"recompute": ["full"]}, ("not a choice",)),
    ({"strategy": " "}, ("no answer",)),
    ({"strategy": None}, ("no answer",)),
]


@pytest.mark.parametrize(("changes", "mistakes"), WRONG_CHOICES, ids=lambda value: str(value)[:60])
def test_any_choice_that_fits_is_right_and_others_are_named(changes, mistakes):
    verdict = BUDGET.judge(FITS | changes, None)
    assert (verdict.right, verdict.mistakes) == (not mistakes, mistakes), verdict
    assert len({mistakes for _, mistakes in WRONG_CHOICES}) > MISTAKES_TO_DISTINGUISH


def test_over_nodes_only_what_leaves_one_counts():
    """With a replica on each node, parameters are gathered inside it; what is sent in all hardly changes."""
    whole, replicas = (choosing.configured(GIVEN, FITS | {"mesh": mesh}) for mesh in (None, "2x8"))
    assert choosing.needs(replicas)[1] < 0.6 * choosing.needs(whole)[1]
    assert plans.sent_bytes(plans.plan_of(replicas)) > 0.9 * plans.sent_bytes(plans.plan_of(whole))


def fill(folder, answers: dict):
    paper = json.loads((folder / papers.ANSWERS).read_text())
    paper["answers"] |= answers
    (folder / papers.ANSWERS).write_text(json.dumps(paper))


@pytest.mark.long
def test_an_exam_is_written_from_runs_solved_from_its_files_and_judged_by_running(tmp_path):
    """Seed 5, from its command's functions to the recheck: nothing here is planned where the exam says it is run."""
    folder = tmp_path / "exam-5"
    exam.write_tasks(5, folder)
    of_seed = tasks.draw(5)
    texts = {path.name: path.read_text() for path in folder.glob("*.csv")}
    drill = {number: named(diagnose_hang.report(folder / f"task-{number:02}")) for number in (5, 6)}
    fill(folder, {str(task.number): solved(task, texts, drill) for task in of_seed})
    exam.judge(folder, 5, True)
    report = papers.recheck(folder / "exam-5.json", 5)
    assert [row for row in report["verdicts"] if not row["right"]] == []
    judged = [row["judged_by"] for row in report["verdicts"]]
    assert [number for number, how in enumerate(judged, 1) if how == "run"] == [1, 2, 7, 9]
