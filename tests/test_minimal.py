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
RUNS = [("one_gpu.py", 0), *((script, ranks) for script in SCRIPTS[1:] for ranks in (1, 2, 4))]  # 0: without torchrun
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


@pytest.mark.long
def test_losses_are_equal_however_many_ranks_train(tmp_path):
    found = {run: trained(tmp_path / f"{run[0]}-{run[1]}", *run, epochs=1) for run in RUNS}
    first = found["one_gpu.py", 0]
    assert first.keys() == {0} and first[0][0] < 2.3  # ten classes by chance: 2.3
    for run, epochs in found.items():
        for epoch, (loss, correct, of) in epochs.items():
            assert loss == pytest.approx(first[epoch][0], rel=1e-3), run
            assert of == 1000 and abs(correct - first[epoch][1]) <= 2, run  # each image once


@pytest.mark.long
@pytest.mark.parametrize(("script", "ranks", "then"), [("one_gpu.py", 0, 0), ("ddp.py", 2, 1), ("fsdp2.py", 4, 2)])
def test_a_run_that_ended_continues(script, ranks, then, tmp_path):
    """On another number of ranks, with the loss of the run that did not end."""
    whole = trained(tmp_path / "whole", script, ranks)
    assert trained(tmp_path / "ended", script, ranks, epochs=1).keys() == {0}
    resumed = trained(tmp_path / "ended", script, then)
    assert resumed.keys() == {1} and resumed[1][0] == pytest.approx(whole[1][0], rel=1e-3)


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
