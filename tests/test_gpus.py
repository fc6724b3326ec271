# SPDX-License-Identifier: BSD-3-Clause
"""GPUs that cannot be used are one sentence. Shown without a GPU: the ranks are real, and what torch sees is made up."""

import os
import re
import shlex
import sys
from types import SimpleNamespace

import gpt_fsdp
import pytest
import torch
from commands import call, refused, ways
from conftest import SOURCE
from labkit.running import gpus, preflight, ranks

from notebooks import FOLDER, PATHS, code_cells, read

TORCHRUN = f"{shlex.quote(sys.executable)} -m torch.distributed.run --standalone --nproc-per-node 3"

# Point for point what the ranks ask torch.cuda for before they meet; then they say that they are there.
STUB = f"""
import os, sys
sys.path.insert(0, {str(SOURCE)!r})
import torch
from types import SimpleNamespace
from labkit.running import ranks

torch.cuda.is_available, torch.cuda.set_device = lambda: True, lambda device: None
torch.cuda.device_count = lambda: {{count}}
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid={{uuid}})

def main(config, me):
    print("here is rank", me.rank)

if __name__ == "__main__":
    ranks.run(main, SimpleNamespace(ranks=None, device="auto", backend={{backend!r}}))
"""


def test_ranks_that_do_not_come_are_counted(monkeypatch):
    """A node that reads torch from a cold file system, or a rank that has failed: NCCL would say neither."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    me = ranks.Rank(0, 0, 3, "node-1", torch.device("cuda", 0), "nccl")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    with refused("1 of 3 ranks", "0.1 s"):
        gpus.check_one_each(me, store, seconds=0.1)


def start(way, tmp_path, request, **about):
    """Three ranks on one node, by torchrun or srun."""
    stub = tmp_path / "stub.py"
    stub.write_text(STUB.format(**{"backend": "auto"} | about))
    env = request.getfixturevalue("slurm") if way == "srun" else os.environ
    command = f"srun -N 1 -n 3 python {stub}" if way == "srun" else f"{TORCHRUN} {stub}"
    return call("bash", "-c", command, env=env, cwd=SOURCE, timeout=90)


@pytest.mark.long
@pytest.mark.parametrize("way", ways(["torchrun", "srun"]))
def test_two_ranks_on_one_gpu_are_one_sentence(way, tmp_path, request):
    run = start(way, tmp_path, request, count=2, uuid='f"GPU-{device.index}"')
    said = re.findall(r"stub.py: (.*)", run.stderr)
    assert len(said) == 1 and run.returncode in (1, 2), run.stderr
    assert re.fullmatch(r"ranks 0 and 2 are both on GPU 0 of \S+: start at most one rank for each GPU .*", said[0])
    assert "here is rank" not in run.stdout  # not even the rank that has a GPU of its own: NCCL would wait there


@pytest.mark.long
@pytest.mark.parametrize(
    "about",
    [
        {"count": 3, "uuid": 'f"GPU-{device.index}"'},
        {"count": 1, "uuid": 'f"GPU-{os.environ["LOCAL_RANK"]}"'},  # a site shows each task its own, as its 0
        {"count": 1, "uuid": '"GPU-0"', "backend": "gloo"},  # which can: the ranks take turns
    ],
    ids=["a GPU each", "a GPU each, isolated", "gloo"],
)
def test_ranks_on_gpus_of_their_own_start(about, tmp_path, request):
    about["uuid"] = about["uuid"].replace('["LOCAL_RANK"]', ".get('LOCAL_RANK')")
    run = start("torchrun", tmp_path, request, **about)
    assert run.returncode == 0, run.stderr
    assert sorted(re.findall("here is rank (.)", run.stdout)) == ["0", "1", "2"]


# GPUs that PyTorch does not see

OLD, NEW = "535.104.05", "580.82.07"
VERSIONS = {
    OLD: f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {OLD}  Sat Aug 19 01:15:15 UTC 2023\nGCC version: gcc 12.3.0\n",
    NEW: f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {NEW}  Release Build  (dvs-builder@U22)\n",
}
IN_JOB = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "alps"}
GRANTED = IN_JOB | {"SLURM_GPUS_ON_NODE": "4"}
# (driver, CUDA of the wheel, environment): what the sentence says; None: the CPU is right
UNSEEN = [
    (
        OLD,
        "13.2",
        {},
        ("this machine", "PyTorch", "CUDA 13.2"),
    ),
    (
        OLD,
        "13.2",
        {},
        (OLD, "wheel", "--device"),
    ),
    (
        OLD,
        "13.2",
        GRANTED,
        ("Slurm", "PyTorch", "12", "525", "CUDA 13", "580"),
    ),
    (NEW, "13.2", {}, (NEW, "nvidia-smi")),
    (NEW, None, {}, ("CPU only", NEW, "wheel")),
    (None, "13.2", GRANTED, ("Slurm", "no NVIDIA driver")),
    (NEW, "13.2", IN_JOB, ("this node", "Slurm", "--gres=gpu:4")),
    (NEW, "13.2", IN_JOB | {"SLURM_GPUS_ON_NODE": "0"}, ("this node", "Slurm", "--gres=gpu:4")),
    (None, "13.2", IN_JOB | {"SLURM_JOB_GPUS": "0"}, ("Slurm", "no NVIDIA driver")),
    (None, "13.2", {}, None),
    (None, "13.2", IN_JOB, None),
    (None, "13.2", GRANTED | {"SLURM_CLUSTER_NAME": "practice"}, None),
    (OLD, "13.2", {"CUDA_VISIBLE_DEVICES": ""}, None),
]


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A function that makes this machine one with a driver (or None), a wheel and an environment; torch sees no GPU."""

    def make(version, cuda, environ):
        monkeypatch.setattr(gpus, "ROOT", tmp_path)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for name in [n for n in os.environ if n.startswith("SLURM_") or n == "CUDA_VISIBLE_DEVICES"]:
            monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        if version:
            for file, text in {"dev/nvidiactl": "", "proc/driver/nvidia/version": VERSIONS[version]}.items():
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / file).write_text(text)

    return make


@pytest.mark.parametrize(("version", "cuda", "environ", "said"), UNSEEN)
def test_a_gpu_that_torch_does_not_see_is_one_sentence(version, cuda, environ, said, node):
    node(version, cuda, environ)
    assert ranks.device_and_backend("cpu", "auto") == ranks.device_and_backend("auto", "gloo") == ("cpu", "gloo")
    if said is None:
        assert ranks.device_and_backend("auto", "auto") == ("cpu", "gloo")
        return
    for device in ("auto", "cuda"):
        with refused(*said):
            ranks.device_and_backend(device, "auto")


# Compilers


@pytest.mark.parametrize(
    ("device", "there", "variables", "said"),
    [
        ("cuda", (), {}, ("--compile", "C compiler", "gcc", "clang")),
        ("cuda", ("g++",), {}, ("gcc", "clang")),
        ("cuda", ("gcc",), {"CC": "icx"}, ("icx",)),
        ("cuda", ("clang",), {}, None),
        ("cuda", ("gcc",), {}, None),
        ("cpu", ("gcc",), {}, ("--compile", "C++", "g++")),
        ("cpu", ("g++",), {}, None),
    ],
)
def test_no_compiler_is_one_sentence(device, there, variables, said, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(preflight.sys, "platform", "linux")
    monkeypatch.setattr(preflight.shutil, "which", lambda name: name if name in there else None)
    me = ranks.Rank(0, 0, 1, "here", torch.device(device), "gloo")
    if said is None:
        preflight.check(gpt_fsdp.Config(compile=True), me)
        return
    with refused(*said):
        preflight.check(gpt_fsdp.Config(compile=True), me)


# Notebooks


class Reduced(Exception):
    """Carries the tensor that was to be reduced."""


def test_the_sum_of_chapter_00_is_taken_where_the_ranks_compute(monkeypatch):
    """NCCL has no tensors on the CPU. Here the ranks are on the meta device, and nothing is reduced."""

    def reduce(tensor, **_):
        raise Reduced(tensor)

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    (cell,) = [c for c in code_cells(read(FOLDER / "00_start_here.ipynb")) if "def sum_over_ranks" in c.source]
    names = {}
    exec(cell.source.split("sums =")[0], names)
    with pytest.raises(Reduced) as caught:
        names["sum_over_ranks"](SimpleNamespace(rank=1, device=torch.device("meta")))
    assert caught.value.args[0].device.type == "meta"


def test_chapter_07_loads_what_ranks_on_gpus_have_saved(tmp_path, monkeypatch):
    """Also where the notebook itself has no GPU, as on a login node."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"fc1.weight": torch.ones(2)}, tmp_path / "ddp-style.pt")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code = "\n".join(c.source for c in code_cells(read(FOLDER / "07_checkpoints.ipynb")))
    (line,) = re.findall(r'found = (torch\.load\(folder / "ddp-style.pt".*\))', code)
    assert eval(line, {"torch": torch, "folder": tmp_path})["fc1.weight"].device.type == "cpu"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_no_launch_forgets_what_the_settings_cell_says(path):
    """A second Lab(...) would not know the partition of the first; replace(lab, ...) does."""
    code = "\n".join(line for c in code_cells(read(path)) for line in c.source.splitlines() if line[:1] != "#")
    assert re.findall(r"\bLab\(\S*", code) in (["Lab()"], ["Lab(at_least=1)"])
