# SPDX-License-Identifier: BSD-3-Clause
"""A disk or quota that is full: one sentence wherever something is written, and nothing that was measured is lost."""

import contextlib
import errno
import json
import os
from pathlib import Path

import pytest
from commands import refused, script
from labkit.measuring import records
from labkit.running import launch

RECORD = {"schema": records.SCHEMA, "script": "mnist_fsdp.py", "config": {}, "ranks": 2, "losses": [2.0, 1.5]}


def fill(folder):
    """Write until no byte more has room; names still have."""
    with open(Path(folder, "filler"), "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def full(small_disk):
    fill(small_disk)
    return small_disk


def test_a_record_that_cannot_be_written_is_refused_before_the_run(full):
    (full / "empty").touch()  # which still can be
    with refused("--record", full, "No space left on device"):
        records.check_writable(full / "r.json")


def test_a_folder_for_runs_that_is_full_is_refused_before_the_run(full):
    with refused("FSDP_LABS_RUNS", full, "No space left on device"):
        records.ensure_writable_dir(full)


def test_a_record_for_which_there_is_no_room_any_more_is_printed(tmp_path, monkeypatch, capsys):
    def full(path, text):
        path.touch()  # a name can be made
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with refused(tmp_path / "r.json", "No space left on device", "printed above"):
        records.write(tmp_path / "r.json", RECORD)
    assert json.loads(capsys.readouterr().out) == RECORD
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_run_whose_disk_is_full_when_it_has_trained_prints_its_record(small_disk):
    """It fills while the run trains: another program is to blame."""
    lab = small_disk.parent / "lab.py"
    lab.write_text(
        f"import sys; sys.path[:0] = [{str(launch.SOURCE)!r}, {str(Path(__file__).parent)!r}]\n"
        "import gpt_fsdp, test_full_disk\nfrom labkit.running import options, ranks\n"
        "train = gpt_fsdp.train\n"
        "def and_fill(*given):\n"
        "    result = train(*given)\n"
        f"    test_full_disk.fill({str(small_disk)!r})\n"
        "    return result\n"
        "gpt_fsdp.train = and_fill\n"
        "ranks.run(gpt_fsdp.main, options.parse(gpt_fsdp.Config, ''))\n"
    )
    words = ["--strategy", "single", "--device", "cpu", "--batch-size", 1, "--seq-len", 16, "--max-steps", 3]
    run = script(lab, *words, "--record", small_disk / "r.json")
    assert run.returncode == 2, run.stderr
    (sentence,) = run.stderr.splitlines()
    assert "No space left on device" in sentence
    assert json.loads(run.stdout[run.stdout.index("{\n") :])["script"] == "gpt_fsdp.py"
    assert not (small_disk / "r.json").exists()


def test_output_that_is_lost_is_explained(full, monkeypatch):
    """A notebook's run whose log could not be written would end with "exit code 1" alone."""
    monkeypatch.setattr(launch, "RUNS", full)
    monkeypatch.setattr(records, "ensure_writable_dir", lambda folder: folder)
    command = [launch.sys.executable, "-u", "-c", "import sys; print('x' * 100_000); sys.exit(1)"]
    with pytest.raises(launch.RunFailed, match="Nothing more can be written to .*No space left on device"):
        launch.follow(command, lambda *_: None, timeout=60, device="cpu")
