# SPDX-License-Identifier: BSD-3-Clause
"""Slurm as it is at real sites: a job around the notebook, GPUs by the node or by the task, a queue, a site's words."""

import re
import subprocess
import sys
import threading
import time

import pytest
import torch
from commands import call, refused
from labkit.running import launch, ranks, slurm

from notebooks import FOLDER, code_cells, read

SOURCE = launch.SOURCE

# Inside a job: start ranks as a notebook does, from arguments (ranks, nodes, device), and print what they say.
IN_A_JOB = """
import sys
from labkit import UserError
from labkit.running import launch
script, ranks, nodes, device = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
try:
    print(launch.follow(launch.build_command([script], ranks, nodes, device, launch.Cluster(launcher="slurm"))))
except UserError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
# A rank that needs no torch: its number, of how many, its node, the GPUs it sees, the CPUs of its step on this node
WHO = """
import os
names = "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURMD_NODENAME CUDA_VISIBLE_DEVICES SLURM_CPUS_ON_NODE SLURM_CPU_BIND_TYPE"
os.write(1, (" ".join(os.environ.get(name, "-") for name in names.split()) + "\\n").encode())
"""


@pytest.fixture
def who(tmp_path):
    script = tmp_path / "who.py"
    script.write_text(WHO)
    return script


def within(job: str, script, ranks: int, nodes: int, device: str, env) -> subprocess.CompletedProcess:
    """Start ranks from inside a job, which ``job`` (srun's or salloc's words) makes."""
    words = [sys.executable, "-c", IN_A_JOB, script, ranks, nodes, device]
    return call(*job.split(), *words, env=env, cwd=SOURCE, timeout=60)


def nodes_of(done) -> list[str]:
    """Of each rank that printed, in order: its node. There must be one of each number, of that many."""
    assert done.returncode == 0, done.stderr
    said = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[:2] for line in said] == [[str(rank), str(len(said))] for rank in range(len(said))], done.stdout
    return [line[2] for line in said]


# A job around the notebook


@pytest.mark.parametrize(
    "job",
    [
        "srun -N1 -n1 --gres=gpu:4",  # JupyterHub's
        "srun -N1 -n1 -c8 --gpus-per-task=4",
        "salloc -N1 -n2 --gres=gpu:4",  # fewer tasks than ranks
        "salloc -N2 --ntasks-per-node=4 --gres=gpu:4",
        "salloc -N2 --ntasks-per-node=1 -c8 --gres=gpu:4",
    ],
)
def test_steps_in_a_job_are_the_ranks_that_were_asked_for(job, slurm, who):
    first = within(job, who, 4, 1, "cuda", slurm)
    assert nodes_of(first) == ["127.0.0.1"] * 4
    assert {line.split()[3] for line in first.stdout.splitlines()} == {"0,1,2,3"}
    if "-N2" in job:
        second = within(job, who, 4, 2, "cuda", slurm)
        assert nodes_of(second) == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2


# What jobs of other Slurms, and of other words, leave in a notebook's environment; each changed a step, or stopped it.
LEFTOVERS = {
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_CPUS_PER_TASK": "32",
    "SRUN_CPUS_PER_TASK": "32",
    "SLURM_CPUS_PER_GPU": "32",
    "SLURM_TRES_PER_TASK": "cpu:32",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_MEM_PER_CPU": "999999999",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_EXPORT_ENV": "NONE",
}


def test_a_job_s_own_variables_do_not_change_its_steps(slurm, who):
    left = " ".join(f"{name}={value}" for name, value in LEFTOVERS.items())
    job = f"salloc -N2 --ntasks-per-node=1 -c2 --gres=gpu:4 env {left}"
    done = within(job, who, 4, 2, "cuda", slurm)
    assert nodes_of(done) == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2  # not 1, 2, 1, 2, as a cyclic one would be
    assert {line.split()[3] for line in done.stdout.splitlines()} == {"0,1"}
    assert {tuple(line.split()[4:]) for line in done.stdout.splitlines()} == {("2", "-")}  # all the job's CPUs, unbound


def test_ranks_in_a_job_may_use_all_its_cpus(slurm, who):
    """Without --cpus-per-task, which since Slurm 22.05 is not the job's either: a step has what its job has."""
    env = slurm | {"FSDP_LABS_SRUN": "--exclusive --cpus-per-task=16 --mem-per-cpu=4G"}  # for jobs of its own
    done = within("srun -N1 -n1 -c6 --gres=gpu:4", who, 4, 1, "cpu", env)
    nodes_of(done)
    assert [line.split()[4] for line in done.stdout.splitlines()] == ["6"] * 4


@pytest.mark.parametrize(
    ("job", "nodes", "why"),
    [
        ("salloc -N1 -n4 --gres=gpu:4", 2, "Only allocated 1 nodes asked for 2"),
        ("srun -N1 -n1 --gres=gpu:2", 1, "Invalid generic resource (gres) specification"),
        ("srun -N1 -n1", 1, "Invalid generic resource (gres) specification"),
    ],
)
def test_a_job_that_is_too_small_is_told_in_one_sentence(job, nodes, why, slurm, who):
    done = within(job, who, 4 * nodes, nodes, "cuda", slurm)
    said = [
        line for line in done.stderr.splitlines() if not line.startswith(("salloc: ", "srun: "))
    ]  # of the job's own
    gpus = f"srun --nodes={nodes} --ntasks={4 * nodes} --gres=gpu:4"
    assert len(said) == 1 and re.fullmatch(
        rf"RunFailed: job \d+, in which this runs, has too few resources for {gpus} \({re.escape(why)}\): "
        "request more when you start the job, or fewer ranks",
        said[0],
    ), done.stderr


def test_a_function_of_a_notebook_runs_on_all_ranks_of_a_job_s_step(slurm):
    code = """
from labkit.running import notebook_ranks
def who(me):
    import torch, torch.distributed as dist
    total = torch.ones(1)
    dist.all_reduce(total)
    return me.rank, me.local_rank, me.world_size, total.item()
print(notebook_ranks.on_ranks(who, ranks=4))
"""
    done = call("srun", "-N1", "-n1", "-c2", sys.executable, "-c", code, env=slurm, cwd=SOURCE, timeout=120)
    assert done.stdout.strip() == str([(rank, rank, 4, 4.0) for rank in range(4)]), done.stderr


def test_a_job_queued_from_inside_a_job_is_its_own(slurm, tmp_path):
    """sbatch hands on the environment, and with it the tasks of the job around the notebook, to the new job's srun."""
    code = """
from labkit.running import launch
options = {"data": "mnist-5k", "max_steps": 1, "batch_size": 8, "device": "cpu"}
print(launch.submit("mnist_fsdp.py", ranks=4, nodes=2, **options).wait()["ranks"])
"""
    around = [
        "srun",
        "-N1",
        "-n1",
        "--gpus-per-task=1",
        "env",
        *(f"{name}={value}" for name, value in LEFTOVERS.items()),
    ]
    done = call(*around, sys.executable, "-c", code, env=slurm, cwd=SOURCE, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "4"


# GPUs of one's own


@pytest.mark.parametrize(("seen", "device"), [(8, 3), (4, 3), (1, 0)])
def test_a_rank_takes_its_own_of_the_gpus_it_sees(seen, device, monkeypatch):
    """All of its node's, or, where a site gives each task one and hides the others, the one that it calls 0."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    assert ranks._own_device("cuda", local_rank=3) == torch.device("cuda", device)
    assert ranks._own_device("cpu", local_rank=3) == torch.device("cpu")


# A site's own words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--comment='a class", ('"--comment=\'a class"', "(No closing quotation)")),
        ("-c 4", ("'-c'", "--name=value")),
        ("--qos class", ("'class'", "--name=value")),
        ("--exclusive --ntasks=1", ("--ntasks",)),
        ("-n1", ("'-n1'", "--name=value")),
        ("--nodes=2", ("--nodes",)),
        ("--partition=a", ("--partition", "FSDP_LABS_PARTITION")),
    ],
)
@pytest.mark.parametrize("start", [launch.run, launch.submit])
def test_words_that_cannot_be_passed_on_are_refused(start, words, said, stand_in, monkeypatch):
    monkeypatch.setenv("FSDP_LABS_SRUN", words)
    with refused("FSDP_LABS_SRUN", *said):
        start("hello.py", ranks=2)
    assert not list(stand_in.glob("s[rb]*.words"))  # neither srun nor sbatch was started


def test_a_site_s_words_come_last_so_that_they_win(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    cluster = launch.Cluster(slurm="--exclusive --comment='for the class'")
    words = cluster.srun(ranks=2, nodes=1, device="cuda")
    assert "--exclusive" in words and "--comment=for the class" in words


@pytest.mark.parametrize("named", ["gpu:a100", "gpu:a100:4"])
def test_a_site_s_type_of_gpu_is_taken_and_how_many_is_the_run_s(named, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    cluster = launch.Cluster(slurm=f"--gres={named}")
    asked = {(ranks, nodes): cluster.request(ranks, nodes, "cuda")["gres"] for ranks, nodes in ((1, 1), (2, 1), (8, 2))}
    assert asked == {(1, 1): "gpu:a100:1", (2, 1): "gpu:a100:2", (8, 2): "gpu:a100:4"}
    assert not [word for word in cluster.srun(4, 1, "cpu") if "gres" in word]  # nor does a run on the CPU wait for GPUs


def test_the_queue_gets_a_site_s_words(slurm):
    code = """
from labkit.running import launch
job = launch.submit("hello.py", ranks=2, device="cpu")
job.handle.cancel()
print(job.handle.paths.submission_file.read_text())
"""
    words = "--exclusive --cpus-per-task=3 --comment='for the class'"
    done = call(sys.executable, "-c", code, env=slurm | {"FSDP_LABS_SRUN": words}, cwd=SOURCE)
    asked = {line for line in done.stdout.splitlines() if line.startswith("#SBATCH")}
    assert {"#SBATCH --exclusive", "#SBATCH --cpus-per-task=3", "#SBATCH --comment='for the class'"} <= asked
    assert "gpu" not in "".join(asked)  # device="cpu"


def test_a_word_that_only_srun_knows_is_told_by_sbatch(slurm):
    code = "from labkit.running import launch; launch.submit('hello.py', ranks=2, device='cpu')"
    done = call(sys.executable, "-c", code, env=slurm | {"FSDP_LABS_SRUN": "--cpu-bind=none"}, cwd=SOURCE)
    assert done.stderr.splitlines()[-1].startswith('Try "sbatch --help"')
    assert "RunFailed: sbatch: unrecognized option '--cpu-bind=none'" in done.stderr


# The queue

ENDLESS = """
import signal, sys
from pathlib import Path
from labkit.running import progress
progress.report()
Path(sys.argv[1]).touch()
signal.pause()
"""


@pytest.fixture
def busy(slurm, monkeypatch):
    """All nodes are taken by one job, whose number this is; this process uses the practice cluster."""
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    job = call("sbatch", "--parsable", "-N2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 600", env=slurm)
    number = job.stdout.strip()
    try:
        until(lambda: call("squeue", "-h", "-j", number, "-o", "%T").stdout.strip() == "RUNNING")
        yield number
    finally:
        call("scancel", number, env=slurm)
        until(lambda: not call("squeue", "-h", env=slurm).stdout)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Watcher:
    """What a bar would show; ``then`` is called with every reason."""

    def __init__(self, then):
        self.then = then

    def __call__(self, step, total):
        pass

    def wait(self, why):
        self.then(why)


def started(script, *words):
    return launch.build_command([str(script), *map(str, words)], 2, 1, "cpu", launch.Cluster(launcher="slurm"))


def test_a_time_out_counts_from_the_ranks_report_not_in_the_queue(busy, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "ASK_SECONDS", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    (tmp_path / "endless.py").write_text(ENDLESS)
    begin, reasons = time.monotonic(), set()

    def then(why):
        reasons.add(why)
        if time.monotonic() - begin > 3:  # three times the time-out, in the queue
            call("scancel", busy)

    with pytest.raises(launch.RunFailed, match="not finished after 1 s"):
        launch.follow(started(tmp_path / "endless.py", tmp_path / "ran"), Watcher(then), timeout=1)
    assert (tmp_path / "ran").exists()
    assert "waiting for Slurm (Resources)" in reasons
    until(lambda: not call("squeue", "-h").stdout)  # and its ranks ended


def test_interrupting_a_run_that_waits_cancels_its_job(busy, who):
    def then(why):
        assert call("squeue", "-h", "-t", "pending").stdout
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.follow(started(who), Watcher(then))
    until(lambda: not call("squeue", "-h", "-t", "pending").stdout)


def test_a_queued_job_shows_why_it_waits_too(busy):
    seen = []

    def then(why):
        seen.append(why)
        raise KeyboardInterrupt

    job = launch.submit("hello.py", ranks=2, device="cpu")
    too_late = threading.Timer(30, job.handle.cancel)  # or it would wait for ever, if it showed nothing
    too_late.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            job.wait(Watcher(then))
    finally:
        too_late.cancel()
        job.handle.cancel()
    assert re.fullmatch(r"waiting for Slurm \((Resources|Priority)\)", seen[0])


def test_what_srun_says_of_the_queue_is_not_the_run_s_output(busy, who):
    said = launch.follow(started(who), Watcher(lambda why: call("scancel", busy)))
    assert len(said.splitlines()) == 2 and "queued" not in said


def test_a_terminal_shows_why_a_run_waits(capsys):
    bar = launch._TerminalBar()
    bar.wait("waiting for Slurm (Priority)")
    bar(3, 6)
    bar.close()
    shown = capsys.readouterr().err
    assert "waiting for Slurm (Priority), 0" in shown and "/6 [" in shown


# Notebook 10's ways to start two nodes

WAYS = """
import os, sys
from labkit.running import launch
from labkit.running.lab import Lab
lab = Lab()
"""


def test_torchrun_meets_at_the_first_node_of_its_job_not_of_the_cluster(linked):
    """On a cluster of two nodes, with the first one busy, a job of one node: it runs on the second, and must end."""
    (cell,) = (
        cell.source
        for cell in code_cells(read(FOLDER / "10_many_nodes.ipynb"))
        if "torch.distributed.run --nnodes" in cell.source
    )
    assert "NODES, RANKS = 2, 4" in cell
    code = WAYS + cell.replace("NODES, RANKS = 2, 4", "NODES, RANKS = 1, 2")
    env = linked | {"FSDP_LABS_LAUNCHER": "slurm", "FSDP_LABS_PARTITION": "gpu"}
    first = call("sinfo", "-hNo", "%N", env=env).stdout.split()[0]
    words = ["--parsable", f"--nodelist={first}", "--exclusive", "--output=/dev/null", "--wrap", "sleep 600"]
    busy = call("sbatch", *words, env=env).stdout.strip()
    try:
        until(lambda: call("squeue", "-h", "-j", busy, "-o", "%T", env=env).stdout.strip() == "RUNNING")
        done = call(sys.executable, "-c", code, env=env, cwd=SOURCE, timeout=90)
    finally:
        call("scancel", busy, env=env)
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if line.startswith("$ srun ")]
    assert len(commands) == 2 and all("--partition=gpu" in line for line in commands)
    assert done.stdout.count("the sum of 1 … 2 over all ranks, by gloo: 3") == 2
    assert first not in done.stdout


def test_a_notebook_s_page_does_not_say_for_ever_that_a_run_waits(monkeypatch):
    page = []

    class Line:
        def update(self, content, raw):
            page.append(content["text/plain"])

    monkeypatch.setattr(
        "IPython.display.display", lambda content, raw, display_id: Line().update(content, raw) or Line()
    )
    for steps, last in ([], ""), ([(1, 6), (2, 6)], "step 2 of 6, "):
        line = launch._NotebookLine()
        line.wait("waiting for Slurm (Priority)")
        assert page[-1].startswith("waiting for Slurm (Priority), ")
        for step in steps:
            line(*step)
        line.close()
        assert page[-1].startswith(last) and bool(page[-1]) == bool(last)


# A node list's first name


@pytest.mark.parametrize("with_scontrol", [False, pytest.param(True, marks=pytest.mark.slurm)])
@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[03-04,07],login1", "gpu03"),
        ("a1,b[2-3]", "a1"),
        ("b[2-3],a1", "b2"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("rack[2,5]n[07,09-12]-ib,login1", "rack2n07-ib"),
        ("127.0.0.[1-2]", "127.0.0.1"),
    ],
)
def test_the_first_name_of_a_node_list(nodelist, first, with_scontrol, monkeypatch, request):
    if with_scontrol:
        for name, value in request.getfixturevalue("slurm").items():
            monkeypatch.setenv(name, value)
    else:
        monkeypatch.setenv("PATH", "")
    assert ranks.first_host(nodelist) == first


@pytest.mark.parametrize("nodelist", ["", "gpu[1-2", "]", ",a"])
def test_a_node_list_that_cannot_be_read_is_told(nodelist, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with refused("Slurm", nodelist):
        ranks.first_host(nodelist)
