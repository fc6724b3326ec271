# SPDX-License-Identifier: BSD-3-Clause
"""One installation serves a class: who may not write into it opens, runs and checks everything all the same."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from commands import call

from notebooks import read

CHECKOUT = Path(__file__).resolve().parents[1]
# The superuser may write anywhere. Without that power, permissions hold for root as for any user.
AS_A_LEARNER = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"] if os.geteuid() == 0 else []
OURS = ("FSDP_LABS_", "JUPYTER_", "XDG_", "MPL", "PYTEST_")  # settings of whoever runs the tests


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of this checkout in which nobody may write. Afterwards: nobody has."""
    folder = tmp_path_factory.mktemp("shared") / "course"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (CHECKOUT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(CHECKOUT / name, folder / name)
    shorten(folder / CHECKED)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555)
    before = listing(folder)
    yield folder
    assert listing(folder) == before


def shorten(path: Path):
    """Leave of a notebook what comes up to its first run of a lab: how one is checked in place takes no more."""
    notebook = read(path)
    first = next(n for n, cell in enumerate(notebook.cells) if cell.cell_type == "code" and "lab.run(" in cell.source)
    notebook.cells = notebook.cells[: first + 1]
    nbformat.write(notebook, path)


def listing(folder: Path) -> dict:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def as_learner(course: Path, home: Path, *words, folder="source_code", **variables) -> tuple[int, str]:
    """(exit code, output) of a command of somebody with a home of their own, in a folder of the course."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    env |= {"HOME": str(home), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    env.pop("PYTHONSTARTUP", None)  # it would bring this checkout's labkit
    done = call(*AS_A_LEARNER, *words, cwd=course / folder, env=env | variables, timeout=600)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def learner(course, tmp_path):
    """``as_learner`` for a learner with a new home, which is its .home."""
    (tmp_path / "home").mkdir()
    assert_read_only(course, tmp_path / "home")
    run = functools.partial(as_learner, course, tmp_path / "home")
    run.home = tmp_path / "home"
    return run


def assert_read_only(course: Path, home: Path):
    """Or nothing below would prove anything."""
    code, said = as_learner(course, home, "touch", "mine")
    assert code and "Permission denied" in said


STAND_IN = "cannot be written: Permission denied): using mnist-5k"
COMMANDS = {
    "hello.py --ranks 2": "as it should be",
    "gpt_fsdp.py --ranks 2 --max-steps 1": "after step 1",
    "plan.py --ranks 4 --simulate": "simulated",
    "prepare_data.py": "4,000 training and 1,000 test images, verified",
    "-m proofs.memory --every 999": "record: {runs}/memory-",
    # Each rung of which is a run of mnist_fsdp.py
    "ladder.py --data auto --epochs 1 --ranks 2 --batch-size 200": "Tables, picture and records: {runs}/ladder-",
}


# Its first rung, of eight: test_ladder.py climbs them all.
SHORT_LADDER = "import sys; sys.path.insert(0, '.'); import ladder; ladder.RUNGS = ladder.RUNGS[:1]; ladder.main()"

CHECKED = "notebooks/04_fsdp_one_unit.ipynb"
NBVAL = ["-m", "pytest", "-q", "--nbval-lax", CHECKED]

CELLS = """
import json, sys
cells = json.load(open(sys.argv[1]))["cells"]
code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
for source in code:
    if any(text in source for text in sys.argv[2:]):
        exec(source)
"""
COPIED = ["11_plan_before_you_train.ipynb", "sys.path.insert", "MINE ="]

# Prints the folder that every command asks for.
WHERE = "import sys; sys.path.insert(0, '.'); from labkit.measuring import records; print(records.ensure_writable_dir(records.RUNS))"

# The commands one after the other, each with a folder and an environment of its own, as ``python`` would run them: forked from
# a process that the learner has started, which their runs share, so that torch is imported once.
# {name: (words, variables, folder)} → {name: (exit code, output)}
IN_TURN = """
import json, os, subprocess, sys, tempfile
from labkit.running import fork_server

found = {}
for name, (words, variables, folder) in json.loads(sys.argv[1]).items():
    words = [sys.executable, "-u", *words]
    env = os.environ | variables
    with tempfile.TemporaryFile("w+", dir=os.environ["HOME"]) as out:
        if fork_server.possible():
            env[fork_server.VARIABLE] = fork_server.address()
            process = fork_server.start(words, folder, env, out, out)
        else:
            process = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out)
        process.wait()
        out.seek(0)
        found[name] = process.returncode, out.read()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ran(course, tmp_path_factory):
    """{name: (exit code, output, home)} of the commands, of those with settings of their own, notebooks, and an exam."""
    home = tmp_path_factory.mktemp("home")
    assert_read_only(course, home)
    for name, code in {"short": SHORT_LADDER, "where": WHERE, "cells": CELLS}.items():
        (home / f"{name}.py").write_text(code)
    ladder = ["ladder.py", "--epochs", "1", "--ranks", "2", "--batch-size", "200"]
    words = {words: words.replace("ladder.py", str(home / "short.py")).split() for words in COMMANDS}
    words |= {"where": [str(home / "where.py")], "where, set": [str(home / "where.py")], "no home": ladder}
    words |= {"in place": NBVAL, "copy": [str(home / "cells.py"), *COPIED]}
    exam = str(home / "exam-7")
    words |= {"exam": ["exam.py", "--seed", "7", "--folder", exam], "judged": ["exam.py", "--judge", exam]}
    variables = {name: {"HOME": str(tmp_path_factory.mktemp("home"))} for name in words}
    variables["where, set"]["FSDP_LABS_RUNS"] = str(home / "scratch")
    variables["no home"]["HOME"] = str(course)
    variables["in place"]["FSDP_LABS_RANKS"] = "2"
    copies = Path(variables["copy"]["HOME"])
    assert as_learner(course, copies, "make", "-s", "learner", folder=".")[0] == 0
    folders = dict.fromkeys(words, course / "source_code")
    folders |= {"in place": course, "copy": copies / "my-fsdp-labs" / "notebooks"}
    asked = {name: (words[name], variables[name], str(folders[name])) for name in words}
    code, said = as_learner(course, home, sys.executable, "-c", IN_TURN, json.dumps(asked))
    assert code == 0, said
    found = json.loads(said.splitlines()[-1])
    return {name: (*found[name], Path(variables[name]["HOME"])) for name in words}


@pytest.mark.long
@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_runs_and_writes_into_the_home(words, ran):
    code, said, home = ran[words]
    runs = home / "my-fsdp-labs" / "runs"
    assert code == 0 and COMMANDS[words].format(runs=runs) in said, said
    assert (STAND_IN in said) == ("auto" in words or "prepare" in words)
    assert ("{runs}" in COMMANDS[words]) == any(runs.glob("*")), said


@pytest.mark.long
def test_where_runs_go_is_a_setting(ran):
    """The folder that every command asks for; proofs/memory.py's record lies in it, see above."""
    code, said, home = ran["where"]
    assert (code, said) == (0, f"{home}/my-fsdp-labs/runs\n")
    code, said, home = ran["where, set"]
    scratch = Path(said.strip())
    assert code == 0 and scratch.name == "scratch" and scratch.is_dir()
    assert not scratch.is_relative_to(home) and not (home / "my-fsdp-labs").exists()


@pytest.mark.long
def test_a_home_that_cannot_be_written_is_one_sentence(ran):
    code, said, course = ran["no home"]
    (sentence,) = [line for line in said.splitlines() if line.startswith("ladder.py: ")]
    assert code == 2 and "Traceback" not in said, said
    assert f"{course}/my-fsdp-labs/runs (Permission denied)" in sentence and "set FSDP_LABS_RUNS" in sentence


@pytest.mark.long
def test_an_exam_is_written_and_judged_in_a_folder_of_the_learners(ran):
    for name, line in {"exam": "12 tasks of seed 7 are in ", "judged": "# Exam 7: 0 of 12"}.items():
        code, said, _ = ran[name]
        assert code == 0 and line in said, said


@pytest.mark.long
def test_notebooks_are_checked_in_place(ran):
    code, said, home = ran["in place"]
    assert code == 0 and "warning" not in said, said
    assert list((home / "my-fsdp-labs" / "runs").glob("*-mnist_fsdp.json"))


@pytest.mark.long
def test_the_copy_of_a_notebook_finds_the_course(ran):
    """Chapter 11 writes a file of its own, and starts a command of the course on it."""
    code, said, home = ran["copy"]
    mine = home / "my-fsdp-labs"
    assert code == 0 and f"{mine}/runs/my_model.py:build: 402,776,064 parameters" in said, said
    # Jupyter shows no picture that lies outside the folder which it was started in, link or not.
    assert (mine / "images" / "ladder.png").resolve().is_relative_to(home)


def test_a_copy_is_never_written_over(learner):
    code, said = learner("make", "-s", "learner", folder=".")
    mine = learner.home / "my-fsdp-labs" / "notebooks"
    assert code == 0 and str(mine) in said
    assert {path.name for path in mine.iterdir()} == {path.name for path in (CHECKOUT / "notebooks").glob("[!.]*.*")}
    with (mine / "00_start_here.ipynb").open("a") as notebook:
        notebook.write("\n")
    (mine / "01_ddp.ipynb").unlink()
    changed = (mine / "00_start_here.ipynb").read_text()
    assert learner("make", "-s", "learner", folder=".")[0] == 0
    assert (mine / "00_start_here.ipynb").read_text() == changed and (mine / "01_ddp.ipynb").exists()
