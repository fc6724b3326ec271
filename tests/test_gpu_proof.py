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
from proofs import gpu_checks, gpu_page, gpu_rows
from proofs.gpu_parts import PARTS

LABS = ("mnist_fsdp.py", "gpt_fsdp.py", "gpt_zero.py", "gpt_pipeline.py", "gpt_jax.py", "hf_fsdp.py", "one_rank.py")


def shown(monkeypatch, capsys, gpus, **settings):
    monkeypatch.setattr(gpu_proof.site, "gpus_here", lambda: gpus)
    assert gpu_proof.main(gpu_proof.Config(dry_run=True, **settings)) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("      ")]


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_line_is_a_command_that_its_lab_accepts(gpus, monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, gpus)
    assert len(lines) > 100
    for line in lines:
        python, name, *words = shlex.split(line.removeprefix("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "))
        assert python == "python"
        if name in LABS:
            config = options.parse(import_module(name[:-3]).Config, "", words)
            assert config.device == "cuda"
            if name not in ("one_rank.py", "gpt_jax.py") and getattr(config, "strategy", None) != "single":
                assert config.ranks <= gpus  # every rank has a GPU
            if getattr(config, "mesh", None):
                config.arranged(config.ranks)
    assert {*LABS, "hello.py"} - {*((), ("gpt_pipeline.py",))[gpus == 1]} <= {
        word for line in lines for word in line.split()
    }
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
    return gpu_rows.Step(
        name, (("gpt_fsdp.py", {"strategy": "single", "max_steps": 6} | about),), gpu_rows.as_planned, "nothing"
    )


def test_a_part_measures_keeps_and_tells(monkeypatch, tmp_path, capsys):
    failing = gpu_rows.Command("failing", ("python", "hello.py", "--ranks", "no"), "nothing")
    assert rehearse(monkeypatch, tmp_path, [gpt("planned"), failing]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"planned +tracer's peak, bytes +([\d,]+) +\1 +\+0\.0000% +yes", printed)
    assert re.search(r"failing +fails .*NO .*--ranks", printed)
    assert "4 hold, 1 do not, 0 are facts" in printed
    assert launch.records.load(tmp_path / "planned.json")["script"] == "gpt_fsdp.py"

    # What is done is not done again, unless that is asked for; what has failed is.
    mended = gpu_rows.Command("failing", ("python", "hello.py", "--ranks", "1"), "nothing")
    monkeypatch.setattr(gpu_rows.Step, "do", lambda *_: pytest.fail("run again"))
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
        (gpu_rows.row("x", 100, 100, 0), True),
        (gpu_rows.row("x", 101, 100, 0), False),
        (gpu_rows.row("x", 101, 100, 0.02), True),
        (gpu_rows.row("x", 97, 100, 0.02), False),
        (gpu_rows.row("x", 0, 0, 0), True),
        (gpu_rows.row("x", 1, 0, 0), False),
        (gpu_rows.row("x", 1.17), None),
    ],
)
def test_a_row_holds_within_its_limit(found, holds):
    assert found["holds"] is holds


def test_a_rehearsal_is_no_reference(monkeypatch, tmp_path):
    """The folder of references is committed, and the planner reads it."""
    monkeypatch.setattr(gpu_rows, "REFERENCE", tmp_path / "reference")
    monkeypatch.setattr(launch, "RUNS", tmp_path / "runs")
    step = SimpleNamespace(name="seen", do=lambda *_: [gpu_rows.row("ends well", holds=True)])
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


def test_each_step_names_what_its_numbers_would_change():
    """Words that stand in a file, on a page that is up to date; and no two steps of the hour have the same name."""
    steps = [step for part in PARTS.values() for step in part(gpu_page.AnyMachine)]
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        path, _, said = step.changes.partition(": ")
        assert said and said in " ".join((launch.SOURCE.parent / path).read_text().split()), step
    assert gpu_page.PAGE.read_text() == gpu_page.page()


def test_a_check_makes_rows_of_its_last_line(tmp_path):
    config = gpu_proof.Config(device="cpu", folder=str(tmp_path))
    words = ("python", "-m", "proofs.gpu_checks", "--check", "float8-gather", "--ranks", "2", "--device", "cpu")
    size, loss = gpu_rows.Check("gather", words, "nothing").do(config, 100)
    assert 0.25 < size["measured"] < 0.3 and loss["measured"] < 1e-2


def test_a_check_of_more_ranks_than_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(gpu_checks.torch.cuda, "device_count", lambda: 2)
    with refused("--ranks 3 needs as many GPUs, and PyTorch sees 2 here"):
        gpu_checks.main(gpu_checks.Config(check="groups", ranks=3))


def test_a_gpu_s_efficiency_is_of_its_published_peak():
    """Of a step that takes as long as the peak would, all of it; of an unknown GPU nothing is said."""
    record = launch.records.load(next(iter((launch.SOURCE / "results" / "reference").glob("tiny-*/*.json"))))
    plan = gpu_rows.predict.plan_of(record)
    seconds = gpu_rows.hardware_flops(plan) / gpu_rows.GPUS["h100"].flops["fp32"]
    record |= {
        "hardware": "NVIDIA H100 80GB HBM3",
        "time": {"step": {"median": seconds, "p10": seconds, "p90": seconds}},
    }
    assert gpu_rows.efficiency(record)[0]["measured"] == pytest.approx(1)
    assert len(gpu_rows.efficiency(record | {"hardware": "another"})) == 1
