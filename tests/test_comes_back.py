# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that come back: their time is up, they are preempted, a node fails, a rank dies; the weights are those of a run
that nobody interrupted."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import call, script
from labkit import UserError
from labkit.running import launch, submitit_job
from labkit.training import checkpoints
from proofs import crash

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "source_code"
LAB = Path(__file__).with_name("coming_back.py")
MNIST = ["--data", "mnist-5k", "--batch-size", 20, "--max-steps", 12, "--device", "cpu"]
GPT = ["--batch-size", 2, "--seq-len", 32, "--max-steps", 12, "--checkpoint-every", 2, "--device", "cpu"]
SECONDS = 150  # for a job to come back and to end


def same(one: Path, other: Path) -> bool:
    """Whether the newest checkpoints in two folders are of the same step and hold the same bits."""
    one, other = checkpoints.latest(one), checkpoints.latest(other)
    return one.name == other.name and crash.fingerprint(one) == crash.fingerprint(other)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A function: the folder of a lab's last checkpoint, of two ranks that nobody interrupts."""
    folder = tmp_path_factory.mktemp("uninterrupted")

    @functools.cache
    def of(lab: str) -> Path:
        words = {"mnist_fsdp": MNIST, "gpt_fsdp": GPT}[lab]
        run = script(f"{lab}.py", *words, "--ranks", 2, "--checkpoint", folder / lab)
        assert run.returncode == 0, run.stderr
        return folder / lab

    return of


def wait_for(happened, what: str, job: str = "", env=None):
    deadline = time.monotonic() + SECONDS
    while not happened():
        if time.monotonic() > deadline:
            queue = call("scontrol", "show", "job", job, env=env).stdout if job else ""
            pytest.fail(f"no {what} after {SECONDS} s\n{queue}")
        time.sleep(0.1)


def state(job: str, env) -> str:
    return call("squeue", "-h", "--states=all", "-j", job, "-o", "%T", env=env).stdout.strip()


def queue(template: str, lab: str, words: list, folder: Path, env, *sbatch, what: str = "asked") -> str:
    """Submit a template, two ranks, whose mnist_fsdp.py is ``coming_back.py`` with that lab; return the job."""
    source = folder / "source_code"
    (source / "slurm").mkdir(parents=True)
    for name in (f"{template}.sbatch", "requeue.sh"):
        shutil.copy(SOURCE / "slurm" / name, source / "slurm")
    (source / "mnist_fsdp.py").write_text(
        f"import runpy, sys\nsys.argv[1:1] = [{lab!r}, {str(folder / 'waits')!r}, {what!r}]\n"
        f"runpy.run_path({str(LAB)!r}, run_name='__main__')\n"
    )
    words = [*words, "--checkpoint", folder / "c", "--resume"]
    submitted = call(
        "sbatch", "--parsable", f"--output={folder}/out", *sbatch, f"slurm/{template}.sbatch", *words, env=env, cwd=source
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stderr
    return submitted.stdout.strip()


def ended(job: str, folder: Path, env):
    # It is SIGNALING for the moment in which Slurm sends the warning
    alive = ("", "PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED")
    wait_for(lambda: state(job, env) not in alive, "end of the job", job, env)
    output = (folder / "out").read_text()
    assert state(job, env) == "COMPLETED", output
    return output


# ---- on the practice cluster


@pytest.mark.long
def test_preempted_jobs_go_on(slurm, uninterrupted, tmp_path):
    """Two of templates and one of submitit, sent away by one job."""
    folders = one, two, three = [tmp_path / name for name in ("one node", "two", "submitit")]
    jobs = [
        queue("one_node", "mnist_fsdp", MNIST, one, slurm, "--gres=gpu:2"),
        queue("two_nodes_srun", "gpt_fsdp", GPT, two, slurm, "--ntasks-per-node=1", "--gres=gpu:1"),
    ]
    with submitted(three, slurm, limit="20") as process:
        for folder in folders:
            wait_for((folder / "waits").exists, "training", jobs[0], slurm)
        preempt(slurm)
        first_step, said = result(process)
    for job, folder in zip(jobs, (one, two), strict=True):
        output = ended(job, folder, slurm)
        assert "asked to end (SIGUSR1): saved at step" in output and "resumed at step" in output
    assert first_step > 3 and "asked to end (SIGUSR2): saved at step" in said and "resumed at step" in said
    assert same(uninterrupted("mnist_fsdp"), one / "c")
    assert same(uninterrupted("gpt_fsdp"), two / "c")
    assert same(uninterrupted("gpt_fsdp"), three / "c")


def preempt(env):
    """Have a job of a higher priority take all nodes for a moment."""
    urgent = [
        "sbatch",
        "-p",
        "urgent",
        "--nodes=2",
        "--exclusive",
        "--gres=gpu:4",
        "--output=/dev/null",
        "--wrap",
        "true",
    ]
    assert call(*urgent, env=env, cwd="/").returncode == 0


SUBMIT = """
import sys
from labkit.running import launch
lab, checkpoint, limit = sys.argv[1:]
words = dict(batch_size=2, seq_len=32, max_steps=12, checkpoint_every=2, device="cpu", resume=True)
job = launch.submit(lab, ranks=2, cluster=launch.Cluster(time=limit), checkpoint=checkpoint, **words)
record = job.wait(lambda *_: None)
print(job.handle.stdout())
print(record["first_step"])
"""


@contextlib.contextmanager
def submitted(folder: Path, env, limit: str):
    """A process that submits the GPT lab through submitit, as a notebook does, and waits for it."""
    folder.mkdir()
    lab = folder / "gpt_fsdp.py"
    lab.write_text(
        f"import runpy, sys\nsys.argv[1:1] = ['gpt_fsdp', {str(folder / 'waits')!r}, 'asked']\n"
        f"runpy.run_path({str(LAB)!r}, run_name='__main__')\n"
    )
    command = ["python", "-c", SUBMIT, lab, folder / "c", limit]
    env = env | {"FSDP_LABS_RUNS": str(folder / "runs")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, cwd=SOURCE, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def result(process) -> tuple[int, str]:
    """(the step from which the job went on in its last life, all that it said)."""
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    said, _, first_step = out.rstrip().rpartition("\n")
    return int(first_step), said


def test_time_is_up_for_a_job_of_a_template_and_for_one_of_submitit(slurm, uninterrupted, tmp_path):
    """Both at once, as Slurm's shortest time limit is a minute. Slurm looks every half minute, and warns so much earlier
    if it must: with submitit's 90 seconds as soon as it looks, which may be before training has begun."""
    one, two = tmp_path / "template", tmp_path / "submitit"
    job = queue("one_node", "mnist_fsdp", MNIST, one, slurm, "--gres=gpu:2", "--time=1", "--signal=USR1@15")
    with submitted(two, slurm, limit="1") as process:
        _, said = result(process)
    assert "Requeued job" in said and same(uninterrupted("gpt_fsdp"), two / "c")
    output = ended(job, one, slurm)
    assert "asked to end (SIGUSR1): saved at step" in output and "resumed at step" in output
    assert same(uninterrupted("mnist_fsdp"), one / "c")


def test_a_job_whose_node_fails_goes_on(slurm, uninterrupted, tmp_path):
    job = queue("one_node", "gpt_fsdp", GPT, tmp_path, slurm, "--gres=gpu:2", "--nodelist=127.0.0.2")
    wait_for((tmp_path / "waits").exists, "training", job, slurm)
    node = ["scontrol", "update", "nodename=127.0.0.2"]
    assert call(*node, "state=down", "reason=drill", env=slurm).returncode == 0
    process = int((tmp_path / "waits.pid").read_text())
    wait_for(lambda: not Path(f"/proc/{process}").exists(), "end of the first life", job, slurm)
    call(*node, "state=resume", env=slurm)  # refused where the node has answered by now, which brings it back, too
    assert "resumed at step" in ended(job, tmp_path, slurm)  # of 2, or later where Slurm sent it SIGTERM first
    assert same(uninterrupted("gpt_fsdp"), tmp_path / "c")


@pytest.mark.long
def test_a_job_of_which_a_rank_fails_goes_on_without_its_node(slurm, uninterrupted, tmp_path):
    """The exception of one rank ends the others by a lost contact, or by srun: what the first has noted decides."""
    env = slurm | {"EXCLUDE_FAILED_NODE": "1"}
    job = queue("one_node", "gpt_fsdp", GPT, tmp_path, env, "--gres=gpu:2", "--nodelist=127.0.0.1", what="fails")
    wait_for(lambda: "as planned" in (tmp_path / "out").read_text() if (tmp_path / "out").exists() else 0, "failure")
    wait_for(lambda: state(job, env) in ("PENDING", "COMPLETING"), "return to the queue", job, env)
    # The practice cluster asked for this node by name, which would now contradict: any other will do.
    call("scontrol", "update", f"JobId={job}", "ReqNodeList=", env=env)
    output = ended(job, tmp_path, env)
    assert "rank 1 failed" in output and "resumed at step 2 of 12" in output
    shown = call("scontrol", "show", "job", job, env=env).stdout
    assert "ExcNodeList=127.0.0.1" in shown and " NodeList=127.0.0.2" in shown, shown
    assert same(uninterrupted("gpt_fsdp"), tmp_path / "c")


@pytest.mark.long
def test_a_job_that_fails_at_the_same_step_every_time_ends(slurm, tmp_path):
    env = slurm | {"MAX_RESTARTS": "2"}
    words = ["--ntasks-per-node=1", "--gres=gpu:1"]
    job = queue("two_nodes_srun", "gpt_fsdp", GPT, tmp_path, env, *words, what="always fails")
    wait_for(lambda: state(job, env) == "FAILED", "end of the job", job, env)
    output = (tmp_path / "out").read_text()
    assert "Not requeued: the last 3 starts saved nothing" in output
    # The first start saved step 2; then as many restarts as are allowed, and one more that began it
    assert output.count("RuntimeError: as planned") == 4 and output.count("resumed at step 2 of 12") == 3
    assert checkpoints.latest(tmp_path / "c").name == "step-000002"


def test_tasks_of_an_array_do_not_share_a_folder(slurm, tmp_path):
    words = [*GPT, "--max-steps", 2]
    job = queue("one_node", "gpt_fsdp", words, tmp_path, slurm, "--array=0-1", "--gres=gpu:2", what="nothing")
    wait_for(lambda: state(job, slurm).split() == ["COMPLETED"] * 2, "end of both", job, slurm)
    found = [checkpoints.latest(tmp_path / "c" / f"task-{task}").name for task in (0, 1)]
    assert found == ["step-000002"] * 2 and not checkpoints.latest(tmp_path / "c")


# ---- torchrun


@pytest.mark.long
@pytest.mark.nightly  # in make test, notebook 10's verdicts on a run that loses a rank
def test_torchrun_starts_anew_when_a_rank_is_killed(uninterrupted, tmp_path):
    """Here the GPT; how MNIST resumes does not depend on who starts it (test_saving.py, test_crash.py)."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words = [*torchrun, LAB, "gpt_fsdp", tmp_path / "mark", "killed", *GPT, "--checkpoint", tmp_path / "c", "--resume"]
    fresh_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as slurm/two_nodes_torchrun.sbatch has it
    run = call(*words, env=os.environ | fresh_store, cwd=SOURCE, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "starting at step 0 of 12" in run.stdout and run.stdout.count(" of 12\n") == 2  # two starts
    assert same(uninterrupted("gpt_fsdp"), tmp_path / "c")


# ---- what can be said wrong


def test_a_job_that_is_warned_before_its_command_begins_comes_back(monkeypatch):
    again = submitit_job.Command(["never", "started"], resumes=True).checkpoint()
    assert again.function.words == ["never", "started"] and again.function.resumes
    assert submitit_job.Command(["never", "started"], resumes=False).checkpoint() is None


@pytest.mark.parametrize(
    ("code", "next_life"), [(75, ["bash"]), (138, ["bash"]), (1, ["bash"]), (0, ["true"]), (2, None)]
)
def test_a_queued_job_comes_back_but_not_after_a_users_error(code, next_life):
    command = submitit_job.Command(["bash", "-c", f"trap 'exit {code}' USR2; echo; while :; do sleep 0.1; done"], True)
    with subprocess.Popen(command.words, stdout=subprocess.PIPE) as process:
        process.stdout.read(1)  # it listens
        command.process = process
        again = command.checkpoint()
        assert (again and again.function.words[:1]) == next_life


@pytest.mark.parametrize("signal_name, waits", [("USR2", True), ("USR1", True), ("KILL", False)])
def test_a_command_that_the_warning_ends_before_it_listens_is_no_failure(signal_name, waits, monkeypatch):
    """Its task waits for the job to be requeued: what submitit is told of one task decides for the whole job."""
    monkeypatch.setenv("SLURM_PROCID", "1")  # task 0 has submitit requeue the job
    monkeypatch.setattr(submitit_job.signal, "pause", lambda: (_ for _ in ()).throw(TimeoutError("waits")))
    command = submitit_job.Command(["bash", "-c", f"kill -{signal_name} $$"], True)
    with pytest.raises(TimeoutError if waits else submitit_job.FailedJobError):
        command()


def test_the_exit_code_of_a_command_that_ends_at_once_is_not_lost(monkeypatch):
    """A Popen that nobody holds would reap it before anyone has asked."""

    def ended(words):
        process = subprocess.Popen(words)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return process

    monkeypatch.setattr(submitit_job, "subprocess", SimpleNamespace(Popen=ended))
    with pytest.raises(submitit_job.FailedJobError, match="3"):
        submitit_job.Command(["bash", "-c", "exit 3"], True)()


def test_a_queued_job_that_saves_nothing_comes_back_so_often_and_no_more(tmp_path):
    """And as often as it takes, if it does save."""
    command = submitit_job.Command(["lab.py", "--checkpoint", str(tmp_path), "--resume"], True)
    for _ in range(submitit_job.MAX_IDLE):
        command = command.checkpoint().function
    assert command.checkpoint() is None
    command.newest = command._newest()
    (tmp_path / "step-000002").mkdir()
    command = command.checkpoint().function
    assert command.idle == 0
    command.newest = "step-999999"
    (tmp_path / "step-999999").mkdir()
    (tmp_path / "step-1000000").mkdir()
    assert command.checkpoint().function.idle == 0  # more steps, though not in the order of letters


def test_a_queued_job_listens_before_torch_is_imported():
    """Which takes seconds, and on a cluster's file system a minute; a warning in that time would end the job for good."""
    asked = call(
        sys.executable, "-c", "import sys, labkit.running.submitit_job; print('torch' in sys.modules)", cwd=SOURCE
    )
    assert asked.stdout == "False\n", asked.stderr


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [(None, None), ("90", 90), ("30:00", 30), ("1:30:00", 90), ("0:00:30", 1), ("2-12", 3600), ("1-0:30", 1470)],
)
def test_time_limits_as_slurm_writes_them(limit, minutes):
    assert submitit_job.minutes(limit) == minutes


def test_a_time_limit_that_is_none_is_told(monkeypatch):
    with pytest.raises(UserError, match="FSDP_LABS_TIME is 'soon': give minutes"):
        submitit_job.minutes("soon")


def test_a_job_that_is_to_come_back_needs_a_time_limit(monkeypatch):
    monkeypatch.setattr(launch.Cluster, "uses_slurm", lambda self: True)
    with pytest.raises(UserError, match="set FSDP_LABS_TIME, in minutes"):
        launch.submit("gpt_fsdp.py", ranks=2, cluster=launch.Cluster(time=None), checkpoint="c", resume=True)
