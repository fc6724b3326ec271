# SPDX-License-Identifier: BSD-3-Clause
"""What class_check.py says of a site on which a class would work, and of those on which it would not."""

import re
import subprocess
import sys
from pathlib import Path

import class_check
import pytest
from commands import call, refused
from conftest import SOURCE
from labkit.measuring import records
from labkit.running import launch

PORTS = ("ipproto", "tcp", "dport", "12000-29999")  # of ranks' rendezvous: labkit/running/ranks.py
OK = re.compile(r"^ok  (.{15})", re.M)


@pytest.fixture
def site(monkeypatch, tmp_path):
    monkeypatch.setenv("FSDP_LABS_LAUNCHER", "local")
    monkeypatch.setattr(records, "RUNS", tmp_path / "runs")
    return class_check.Site(class_check.Config(notebook="none"))


def test_a_clean_environment_passes(site, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "nothing" in site.environment()


def test_a_package_from_elsewhere_is_found(site, monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with refused(str(tmp_path), "unset PYTHONPATH"):
        site.environment()


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, ["2 tasks", "srun -n 1"]),
        ({"OMP_NUM_THREADS": "4096"}, ["OMP_NUM_THREADS", "4096"]),
        ({"SLURM_JOB_ID": "777777", "FSDP_LABS_LAUNCHER": "auto"}, ["777777", "unset"]),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_a_variable_that_misleads_a_lab_is_found(variables, words, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with refused(*words):
        class_check.Site(class_check.Config()).environment()


@pytest.mark.parametrize("closed", ["folder", "file"])
def test_what_others_may_not_read_is_named(closed, tmp_path):
    """What a umask of 077 leaves behind. tmp_path itself is private: from there on everything is open."""
    folder = tmp_path / "course"
    folder.mkdir()
    (folder / "file").touch()
    for path in (folder, *folder.absolute().parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)
    assert class_check._closed_to_others(folder / "file") is None
    shut = folder if closed == "folder" else folder / "file"
    shut.chmod(0o700 if closed == "folder" else 0o600)
    assert class_check._closed_to_others(folder / "file") == shut


def test_a_full_disk_is_found(site, small_disk, monkeypatch):
    monkeypatch.setattr(records, "RUNS", small_disk)
    assert str(small_disk) in site.runs()
    (small_disk / "full").write_bytes(bytes(7 * 2**20))
    with refused(str(small_disk), "FSDP_LABS_RUNS"):
        site.runs()


def test_a_notebook_that_is_not_there_is_refused():
    with refused("no_such.ipynb"):
        class_check.Site(class_check.Config(notebook="no_such.ipynb")).notebook()


def test_folders_of_killed_kernels_are_counted(site, tmp_path):
    (tmp_path / "runs" / ".progress-abc").mkdir(parents=True)
    assert "1 folders .progress-" in site.runs()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-27T10:00:00 DUE TO TIME LIMIT ***",
            "FSDP_LABS_TIME",
        ),
        ("srun: error: n1: task 1: Out Of Memory", "--mem-per-cpu"),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
            "memory",
        ),
        ("srun: error: n1: task 1: Killed", None),  # so is every rank that Slurm ends after another has failed
        ("srun: error: Slurm job 777777 has expired", "unset"),
        ("srun: error: n1: task 1: Exited with exit code 1", None),
    ],
    ids=["time", "memory", "oom", "killed", "expired", "other"],
)
def test_a_run_that_slurm_has_ended_says_what_to_do(said, words, tmp_path, monkeypatch):
    """Its last line, after Slurm's own words."""
    (tmp_path / "srun").write_text(f"#!/bin/sh\necho '{said}'\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(launch, "RUNS", tmp_path)
    with pytest.raises(launch.RunFailed) as failed:
        launch.follow(["srun", "python", "hello.py"], timeout=60, device="cpu")
    first, *rest = str(failed.value).splitlines()
    assert first == said and [words in line for line in rest] == ([True] if words else [])


def checked(env: dict, tmp_path: Path, **settings) -> tuple[int, str]:
    """(exit code, output) of the command on a practice cluster, without a notebook."""
    env = env | {"FSDP_LABS_RUNS": str(tmp_path / "runs"), "FSDP_LABS_PARTITION": "gpu", "OMP_NUM_THREADS": "1"}
    env |= {f"FSDP_LABS_{name}": value for name, value in settings.items()}
    done = call(sys.executable, "class_check.py", "--notebook", "none", cwd=SOURCE, env=env, timeout=400)
    assert not list((tmp_path / "runs").glob(".class-check-*"))  # it leaves nothing behind
    return done.returncode, done.stdout + done.stderr


def passed(said: str) -> set[str]:
    return {name.strip() for name in OK.findall(said)}


def test_a_practice_cluster_is_fit_for_a_class(slurm, tmp_path):
    code, said = checked(slurm, tmp_path)
    assert passed(said) >= set(class_check.CHECKS) - {"installation"}, said  # this Python may be in a private home
    assert "2 nodes see runs and data" in said and "2 ranks on 2 nodes met" in said
    assert code == ("NO" in said)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings, words, check",
    [
        ({"PARTITION": "nowhere"}, ["no partition nowhere", "gpu", "FSDP_LABS_PARTITION"], "partition"),
        ({"DATASET": "mnist", "DATA": "/nowhere"}, ["has no data", "prepare_data.py"], "a step"),
    ],
    ids=["partition", "data"],
)
def test_what_is_missing_is_said(settings, words, check, slurm, tmp_path):
    code, said = checked(slurm, tmp_path, **settings)
    (line,) = [line for line in said.splitlines() if line.startswith("NO") and check in line]
    assert code == 1 and all(word in line for word in words), said
    assert "--  notebook" in said  # what needs it is not tried


def in_node(env: dict, node: int, space: str, *words: str):
    """Run a command in the network or the mounts of a node of a cluster with a link."""
    pids = dict(
        reversed(line.split()) for line in (Path(env["SLURM_CONF"]).parents[1] / "pids").read_text().splitlines()
    )
    names = [name for name in pids if name.startswith("network.")]
    subprocess.run(["nsenter", "--target", pids[sorted(names)[node]], f"--{space}", *words], check=True, timeout=30)


@pytest.mark.long
def test_a_folder_that_the_second_node_does_not_see_is_said(linked, tmp_path):
    (tmp_path / "runs").mkdir()
    in_node(linked, 1, "mount", "mount", "-t", "tmpfs", "none", str(tmp_path / "runs"))
    try:
        code, said = checked(linked, tmp_path)
    finally:
        in_node(linked, 1, "mount", "umount", str(tmp_path / "runs"))
    assert code == 1 and f"does not see {tmp_path / 'runs'}" in said, said


@pytest.mark.long
def test_a_blocked_port_is_said(linked, tmp_path):
    address = subprocess.run(
        ["srun", "-p", "gpu", "-N1", "-w", first_node(linked), "hostname", "-I"],
        env=linked,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.split()
    for each in address:
        in_node(linked, 1, "net", "ip", "rule", "add", "to", each, *PORTS, "prohibit")
    try:
        code, said = checked(linked, tmp_path)
    finally:
        for each in address:
            in_node(linked, 1, "net", "ip", "rule", "del", "to", each, *PORTS, "prohibit")
    (line,) = [line for line in said.splitlines() if line.startswith("NO") and "rendezvous" in line]
    assert code == 1 and "did not meet" in line and "MASTER_ADDR" in line, said


def first_node(env: dict) -> str:
    nodes = subprocess.run(["sinfo", "-h", "-N", "-o", "%N"], env=env, capture_output=True, text=True, timeout=30)
    return sorted(set(nodes.stdout.split()))[0]
