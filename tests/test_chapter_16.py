"""Chapter 16: its diagnoses and its check judge fairly, its verdicts fail when what it claims is broken."""

import pytest
import torch
import torch.distributed as dist
from forked import by_value
from labkit.measuring import limits, trace
from labkit.teaching.exercises import check
from labkit.teaching.exercises.chapter_16 import CAUSES, EXERCISES, Diagnose
from labkit.teaching.symptoms import folded

from notebooks import run_broken

DIAGNOSES = {number: exercise for number, exercise in EXERCISES.items() if isinstance(exercise, Diagnose)}


@pytest.mark.parametrize("number", DIAGNOSES)
def test_a_wrong_cause_is_told_what_it_would_look_like(number, capsys):
    right = DIAGNOSES[number]
    for cause, (_, looks) in CAUSES.items():
        check(number, (cause, right.rank) if right.rank is not None else cause)
        assert capsys.readouterr().out.endswith(": right\n" if cause == right.cause else f"{looks}\n")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("lone collective", "the cause is right; on which rank?"),
        (("lone collective", 2), "not on rank 2"),
        (("lone collective", 0), ": right"),
        ("the network", "is not among the causes: damaged data, "),
        (("lone collective", 0, 1), "is not among the causes"),
        ((..., 0), "not answered yet"),
        (["killed"], "is not among the causes"),
    ],
)
def test_an_answer_of_another_form_is_told_what_is_wanted(answer, said, capsys):
    check("16.1", answer)
    assert said in capsys.readouterr().out


def gathered(units, me):
    everybodys = [None] * me.world_size
    dist.all_gather_object(everybodys, units)
    return everybodys


def all_alike(units, me):
    return len({str(some) for some in gathered(units, me)}) == 1


def like_rank_0(units, me):
    return gathered(units, me)[0] == units


def on_rank_0_only(units, me):
    everybodys = [None] * me.world_size if me.rank == 0 else None
    dist.gather_object(units, everybodys)
    return all(some == units for some in everybodys) if me.rank == 0 else None


def names_only(units, me):
    return len({str([name for name, *_ in some]) for some in gathered(units, me)}) == 1


def asks_nobody(units, me):
    return True


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (all_alike, "right"),
        (like_rank_0, "rank 1 had other units, and rank 0 says True"),
        (on_rank_0_only, "rank 0 alone knows"),
        (names_only, "rank 1 had other units, and rank 0 says True"),
        (asks_nobody, "rank 1 had other units, and rank 0 says True"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_check_of_units_is_told_its_first_difference(function, said, capsys):
    by_value(gathered)
    check("16.13", function)
    assert said in capsys.readouterr().out


PRINTED = """starting 4 ranks, as torchrun
step 0: loss 2.1
lab.py: rank 1 failed:
Traceback (most recent call last):
  File "/home/me/labkit/running/ranks.py", line 1, in be_rank
    main(config, rank)
  File "/home/me/lab.py", line 7, in train
    model(x)
    ^^^^^^^^
RuntimeError: no room in /home/me/data/part-1
slurmstepd-n1: error: *** STEP 1.0 CANCELLED
terminate called
  what():  [enforce fail at /pytorch/gloo/pair.cc:464]"""


def test_an_output_is_folded_to_the_programs_lines_and_the_error():
    assert folded(PRINTED, own=("lab.py",)).splitlines() == [
        "step 0: loss 2.1",
        "lab.py: rank 1 failed:",
        "  lab.py:7 in train:  model(x)",
        "RuntimeError: no room in …/part-1",
        "terminate called",
        "what():  [enforce fail at …/pair.cc:464]",
    ]
    assert folded(PRINTED, own=(), width=9, most=2).splitlines() == ["terminat…", "what():  "[:8] + "…"]


def test_a_budget_is_kept_and_what_it_freed_can_be_used_again(world_of_one):
    model = torch.nn.Linear(4, 4, bias=False)  # 64 bytes
    with limits.Budget(model, torch.optim.SGD(model.parameters()), torch.device("cpu"), 64 + 400) as budget:
        for _ in range(3):
            some = torch.empty(100)
            del some
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 0.5 KiB; 0.1 of 0.5 KiB are in use"):
            torch.empty(128)
    assert max(map(trace.total, budget.timeline())) == 464


def failed(lines):
    return [line.split(":")[0].removeprefix("FAIL  ") for line in lines if line.startswith("FAIL")]


@pytest.mark.long
def test_an_accuracy_of_ones_own_is_noticed():
    """Nothing is reduced: each rank has the share of its own batch."""
    breaks = {"reached = faults.accuracy": "faults.dist.all_reduce = lambda *_: None\n    reached = faults.accuracy"}
    lines = run_broken("16", breaks, until="accuracies above 100 %")
    assert failed(lines) == ["different accuracies on four ranks"] and len(lines) == 3


OTHER_FAULTS = (
    "meet(1)",
    "report = ",
    "named = ",
    "reached",
    "meet(2)",
    "memory(",
    "free",
    "meet(5",
    "calls[rank]",
    "ReduceOp",
    "alike = ",
)


@pytest.mark.long
def test_faults_that_are_not_mended_are_noticed():
    breaks = {
        "torch.no_grad():\n            for step": "torch.enable_grad():\n            for step",  # and room for what it keeps
        "with faults.limits.Budget(model, optimizer, me.device, 2**20) as": (
            "with faults.limits.Budget(model, optimizer, me.device, 2**24) as"
        ),
        "for sharded_first in (False, True)": "for sharded_first in (False, False)",
        "self.set_epoch(next(epochs))": "next(epochs)",
        "module.reset_parameters()": "pass",
        "    dcp.save(state": "    [p.data.mul_(2) for p in model.parameters()]\n    dcp.save(state",
    }
    lines = run_broken("16", breaks, until="samples per epoch on four ranks, mended", skip=(*OTHER_FAULTS, "figures."))
    assert failed(lines) == [
        "activations, as it was, over those of the mended validation",
        "sharded first",
        "sharded first",
        "orders in six epochs, with set_epoch",
        "samples that rank 0 has seen, with set_epoch",
        "with first values",
        "with first values",
    ], lines


BEFORE_THE_MYSTERIES = (
    *OTHER_FAULTS, "figures.", "meet(3)", "timeline", "meet(4)", "sharded_first", "shared", "meet(6)",
    "seen", "set_epoch", "meet(7)", "loud", "reset_parameters", "meet(8)", "by_dcp", "saved", "meet(9)", 'environ["',
    "samples", "meet(10)", "visible", "sum(got)", "meet(11)",
)  # fmt: skip


@pytest.mark.long
def test_mysteries_that_are_told_otherwise_are_noticed():
    breaks = {"first = who(11)": "first = who(12)", "raise got": "raise RuntimeError(0)", "30 - 30 %": "27 - 27 %"}
    lines = run_broken("16", breaks, until="the second, mended", skip=BEFORE_THE_MYSTERIES)
    assert failed(lines) == [
        "the first",
        "the first, mended",
        "the second, mended",
    ], lines
