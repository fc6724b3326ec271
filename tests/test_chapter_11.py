"""Chapter 11: its verdicts fail where a way is blind to a term, its exercises judge fairly, its figures hold."""

import re

import pytest
from labkit import predict
from labkit.exercises import chapter_11, check

from notebooks import FOLDER, code_cells, read, run_broken

LATER = ("subprocess", "train(me", "ask(", "peaks(", "eight[")  # cells that start something, or need what they found


def test_a_simulation_that_recomputes_nothing_is_found_out():
    lines = run_broken(
        "11",
        {
            '"FSDP1": {"strategy": "fsdp1"},': "",
            '"FSDP2, parameters kept": {"strategy": "fsdp2", "reshard_after_forward": "false"},': "",
            '"FSDP2, bf16, selective": {"strategy": "fsdp2", "precision": "bf16", "recompute": "selective"},': "",
            '    common |= {"recompute": "none"': '    config = config | {"recompute": "none"}\n    common |= {"recompute": "none"',
        },
        until="peaks, CONFIGS",
    )
    assert [line[:4] for line in lines] == ["FAIL", "PASS", "FAIL", "FAIL"]
    assert "largest distance of a measured peak" in lines[0]


def test_a_published_figure_that_the_terms_miss_is_found_out():
    broken = {"62.18 - 49.41, peak_of": "62.18 - 47.41, peak_of", '"31.4", "16.6"': '"31.4", "16.8"'}
    lines = run_broken("11", broken, until="torchtitan #822, {name}", skip=LATER)
    failed = [line for line in lines if line.startswith("FAIL")]
    assert "ZeRO's table 1" in failed[0] and "32 blocks kept" in failed[1] and len(failed) == 2


def world(fits, worlds=chapter_11.WORLDS):
    """A function that answers with the first world that fits(its terms, GiB)."""

    def smallest_world(size, gib, batch, recompute):
        found = (n for n in worlds if fits(chapter_11._terms(size, n, batch, recompute), gib))
        return next(found, None)

    return smallest_world


KEPT = ("parameters", "optimizer state")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda *case: None, "not answered yet"),
        (lambda *case: ..., "not answered yet"),
        (world(lambda terms, gib: predict.total(terms) <= gib * 1e9), "GiB are 1024³"),
        (world(lambda terms, gib: sum(s for (c, _), s in terms.items() if c in KEPT) <= gib * 2**30), "not the peak"),
        (world(lambda terms, gib: predict.total(terms) <= gib * 2**30, chapter_11.WORLDS[::-1]), "so do fewer"),
        (lambda *case: chapter_11.reference_world(*case) or 1024, "no world fits"),
        (lambda *case: (chapter_11.reference_world(*case) or 2) // 2, "the peak is"),
        (lambda *case: 3, "none of 1, 2, 4"),
        (lambda size: 2, "raises TypeError"),
    ],
)
def test_a_wrong_world_hears_why(wrong, said, capsys):
    check("11.2", wrong)
    assert said in capsys.readouterr().out


def test_no_world_is_an_answer():
    assert None in [chapter_11.reference_world(*case) for case in chapter_11.CASES]


def test_the_page_says_in_words_where_sliders_cannot_move():
    (path,) = FOLDER.glob("11_*.ipynb")
    outputs = [o for cell in code_cells(read(path)) if "planner.sliders(" in cell.source for o in cell.outputs]
    (widget,) = [o for o in outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert re.search("run this cell in JupyterLab", widget["data"]["text/plain"])
