"""Chapter 11: its verdicts fail where a way is blind to a term, its exercises judge fairly, its figures hold."""

from unittest.mock import Mock

import pytest
from labkit.teaching.exercises import chapter_11, check
from labkit.teaching.verdicts import verdict
from planner import predict

from notebooks import FOLDER, code_cells, read, run_broken

(PATH,) = FOLDER.glob("11_*.ipynb")


@pytest.mark.long
def test_a_plan_that_forgets_the_options_is_found_out():
    three = ["FSDP1", "FSDP2", "FSDP2, parameters kept"]
    breaks = {f'    "{name}": {{"strategy"': f'    # "{name}": {{"strategy"' for name in three}  # two are enough
    lines = run_broken("11", breaks | {"common | config": "config | common"})
    assert [line[:4] for line in lines] == ["FAIL", "PASS", "FAIL", "PASS", "FAIL", "FAIL"]
    assert "a measured peak from its prediction" in lines[0] and "a category differs by" in lines[2]
    assert "bytes in the collectives" in lines[4]


def published(break_: dict, capsys) -> list[str]:
    """The verdicts about published figures, after ``break_`` in the cells that they need: arithmetic alone."""
    notebook = read(PATH)
    needed = ("GIB = 2**30", "def llama(", "PUBLISHED", "torchtitan #822, {name}")
    cells = [next(cell.source for cell in code_cells(notebook) if text in cell.source) for text in needed]
    source = "\n".join(cells)
    for text, replacement in break_.items():
        assert text in source
        source = source.replace(text, replacement)
    exec(source, {"predict": predict, "verdict": verdict, "planner": Mock()})
    return [line for line in capsys.readouterr().out.splitlines() if line[:4] in ("PASS", "FAIL")]


@pytest.mark.parametrize(
    ("break_", "failed"),
    [
        ({}, []),
        ({"never[1] - always[1]": "never[1] - always[1] + 1"}, ["32 blocks kept"]),
        ({'optimizer="adamw-fused"': 'optimizer="momentum"'}, ["step 1, always", "step 1, never"]),
        ({'("never", "false")': '("never", "true")'}, ["32 blocks kept"]),
    ],
)
def test_a_published_figure_that_the_terms_miss_is_found_out(break_, failed, capsys):
    lines = [line for line in published(break_, capsys) if line.startswith("FAIL")]
    assert len(lines) == len(failed)
    assert all(words in line for words, line in zip(failed, lines, strict=True))


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
        (world(lambda plan: predict.total(plan.persistent())), "holds what stays between steps, but not the peak"),
        (world(lambda plan: predict.total(plan.peak(True)[1])), "the peak of the first step"),
        (world(peak, [2**n for n in range(7)]), "but so do 3; not only powers of two"),
        (world(peak, range(64, 0, -1)), "yours says 64 ranks, and they fit, but so do"),
        (lambda plan_of, room, most: chapter_11.reference_world(plan_of, room) or 64, "no world of 64 ranks or fewer"),
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
