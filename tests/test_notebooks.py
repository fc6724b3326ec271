# SPDX-License-Identifier: BSD-3-Clause
"""Every notebook has what a chapter has, is committed as it should be, and runs on Slurm too."""

import configparser
import re
import sys
from pathlib import Path

import nbformat
import pytest
from commands import call
from labkit.teaching.verdicts import verdict

from notebooks import FOLDER, PATHS, code_cells, read, text_of, verdicts

SANITIZE = Path(__file__).with_name("sanitize.cfg")
NAMES = [path.stem for path in PATHS]
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work|tmp|Users|usr|opt|var)/")
# Words that talk down, and an expression with which nobody may end a sentence about somebody else's machine
BANNED = re.compile(r"\b(simply|obviously|of course|just)\b", re.IGNORECASE)


@pytest.fixture(params=PATHS, ids=NAMES)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return read(path)


def prose(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def test_has_the_parts_of_a_chapter(path, notebook):
    text, code = prose(notebook), "\n".join(cell.source for cell in code_cells(notebook))
    number = path.stem[:2]
    assert notebook.cells[0].source.startswith("# ")
    for heading in ("## Predict", "## Break it", "## Exercises", "## Recap", "## References"):
        assert heading in text, heading
    assert 'sys.path.insert(0, "../source_code")' in code_cells(notebook)[0].source
    assert re.search(r"^lab = Lab\(", code, re.MULTILINE)
    assert "srun" in text and "torchrun" in text
    exercises = set(re.findall(rf'check\("({number}\.\d)"', code))
    assert len(exercises) >= 2
    for exercise in exercises:
        assert f'hint("{exercise}")' in code + text and f'solution("{exercise}")' in code + text


def test_the_head_states_the_minutes_of_its_exercises(path, notebook):
    (stated,) = re.findall(r"\d+ minutes, and (\d+) for the exercises", notebook.cells[0].source)
    each = re.findall(rf"^\**(?:Your turn\. )?\**{path.stem[:2]}\.\d+\b.*?(\d+) min", prose(notebook), re.MULTILINE)
    assert int(stated) == sum(map(int, each))


def test_links_to_its_neighbours_and_its_pictures(path, notebook):
    text = prose(notebook)
    place = PATHS.index(path)
    for neighbour in PATHS[max(0, place - 1) : place + 2]:
        if neighbour != path:
            assert f"({neighbour.name})" in text
    for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
        assert (FOLDER / target).exists(), target
        assert len(alt) > 20, f"no alt text for {target}"


def test_shows_two_figures_or_more(notebook):
    drawn = sum("image/png" in output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs)
    assert drawn + prose(notebook).count(".svg)") >= 2
    assert drawn >= 1


def test_was_run_from_top_to_bottom_and_passed(notebook):
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    assert verdicts(notebook) and all(line.startswith("PASS") for line in verdicts(notebook))
    checked = [cell for cell in code_cells(notebook) if "NBVAL_CHECK_OUTPUT" in cell.source]
    assert any("PASS  " in text_of(cell) for cell in checked)
    assert not any(output.output_type == "error" for cell in code_cells(notebook) for output in cell.outputs)


def test_is_small_and_names_no_machine(path, notebook):
    assert path.stat().st_size < 1_000_000
    assert not MACHINE_PATH.search(nbformat.writes(notebook))


def test_cells_are_short_and_words_are_kind(notebook):
    for cell in code_cells(notebook):
        assert len(cell.source.splitlines()) <= 25, cell.source
        assert max(map(len, cell.source.splitlines()), default=0) <= 110, cell.source
    assert not BANNED.findall(prose(notebook))


HOWS = ["measured", *re.findall('"([a-z ]+)"', verdict.__doc__)]  # words that say how a number was obtained


@pytest.mark.parametrize("how", HOWS)
def test_a_checked_verdict_may_have_other_numbers_on_other_ranks(how, capsys):
    rules = configparser.ConfigParser(interpolation=None)
    rules.read(SANITIZE)
    for bytes_sent in (9_518_632, 9_519_664):
        verdict("sent", bytes_sent, predicted=bytes_sent, unit="bytes", how=how)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] != lines[1]
    for rule in map(rules.__getitem__, rules.sections()):
        lines = [re.sub(rule["regex"], rule["replace"], line) for line in lines]
    assert lines[0] == lines[1]


def test_the_first_runs_on_slurm(slurm):
    # On two ranks, as a class may: under Slurm each imports torch anew, and the verdicts hold for any number.
    env = slurm | {"FSDP_LABS_LAUNCHER": "slurm", "FSDP_LABS_PARTITION": "gpu", "FSDP_LABS_RANKS": "2"}
    words = ("-m", "pytest", "--nbval-lax", "-q", "-p", "no:cacheprovider", FOLDER / "00_start_here.ipynb")
    run = call(sys.executable, *words, env=env, cwd=FOLDER.parent, timeout=500)
    assert run.returncode == 0, run.stdout[-4000:]
