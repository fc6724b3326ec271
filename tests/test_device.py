# SPDX-License-Identifier: BSD-3-Clause
"""device=cpu is the CPU on every machine; "auto" takes GPUs where each rank finds one, and says what it does."""

import os
import sys
from pathlib import Path

import pytest
from commands import call, command, refused
from labkit.running import launch, site
from labkit.running.lab import Lab

BELIEVING = Path(__file__).with_name("believing")
# A new Python each time: a fork of the tests' fork server would believe what that believes.
ENV = {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name}
ENV |= {"PYTHONPATH": str(BELIEVING), "FSDP_LABS_WARM": "0", "OMP_NUM_THREADS": "1"}


def believing(*words, code=0, **env):
    run = call(sys.executable, *words, env=ENV | env, cwd=launch.SOURCE, timeout=400)
    assert run.returncode == code, run.stdout + run.stderr
    return run


@pytest.mark.long
def test_ranks_believe_in_gpus_unless_they_are_hidden():
    see = "print(torch.cuda.is_available(), torch.cuda.device_count(), torch._C._get_accelerator())"
    program = f"import torch; from labkit.running import gpus; {see}; gpus.hide(); {see}"
    assert believing("-c", program).stdout == "True 4 cuda\nFalse 0 cpu\n"


LABS = {
    "hello": "hello.py --ranks 2",
    "FSDP1": "mnist_fsdp.py --ranks 2 --strategy fsdp1 --data mnist-5k --max-steps 1",
    "FSDP2 offload": "mnist_fsdp.py --ranks 2 --strategy fsdp2 --cpu-offload --data mnist-5k --max-steps 1",
    "GPT HSDP": "gpt_fsdp.py --ranks 2 --mesh 2x1 --precision bf16 --recompute full --max-steps 1",
}
# Each in a fork of a Python that believes and has imported torch, and nothing that has looked for a GPU.
ONE_AFTER_THE_OTHER = """
import os, runpy, sys
for words in sys.argv[1:]:
    if (child := os.fork()) == 0:
        sys.argv = words.split()
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"failed: {words}")
"""


@pytest.mark.long
def test_labs_stay_on_the_cpu_and_a_simulation_needs_no_gpu():
    labs = [f"{words} --device cpu" for words in LABS.values()]
    run = believing("-c", ONE_AFTER_THE_OTHER, *labs, "plan.py --ranks 4 --seq-len 64 --batch-size 1 --simulate")
    assert "cuda" not in run.stdout.partition("simulated")[0] + run.stderr
    assert "(+0.00%)" in run.stdout


IN_A_CELL = """
from labkit.running.lab import Lab

def on_what(me):
    import torch
    from torch.distributed.fsdp import fully_shard
    layer = fully_shard(torch.nn.Linear(4, 4))  # without a mesh, it takes the device that it finds
    layer(torch.ones(1, 4)).sum().backward()
    return layer.weight.device_mesh.device_type, me.device.type, torch.cuda.device_count()

print(Lab(device="cpu", launcher="local").on_ranks(on_what, ranks=2))
"""


@pytest.mark.long
def test_what_a_cell_shards_without_a_mesh_stays_on_the_cpu():
    assert believing("-c", IN_A_CELL).stdout == "[('cpu', 'cpu', 0), ('cpu', 'cpu', 0)]\n"


# What a notebook's settings choose


@pytest.mark.parametrize(
    ("gpus", "chosen", "words"),
    [
        (0, ["cpu", "cpu", "cpu"], "there is no GPU here: all runs compute on the CPU"),
        (1, ["cuda", "cpu", "cpu"], "single ranks compute on the GPU; this notebook's runs of 4 on the CPU"),
        (2, ["cuda", "cuda", "cpu"], "up to 2 ranks compute on a GPU each; this notebook's runs of 4 on the CPU"),
        (4, ["cuda", "cuda", "cuda"], "up to 4 ranks compute on a GPU each; this notebook's runs of 4 on GPUs, too"),
        (8, ["cuda", "cuda", "cuda"], "up to 8 ranks compute on a GPU each; this notebook's runs of 4 on GPUs, too"),
    ],
)
def test_auto_takes_a_gpu_for_each_rank_or_the_cpu(gpus, chosen, words, monkeypatch):
    monkeypatch.setattr(site, "gpus_here", lambda: gpus)
    lab = Lab(launcher="local", device="auto")
    assert [lab.device_of(ranks) for ranks in (1, 2, 4)] == chosen
    assert words in repr(lab)
    assert [lab.plan("gpt_fsdp.py", ranks=ranks).on_gpu for ranks in (1, 2, 4)] == [one == "cuda" for one in chosen]
    assert lab.plan("gpt_fsdp.py", ranks=4, nodes=2).on_gpu == (gpus >= 2)  # two nodes have twice as many

    started, called = [], []
    monkeypatch.setattr(launch, "run", lambda script, **settings: started.append(settings))
    monkeypatch.setattr("labkit.running.notebook_ranks.on_ranks", lambda function, **settings: called.append(settings))
    for options in ({"strategy": "single"}, {"ranks": 2}, {}):
        lab.run("gpt_fsdp.py", **options)
    for ranks in (1, 2, None):
        lab.on_ranks(print, ranks=ranks)
    for settings in (started, called):
        assert [one["device"] for one in settings] == chosen
        assert [one["ranks"] for one in settings] == [1, 2, 4]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_was_named_is_taken(device, monkeypatch):
    monkeypatch.setattr(site, "gpus_here", lambda: 1)
    lab = Lab(launcher="local", device=device)
    assert [lab.device_of(ranks) for ranks in (1, 4)] == [device, device]
    assert ("GPUs stay unused" in repr(lab)) == (device == "cpu")


def test_an_unknown_device_is_a_sentence(monkeypatch):
    monkeypatch.setenv("FSDP_LABS_DEVICE", "gpu")
    with refused("'gpu'", "cpu", "cuda", "auto"):
        Lab()


@pytest.fixture
def slurm_says(tmp_path, monkeypatch):
    """A function that puts Slurm's commands in PATH: they print what it is told of each."""

    def say(**outputs):
        for name, text in outputs.items():
            (tmp_path / name).write_text(text)
            command(tmp_path / "bin" / name, f"cat '{tmp_path / name}'")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    return say


@pytest.mark.parametrize(
    ("said", "partition", "count"),
    [
        ("cpu* (null)\ngpu gpu:4\n", None, 0),  # where a run without a partition goes
        ("cpu* (null)\ngpu gpu:4\n", "gpu", 4),
        ("gpu* gpu:a100:2(S:0-1)\ngpu* gpu:h100:8(S:0-1)\ngpu* (null)\n", None, 8),
        ("mixed gpu:a100:2,gpu:v100:2,shard:16\nbig gpu:8\n", "mixed", 4),
        ("gpu gpu:nvidia_h200:8(S:0,1),nvme:1\n", "gpu", 8),
        ("small gpu:2\nlarge gpu:8\nother gpu:16\n", "small,large", 8),
        ("", None, 0),
    ],
)
def test_gpus_of_a_node_by_slurms_word(said, partition, count, slurm_says):
    slurm_says(sinfo=said)
    assert site.gpus_of_a_node(partition) == count


@pytest.mark.parametrize(
    ("told", "count"),
    [
        ({}, 0),  # a job without GPUs
        ({"SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"SLURM_GPUS_ON_NODE": "gpu:2"}, 2),
        ({"SLURM_GPUS_ON_NODE": "gpu:a100:2"}, 2),
        ({"SLURM_GPUS_ON_NODE": "3(S:0-1)"}, 3),
        ({"SLURM_GPUS_ON_NODE": "0"}, 0),
        ({"SLURM_JOB_GPUS": "0,3,5"}, 3),
    ],
)
def test_inside_a_job_only_its_gpus_count(told, count, slurm_says, monkeypatch):
    monkeypatch.setattr(site, "partitions", lambda: ["gpu"])
    slurm_says(sinfo="gpu* gpu:8\n", scontrol="ClusterName = a\n")
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS"):
        monkeypatch.delenv(name, raising=False)
    assert Lab(launcher="slurm", device="auto").gpus == 8
    for name, value in (told | {"SLURM_JOB_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    lab = Lab(launcher="slurm", device="auto")
    assert lab.gpus == count and lab.device_of(4) == "cpu"


def test_the_practice_clusters_slots_are_no_gpus(slurm_says, monkeypatch):
    monkeypatch.setattr(site, "partitions", lambda: ["gpu"])
    slurm_says(sinfo="gpu* gpu:4\n", scontrol="ClusterName = practice\n")
    assert Lab(launcher="slurm", device="auto", partition="gpu").gpus == 0
