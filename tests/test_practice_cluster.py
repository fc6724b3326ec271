# SPDX-License-Identifier: BSD-3-Clause
"""The practice cluster and the job templates: the commands that a learner types, typed."""

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from commands import call, run_job

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "source_code" / "slurm"
SCRIPT = TEMPLATES / "practice_cluster.sh"
BASH = shutil.which("bash")

# A lab that needs nothing: it says who it is and what it was given.
LAB = """
import os, sys
names = "SLURM_PROCID SLURM_NTASKS SLURMD_NODENAME CUDA_VISIBLE_DEVICES RANK WORLD_SIZE SRUN_CPUS_PER_TASK".split()
sys.stdout.write(" ".join(f"{n}={os.environ.get(n)}" for n in names) + f" ARGS={','.join(sys.argv[1:])}\\n")
"""


def cluster(verb, folder, **options):
    return call(BASH, SCRIPT, verb, folder, **options)


@pytest.fixture
def folder(slurm_installed):
    """Where a test's own cluster may live: a path short enough for sockets, which pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as parent:
        folder = Path(parent) / "cluster"
        yield folder
        cluster("down", folder)


def processes_of(folder):
    """The numbers of the processes (zombies apart) that name the folder in their command or their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            text = command + (process / "environ").read_bytes()
        except OSError:  # gone by now, or another user's
            continue
        if command and os.fsencode(folder) in text:
            found.append(int(process.name))
    return found


# Up and down


@pytest.mark.parametrize("path", ["", "/nonexistent"])
def test_missing_packages_are_named_in_one_sentence(tmp_path, path):
    folder = tmp_path / "cluster"
    up = cluster("up", folder, env={"PATH": path})
    assert up.returncode == 2
    assert up.stderr.count("\n") == 1
    assert "sudo apt-get install --no-install-recommends slurm-wlm munge" in up.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cluster", "a name with blanks, and too long for a socket: " + 60 * "x"])
def test_up_and_down_leave_nothing(folder, name):
    folder = folder.with_name(name)
    try:
        up = cluster("up", folder)
        assert up.returncode == 0, up.stderr
        assert "env.sh" in up.stdout and "srun -p gpu -N 1 --gres=gpu:4 python mnist_fsdp.py" in up.stdout
        base = folder
        if name != "cluster":
            base = Path((folder / "base").read_text().strip())
            assert base != folder and base.samefile(folder)
        assert len(daemons := processes_of(base)) >= 4  # munged, slurmctld (and its helper), two slurmd

        again = cluster("up", folder)
        assert again.returncode == 0 and "already up" in again.stderr
        assert processes_of(base) == daemons

        # A job that runs, and one that waits for its GPUs, must not be in the way.
        work = f'. "{folder}/env.sh" && cd / && sbatch -N2 --gres=gpu:4 --output=/dev/null --wrap "sleep 300"'
        for _ in range(2):
            assert call(BASH, "-c", work).returncode == 0
    finally:
        down = cluster("down", folder)
    assert down.returncode == 0, down.stderr
    assert processes_of(base) == []
    assert list(folder.parent.iterdir()) == []
    assert base == folder or not base.parent.exists()

    nothing = cluster("down", folder)
    assert nothing.returncode == 0 and "nothing is up" in nothing.stderr


def test_ranks_that_outlive_their_job_end_with_the_cluster(folder):
    assert cluster("up", folder).returncode == 0
    daemons = processes_of(folder)
    # The batch script ends; the child that it left behind, in a session of its own, Slurm no longer knows.
    work = f". {folder}/env.sh; cd /; sbatch --output=/dev/null --wrap 'setsid sleep 300 & exit 0'"
    assert call(BASH, "-c", work).returncode == 0
    deadline = time.monotonic() + 30
    while call(BASH, "-c", f". {folder}/env.sh; squeue -h").stdout and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(orphans := set(processes_of(folder)) - set(daemons)) == 1, orphans

    down = cluster("down", folder)
    assert down.returncode == 0, down.stderr
    assert processes_of(folder) == []
    assert not folder.exists()


def test_a_cluster_that_does_not_come_up_says_why_and_leaves_nothing(folder, tmp_path):
    broken = tmp_path / "slurmd"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = -V ] && exec echo slurm 22.05.8\necho "slurmd: fatal: as planned" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    up = cluster("up", folder, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert up.returncode == 1
    assert "slurmd: fatal: as planned" in up.stderr
    assert processes_of(folder) == []
    assert not folder.exists()


def test_a_folder_with_something_in_it_is_left_alone(slurm_installed, tmp_path):
    mine = tmp_path / "bin" / "mine"
    mine.parent.mkdir()
    mine.write_text("precious")
    up = cluster("up", tmp_path)
    down = cluster("down", tmp_path)
    assert up.returncode == 1 and "not empty" in up.stderr
    assert down.returncode == 0 and "nothing is up" in down.stderr
    assert mine.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [mine.parent]


# What the nodes give


def test_four_gpus_for_one_task(slurm):
    task = call("srun", "-p", "gpu", "-N", "1", "--gres=gpu:4", "printenv", "CUDA_VISIBLE_DEVICES", env=slurm)
    assert task.stdout.split() == ["0,1,2,3"], task.stderr


def test_one_gpu_for_each_task(slurm):
    who = "echo $SLURM_PROCID $SLURM_LOCALID $CUDA_VISIBLE_DEVICES $SLURMD_NODENAME"
    tasks = call("srun", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1", BASH, "-c", who, env=slurm)
    assert sorted(tasks.stdout.splitlines()) == [
        "0 0 0 127.0.0.1",
        "1 1 1 127.0.0.1",
        "2 0 0 127.0.0.2",
        "3 1 1 127.0.0.2",
    ], tasks.stderr


def test_leftovers_of_another_slurm_are_dropped(slurm):
    inside = {**os.environ, "SLURM_JOB_ID": "77", "SBATCH_PARTITION": "elsewhere", "SLURM_CONF": "/etc/elsewhere.conf"}
    folder = Path(slurm["SLURM_CONF"]).parent.parent
    show = call(BASH, "-c", f'. "{folder}/env.sh" && env', env=inside)
    kept = [line for line in show.stdout.splitlines() if re.match("SLURM_|SBATCH_", line)]
    assert kept == [f"SLURM_CONF={slurm['SLURM_CONF']}"]
    assert {"OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo"} <= set(show.stdout.splitlines())


# The job templates


@pytest.fixture
def lab(tmp_path):
    """A repository with the templates, and a mnist_fsdp.py that only says who it is."""
    source = tmp_path / "source_code"
    (source / "slurm").mkdir(parents=True)
    for file in (*TEMPLATES.glob("*.sbatch"), TEMPLATES / "requeue.sh"):
        shutil.copy(file, source / "slurm")
    (source / "mnist_fsdp.py").write_text(LAB)
    return source


@pytest.mark.parametrize("template", ["one_node", "two_nodes_srun", "two_nodes_torchrun"])
def test_sbatch_accepts_the_template(slurm, template):
    tried = call("sbatch", "--test-only", f"slurm/{template}.sbatch", "--epochs", "1", env=slurm, cwd=TEMPLATES.parent)
    assert tried.returncode == 0, tried.stderr
    assert f"on nodes 127.0.0.{'1' if template == 'one_node' else '[1-2]'} in partition gpu" in tried.stderr


def test_one_node_starts_one_task(slurm, lab):
    states, output = run_job("slurm/one_node.sbatch", "--epochs", "1", env=slurm, cwd=lab)
    assert states == ["COMPLETED"], output
    (line,) = output.splitlines()
    assert "SLURM_PROCID=0 SLURM_NTASKS=1 SLURMD_NODENAME=127.0.0.1 CUDA_VISIBLE_DEVICES=0,1,2,3" in line
    assert line.endswith("SRUN_CPUS_PER_TASK=16 ARGS=--epochs,1")


def test_two_nodes_srun_starts_eight_ranks(slurm, lab):
    states, output = run_job("source_code/slurm/two_nodes_srun.sbatch", "--epochs", "1", env=slurm, cwd=lab.parent)
    assert states == ["COMPLETED"], output
    assert sorted(output.splitlines()) == [
        f"SLURM_PROCID={rank} SLURM_NTASKS=8 SLURMD_NODENAME=127.0.0.{1 + rank // 4} CUDA_VISIBLE_DEVICES=0,1,2,3 "
        "RANK=None WORLD_SIZE=None SRUN_CPUS_PER_TASK=4 ARGS=--epochs,1"
        for rank in range(8)
    ]


def test_two_nodes_torchrun_starts_eight_ranks_of_one_world(slurm, lab):
    if not shutil.which("torchrun", path=slurm["PATH"]):
        pytest.skip("torchrun is not installed")
    states, output = run_job("slurm/two_nodes_torchrun.sbatch", "--epochs", "1", env=slurm, cwd=lab)
    assert states == ["COMPLETED"], output
    ranks = re.findall(r"SLURMD_NODENAME=(\S+) .* RANK=(\d) WORLD_SIZE=8 SRUN_CPUS_PER_TASK=16 ARGS=--epochs,1", output)
    assert sorted(rank for _, rank in ranks) == list("01234567"), output
    assert {node for node, _ in ranks} == {"127.0.0.1", "127.0.0.2"}


def test_two_nodes_torchrun_without_a_first_node_starts_nothing(lab, tmp_path):
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, does in {"scontrol": "exit 1", "srun": f"touch {tmp_path}/started"}.items():
        (bin / name).write_text(f"#!/bin/sh\n{does}\n")
        (bin / name).chmod(0o755)
    env = {"PATH": f"{bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "16"}
    job = call(BASH, "slurm/two_nodes_torchrun.sbatch", env=env, cwd=lab)
    assert job.returncode == 1
    assert "not starting" in job.stderr
    assert not (tmp_path / "started").exists()
