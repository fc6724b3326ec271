# SPDX-License-Identifier: BSD-3-Clause
"""What notebooks launch in tests: the same is launched once, and whatever differs is launched."""

import sys
from pathlib import Path

import cloudpickle
import once
import pytest
from labkit.running import launch, notebook_ranks

HERE = launch.Cluster(launcher="local")
LAB = {"ranks": 2, "cluster": HERE, "quiet": True}


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """The commands that were launched: of each, all files that it returns hold their number."""
    commands = []

    def follow(command, *about, **more):
        commands.append(command)
        record = [launch.SOURCE / command[command.index("--record") + 1]] if "--record" in command else []
        for path in record or [Path(command[4], f"rank-{rank}") for rank in range(int(command[5]))]:
            path.write_text(f"of launch {len(commands)}")
        return f"printed {len(commands)}"

    monkeypatch.setenv(once.VARIABLE, str(tmp_path))
    monkeypatch.setattr(launch, "follow", follow)
    monkeypatch.setattr(launch, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(launch.records, "load", lambda path: path.read_text())
    monkeypatch.setattr(notebook_ranks.torch, "load", lambda path, **how: Path(path).read_text())
    return commands


@pytest.fixture
def execution(launched, monkeypatch):
    """Begin another execution of a notebook."""
    follow = launch.follow

    def begin():
        monkeypatch.setattr(launch, "follow", follow)
        once.install()

    begin()
    return begin


def lab(script="mnist_fsdp.py", **options):
    return launch.run(script, **LAB | options)


def on_ranks(function, *arguments, ranks=2):
    return notebook_ranks.on_ranks(function, *arguments, ranks=ranks, cluster=HERE)


def test_a_run_of_another_execution_is_read_again(launched, execution):
    first = lab(max_steps=3)
    execution()
    assert lab(max_steps=3) == first and len(launched) == 1


def test_two_runs_of_one_execution_are_two(launched, execution):
    pair = [lab(), lab()]
    assert pair[0] != pair[1]
    execution()
    assert [lab(), lab()] == pair and len(launched) == 2


@pytest.mark.parametrize(
    "other", [{"max_steps": 4}, {"ranks": 4}, {"strategy": "ddp"}, {"script": "gpt_fsdp.py"}], ids=str
)
def test_another_command_is_launched(other, launched, execution):
    lab(max_steps=3)
    execution()
    lab(**{"max_steps": 3} | other)
    assert len(launched) == 2


def test_another_variable_is_launched_with(launched, execution, monkeypatch):
    lab()
    execution()
    monkeypatch.setenv("FSDP_LABS_FAULT", "7")
    lab()
    assert len(launched) == 2


def test_other_code_is_launched(launched, execution, monkeypatch):
    lab()
    execution()
    monkeypatch.setattr(once, "_code", lambda: "edited")
    lab()
    assert len(launched) == 2


@pytest.mark.parametrize("option", ["checkpoint", "profile", "log"])
def test_what_writes_to_a_path_is_always_launched(option, launched, execution, tmp_path):
    for _ in range(2):
        execution()
        lab(**{option: tmp_path / "there"})
    assert len(launched) == 2


def test_what_fails_is_launched_again(launched, execution, monkeypatch):
    def fail(*_, **__):
        launched.append("failed")
        raise launch.RunFailed("no memory")

    for _ in range(2):
        monkeypatch.setattr(launch, "follow", fail)
        once.install()
        with pytest.raises(launch.RunFailed):
            lab()
    assert launched == ["failed"] * 2


def counted(factor, body="me.rank * factor"):
    """A function of a notebook's cell, with a variable of the notebook."""
    source = f"def count(me):\n    return {body}\n"
    names = {"__name__": "__main__", "__package__": None, "factor": factor}
    exec(compile(source, once.file_of(source), "exec"), names)
    return names["count"]


@pytest.mark.parametrize(
    ("function", "ranks", "times"),
    [(counted(3), 2, 1), (counted(4), 2, 2), (counted(3, "me.rank + factor"), 2, 2), (counted(3), 3, 2)],
    ids=["the same", "another variable", "another body", "other ranks"],
)
def test_a_function_is_launched_when_it_or_what_it_reads_differs(function, ranks, times, launched, execution):
    first = on_ranks(counted(3))
    execution()
    assert (on_ranks(function, ranks=ranks) == first) == (times == 1)
    assert len(launched) == times


def test_a_function_that_is_given_a_path_is_always_launched(launched, execution, tmp_path):
    for _ in range(2):
        execution()
        on_ranks(counted(3), tmp_path)
    assert len(launched) == 2


def test_what_runs_on_slurm_is_always_launched(launched, execution):
    for _ in range(2):
        execution()
        launch.follow(["srun", "--ntasks=2", sys.executable, "-u", "mnist_fsdp.py", "--record", "there.json"])
    assert len(launched) == 2


def test_the_same_cell_pickles_to_the_same_bytes():
    assert cloudpickle.dumps(counted(3)) == cloudpickle.dumps(counted(3))
