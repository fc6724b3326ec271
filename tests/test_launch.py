# SPDX-License-Identifier: BSD-3-Clause
"""The lab script starts in all the ways the course shows, computes the same in each, and fails tidily."""

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mnist_fsdp
import psutil
import pytest
import torch.distributed as dist
from commands import assert_about, call, command, refused, run_job, script, ways
from forked import by_value, forked
from labkit import UserError
from labkit.measuring import records
from labkit.running import fork_server, launch, progress, ranks, site
from labkit.running.lab import Lab

SOURCE = launch.SOURCE
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)  # its ranks import torch anew
PYTHON = shlex.quote(sys.executable)
LAB = "mnist_fsdp.py --data mnist-5k --strategy fsdp2 --wrap size --precision fp64 --no-dropout --global-batch-size 12"


def bash(command: str, env=None, timeout=120):
    """Run a command line in source_code/."""
    return call("bash", "-c", command, env=env, cwd=SOURCE, timeout=timeout)


@pytest.fixture(scope="module")
def losses_of_four(tmp_path_factory):
    """The losses of a run of four local ranks, to which every other way is compared."""
    path = tmp_path_factory.mktemp("reference") / "run.json"
    run = script(*LAB.split(), "--ranks", 4, "--max-steps", 3, "--record", path)
    assert run.returncode == 0, run.stderr
    return records.load(path)["losses"]


WAYS = {
    "torchrun": f"{PYTHON} -m torch.distributed.run --standalone --nproc-per-node 2 {{lab}}",  # two compute what four do
    "srun, one task": "srun -p gpu -N 1 --gres=gpu:4 python {lab}",
    "srun, a task per rank": "srun -p gpu -N 2 --ntasks-per-node=2 --gres=gpu:2 python {lab}",
    "srun torchrun": (
        "export HOST=127.0.0.1; srun -p gpu -N 2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 2"
        " --rdzv-backend c10d --rdzv-endpoint $HOST:{port} {lab}"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("way", ways(WAYS))
def test_every_way_computes_the_same(way, losses_of_four, tmp_path, request):
    env = request.getfixturevalue("slurm") if "srun" in way else os.environ
    command = WAYS[way].format(lab=f"{LAB} --max-steps 3 --record {tmp_path / 'run.json'}", port=free_port())
    run = bash(command, env=env)
    assert run.returncode == 0, run.stderr
    record = records.load(tmp_path / "run.json")
    assert record["ranks"] == (2 if way == "torchrun" else 4)
    assert record["losses"] == pytest.approx(losses_of_four, rel=1e-10)
    assert run.stdout.count("accuracy") == 1  # one line, not one per rank


def test_launch_run_and_submit_on_slurm(slurm, losses_of_four):
    """What the notebooks call: the same function uses Slurm where there is one; submitit queues a job."""
    options = "strategy='fsdp2', wrap='size', precision='fp64', dropout=False, global_batch_size=12, data='mnist-5k', max_steps=3"
    code = f"""
import json
from labkit.running import launch
ran = launch.run("mnist_fsdp.py", ranks=4, nodes=2, {options})
queued = launch.submit("mnist_fsdp.py", ranks=4, nodes=2, {options}).wait()
alone = launch.run("mnist_fsdp.py", ranks=1, data="mnist-5k", max_steps=1)
print(alone["ranks"], json.dumps([ran["losses"], queued["losses"]]))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=SOURCE, env=slurm, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    assert "$ srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --gres=gpu:2" in run.stdout
    alone, losses_of_both = run.stdout.splitlines()[-1].split(maxsplit=1)
    assert alone == "1"
    for losses in json.loads(losses_of_both):
        assert losses == pytest.approx(losses_of_four, rel=1e-10)


@pytest.mark.parametrize("template", ["one_node", "two_nodes_srun", "two_nodes_torchrun"])
def test_job_templates_train(slurm, template, tmp_path):
    """Each template, as a learner submits it, ends with a record."""
    record = tmp_path / "run.json"
    words = ["--data", "mnist-5k", "--max-steps", "2", "--batch-size", "8", "--record", record]
    states, output = run_job(f"slurm/{template}.sbatch", *words, env=slurm, cwd=SOURCE, logs=tmp_path)
    assert states == ["COMPLETED"], output
    assert records.load(record)["ranks"] == (4 if template == "one_node" else 8)


def test_unknown_partition_shows_slurms_own_message(slurm):
    code = "from labkit.running import launch; launch.run('mnist_fsdp.py', cluster=launch.Cluster(partition='nope'))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=SOURCE, env=slurm, capture_output=True, text=True, timeout=60
    )
    assert "RunFailed" in run.stderr
    assert "invalid partition specified: nope" in run.stderr


# Failing

STUB = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
import torch, torch.distributed as dist
from dataclasses import dataclass
from labkit import UserError
from labkit.running import ranks

@dataclass(frozen=True)
class Config:
    ranks: int | None = None
    device: str = "cpu"
    backend: str = "gloo"

def main(config, me):
    dist.init_process_group(me.backend)
    dist.all_reduce(torch.ones(1))
    if me.rank >= 1:
        raise {{error}}
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    ranks.run(main, Config({{arguments}}))
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ways(["python", "torchrun", "srun"]))
def test_first_error_is_shown_once(way, tmp_path, request):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB.format(error="ValueError('boom')", arguments="ranks=4" if way == "python" else ""))
    if way == "srun":
        command = f"srun -N 2 --ntasks-per-node=2 --kill-on-bad-exit=1 python {stub}"
        run = bash(command, env=request.getfixturevalue("slurm"))
    else:
        run = script(*(TORCHRUN if way == "torchrun" else ()), stub)
    assert run.returncode not in (0, 2)
    assert run.stderr.count("ValueError: boom") == 1
    assert len(re.findall("rank [123] failed", run.stderr)) == 1
    assert "lost contact" not in run.stderr
    if way == "python":
        assert run.stderr.count("Traceback") == 1
        assert re.search("rank [123] ended with exit code 1; the other ranks were ended", run.stderr)


@pytest.mark.long
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_users_error_in_a_rank_is_one_sentence(start, tmp_path):
    """Where ranks are forked (Linux, CPU), of which two fail, and where they start as new processes (GPUs, macOS)."""
    stub = tmp_path / "stub.py"
    arguments = f"ranks={3 if start == 'fork' else 2}"
    text = STUB.format(error="UserError('the data are missing on node 7: copy them')", arguments=arguments)
    stub.write_text(text if start == "fork" else text.replace("import sys", "import sys; sys.platform = 'other'", 1))
    run = script(stub)
    assert run.returncode == 2
    assert run.stderr == "stub.py: the data are missing on node 7: copy them\n"


@pytest.mark.long
@pytest.mark.parametrize("way", ["python", "torchrun"])
def test_an_error_before_the_process_group_is_told_once(way, tmp_path):
    """Every rank makes it, and all of them have met: the first says it."""
    stub = tmp_path / "stub.py"
    text = STUB.format(error="ValueError()", arguments="ranks=4" if way == "python" else "")
    stub.write_text(text.replace("    dist.init_process_group", "    raise UserError('too small')\n    dist.init"))
    run = script(*(TORCHRUN if way == "torchrun" else ()), stub)
    assert run.stderr.count("stub.py: too small\n") == 1
    assert run.stderr == "stub.py: too small\n" or way == "torchrun"  # which adds a page of its own


SLOW = """
    import builtins
    shown = builtins.print
    builtins.print = lambda *given, **more: (__import__("time").sleep(1.5), shown(*given, **more))
    raise UserError("too small")
    dist.init_process_group"""


@pytest.mark.parametrize("first", [0, 1])
def test_no_rank_ends_before_the_first_has_said_why(first, tmp_path):
    """The launcher ends all when it sees one end, and the one that speaks may be slow."""
    text = STUB.format(error="ValueError()", arguments="ranks=2").replace("\n    dist.init_process_group", SLOW)
    late = f"    while me.rank != {first} and not ranks._store_of_the_run().check([ranks.FAILED_KEY]): pass\n    raise UserE"
    (tmp_path / "stub.py").write_text(text.replace("    raise UserE", late, 1))
    run = script(tmp_path / "stub.py")
    assert run.returncode == 2 and run.stderr == "stub.py: too small\n"


SLOW_TO_FAIL = """
    import signal, time
    if me.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the launcher ends it, perhaps after it has warned
        while not ranks._store_of_the_run().check([ranks.FAILED_KEY]):
            pass
        first_to_fail = ranks._first_to_fail
        ranks._first_to_fail = lambda: {slow}
    raise {error}
    dist.init_process_group"""


@pytest.mark.parametrize(
    ("error", "code", "slow"),
    [
        ("UserError('boom')", 2, "(first_to_fail(), time.sleep(0.5))[0]"),  # then it waits for the first to speak
        ("ValueError('boom')", 1, "(time.sleep(0.5), first_to_fail())[1]"),
    ],
    ids=["a user's error", "another error"],
)
def test_a_rank_that_fails_more_slowly_than_rank_0_does_not_warn_of_a_lost_store(error, code, slow, tmp_path):
    """Rank 0 hosts the store; without it PyTorch prints some 50 C++ frames below the reason."""
    text = STUB.format(error="ValueError()", arguments="ranks=2")
    body = SLOW_TO_FAIL.format(error=error, slow=slow)
    (tmp_path / "stub.py").write_text(text.replace("\n    dist.init_process_group", body, 1))
    run = script(tmp_path / "stub.py")
    assert run.returncode == code and "TCPStore" not in run.stderr and "frame #" not in run.stderr, run.stderr
    assert len(re.findall("^.*: boom$", run.stderr, re.M)) == 1


@pytest.mark.skipif(not fork_server.possible(), reason="forks, which Linux can")
@pytest.mark.parametrize(("number", "code"), [("USR1", 138), ("USR2", 140), ("KILL", 1)])
def test_a_rank_that_is_warned_before_it_listens_ends_the_run_as_the_templates_expect(number, code, tmp_path):
    """With 138 or 140 they put the job back in the queue. Where GPUs are, ranks import torch before they listen."""
    text = STUB.format(error="ValueError()", arguments="ranks=2")
    killed = f"""
    import os, signal
    for each in signal.SIGUSR1, signal.SIGUSR2:
        signal.signal(each, signal.SIG_DFL)  # as in a process that imports torch
    os.kill(os.getpid(), signal.SIG{number})
    dist.init_process_group"""
    (tmp_path / "stub.py").write_text(text.replace("\n    dist.init_process_group", killed, 1))
    run = script(tmp_path / "stub.py")
    assert run.returncode == code and f"was killed by SIG{number}; the other ranks were ended" in run.stderr, run.stderr


@pytest.mark.parametrize(("told", "threads"), [("3", 3), ("", 1), ("2,1", 2), ("0", 1), ("many", 1)])
def test_threads_are_as_many_as_openmp_is_told(told, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    monkeypatch.setattr(ranks.torch, "set_num_threads", (asked := []).append)
    ranks.configure_cpu()
    assert asked == [threads]


def schedulings(me):
    """Return [(a thread's name, its scheduling policy), …] of a rank, after a lab has created its process groups."""
    import gpt_fsdp

    gpt_fsdp.train(gpt_fsdp.Config(mesh="2x1", batch_size=1, seq_len=16, max_steps=1), me)
    threads = [Path(f"/proc/self/task/{number}") for number in os.listdir("/proc/self/task")]
    return [((thread / "comm").read_text().strip(), os.sched_getscheduler(int(thread.name))) for thread in threads]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_gloos_threads_preempt_no_others_and_the_ranks_keep_their_policy():
    for of_rank in Lab(launcher="local", ranks=2).on_ranks(by_value(schedulings)):
        gloos = [how for name, how in of_rank if name == "gloo_tcp_loop"]
        assert len(gloos) > 1 and set(gloos) == {os.SCHED_BATCH}
        assert {how for name, how in of_rank if name != "gloo_tcp_loop"} == {os.SCHED_OTHER}


def test_ports_that_are_in_use_are_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(ranks.dist, "TCPStore", lambda *given, **named: (_ for _ in ()).throw(RuntimeError))
    with pytest.raises(UserError, match="ports 12000 to 12007 are in use on .*: start the run again"):
        ranks._open(2, range(12000, 12008))
    with pytest.raises(UserError, match="port 29500 is in use on .*: set MASTER_PORT"):
        ranks._open(2, ["29500"])


def test_a_progress_that_cannot_be_written_ends_no_training(tmp_path, monkeypatch):
    """A full disk, a file system that is away: the training may have nothing to do with them."""
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path))  # a folder, which nothing can be written to
    progress.Progress(ranks.Rank(0, 0, 1, "here", "cpu", "gloo"), 2).advance()


def test_ranks_that_gloo_does_not_bring_together_are_told_of_its_setting(monkeypatch, capsys):
    monkeypatch.setattr(ranks, "LINGER_SECONDS", 0)
    for error, hint in (
        ("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:1]", True),
        ("gloo/transport", False),
    ):
        with pytest.raises(SystemExit):
            ranks._fail(RuntimeError(error))
        said = capsys.readouterr().err
        assert "rank 0 lost contact with another rank: " in said and ("GLOO_SOCKET_IFNAME" in said) == hint


@pytest.mark.long
def test_a_rank_that_fails_alone_says_so(tmp_path):
    """One node has no GPU, or cannot reach rank 0: nobody else can know."""
    stub = tmp_path / "stub.py"
    stub.write_text(STUB.format(error="ValueError()", arguments=""))
    alone = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    impatient = tmp_path / "impatient.py"
    impatient.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(SOURCE)!r})\nfrom labkit.running import ranks\n"
        f"ranks.RENDEZVOUS_SECONDS = 1\nrunpy.run_path({str(stub)!r}, run_name='__main__')\n"
    )
    run = script(impatient, env=os.environ | alone)
    assert run.returncode == 2
    assert_about(run.stderr, "rank 0", "127.0.0.1, ports [1]", "1 s")


def test_an_error_of_ones_own_keeps_its_traceback(tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB.format(error="OSError('the licence server timed out: socket')", arguments="ranks=2"))
    run = script(stub)
    assert run.returncode == 1
    assert "stub.py: rank 1 failed:\nTraceback" in run.stderr and "lost contact" not in run.stderr


# The lab, of which each rank writes down which process it is
NAMED = f"""
import os, pathlib, sys
sys.path.insert(0, {str(SOURCE)!r})
import mnist_fsdp
from labkit.running import options, ranks

def main(config, me):
    pathlib.Path("{{folder}}", f"rank-{{{{me.rank}}}}").write_text(str(os.getpid()))
    mnist_fsdp.main(config, me)

if __name__ == "__main__":
    ranks.run(main, options.parse(mnist_fsdp.Config, ""))
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ways(["python", "srun"]))
def test_kill_9_on_a_rank_ends_the_run_and_names_it(way, tmp_path, request):
    env = dict(request.getfixturevalue("slurm") if way == "srun" else os.environ)
    env[progress.VARIABLE] = str(tmp_path / "progress")
    (tmp_path / "named.py").write_text(NAMED.format(folder=tmp_path))
    words = [f"{tmp_path}/named.py", *LAB.split()[1:], "--epochs", "1000"]
    with open(tmp_path / "err", "w+") as err:
        if way == "srun":
            command = ["srun", "-N", "1", "--ntasks-per-node=3", "--kill-on-bad-exit=1", "python", *words]
            process = subprocess.Popen(command, cwd=SOURCE, env=env, stderr=err, start_new_session=True)
        else:
            process = start([*words, "--ranks", "3"], env, err)
        try:
            wait_until(lambda: progress.read(tmp_path / "progress"), 60, process)
            os.kill(int((tmp_path / "rank-1").read_text()), 9)
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
        err.seek(0)
        said = err.read()
    assert process.returncode != 0
    assert ("rank 1 was killed by SIGKILL; the other ranks were ended" if way == "python" else "task 1: Killed") in said


def start(words: list[str], env: dict, err):
    """Start a Python program in source_code/, forked where programs can be."""
    command = [sys.executable, "-u", *words]
    if fork_server.possible():
        return fork_server.start(command, SOURCE, env, err, err)
    return subprocess.Popen(command, cwd=SOURCE, env=env, stdout=err, stderr=err, start_new_session=True)


ASK = f"""
import ctypes, os, sys
sys.path.insert(0, {str(SOURCE)!r})
from labkit.running import fork_server, launch
ctypes.CDLL = None  # as if another thread of this process had been loading a library, and held the lock
launch.follow([sys.executable, "-u", sys.argv[1]], on_progress=lambda pid, total: print(pid, flush=True))
"""
WAIT = """
import os, signal
from pathlib import Path
Path(os.environ["FSDP_LABS_PROGRESS"]).write_text(f"{os.getpid()} 0")
signal.pause()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_what_a_killed_notebook_has_started_ends_with_it(tmp_path):
    (tmp_path / "wait.py").write_text(WAIT)
    words = [sys.executable, "-c", ASK, tmp_path / "wait.py"]
    notebook = subprocess.Popen(words, env=os.environ | {fork_server.VARIABLE: "0"}, stdout=subprocess.PIPE, text=True)
    with notebook:
        started = psutil.Process(int(notebook.stdout.readline()))
        notebook.kill()
        wait_for_end(started)


@pytest.mark.parametrize("way", ways(["python", "forked", "srun"]))
def test_what_a_run_has_started_ends_when_it_is_interrupted(way, tmp_path, monkeypatch, request):
    """Its ranks, even where no kernel ends them with the process that started them."""
    (tmp_path / "wait.py").write_text(WAIT)
    (tmp_path / "start.py").write_text(
        f"import subprocess, sys; subprocess.run([sys.executable, '{tmp_path}/wait.py'])"
    )
    if way == "python":
        monkeypatch.setenv(fork_server.VARIABLE, "0")
    if way == "srun":
        for name, value in request.getfixturevalue("slurm").items():
            monkeypatch.setenv(name, value)
    cluster = launch.Cluster(launcher="slurm" if way == "srun" else "local")
    started = []

    def interrupt(pid, total):
        started.append(psutil.Process(pid))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.follow(launch.build_command([str(tmp_path / "start.py")], 1, 1, "cpu", cluster), on_progress=interrupt)
    wait_for_end(started[0])


def wait_for_end(process: psutil.Process):
    try:
        process.wait(60)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def wait_until(condition, seconds: float, process):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.returncode
        assert time.monotonic() < deadline
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Finding one's place


def met(rank, port) -> int:
    """The port where this rank has met the other."""
    import torch.distributed as dist

    ranks.rendezvous(rank, 2, "127.0.0.1", range(port, port + 8), "job")
    dist.init_process_group("gloo")
    dist.barrier()
    return int(os.environ["MASTER_PORT"])


@pytest.mark.long
def test_meeting_takes_the_next_port_when_one_is_in_use():
    """Something else listens on the first port: ranks that Slurm started still find each other."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with ThreadPoolExecutor(2) as both:
            ports = [*both.map(lambda rank: forked(met, rank, port), (0, 1))]
    assert ports[0] == ports[1] > port


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}, "RANK, WORLD_SIZE, LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "node7"}, "MASTER_PORT"),
    ],
)
def test_half_a_rendezvous_is_an_error_never_a_world_of_one(environ, missing):
    with refused(missing):
        ranks.placement(environ)


def test_single_under_several_ranks_is_an_error():
    """How such a sentence is told once for all ranks of torchrun, is tested above."""
    config = mnist_fsdp.Config(strategy="single", device="cpu")
    with refused("--strategy single", "2 were started"):
        ranks.run_as_rank((1, 1, 2), pytest.fail, config)


@pytest.mark.parametrize(("rank", "local_rank", "node"), [(0, 0, "gpu03"), (3, 1, "gpu04")])
def test_a_task_of_srun_knows_its_place_from_slurm(rank, local_rank, node, monkeypatch):
    """Without a Slurm: of four tasks on two nodes. All meet at the first, and know their job by its name."""
    met = []
    monkeypatch.setattr(ranks, "rendezvous", lambda *given: met.append(given))
    step = {"SLURM_JOB_ID": "70", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8"}
    step |= {"SLURM_JOB_NODELIST": "gpu[02-04]", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURMD_NODENAME": node}
    placed = ranks.placement(step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank)})
    assert placed == (rank, local_rank, 4)
    ((*asked, ports, job),) = met
    assert asked == [rank, 4, "gpu03"] and len(ports) == 8 and job == "slurm-70.2"


@pytest.mark.long
def test_half_a_rendezvous_on_the_command_line():
    run = script(*LAB.split(), env=os.environ | {"RANK": "0"})
    assert run.returncode == 2
    assert run.stderr.startswith("mnist_fsdp.py: ")
    assert_about(run.stderr, "RANK", "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # inside an sbatch script, before srun
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_nobody_has_started_the_ranks(environ):
    assert ranks.placement(environ) is None


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[03-04,07],login1", "gpu03"),
        ("127.0.0.[1-2]", "127.0.0.1"),
        ("a1,b2", "a1"),
        ("n[1,3]-ib", "n1-ib"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("b[2-3],a1", "b2"),
    ],
)
def test_first_host_without_scontrol(nodelist, first, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert ranks.first_host(nodelist) == first


# Choosing where to run


def test_slurm_asked_for_and_absent(monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    with refused("Slurm", "srun"):
        launch.Cluster(launcher="slurm").uses_slurm()
    assert launch.Cluster(launcher="auto").uses_slurm() is False


def test_slurm_that_answers_is_used(stand_in):
    assert launch.Cluster(launcher="auto").uses_slurm() is True
    assert launch.Cluster(launcher="local").uses_slurm() is False


UNREACHABLE = "echo 'sinfo: error: a detail' >&2; echo 'Unable to contact slurm controller' >&2; exit 1"


def test_slurm_that_is_only_installed_is_not_used(stand_in):
    """The packages, for the practice cluster, on a machine of one's own."""
    command(stand_in / "bin" / "sinfo", UNREACHABLE)
    assert launch.Cluster(launcher="auto").uses_slurm() is False
    with refused("Slurm", "not configured"):
        launch.Cluster(launcher="slurm").uses_slurm()
    assert_about(site.describe_machine(Lab(launcher="local")), "not configured", "make slurm")


@pytest.mark.parametrize("sign", ["SLURM_CONF", "SLURM_JOB_ID", "where packages look", "beside srun"])
def test_slurm_that_is_in_use_and_does_not_answer_stops_the_run(sign, stand_in, monkeypatch):
    """On a cluster, to train on the login node instead is no help."""
    command(stand_in / "bin" / "sinfo", UNREACHABLE)
    conf = stand_in / "etc" / "slurm.conf"
    if sign.startswith("SLURM_"):
        monkeypatch.setenv(sign, "7")
    else:
        conf.parent.mkdir()
        conf.touch()
    if sign == "where packages look":
        monkeypatch.setattr(site, "SLURM_CONFS", (conf.rename(stand_in / "slurm.conf"),))
    words = "Slurm", "(Unable to contact slurm controller)", "FSDP_LABS_LAUNCHER=local"
    for launcher in ("auto", "slurm"):
        with refused(*words):
            launch.Cluster(launcher=launcher).uses_slurm()
    assert_about(site.describe_machine(Lab(launcher="local")), *words)


@pytest.mark.parametrize(("does", "words"), [("exec sleep 20", ("sinfo", "0.2 s")), (None, ("sinfo", "started"))])
def test_slurm_that_is_silent_stops_the_run(does, words, stand_in, monkeypatch):
    monkeypatch.setattr(site, "SINFO_SECONDS", 0.2)
    monkeypatch.setenv("SLURM_CONF", "here")
    (stand_in / "bin" / "sinfo").unlink()
    if does:
        command(stand_in / "bin" / "sinfo", does)
    else:
        monkeypatch.setenv("PATH", str(stand_in / "bin"))
    with refused("Slurm", *words):
        launch.Cluster(launcher="auto").uses_slurm()


def starts_nothing(stand_in):
    """Have srun only write its words."""
    command(stand_in / "bin" / "srun", f"""printf '%s\\n' "$@" > '{stand_in}/srun.words'; exit 3""")


def asked(words: str) -> dict:
    """What srun's words, or a batch job, ask of Slurm."""
    names = "nodes|ntasks|ntasks-per-node|gres|partition|account|time|wckey|qos|mem-per-cpu"
    return dict(re.findall(rf"--({names})=(\S+)", words))


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_run_and_submit_ask_slurm_for_the_same(device, stand_in, monkeypatch):
    for name, value in {
        "PARTITION": "a100",
        "ACCOUNT": "course",
        "TIME": "0:30:00",
        "SRUN": "--qos=class --mem-per-cpu=4G",
    }.items():
        monkeypatch.setenv(f"FSDP_LABS_{name}", value)
    starts_nothing(stand_in)
    with pytest.raises(launch.RunFailed):
        launch.run("hello.py", ranks=4, nodes=2, device=device)
    job = launch.submit("hello.py", ranks=4, nodes=2, device=device)
    expected = {
        "nodes": "2",
        "ntasks": "4",
        "ntasks-per-node": "2",
        "partition": "a100",
        "account": "course",
        "time": "0:30:00",
    }
    expected |= {"qos": "class", "mem-per-cpu": "4G"} | ({} if device == "cpu" else {"gres": "gpu:2"})
    assert asked((stand_in / "srun.words").read_text()) == expected
    queued = expected | {"time": "30"}  # submitit counts in minutes
    assert asked(job.handle.paths.submission_file.read_text()) == queued


def test_without_a_time_slurms_own_limit_holds(stand_in):
    job = launch.submit("hello.py", ranks=2, device="cpu")
    assert "--time" not in job.handle.paths.submission_file.read_text()


@pytest.mark.long
@pytest.mark.parametrize("options", [{"ranks": 1}, {"strategy": "single"}], ids=str)
def test_one_rank_is_one_rank_under_slurm_too(options, stand_in, capsys):
    """A script that is a single task would start ranks of its own, two if nobody said how many."""
    if "ranks" in options:
        assert launch.run("mnist_fsdp.py", device="cpu", data="mnist-5k", max_steps=2, **options)["ranks"] == 1
    else:
        starts_nothing(stand_in)
        with pytest.raises(launch.RunFailed):
            launch.run("mnist_fsdp.py", device="cpu", data="mnist-5k", max_steps=2, **options)
    assert "--ntasks-per-node=1\n" in (stand_in / "srun.words").read_text()
    job = launch.submit("mnist_fsdp.py", **{"ranks": 2} | options)
    assert "--ntasks-per-node=1\n" in job.handle.paths.submission_file.read_text()
    assert ("srun python mnist_fsdp.py --ranks 1" in capsys.readouterr().out) == ("ranks" in options)


@pytest.mark.parametrize("start", [launch.run, launch.submit])
def test_ranks_that_nodes_cannot_share_are_refused(start, stand_in):
    with refused("5 ranks", "2 nodes"):
        start("hello.py", ranks=5, nodes=2)


def test_run_that_fails_raises_with_its_last_words():
    with pytest.raises(launch.RunFailed, match="mnist_fsdp.py: --cpu-offload .*--strategy"):
        launch.run(
            "mnist_fsdp.py", strategy="ddp", cpu_offload=True, cluster=launch.Cluster(launcher="local"), quiet=True
        )


def test_frames_that_another_rank_prints_do_not_hide_why_a_run_failed():
    """A slow rank that asks the store once rank 0 has failed makes PyTorch warn, with a frame per line."""
    prints = "print('lab.py: rank 0 failed', *[f'frame #{n}: main() + 0x2c' for n in range(60)], sep='\\n')"
    with pytest.raises(launch.RunFailed, match="^lab.py: rank 0 failed$"):
        launch.follow([sys.executable, "-c", f"{prints}; exit(1)"], device="cpu")


def test_a_command_is_shown_and_recorded_as_one_types_it(tmp_path, capsys):
    folder = tmp_path / "a folder with a long name, of the kind that people make"
    options = {"strategy": "single", "data": "mnist-5k", "max_steps": 2, "batch_size": 8, "checkpoint": folder}
    here = launch.Cluster(launcher="local")
    record = launch.run("mnist_fsdp.py", cluster=here, record=folder / "run.json", device="cpu", **options)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("$ python mnist_fsdp.py --") and all(line.startswith("    --") for line in others)
    typed = shlex.split("\n".join([first.removeprefix("$ python "), *others]).replace("\\\n", " "))
    assert typed[-4:] == ["--checkpoint", str(folder), "--record", str(folder / "run.json")]
    assert shlex.split(record["command"]) == typed


def test_rank_0_goes_on_when_the_others_have_found_it(monkeypatch):
    """It would otherwise refuse an option, and end, while they connect: they would say so, in C++."""
    monkeypatch.setattr(ranks, "_store", dist.HashStore())
    went_on = threading.Event()
    thread = threading.Thread(target=lambda: (ranks._meet(0, 3), went_on.set()), daemon=True)
    thread.start()
    ranks._meet(1, 3)
    assert not went_on.wait(0.1)
    ranks._meet(2, 3)
    assert went_on.wait(10)
