# SPDX-License-Identifier: BSD-3-Clause
"""The GPU hour, where there is no GPU: what it would run is right, and its steps, rows and table work on the CPU."""

import os
import re
import shlex
from importlib import import_module
from types import SimpleNamespace

import pytest
from commands import call, refused, script
from labkit.running import launch, options
from proofs import gpu as gpu_proof

LABS = ("mnist_fsdp.py", "gpt_fsdp.py", "hf_fsdp.py", "one_rank.py")


def shown(monkeypatch, capsys, gpus, **settings):
    monkeypatch.setattr(gpu_proof.site, "gpus_here", lambda: gpus)
    assert gpu_proof.main(gpu_proof.Config(dry_run=True, **settings)) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("      ")]


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_line_is_a_command_that_its_lab_accepts(gpus, monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, gpus)
    assert len(lines) == len(set(lines)) > 50
    for line in lines:
        python, name, *words = shlex.split(line)
        assert python == "python"
        if name in LABS:
            config = options.parse(import_module(name[:-3]).Config, "", words)
            assert config.device == "cuda"
            if name != "one_rank.py" and config.strategy != "single":  # every GPU has a rank, and every rank a GPU
                assert config.ranks in (gpus, 1)
            if getattr(config, "mesh", None):
                config.arranged(config.ranks)
    assert {line.split()[1] for line in lines} == {*LABS, "hello.py", "-m"}
    named = {path.name for path in (launch.SOURCE.parent / "notebooks").glob("*.ipynb")}
    assert named == {name for line in lines for name in re.findall(r"[^/ ]+\.ipynb", line)}


def test_make_says_what_it_would_run_in_a_part():
    run = call("make", "--no-print-directory", "gpu", "PART=planner", "DRY=1", cwd=launch.SOURCE.parent)
    assert run.returncode == 0, run.stderr
    assert "one_rank.py --preset llama3-70b --ranks 64 --recompute full" in run.stdout and "smoke" not in run.stdout


def test_without_a_gpu_it_says_so():
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = script("-m", "proofs.gpu", "--part", "smoke", env=env)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "--dry-run" in run.stderr


# A part of its own, rehearsed on the CPU


def rehearse(monkeypatch, tmp_path, steps, **settings):
    monkeypatch.setitem(gpu_proof.PARTS, "smoke", lambda config: iter(steps))
    config = gpu_proof.Config(device="cpu", part="smoke", folder=str(tmp_path), **settings)
    return gpu_proof.main(config)


def gpt(name, **about):
    return gpu_proof.Step(
        name, (("gpt_fsdp.py", {"strategy": "single", "max_steps": 6} | about),), gpu_proof.as_planned
    )


def test_a_part_measures_keeps_and_tells(monkeypatch, tmp_path, capsys):
    failing = gpu_proof.Command("failing", ("python", "hello.py", "--ranks", "no"))
    assert rehearse(monkeypatch, tmp_path, [gpt("planned"), failing]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"planned +tracer's peak, bytes +([\d,]+) +\1 +\+0\.0000% +yes", printed)
    assert re.search(r"failing +fails .*NO .*--ranks", printed)
    assert "4 hold, 1 do not, 0 are facts" in printed
    assert launch.records.load(tmp_path / "planned.json")["script"] == "gpt_fsdp.py"

    # What is done is not done again, unless that is asked for; what has failed is.
    mended = gpu_proof.Command("failing", ("python", "hello.py", "--ranks", "1"))
    monkeypatch.setattr(gpu_proof.Step, "do", lambda *_: pytest.fail("run again"))
    assert rehearse(monkeypatch, tmp_path, [gpt("planned"), mended]) == 0
    assert "5 hold, 0 do not" in capsys.readouterr().out
    with pytest.raises(pytest.fail.Exception, match="run again"):
        rehearse(monkeypatch, tmp_path, [gpt("planned")], force=True)


def test_a_part_whose_time_is_up_says_what_is_left(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_proof, "SECONDS", gpu_proof.MIN_STEP_SECONDS - 1)
    assert rehearse(monkeypatch, tmp_path, [gpt("first"), gpt("second")]) == 1
    assert "2 steps of smoke are left: start it again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (gpu_proof.row("x", 100, 100, 0), True),
        (gpu_proof.row("x", 101, 100, 0), False),
        (gpu_proof.row("x", 101, 100, 0.02), True),
        (gpu_proof.row("x", 97, 100, 0.02), False),
        (gpu_proof.row("x", 0, 0, 0), True),
        (gpu_proof.row("x", 1, 0, 0), False),
        (gpu_proof.row("x", 1.17), None),
    ],
)
def test_a_row_holds_within_its_limit(found, holds):
    assert found["holds"] is holds


def test_a_rehearsal_is_no_reference(monkeypatch, tmp_path):
    """The folder of references is committed, and the planner reads it."""
    monkeypatch.setattr(gpu_proof, "REFERENCE", tmp_path / "reference")
    monkeypatch.setattr(launch, "RUNS", tmp_path / "runs")
    step = SimpleNamespace(name="seen", do=lambda *_: [gpu_proof.row("ends well", holds=True)])
    monkeypatch.setitem(gpu_proof.PARTS, "smoke", lambda config: [step])
    assert gpu_proof.main(gpu_proof.Config(device="cpu", part="smoke")) == 0
    assert not (tmp_path / "reference").exists()
    assert len([*tmp_path.glob("runs/gpu-hour/*/rows/smoke.json")]) == 1
    monkeypatch.setattr(launch.records, "hardware", lambda device: "NVIDIA H100 80GB HBM3")
    assert gpu_proof.records_folder(gpu_proof.Config()) == tmp_path / "reference" / "nvidia-h100-80gb-hbm3"


def test_a_folder_that_cannot_be_is_refused_first(tmp_path):
    (tmp_path / "file").touch()
    with refused("--folder"):
        gpu_proof.main(gpu_proof.Config(device="cpu", folder=str(tmp_path / "file" / "folder")))
