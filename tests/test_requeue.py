# SPDX-License-Identifier: BSD-3-Clause
"""When the job templates put a job back in the queue: slurm/requeue.sh, with a scontrol that only notes what it is asked."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from labkit.running import job_status, launch

BASH = shutil.which("bash")
REQUEUE = launch.SOURCE / "slurm" / "requeue.sh"
SAVED, ASKED = ["saved 4"], ["saved 4", "asked 6"]
FAILED, REFUSED, DIVERGED = ["failed node7 5"], ["refused"], ["diverged"]


def start(
    folder: Path, number: int, status: list[str], code: int, words=("--resume",), **env
) -> tuple[bool, str, list]:
    """Run a start of the job whose step adds these lines to the status file and ends with the code.

    Returns whether the job is requeued, what it printed, and what else scontrol was asked.
    """
    (folder / "bin").mkdir(exist_ok=True)
    scontrol, asked = folder / "bin" / "scontrol", folder / "asked"
    scontrol.write_text(
        f'#!{BASH}\necho "$@" >>{asked}\n[ "$1" = show ] && echo "   ReqNodeList=(null) ExcNodeList=(null)"\nexit 0\n'
    )
    scontrol.chmod(0o755)
    asked.unlink(missing_ok=True)
    step = "".join(f"echo {line} >>$FSDP_LABS_STATUS; " for line in status) + f"exit {code}"
    script = f'set -e\nsource {REQUEUE}\nrun_and_requeue {BASH} -c "$STEP" step {" ".join(words)}'
    env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "STEP": step, "SLURM_JOB_ID": "12"} | env
    env |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_RESTART_COUNT": str(number)}
    ran = subprocess.run([BASH, "-c", script], env=env, capture_output=True, text=True, timeout=30)
    assert ran.returncode == code, ran.stderr
    lines = asked.read_text().splitlines() if asked.exists() else []
    return "requeue 12" in lines, ran.stderr, [line for line in lines if not line.startswith(("requeue", "show"))]


@pytest.mark.parametrize(
    ("starts", "requeued"),
    [
        ([(SAVED, 0)], [False]),  # done
        ([(ASKED, 75)], [True]),
        ([(ASKED, 137)], [True]),  # srun's --kill-on-bad-exit was faster than a rank's own end
        ([(ASKED, 1)], [True]),  # torchrun has one code for all ends
        ([([], 138)], [True]),  # warned before it could listen
        (
            [([], 140), ([], 140), ([], 140), ([], 140)],
            [True, True, True, False],
        ),  # its start takes longer than its time
        ([(FAILED, 1)], [False]),  # before a first checkpoint: what would it come back to?
        ([(SAVED + FAILED, 1)], [True]),
        ([(SAVED, 137)], [True]),  # killed: it could not say so
        ([(SAVED + FAILED, 1), (FAILED, 1), (FAILED, 1), (FAILED, 1), (FAILED, 1)], [True, True, True, True, False]),
        # a start that saves something begins the count anew
        ([(SAVED, 1), ([], 1), ([], 1), (SAVED, 1), ([], 1), ([], 1), ([], 1), ([], 1)], 7 * [True] + [False]),
        ([(REFUSED, 2)], [False]),
        ([(SAVED, 1), (REFUSED, 2)], [True, False]),
        ([(SAVED + DIVERGED, 65)], [False]),
    ],
)
def test_when_a_job_comes_back(starts, requeued, tmp_path):
    assert [start(tmp_path, n, *each)[0] for n, each in enumerate(starts)] == requeued


def test_how_often_can_be_said(tmp_path):
    starts = [start(tmp_path, n, status, 1, MAX_RESTARTS="1") for n, status in enumerate((SAVED, [], []))]
    assert [requeued for requeued, *_ in starts] == [True, True, False]
    assert "Not requeued: the last 2 starts saved nothing." in starts[-1][1]


def test_without_resume_nothing_comes_back(tmp_path):
    assert not start(tmp_path, 0, ASKED, 75, words=("--checkpoint", "c"))[0]


def test_the_node_on_which_a_rank_failed_can_be_left_out(tmp_path):
    assert start(tmp_path, 0, SAVED + FAILED, 1)[2] == []
    again = start(tmp_path, 1, ["failed node3 0", "failed node7 5"], 1, EXCLUDE_FAILED_NODE="1")
    assert again[0] and again[2] == ["update JobId=12 ExcNodeList=node3"]  # the first to fail: others lost contact
    assert start(tmp_path, 2, [], 137, EXCLUDE_FAILED_NODE="1")[2] == []  # nobody knows


def test_nothing_is_left_of_a_job_that_is_done(tmp_path):
    start(tmp_path, 0, SAVED, 1)
    assert (tmp_path / ".status-12").exists()
    start(tmp_path, 1, SAVED, 0)
    assert not (tmp_path / ".status-12").exists()


def test_what_cannot_be_noted_does_not_end_a_run(monkeypatch, tmp_path):
    monkeypatch.setenv(job_status.VARIABLE, str(tmp_path / "no" / "such" / "folder"))
    job_status.note("saved", 3)
    monkeypatch.setenv(job_status.VARIABLE, str(tmp_path / "status"))
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    job_status.note("failed", job_status.node(), 5)
    assert (tmp_path / "status").read_text() == "failed node7 5\n"
