# SPDX-License-Identifier: BSD-3-Clause
"""The scripts to copy: equal losses on 1, 2 and 4 ranks, resumed on another number of them, short, nothing of this course."""

import ast
import difflib
import itertools
import re
import shutil
import sys

import pytest
from commands import call, run_job
from labkit.running import launch

FOLDER = launch.SOURCE / "minimal"
SCRIPTS = ("one_gpu.py", "ddp.py", "fsdp2.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
PRINTED = re.compile(r"epoch (\d): loss ([\d.]+), (\d+) of (\d+) test images right")


def trained(folder, script: str, ranks: int, epochs: int = 2) -> dict[int, tuple]:
    """{epoch: (loss, correct, of)} that a run in this folder prints, with so many epochs."""
    folder.mkdir(exist_ok=True)
    copy = folder / script
    shutil.copy(FOLDER / script, copy)
    copy.write_text(copy.read_text().replace("BATCH, EPOCHS = 64, 2", f"BATCH, EPOCHS = 64, {epochs}"))
    starter = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks else []
    run = call(sys.executable, *starter, script, cwd=folder, timeout=120)
    assert run.returncode == 0, run.stderr
    printed = PRINTED.findall(run.stdout)  # once, not once per rank
    assert len(printed) == len({epoch for epoch, *_ in printed}), run.stdout
    return {int(epoch): (float(loss), int(correct), int(of)) for epoch, loss, correct, of in printed}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What one process prints in two epochs."""
    return trained(tmp_path_factory.mktemp("uninterrupted"), "one_gpu.py", 0)


def same(found: tuple, expected: tuple) -> bool:
    """Whether two runs printed the same of an epoch: loss and right images, as far as rounding lets them."""
    return found[0] == pytest.approx(expected[0], rel=1e-3) and abs(found[1] - expected[1]) <= 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "ranks", "then"),
    [("one_gpu.py", 0, 0), ("ddp.py", 4, None), ("ddp.py", 2, 1), ("fsdp2.py", 2, None), ("fsdp2.py", 4, 1)],
)
def test_losses_are_those_of_one_process_also_after_a_resume(script, ranks, then, uninterrupted, tmp_path):
    """On whatever number of ranks it continues; every test image counts once. 0: without torchrun."""
    first = trained(tmp_path, script, ranks, epochs=1)
    assert first.keys() == {0} and first[0][0] < 2.3  # ten classes by chance: 2.3
    assert same(first[0], uninterrupted[0]) and first[0][2] == 1000
    if then is not None:
        resumed = trained(tmp_path, script, then)
        assert resumed.keys() == {1} and same(resumed[1], uninterrupted[1]) and resumed[1][2] == 1000


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
