# SPDX-License-Identifier: BSD-3-Clause
"""How much memory a process may use: what a job and a container leave it, not what the machine has."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from labkit.measuring import host_memory, meters

MIB = 2**20
MACHINE = {"proc/meminfo": f"MemTotal: {999 * 1024} kB\nMemAvailable: {500 * 1024} kB\nHugePages_Total: 0\n"}


def group(limit, used, cached, version=2):
    """The files of a control group, all figures in MiB; cached: how much of what is used are files."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    prefix = {1: "total_", 2: ""}[version]
    stat = f"anon 0\n{prefix}inactive_file {cached * MIB - 4096}\n{prefix}active_file 4096\n"
    limit = limit if limit == "max" else limit * MIB
    return {names[0]: f"{limit}\n", names[1]: f"{used * MIB}\n", "memory.stat": stat}


def at(folder, files):
    return {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()}


STEP, NO_LIMIT = "system.slice/slurmstepd.scope/job_7/step_0", 2**43  # version 1's way to say max
UNLIMITED = group("max", 50, 10)
KERNELS = {
    "no limit": ({"proc/self/cgroup": "0::/a\n"} | at("a", UNLIMITED), None, 500),
    "a job's limit, which the step inherits": (
        {"proc/self/cgroup": f"0::/{STEP}\n"}
        | at(STEP, UNLIMITED)
        | at(STEP.removesuffix("/step_0"), group(100, 70, 30))
        | at("system.slice", group(400, 90, 30)),
        100,
        60,
    ),
    "the step's own, lower than the job's": (
        {"proc/self/cgroup": f"0::/{STEP}\n"}
        | at(STEP, group(80, 30, 10))
        | at(STEP.removesuffix("/step_0"), group(100, 40, 10)),
        80,
        60,
    ),
    "the other steps of a job leave less": (
        {"proc/self/cgroup": f"0::/{STEP}\n"}
        | at(STEP, group(80, 30, 10))
        | at(STEP.removesuffix("/step_0"), group(100, 90, 10)),
        80,
        20,
    ),
    "a container that sees its own group as the root": (
        {"proc/self/cgroup": "0::/\n"} | at("", group(64, 4, 2)),
        64,
        62,
    ),
    "version 1 beside an empty version 2": (
        {"proc/self/cgroup": "4:cpu,memory:/slurm/job_7\n1:name=systemd:/\n0::/\n"}
        | at("memory/slurm/job_7", group(100, 70, 30, version=1))
        | at("memory", group(NO_LIMIT, 300, 30, version=1)),
        100,
        60,
    ),
    "version 1 in a container that does not see its group's place": (
        {"proc/self/cgroup": "4:memory:/docker/abc\n"} | at("memory", group(64, 4, 2, version=1)),
        64,
        62,
    ),
    "full": ({"proc/self/cgroup": "0::/a\n"} | at("a", group(50, 50, 1) | {"memory.current": f"{60 * MIB}\n"}), 50, 0),
}


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A function that makes a kernel of files: {path: text}."""

    def make(files):
        monkeypatch.setattr(host_memory, "ROOT", tmp_path)
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)

    return make


@pytest.mark.parametrize("name", KERNELS)
def test_memory_is_what_the_tightest_limit_leaves(name, kernel):
    files, limit, free = KERNELS[name]
    kernel(MACHINE | files)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory.total() == (physical if limit is None else limit * MIB)
    assert host_memory.free() == free * MIB


def test_where_the_kernel_says_nothing(kernel):
    """As on macOS."""
    kernel({})
    assert host_memory.total() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory.free() == math.inf


def test_ranks_share_what_their_job_has_left(kernel, monkeypatch):
    """So that a model too big for --mem is refused, before the kernel kills it."""
    kernel(MACHINE | KERNELS["a job's limit, which the step inherits"][0])
    monkeypatch.setattr(meters.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        meters.dist, "all_gather_object", lambda every, mine: every.__setitem__(slice(None), [mine] * 2)
    )
    for backend, free in {"gloo": 60 * MIB / 2, "fake": 60 * MIB}.items():  # in a simulated world no other rank runs
        me = SimpleNamespace(node="a", backend=backend)
        assert meters.free_memory_of_a_rank(me, torch.device("cpu")) == free
