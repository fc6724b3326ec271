# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 16: its diagnoses and its check judge fairly, its verdicts fail when what it claims is broken."""

import os
import signal
import sys
from pathlib import Path

import faults
import pytest
import torch
import torch.distributed as dist
from commands import call
from forked import by_value
from labkit.measuring import memory_budget, trace
from labkit.running import launch
from labkit.running.symptoms import Bench, folded, own_collective
from labkit.teaching.exercises import check
from labkit.teaching.exercises.chapter_16 import CAUSES, EXERCISES, Diagnose, table, units
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from notebooks import run_broken

DIAGNOSES = {number: exercise for number, exercise in EXERCISES.items() if isinstance(exercise, Diagnose)}


@pytest.mark.parametrize("number", DIAGNOSES)
def test_a_wrong_cause_is_told_what_it_would_look_like(number, capsys):
    right = DIAGNOSES[number]
    for cause, (_, looks) in CAUSES.items():
        check(number, (cause, right.rank) if right.rank is not None else cause)
        said = f"right; {right.also[cause]}" if cause in right.also else f"not quite: with {cause!r}, {looks}"
        assert capsys.readouterr().out.endswith(f": {'right' if cause == right.cause else said}\n")


@pytest.mark.parametrize(
    ("number", "answer", "said"),
    [
        ("16.11", ("damaged data", 3), ": right; that is the root"),
        ("16.11", "damaged data", "on which rank?"),
        ("16.11", ("damaged data", 2), "not on rank 2"),
        ("16.12", "lone collective", ": right; that is what the report shows; and why?"),
        ("16.1", ("fewer batches", 0), "not quite: "),
    ],
)
def test_a_cause_that_is_right_from_another_side_is_taken(number, answer, said, capsys):
    check(number, answer)
    assert said in capsys.readouterr().out


def test_a_fault_can_be_met_again_when_the_notebook_has_been_run_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "RUNS", tmp_path)
    bench = Bench(lab=None, patience=1)
    bench.close()
    assert Path(bench.folder(8)).is_dir()


def test_units_are_what_is_gathered_together_not_who_owns_a_parameter(world_of_one):
    """Fault 5 wraps a Sequential, whose parameters a Linear inside owns."""
    model, blocks = faults.network(), faults.network()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    names = [name for name, _ in model.named_parameters()]
    assert units(model) == {"": names}
    for block in blocks[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(blocks, mesh=mesh)
    assert units(blocks) == {"0": names[:2], "1": names[2:4], "": names[4:]}


def test_the_table_has_a_numbered_row_per_fault():
    lines = table().splitlines()
    assert len(lines) == 2 + 17 and lines[4].startswith("| 3 | out of memory")


def test_what_a_rank_was_about_to_call_is_its_own_not_the_others():
    error = "Rank 1 is running collective: (OpType=A, TensorShape=[4, 66], …), but Rank 0 … (OpType=B, TensorShape=[8]"
    assert own_collective(error) == "A of 4, 66 numbers" and own_collective("another error") == ""


DDP_ON_GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
"""


@pytest.mark.skipif(not torch.__version__.startswith("2.15"), reason="the page warns of PyTorch 2.15")
@pytest.mark.parametrize(("level", "code"), [("OFF", 0), ("DETAIL", -signal.SIGSEGV)])
def test_ddp_on_gloo_crashes_where_every_collective_is_compared_as_the_page_warns(level, code):
    environ = os.environ | {"TORCH_DISTRIBUTED_DEBUG": level}
    assert call(sys.executable, "-c", DDP_ON_GLOO, env=environ, timeout=120).returncode == code


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("lone collective", "the cause is right; on which rank?"),
        (("lone collective", 2), "not on rank 2"),
        (("lone collective", 0), ": right"),
        ("the network", "is not among the causes: bad sample, "),
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


def like_rank_0(units, me):
    return gathered(units, me)[0] == units


def on_rank_0_only(units, me):
    everybodys = [None] * me.world_size if me.rank == 0 else None
    dist.gather_object(units, everybodys)
    return all(some == units for some in everybodys) if me.rank == 0 else None


def names_only(units, me):
    return len({str(sorted(name for names in some.values() for name in names)) for some in gathered(units, me)}) == 1


def same_hash(units, me):
    """Right among ranks that were forked from one process, as they share the seed of hash(); never under torchrun."""
    numbers = torch.tensor([hash(str(units)), -hash(str(units))])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return bool(numbers[0] == -numbers[1])


def same_digest(units, me):
    import hashlib

    number = int.from_bytes(hashlib.sha256(str(units).encode()).digest()[:7], "big")
    numbers = torch.tensor([number, -number])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return bool(numbers[0] == -numbers[1])


def asks_nobody(units, me):
    return True


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (same_digest, ": right"),
        (same_hash, "hash() differs between processes (and with it the order of a set): use hashlib, or gather"),
        (like_rank_0, "rank 1 had different units, but rank 0 returns True"),
        (on_rank_0_only, "only rank 0 knows"),
        (names_only, "rank 1 had different units, but rank 0 returns True"),
        (asks_nobody, "rank 1 had different units, but rank 0 returns True"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_check_of_units_is_told_its_first_difference(function, said, capsys):
    """That gathering them is right, too, test_exercises.py shows with the course's solution."""
    by_value(gathered)
    check("16.18", function)
    out = capsys.readouterr().out
    assert said in out and out.count("\n") == 1  # and nothing from the ranks


PRINTED = """starting 4 ranks, as torchrun
step 0: loss 2.1
lab.py: rank 1 failed:
Traceback (most recent call last):
  File "/home/me/labkit/running/ranks.py", line 1, in run_as_rank
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
    with memory_budget.Budget(model, torch.optim.SGD(model.parameters()), torch.device("cpu"), 64 + 400) as budget:
        for _ in range(3):
            some = torch.empty(100)
            del some
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 0.5 KiB; 0.1 of 0.5 KiB are in use"):
            torch.empty(128)
    assert max(map(trace.total, budget.timeline())) == 464


def failed(lines):
    return [line.split(":")[0].removeprefix("FAIL  ") for line in lines if line.startswith("FAIL")]


SET_UP = ("cell-01", "cell-02", "cell-04")


@pytest.mark.breaks
def test_reports_of_another_fault_and_cures_that_cure_nothing_are_noticed():
    breaks = {
        "meet(1)\nreport = who(1)": "meet(4)\nreport = who(4)",
        "meet(2)\nreport_2 = who(2)": "report_2 = report",
        "meet(17)\nreport_17 = who(17)": "report_17 = report",
        "first, second = (diagnose_hang.report(folder(fault)) for fault in (11, 12))": "first = second = report; "
        "calls = {rank: '' for rank in range(4)}",
        "*faults.on_all_ranks(me), units(faults.wrapped_alike(me))": "7.0, 8, me.rank",
    }
    only = (*SET_UP, "cell-13", "cell-23", "mesh-run", "cell-122")
    lines = run_broken("16", breaks, until="12, mended", only=only)
    assert len(failed(lines)) == len(lines) == 9, lines


@pytest.mark.breaks
def test_faults_that_are_not_mended_are_noticed():
    breaks = {
        "found_6 = meet(6)": "found_6 = {'rows': [[step] for step in range(48)]}",
        "seen = ": "seen = 0  # ",
        "for sharded_first in (False, True)": "for sharded_first in (True, False)",
        "(torch.enable_grad, torch.no_grad)": "(torch.enable_grad, torch.enable_grad)",
        "set_epoch=True": "set_epoch=False",
        "from_empty(me, faults.initial_weights)": "from_empty(me, lambda *_: None)",
        "from_empty(me, lambda *_: None)[0]": "from_empty(me, faults.initial_weights)[0]",
        "found_7 = meet(7)": "found_7 = {'losses': [2.1]}",
        "figures.memory(": "(lambda *_: None)(",
        "where": "''",
        "found_4 = meet(4)": "found_4 = {'losses': [2.1, *7 * [2.0]]}",
    }
    lines = run_broken("16", breaks, until="with no_grad", only=(*SET_UP, "cell-42", "cell-65", "cell-81", "cell-82"))
    assert len(failed(lines)) == len(lines) == 10, lines


@pytest.mark.breaks
@pytest.mark.parametrize(
    ("breaks", "at"), [("True, True", "False, False"), ("report_16 = who(16)", "report_16 = who(13)")]
)
def test_hardware_that_does_not_fail_is_noticed(breaks, at):
    changes = {
        "meet(13)\nreport_13 = who(13)": "meet(4)\nreport_13 = diagnose_hang.report(folder(4))",
        "meet(16)\nreport_16 = who(16)": "report_16 = report_13",
        "faults.checked, True, True": f"faults.checked, {at}"
        if breaks == "True, True"
        else "faults.checked, True, True",
    }
    only = (*SET_UP, "slow-run", "gpu-run", "hardware-verdicts")
    lines = run_broken("16", changes, until="16: the report names", only=only)
    right = [] if breaks == "True, True" else ["14", "15"]
    assert [line.split(":")[0].split()[-1] for line in lines if line.startswith("PASS")] == right, lines


@pytest.mark.parametrize(
    ("drain", "said"),
    [
        ({"n02", "n04"}, ": right"),
        ({"n02", "n03", "n04"}, "n03 has Xid 63, a bad memory row is marked for replacement at the next reset; Xid 94"),
        ({"n04"}, "n02 has Xid 48, uncorrectable (double-bit) memory error"),
        (["n02", "n04", "n05"], "n05 has Xid 43"),
        ("n02", "the answer is a set of nodes"),
        ({"n99"}, "the answer is a set of nodes"),
    ],
    ids=["right", "too many", "too few", "a list", "no set", "no node"],
)
def test_nodes_to_drain_are_judged_by_their_logs(drain, said, capsys):
    check("16.16", drain)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([(("killed", 2), ("killed", 2)), (None, ("stopped", 1))], ": not answered yet"),
        ([(("killed", 2), ("killed", 2))], ": right"),
        ([(("stopped", 2), ("killed", 2))], "report 0 is not of the kind 'stopped'"),
        ([(("killed", 1), ("killed", 2))], "report 0: the kind is right, but it was not rank"),
        ([(5, ("killed", 2))], "write each diagnosis as a kind and a rank"),
    ],
    ids=str,
)
def test_the_drills_diagnoses_are_judged_by_the_draws(answers, said, capsys):
    check("16.19", answers)
    assert said in capsys.readouterr().out


def last_rank_that_is_bad(losses, me):
    """Asks too late: after the step at which the NaN has spread."""
    bad = [None] * me.world_size
    dist.all_gather_object(bad, losses[-1] != losses[-1])
    return (len(losses) - 1, [rank for rank, is_bad in enumerate(bad) if is_bad]) if any(bad) else None


def only_nan(losses, me):
    first = next((step for step, loss in enumerate(losses) if loss != loss), None)
    firsts = [None] * me.world_size
    dist.all_gather_object(firsts, first)
    steps = [step for step in firsts if step is not None]
    return (min(steps), [rank for rank, step in enumerate(firsts) if step == min(steps)]) if steps else None


def on_rank_0_alone(losses, me):
    found = only_nan(losses, me)
    return found if me.rank == 0 else None


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (last_rank_that_is_bad, "rank 1's loss is NaN at step 1, all ranks' at step 2; rank 0 returns (2, [0, 1, 2])"),
        (only_nan, "rank 2's loss is infinite at step 0, and finite after that; rank 0 returns None"),
        (on_rank_0_alone, "rank 1 returns None instead of (1, [1])"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_origin_is_told_its_first_difference(function, said, capsys):
    by_value(only_nan)
    check("16.14", function)
    assert said in capsys.readouterr().out
