# SPDX-License-Identifier: BSD-3-Clause
"""A run that is told to end, at any moment: no process lives on, nothing is half-written, and no traceback is shown.

The moments are drawn with a seed, which ``make nightly`` changes: so many seconds after the ranks have come, or after the
first step. What a run with --checkpoint does with its last step is in other tests; here, only that whatever it leaves is whole.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from commands import script
from labkit.measuring import records
from labkit.running import fork_server, launch, progress
from labkit.training import checkpoints
from proofs import crash

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not fork_server.possible(), reason="macOS ends ranks in another way"),
]
LABS = {
    "mnist": "mnist_fsdp.py --ranks 2 --data mnist-5k --epochs 100 --batch-size 16 --strategy ddp",
    "mnist, with loaders": "mnist_fsdp.py --ranks 2 --data mnist-5k --epochs 100 --batch-size 16 --loader torchvision",
    "gpt": "gpt_fsdp.py --ranks 2 --max-steps 100000 --seq-len 16 --batch-size 2 --strategy ddp",
    "gpt, that saves": "gpt_fsdp.py --ranks 2 --max-steps 100000 --seq-len 16 --batch-size 2 --strategy ddp "
    "--checkpoint {folder}/saved --checkpoint-every 2 --keep-last 3",
}
# To the whole group, as Ctrl-C and Slurm send it; or, as `kill` does, to the process that was started.
SIGNALS = {"SIGINT": (signal.SIGINT, True), "SIGTERM": (signal.SIGTERM, True), "kill": (signal.SIGTERM, False)}
SECONDS = 60  # none of these runs may live longer
LONGEST = 0.5  # seconds of training before a signal: several steps, and where it saves some saves


def ended(words: str, folder: Path, which: str, after: float, begins: bool) -> tuple[int, str]:
    """(exit code, what was said on stderr) of a run that is sent a signal.

    after: seconds, from when the ranks have come (begins), or from the first step.
    """
    mark, (number, to_all) = folder / "progress", SIGNALS[which]
    command = [sys.executable, "-u", *words.format(folder=folder).split(), "--record", f"{folder}/run.json"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = fork_server.start(command, launch.SOURCE, os.environ | {progress.VARIABLE: str(mark)}, out, err)
        try:
            until(mark.exists if begins else lambda: progress.read(mark) is not None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(after)
            assert process.poll() is None, "it has ended by itself"
            (os.killpg if to_all else os.kill)(process.pid, number)
            code = process.wait(SECONDS)
            until(lambda: not lives(process.pid))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        err.seek(0)
        return code, err.read()


def lives(group: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def until(there):
    """Look again and again, up to a limit that only a fault reaches."""
    deadline = time.monotonic() + SECONDS
    while not there():
        assert time.monotonic() < deadline, f"not within {SECONDS} s"
        time.sleep(0.01)


# Of the runs that save, more: about half of their time they are saving.
CASES = [(lab, which, number) for lab in LABS for which in SIGNALS for number in range(3 if "saves" in lab else 1)]


@pytest.mark.parametrize(("lab", "which", "number"), CASES)
def test_a_run_that_is_told_to_end_leaves_nothing_half_done(lab, which, number, seed, tmp_path):
    after = random.Random(f"{seed} {lab} {which} {number}").uniform(0, LONGEST)
    code, said = ended(LABS[lab], tmp_path, which, after, begins=number == 0)
    assert code != 0
    if "checkpoint" not in LABS[lab]:
        assert code in ((130, -signal.SIGINT) if which == "SIGINT" else (143, -signal.SIGTERM)), said
    # A thread of Python's own, between a rank and its loaders, may tell that one of them was gone first.
    assert "Traceback" not in said or ("loaders" in lab and "resource_sharer.py" in said and "labkit" not in said), said
    saved = tmp_path / "saved"
    for path in checkpoints.stored(saved):
        assert crash.validation_error(path) is None
    if (tmp_path / "run.json").exists():
        records.load(tmp_path / "run.json")
    names = {path.name for path in tmp_path.iterdir()} - {"saved", "run.json", "progress"}
    assert not names, names


STARTED = """
import os, signal, time
import torch.multiprocessing
from labkit.running import notebook_ranks, ranks

start = torch.multiprocessing.start_processes

def interrupted(*given, **about):
    os.kill(os.getpid(), signal.SIGINT)
    return start(*given, **about)

torch.multiprocessing.start_processes = interrupted
ranks.run(lambda call, me: time.sleep(600), notebook_ranks.Call("", 2, "cpu"))
"""


def test_ctrl_c_before_the_ranks_are_forked_ends_them(tmp_path):
    """The signal waits in the process that starts them, and its forks do not inherit it."""
    (tmp_path / "started.py").write_text(STARTED)
    run = script(tmp_path / "started.py", env=os.environ | {"PYTHONPATH": str(launch.SOURCE)}, timeout=SECONDS)
    assert run.returncode in (130, -signal.SIGINT) and "Traceback" not in run.stderr, run
