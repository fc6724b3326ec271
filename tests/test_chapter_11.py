# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 11: its verdicts fail where a way is blind to a term, its exercises judge fairly, its figures hold."""

import json

import plan
import pytest
from answers import altered
from labkit.running import options
from labkit.teaching.exercises import chapter_11, check
from planner import gpus
from planner.cli import search

from notebooks import FOLDER, code_cells, read, run_broken

(PATH,) = FOLDER.glob("11_*.ipynb")
GIB = chapter_11.GIB


@pytest.mark.breaks
def test_a_plan_that_forgets_the_options_is_found_out():
    three = ["FSDP1", "FSDP2", "FSDP2, parameters kept"]
    breaks = {f'    "{name}": {{"strategy"': f'    # "{name}": {{"strategy"' for name in three}  # two are enough
    breaks["ask(**common | config)"] = 'ask(**common | {"strategy": config["strategy"]})'
    lines = run_broken("11", breaks)
    assert [line[:4] for line in lines] == ["FAIL", "FAIL", "PASS", "FAIL", "FAIL"]
    assert "a measured peak from its prediction" in lines[0] and "a category differs by" in lines[1]
    assert "bytes in the collectives" in lines[3]


def test_published_differences_are_the_terms():
    """What the allocator reserves on top cancels in differences: optimizer state after step 1, and 32 blocks kept."""
    always, never = (chapter_11.planned(run) for run in chapter_11.TORCHTITAN[:2])
    reserved = [run.reserved for run in chapter_11.TORCHTITAN[:2]]
    first = chapter_11.FIRST_STEP["true"], chapter_11.FIRST_STEP["false"]
    for found, steady, before in zip((always, never), reserved, first, strict=True):
        assert (found["peak"] - found["first_step_peak"]) / GIB == pytest.approx(steady - before, rel=0.01)
    assert (never["peak"] - always["peak"]) / GIB == pytest.approx(reserved[1] - reserved[0], rel=0.03)


def test_the_factor_is_the_highest_of_the_published_eager_runs():
    factors = {True: [], False: []}
    for run in chapter_11.TORCHTITAN:
        factors[run.how == "eager"].append(run.reserved * GIB / chapter_11.planned(run)["peak"])
    assert (round(min(factors[True]), 2), round(max(factors[True]), 2)) == gpus.RESERVE
    assert gpus.RESERVE[1] < max(factors[False]) < 1.3


def test_the_search_of_11_1_finds_what_plan_py_finds():
    room = (gpus.GPUS["h100"].memory - gpus.outside(2)) / gpus.reserve("h100")[0] * GIB

    def needs(ranks):
        return chapter_11.peak_bytes(chapter_11.llama("llama3-70b", ranks))

    ours = chapter_11.reference_world(needs, room, ripple=2**26, most=64)
    words = "--preset llama3-70b --batch-size 1 --seq-len 8192 --precision bf16 --recompute full --gpu h100 --find ranks --json"
    assert ours == json.loads(plan.answer(options.parse(plan.Config, "", words.split())))["found"]


@pytest.mark.parametrize(("size", "world"), [("tiny", 22), ("small", 86), ("small", 52)])
def test_plan_py_finds_a_world_below_some_that_need_more(size, world):
    def needs(ranks):
        return chapter_11.peak_bytes(chapter_11.tiny(ranks, size))

    assert search.least(needs, needs(world), 1024) == one_by_one(needs, needs(world), 0, 1024) == world


def one_by_one(needs, room, ripple, most):
    return next((ranks for ranks in range(1, most + 1) if needs(ranks) <= room), None)


WORLDS = [
    ((), lambda *_: ..., "not answered yet"),
    ((), lambda needs, *_: needs(1) and None, "6 worlds tried, and none returned"),
    ((), lambda *_: 1, "yours returns 1 ranks, but they need"),
    ((), lambda *_: "8", "'8' is not a number of ranks from 1 to"),
    ((), one_by_one, "every number is right, but you ask for"),
    ((), lambda needs: 2, "raises TypeError"),
    ((("room + ripple", "room"),), None, "which fit, but so do 22"),
    ((("return None", "return most"),), None, "no world of up to 160 ranks fits; yours returns 160"),
    ((("needs(ranks) <= room", "needs(ranks) < room"),), None, "not quite: tiny"),
    ((("high = 0, most + 1", "high = 0, 2 * most"),), None, "but most is 160"),
]


@pytest.mark.parametrize(("breaks", "wrong", "told"), WORLDS)
def test_a_wrong_search_is_told_why(breaks, wrong, told, capsys):
    check("11.1", wrong or altered("11.1", *breaks))
    assert told in capsys.readouterr().out


def test_some_worlds_of_11_1_need_more_than_smaller_ones_and_one_room_is_too_small():
    found = [
        chapter_11.reference_world(needs, room, ripple, chapter_11.MOST)
        for _, needs, room, ripple in chapter_11.worlds()
    ]
    assert found == [one_by_one(*case[1:], chapter_11.MOST) for case in chapter_11.worlds()]
    assert None in found and all(ripple > 0 for *_, ripple in chapter_11.worlds())


LOSSES = [
    (("return 8 * chunk", "return 4 * chunk"), "the input of log-softmax, in fp32, is alive"),
    (("return 8 * chunk", "return 10 * chunk"), "the logits in bf16 are gone"),
    (("return 8 * chunk", "return 6 * chunk"), "the moment after that one is smaller"),
    ((" + 2 * tokens * width", ""), "the gradient of the head's input is left out"),
    (("0 if frozen else 2", "2"), "frozen head: a frozen weight has no gradient"),
    (("0 if frozen else 2", "0 if True else 2"), "as large as the weight, however many chunks"),
    (("-(-tokens // chunks)", "(tokens // chunks)"), "the others are rounded up"),
    (("-(-tokens // chunks)", "3 * tokens"), "GiB instead of"),
]


@pytest.mark.parametrize(("change", "told"), LOSSES)
def test_a_wrong_loss_is_told_why(change, told, capsys):
    check("11.0", altered("11.0", change))
    assert told in capsys.readouterr().out


ATTACKS = [
    ({}, "not answered yet"),
    (8, "return a dictionary"),
    ({"loss_chunks": 8}, "does not fit, as it needs"),
    ({"loss_chunks": 8}, "31.0 GiB: block: block's output"),
    ({"ranks": 1024}, "ranks must stay as given"),
    ({"weights": "bf16"}, "changes the numbers that training computes"),
    ({"cpu_offload": True}, "the planned time leaves that out"),
    ({"mesh": "shard=64,tensor=8"}, "a step has 524,288 tokens"),
    ({"mesh": "tensor=8"}, "plan.py refuses this: --mesh tensor=8"),
    ({"no_such_option": 1}, "plan.py refuses this"),
    ({"mesh": "shard=64,tensor=8", "batch_size": 8}, ": right"),
    ({"offload_activations": True}, ": right"),
]


@pytest.mark.parametrize(("changes", "told"), ATTACKS)
def test_an_attack_on_a_term_is_judged_by_its_plan(changes, told, capsys):
    check("11.2", lambda: changes)
    assert told in capsys.readouterr().out


def test_an_attack_that_slows_training_is_not_accepted(monkeypatch, capsys):
    monkeypatch.setattr(chapter_11, "SLOWER", 0.95)
    check("11.2", lambda: {"mesh": "shard=64,tensor=8", "batch_size": 8})
    assert "of the speed without changes" in capsys.readouterr().out


def test_the_page_says_in_words_where_sliders_cannot_move():
    outputs = [o for cell in code_cells(read(PATH)) if "planner.sliders(" in cell.source for o in cell.outputs]
    (widget,) = [o for o in outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert "run this cell in JupyterLab" in widget["data"]["text/plain"]
