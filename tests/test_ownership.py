# SPDX-License-Identifier: BSD-3-Clause
"""A checkpoint folder has one run at a time: a second is refused and changes nothing, one that has been replaced is fenced."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
from commands import script
from forked import forked
from labkit import UserError
from labkit.running import fork_server, launch
from labkit.training import checkpoint_folder, checkpoints, manifest, ownership, saving
from test_checkpoints import RUN, saver, training

SLOW_SAVE = Path(__file__).with_name("slow_save.py")
RACES = 20
ANOTHER = {
    "pid": os.getppid(),
    "started": ownership._started(os.getppid()),
}  # a process that lives, and is not this one


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """The tests' own job, if they run in one, is not theirs to speak of."""
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def everything(folder: Path) -> dict:
    """{path: content and time of its last change} of all that is in a folder, but for the heartbeat of its owner."""
    found = {}
    for path in folder.rglob("*"):
        beats = path.name.startswith(".owner-")
        found[str(path)] = path.read_bytes() if path.is_file() else None, 0 if beats else path.stat().st_mtime_ns
    return found


# Who may have it


def test_a_second_run_is_refused_and_changes_nothing(tmp_path):
    says(tmp_path, ownership.acquire(tmp_path)[0], **ANOTHER)
    (tmp_path / "step-000003.0123abcd.partial").mkdir()
    before = everything(tmp_path)
    with pytest.raises(
        ownership.InUse, match=r"is in use by process \d+ on .* \(.*\), whose last heartbeat was \d+ s ago"
    ):
        ownership.acquire(tmp_path)
    assert everything(tmp_path) == before


def test_a_released_folder_is_taken_without_a_word(tmp_path):
    for number in (1, 2, 3):
        owner, taken = ownership.acquire(tmp_path)
        assert owner.number == number and taken is None
        owner.release()
    assert [path.name for path in tmp_path.iterdir()] == [".owner-000003"]


def test_a_run_that_an_error_has_ended_leaves_the_folder_to_the_next_in_its_process(tmp_path):
    first, _ = ownership.acquire(tmp_path)
    _, taken = ownership.acquire(tmp_path)
    assert taken is None
    with pytest.raises(ownership.TakenOver):
        first.check()


def own_and_end(folder) -> int:
    """Own the folder in a process that ends without releasing it: its id."""
    ownership.acquire(folder)
    return os.getpid()


def test_a_run_whose_process_is_gone_is_replaced_at_once(tmp_path):
    process = forked(own_and_end, tmp_path)
    _, taken = ownership.acquire(tmp_path)
    assert "its process has ended" in taken and f"process {process}" in taken


def test_a_process_with_the_number_of_one_that_is_gone_is_not_taken_for_it(tmp_path):
    owner, _ = ownership.acquire(tmp_path)
    says(tmp_path, owner, started="1")
    assert "its process has ended" in ownership.acquire(tmp_path)[1]


def says(folder, owner, **about):
    """Have an owner's file say something else, as if it were of another run."""
    path = folder / f".owner-{owner.number:06d}"
    path.write_text(json.dumps(json.loads(path.read_text()) | about))


@pytest.mark.parametrize(
    ("first", "again", "replaced"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        (
            {"SLURM_JOB_ID": "7", "TORCHELASTIC_RESTART_COUNT": "3"},
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "0"},
            True,
        ),
    ],
)
def test_a_later_start_of_the_same_job_replaces_the_earlier(first, again, replaced, tmp_path, monkeypatch):
    """Also where the earlier may live on: on a node that only Slurm has lost, its ranks still write."""
    with monkeypatch.context() as patch:
        for name, value in first.items():
            patch.setenv(name, value)
        owner, _ = ownership.acquire(tmp_path)
    says(tmp_path, owner, host="another-node")
    for name, value in again.items():
        monkeypatch.setenv(name, value)
    if not replaced:
        with pytest.raises(ownership.InUse):
            ownership.acquire(tmp_path)
        return
    newer, taken = ownership.acquire(tmp_path)
    assert "a later start of the same job" in taken
    newer.check()
    with pytest.raises(ownership.TakenOver, match="has been taken over by"):
        owner.check()


def test_a_run_on_another_node_is_replaced_when_its_heartbeat_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "HEARTBEAT_SECONDS", 10**6)
    owner, _ = ownership.acquire(tmp_path)
    says(tmp_path, owner, host="another-node")
    path = tmp_path / ".owner-000001"
    now = time.time()
    os.utime(path, (now, now - ownership.STALE_SECONDS + 60))
    with pytest.raises(ownership.InUse):
        ownership.acquire(tmp_path)
    os.utime(path, (now, now - ownership.STALE_SECONDS - 60))
    assert "it had no heartbeat for" in ownership.acquire(tmp_path)[1]


def test_the_heart_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "HEARTBEAT_SECONDS", 0.01)
    ownership.acquire(tmp_path)
    path = tmp_path / ".owner-000001"
    os.utime(path, (0, 0))
    deadline = time.monotonic() + 30
    while path.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def race(folder, go, result):
    while not go.exists():
        pass
    try:
        owner, _ = ownership.acquire(folder)
        result.write_text(str(owner.number))
        signal.pause()  # lives on until it is ended
    except ownership.InUse:
        result.write_text("refused")
    except BaseException:
        result.write_text(traceback.format_exc())
    os._exit(0)


def raced(folder) -> list[list[str]]:
    """Race in folders 0, 1, …: what became of each run. In a process without threads: a fork of one with JAX's may hang."""
    outcomes = []
    for number in range(RACES):
        runs, go, results = [], folder / f"go-{number}", [folder / f"result-{number}-{run}" for run in range(4)]
        for result in results:
            if (process := os.fork()) == 0:
                race(folder / f"{number}", go, result)
            runs.append(process)
        try:
            go.touch()
            deadline = time.monotonic() + 120
            while not all(result.exists() and result.read_text() for result in results):
                assert time.monotonic() < deadline, [Path(f"/proc/{process}/wchan").read_text() for process in runs]
                time.sleep(0.01)
        finally:
            for process in runs:
                os.kill(process, 9)
                os.waitpid(process, 0)
        outcomes.append(sorted(result.read_text() for result in results))
    return outcomes


@pytest.mark.parametrize("left", [None, "stale"])
def test_of_runs_that_start_at_once_one_becomes_the_owner(left, tmp_path):
    for number in range(RACES):
        (tmp_path / f"{number}").mkdir()
        if left:
            owner, _ = ownership.acquire(tmp_path / f"{number}")
            says(tmp_path / f"{number}", owner, started="1")  # as of a process that is gone
    for outcomes in forked(raced, tmp_path, timeout=400):
        assert outcomes == ["2" if left else "1", "refused", "refused", "refused"], outcomes


# What follows for checkpoints


def test_what_a_run_that_was_replaced_has_written_gets_no_name(tmp_path, world_of_one, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    zombie = saver(tmp_path, *training())
    zombie.save(1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    heir = saver(tmp_path, *training(), resume=True)
    assert heir.resume(9) == 1
    with pytest.raises(ownership.TakenOver):
        zombie.save(2)
    heir.save(2)
    assert [path.name for path in checkpoints.stored(tmp_path)] == ["step-000002", "step-000001"]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("why", ["another seed", "no --resume", "not to be written to"])
def test_a_start_that_is_refused_leaves_everything_as_it_was(why, tmp_path, world_of_one, monkeypatch):
    folder = tmp_path / "c"
    saving.save(folder, 1, *training(), RUN)
    (folder / "step-000002.01234567.partial").mkdir()
    (folder / "step-000001.removed").mkdir()
    before = everything(folder)
    if why == "not to be written to":
        touch = Path.touch
        monkeypatch.setattr(Path, "touch", lambda path: touch(path) if "writable" not in path.name else fails())
    with pytest.raises(UserError):
        run = saver(folder, *training(), {"--seed": 2}, resume=why != "no --resume")
        try:
            run.resume(9)
        finally:
            run.folder.close()
    after = {path: state for path, state in everything(folder).items() if ".owner-" not in path}
    assert after == before


def fails():
    raise PermissionError(13, "Permission denied")


def test_tasks_of_an_array_have_folders_of_their_own(tmp_path, world_of_one, monkeypatch):
    for task, given, used in (
        ("3", "ck", "ck/task-3"),
        ("4", "ck", "ck/task-4"),
        ("3", "ck/3", "ck/3"),
        ("3", "ck-03", "ck-03"),
        ("3", "llama13", "llama13/task-3"),
    ):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
        run = saver(tmp_path / given, *training())
        assert run.folder.path == tmp_path / used
        run.folder.close()


# Two runs, started as people start them


@pytest.mark.long
@pytest.mark.skipif(not fork_server.possible(), reason="forks, which Linux can")
def test_of_two_runs_in_one_folder_the_second_is_refused_and_the_first_does_not_notice(tmp_path):
    """The first is writing when the second comes, with another seed; and with the same line, submitted twice."""
    writes, may_go_on = tmp_path / "writes", tmp_path / "goes on"
    words = ["--data", "mnist-5k", "--ranks", 2, "--batch-size", 200, "--max-steps", 2, "--checkpoint", tmp_path / "c"]
    with open(tmp_path / "out", "w+") as out:
        command = [sys.executable, "-u", *map(str, (SLOW_SAVE, writes, may_go_on, "mnist_fsdp", *words))]
        first = fork_server.start(command, launch.SOURCE, os.environ, out, out)
        deadline = time.monotonic() + 120
        while not writes.exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        for more in (["--seed", 2], ["--resume"], []):
            second = script("mnist_fsdp.py", *words, *more)
            assert second.returncode == 2, second.stdout + second.stderr
            assert re.search(r"is in use by process \d+ on .*slow_save.py", second.stderr), second.stderr
        may_go_on.touch()
        assert first.wait(120) == 0, (tmp_path / "out").read_text()
    (saved,) = checkpoints.stored(tmp_path / "c")
    found = manifest.read(saved)
    assert manifest.difference(saved, found["files"]) is None and found["run"]["--seed"] == 1


def test_a_run_that_ends_lets_the_next_have_the_folder(tmp_path):
    """However it ends: here by a user's error."""
    code = (
        "import sys; from labkit import UserError\n"
        "from labkit.training.checkpoint_folder import CheckpointFolder\n"
        "from labkit.running import options, ranks\n"
        "def main(config, me):\n"
        "    CheckpointFolder.of(config)\n"
        "    raise UserError('no')\n"
        f"ranks.run(main, options.Training(ranks=1, device='cpu', checkpoint={str(tmp_path)!r}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=launch.SOURCE, timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, "-c: no\n")
    assert json.loads((tmp_path / ".owner-000001").read_text())["released"]
    assert ownership.acquire(tmp_path)[1] is None


def test_folders_are_named_by_their_steps_alone():
    assert (
        checkpoint_folder.name_of(7) == "step-000007" and checkpoint_folder.step_of(Path("x/step-1234567")) == 1234567
    )
