"""Chapter 11: its verdicts fail where a way is blind to a term, its exercises judge fairly, its figures hold."""

import json
from unittest.mock import Mock

import plan
import pytest
from labkit.running import options
from labkit.teaching.exercises import chapter_11, check
from planner import gpus, predict

from notebooks import FOLDER, code_cells, read, run_broken

(PATH,) = FOLDER.glob("11_*.ipynb")


@pytest.mark.long
def test_a_plan_that_forgets_the_options_is_found_out():
    three = ["FSDP1", "FSDP2", "FSDP2, parameters kept"]
    breaks = {f'    "{name}": {{"strategy"': f'    # "{name}": {{"strategy"' for name in three}  # two are enough
    breaks["ask(**common | config)"] = 'ask(**common | {"strategy": config["strategy"]})'
    lines = run_broken("11", breaks)
    assert [line[:4] for line in lines] == ["FAIL", "PASS", "FAIL", "PASS", "FAIL", "FAIL"]
    assert "a measured peak from its prediction" in lines[0] and "a category differs by" in lines[2]
    assert "bytes in the collectives" in lines[4]


def cells_with(*texts) -> dict:
    """The names after the first cells of the page that contain each text: arithmetic alone."""
    notebook, names = read(PATH), {"predict": predict, "plan": plan, "gpus": gpus, "planner": Mock()}
    for text in texts:
        exec(next(cell.source for cell in code_cells(notebook) if text in cell.source), names)
    return names


SHAPES = ("GIB = 2**30", "def llama(")


def test_published_differences_are_the_terms(capsys):
    """But for the last, as the page says."""
    *three, last = cells_with(*SHAPES, "PUBLISHED")["differences"].values()
    assert all(planned == pytest.approx(theirs, rel=0.03) for theirs, planned in three)
    assert last[1] != pytest.approx(last[0], rel=0.5)


def test_the_factor_is_the_highest_of_the_published_eager_runs(capsys):
    names = cells_with(*SHAPES, "LONG = {", "guess_beyond =", "RUNS = [", "factors = {")
    eager, compiled = names["factors"][True], names["factors"][False]
    assert (round(min(eager), 2), round(max(eager), 2)) == gpus.RESERVE
    assert gpus.RESERVE[1] < max(compiled) < 1.3


def test_the_search_of_the_page_finds_what_plan_py_finds():
    names = cells_with(*SHAPES)
    room = (gpus.GPUS["h100"].memory - gpus.outside(2)) / gpus.reserve("h100")[0] * 2**30
    ours = chapter_11.reference_world(lambda ranks: names["llama"]("llama3-70b", ranks), room)
    words = "--preset llama3-70b --batch-size 1 --seq-len 8192 --precision bf16 --recompute full --gpu h100 --find ranks --json"
    assert ours == json.loads(plan.answer(options.parse(plan.Config, "", words.split())))["found"]


def world(needs, worlds=range(1, 65)):
    """A function that answers with the first world whose need of a plan is within the room."""

    def smallest_world(plan_of, room, most=1024):
        return next((ranks for ranks in worlds if needs(plan_of(ranks)) <= room), None)

    return smallest_world


def peak(plan):
    return predict.total(plan.peak()[1])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda plan_of, room, most: None, "not answered yet"),
        (lambda plan_of, room, most: ..., "not answered yet"),
        (world(lambda plan: predict.total(plan.persistent())), "holds the persistent memory, but not the peak"),
        (world(lambda plan: predict.total(plan.peak(True)[1])), "the peak of the first step"),
        (world(peak, [2**n for n in range(7)]), "but so do 3; try numbers that are not powers of two"),
        (world(peak, range(64, 0, -1)), "yours returns 64 ranks, which fit, but so do"),
        (lambda plan_of, room, most: chapter_11.reference_world(plan_of, room) or 64, "no world of up to 64 ranks"),
        (lambda plan_of, room, most: 1, "the peak is"),
        (lambda plan_of: 2, "raises TypeError"),
    ],
)
def test_a_wrong_world_hears_why(wrong, said, capsys):
    check("11.0", wrong)
    assert said in capsys.readouterr().out


def test_no_world_is_an_answer():
    found = [
        chapter_11.reference_world(plan_of, chapter_11._room(plan_of, room)) for _, plan_of, room in chapter_11.CASES
    ]
    assert None in found and len(set(found)) == len(found)


def test_the_page_says_in_words_where_sliders_cannot_move():
    outputs = [o for cell in code_cells(read(PATH)) if "planner.sliders(" in cell.source for o in cell.outputs]
    (widget,) = [o for o in outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert "run this cell in JupyterLab" in widget["data"]["text/plain"]
