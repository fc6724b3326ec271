# SPDX-License-Identifier: BSD-3-Clause
"""The practice cluster with a network: two hosts, a link of a chosen speed, and how long collectives take over it."""

import json
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from commands import call, run_job
from labkit import UserError
from labkit.running import practice_link
from labkit.running.lab import Lab
from planner.timing import cost
from test_practice_cluster import BASH, SCRIPT, TEMPLATES, cluster, processes_of

SOURCE = TEMPLATES.parent
NODES = r"198\.18\.\d\.[12]"


def up(folder, rate="200mbit", **options):
    return call(BASH, SCRIPT, "up", "--link", rate, folder, **options)


def interfaces(folder):
    """The numbers, which are never used again, of what a cluster has added to this machine's network."""
    aliases = Path("/sys/class/net").glob("fsdp*/ifalias")
    return {int(each.with_name("ifindex").read_text()) for each in aliases if each.read_text().strip() == str(folder)}


def nothing_left(folder, made):
    """Of a cluster that had made those interfaces. Processes hold the networks: without them there are none."""
    there = {int(path.read_text()) for path in Path("/sys/class/net").glob("*/ifindex")}
    return not folder.exists() and not processes_of(folder) and not made & there


def refused(run, folder):
    """One sentence, and nothing made. Returns the sentence."""
    assert run.returncode == 2, run.stderr
    assert run.stderr.count("\n") == 1 and not run.stdout, run.stderr
    assert nothing_left(folder, set())
    return run.stderr


@pytest.fixture
def folder(networks_allowed):
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as parent:
        folder = Path(parent) / "cluster"
        yield folder
        cluster("down", folder)


# Up, another speed, down


def test_up_relink_down_leave_nothing(folder):
    assert (started := up(folder)).returncode == 0, started.stderr
    daemons = processes_of(folder)
    assert len(daemons) >= 6  # munged, slurmctld (and its helper), two slurmd, and what holds the two networks
    assert len(made := interfaces(folder)) == 2  # a control link to each node

    env = call(BASH, "-c", f". {folder}/env.sh && env").stdout.splitlines()
    # Ranks on this machine itself meet as ever; those on the nodes are told otherwise there.
    assert {f"FSDP_LABS_LINK={folder}/link", "GLOO_SOCKET_IFNAME=lo"} <= set(env)
    shape = f". {folder}/env.sh && cd / && srun -N2 tc qdisc show dev eth0"
    for rate, shown in {
        "200mbit": "rate 200Mbit",
        "1gbit": "rate 1Gbit",
        "none": "noqueue",
        "50mbit": "rate 50Mbit",
    }.items():
        again = up(folder, rate)
        assert again.returncode == 0 and f"the link between the nodes: {rate}." in again.stderr
        assert (folder / "link").read_text() == f"{rate}\n"
        both = call(BASH, "-c", shape)
        assert both.stdout.count(shown) == 2, both.stdout + both.stderr
    assert (plain := cluster("up", folder)).returncode == 0 and "already up" in plain.stderr
    bad = up(folder, "fast")
    assert bad.returncode == 2 and (folder / "link").read_text() == "50mbit\n"
    assert processes_of(folder) == daemons  # Slurm was never restarted

    job = call(BASH, "-c", f'. {folder}/env.sh && cd / && sbatch -N2 --output=/dev/null --wrap "srun sleep 300"')
    assert job.returncode == 0
    down = cluster("down", folder)
    assert down.returncode == 0, down.stderr
    assert nothing_left(folder, made)


def test_two_clusters_have_addresses_of_their_own(folder, linked):
    assert (started := up(folder)).returncode == 0, started.stderr
    mine = call(BASH, "-c", f". {folder}/env.sh && cd / && sinfo -h -N -p gpu -o %N").stdout.split()
    others = call("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N", env=linked).stdout.split()
    assert len(mine) == len(others) == 2 and not set(mine) & set(others)


def test_one_that_broke_off_half_way_is_cleared_away(folder, tmp_path):
    broken = tmp_path / "slurmctld"
    broken.write_text("#!/bin/sh\nkill -KILL $PPID\n")
    broken.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert up(folder, env=env).returncode == -9
    made = interfaces(folder)
    assert len(made) == 2

    again = up(folder)
    assert again.returncode == 0 and "clearing away" in again.stderr, again.stderr
    made |= interfaces(folder)
    assert cluster("down", folder).returncode == 0
    assert nothing_left(folder, made)

    assert up(folder, env=env).returncode == -9
    made = interfaces(folder)
    assert cluster("down", folder).returncode == 0
    assert nothing_left(folder, made)


def test_down_of_a_dead_one_spares_the_one_that_has_its_number(networks_allowed, tmp_path):
    """In a network of its own, with links that are named alike: as after a restart of the machine."""
    dead, live = tmp_path / "dead", tmp_path / "live"
    dead.mkdir()
    (dead / "pids").write_text("999999999 network.1\n")
    (dead / "network").write_text("0\n")  # where it is remembered by its number
    links = f"""
mount -t sysfs sysfs /sys
ip link add fsdp0n1 type veth peer name x; ip link set fsdp0n1 alias "{live}"
ip link add fsdp1n1 type veth peer name y; ip link set fsdp1n1 alias "{dead}"
{BASH} {SCRIPT} down {dead}
ls /sys/class/net"""
    run = call("unshare", "--net", "--mount", BASH, "-ec", links)
    assert run.returncode == 0, run.stderr
    assert {"fsdp0n1", "x"} <= set(run.stdout.split()) and not {"fsdp1n1", "y"} & set(run.stdout.split())


def test_one_that_is_up_without_a_network_stays_as_it_is(folder):
    assert cluster("up", folder).returncode == 0
    daemons = processes_of(folder)
    run = up(folder)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "first take it down" in run.stderr
    assert processes_of(folder) == daemons


def test_make_passes_the_link_on():
    for words, command in {
        ("slurm",): "up",
        ("slurm", "LINK=200mbit"): "up --link 200mbit",
        ("slurm-down",): "down",
    }.items():
        shown = call("make", "--no-print-directory", "-n", *words, cwd=SOURCE.parent)
        assert shlex.split(shown.stdout) == ["source_code/slurm/practice_cluster.sh", *command.split()]


# Bad input


@pytest.mark.parametrize("rate", ["fast", "", "200", "200 mbit", "0mbit", "5mbit", "1000gbit", "-1mbit", "1gbit; id"])
def test_a_bad_rate(networks_allowed, tmp_path, rate):
    assert "a rate from 10mbit to 999gbit" in refused(up(tmp_path / "cluster", rate), tmp_path / "cluster")


SCRIPTS = {
    "addresses in use": 'ip link add used up type veth; ip addr add 198.18.0.1/15 dev used; exec "$@"',
    "without ip and tc": """
for c in ip tc; do mount --bind /dev/null "$(realpath "$(type -P $c)")"; done
exec "$@"
""",
}
PREFIXES = {
    "without root": (["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"], "put sudo before the command"),
    "in a container": (["setpriv", "--bounding-set=-net_admin"], "a container needs --cap-add NET_ADMIN"),
    "without namespaces": (["setpriv", "--bounding-set=-sys_admin"], "--cap-add SYS_ADMIN"),
    "addresses in use": (
        ["unshare", "--net", BASH, "-ec", SCRIPTS["addresses in use"], "-"],
        "the addresses 198.18.0.1 to 198.18.9.254 are all in use here",
    ),
    "without ip and tc": (
        ["unshare", "--mount", BASH, "-ec", SCRIPTS["without ip and tc"], "-"],
        "(no ip, no tc), so first type: sudo apt-get install --no-install-recommends iproute2",
    ),
}


@pytest.mark.parametrize("situation", PREFIXES)
def test_where_there_can_be_no_network(networks_allowed, tmp_path, situation):
    prefix, sentence = PREFIXES[situation]
    folder = tmp_path / "cluster"
    shutil.copytree(TEMPLATES, tmp_path / "slurm")  # where another user may read it
    for path in (tmp_path.parent.parent, tmp_path.parent, tmp_path):
        path.chmod(0o755)
    run = call(*prefix, BASH, tmp_path / "slurm" / SCRIPT.name, "up", "--link", "200mbit", folder)
    assert sentence in refused(run, folder)


def test_changing_a_link_where_there_is_none(monkeypatch):
    monkeypatch.delenv("FSDP_LABS_LINK", raising=False)
    assert practice_link.link() is None and practice_link.interface_bytes() is None
    with pytest.raises(UserError, match="make slurm LINK"):
        practice_link.change_link("100mbit")


# Every way to start ranks


def places(output):
    """{rank: (local rank, node)} of what hello.py printed."""
    return {
        int(rank): (int(local), node)
        for rank, local, node in re.findall(rf"rank +(\d) of 4: local rank (\d) on node ({NODES}),", output)
    }


def check_places(output):
    found = places(output)
    assert sorted(found) == [0, 1, 2, 3] and "as it should be" in output, output
    assert [found[rank][0] for rank in range(4)] == [0, 1, 0, 1]
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1]


def test_srun_starts_ranks_on_both_hosts(linked):
    run = call("srun", "-N2", "--ntasks-per-node=2", "python", "hello.py", env=linked, cwd=SOURCE)
    check_places(run.stdout)
    assert run.stderr == ""  # no complaint from PyTorch about the names of the nodes


TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint"


def test_srun_starts_a_torchrun_on_each_host(linked):
    first = call("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N", env=linked).stdout.split()[0]
    words = f"srun -N2 --ntasks-per-node=1 {TORCHRUN} {first}:29500 hello.py".split()
    run = call(*words, env=linked, cwd=SOURCE, timeout=100)
    check_places(run.stdout)


def test_sbatch_starts_a_torchrun_on_each_host(linked, tmp_path):
    job = tmp_path / "job.sbatch"
    host = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    job.write_text(f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1\nsrun {TORCHRUN} {host}:29500 hello.py\n")
    states, output = run_job(job, env=linked, cwd=SOURCE, logs=tmp_path)
    assert states == ["COMPLETED"], output
    check_places(output)


def test_the_notebooks_functions_run_on_both_hosts(linked):
    code = """
import json
from labkit.running import launch
options = dict(ranks=4, nodes=2, strategy="ddp", data="mnist-5k", max_steps=2, global_batch_size=8)
ran = launch.run("mnist_fsdp.py", **options)
queued = launch.submit("mnist_fsdp.py", **options).wait()
print(json.dumps([ran["nodes"], queued["nodes"]]))
"""
    run = call(sys.executable, "-c", code, env=linked, cwd=SOURCE, timeout=200)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[2, 2]"


# Arithmetic

CALLS = {  # kind, and how many ranks take part, with the bytes that leave a node of two ranks for each of the tensor's
    ("all-reduce", 4): 1.5,
    ("all-gather", 4): 0.75,
    ("reduce-scatter", 4): 1.5,
    ("all-reduce", 2): 2.0,  # two at once, between the first ranks of the nodes, and between the second
    ("all-gather", 2): 0.0,  # within a node
}


def entry(kind, ranks, size=1.0, count=1):
    return {"kind": kind, "count": count, "bytes": size, "ranks": ranks}


def plan(ranks, **config):
    return Lab(device="cpu").plan("gpt_fsdp.py", ranks=ranks, **config)


def test_bytes_that_leave_a_node():
    for (kind, ranks), share in CALLS.items():
        assert cost.inter_node_bytes([entry(kind, ranks, 8e6, 3)], plan(4), 2, "gloo") == 3 * 8e6 * share
    # a record does not say how many take part, but its configuration does
    hybrid = [{"kind": "all-gather", "count": 2, "bytes": 8.0}, {"kind": "all-reduce", "count": 1, "bytes": 4.0}]
    assert cost.inter_node_bytes(hybrid, plan(4, mesh="2x2"), 2) == 8.0
    assert cost.inter_node_bytes(hybrid[1:], plan(4, strategy="ddp"), 2) == 6
    assert cost.inter_node_bytes(hybrid[:1], plan(4), 2) == 2 * 6
    assert cost.inter_node_bytes([entry("reduce-scatter", 8)], plan(8), 4) == 7 / 8
    assert cost.inter_node_bytes([entry("all-gather", 2)], plan(8), 4) == 0  # reshard_after_forward=2
    assert cost.inter_node_bytes([entry("all-gather", 2)], plan(6), 3) == 1 / 2  # ranks 2 and 3 are on two nodes


def test_speeds():
    assert practice_link.bytes_per_second("200mbit") == pytest.approx(25e6 * 8948 / 9014)
    assert practice_link.bytes_per_second("1gbit") == 5 * practice_link.bytes_per_second("200mbit")
    assert practice_link.bytes_per_second("none") == math.inf
    assert practice_link.burst_bytes("100mbit") == 66_000 and practice_link.burst_bytes("1gbit") == 250_000
    assert practice_link.burst_bytes("100mbit", pause=1e-3) == pytest.approx(12_500 * 8948 / 9014)
    assert practice_link.burst_bytes("none") == 0


# The law: the time of a collective is latency + bytes / rate

MEASURE = """
import json, os, sys, time
import torch, torch.distributed as dist
from labkit.running import practice_link
from labkit.running import ranks

rank, _, world = ranks.placement(dict(os.environ))
dist.init_process_group("gloo")
pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
groups = {4: dist.group.WORLD, 2: pairs[rank % 2]}

def collective(kind, n, numbers):
    whole, part = torch.zeros(numbers), torch.zeros(numbers // n)
    return {
        "all-reduce": lambda: dist.all_reduce(whole, group=groups[n]),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part, group=groups[n]),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=groups[n]),
    }[kind]

def times(call, count):
    taken = []
    for _ in range(count):
        dist.barrier()
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return taken

def shortest(taken):
    "Of the times that the slowest rank took. The link sets the least; what a busy machine adds comes and goes."
    every = [None] * world
    dist.all_gather_object(every, taken)
    return min(map(max, zip(*every)))

result = []
for kind, n in json.loads(sys.argv[1]):
    small, large = collective(kind, n, 64), collective(kind, n, 2**20)
    times(small, 2), times(large, 1)
    latency = shortest(times(small, 21))
    dist.barrier()
    before = practice_link.interface_bytes()
    taken = times(large, 6)
    dist.barrier()
    after = practice_link.interface_bytes()
    moved = [None] * world
    dist.all_gather_object(moved, [after[way] - before[way] for way in ("sent", "received")])
    result.append({"latency": latency, "seconds": shortest(taken), "moved": moved, "link": practice_link.link()})
if rank == 0:
    print(json.dumps(result), flush=True)
dist.barrier()
os._exit(0)  # as labkit.running.ranks does: a tidy way out can end in gloo's threads
"""
SIZE = 4 * 2**20  # bytes of the tensor in MEASURE: 84 ms of a link of 100 Mbit/s and more, latency is one or two
REPEATED = 6


@pytest.fixture(scope="module")
def measured(linked, tmp_path_factory):
    """{rate: {call: what MEASURE found}}, at two speeds of the running cluster's link."""
    script = tmp_path_factory.mktemp("measure") / "measure.py"
    script.write_text(MEASURE)
    calls = [call for call, share in CALLS.items() if share]
    env = linked | {"PYTHONPATH": str(SOURCE)}
    result = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_LABS_LINK", linked["FSDP_LABS_LINK"])
        for rate in ("200mbit", "100mbit"):
            practice_link.change_link(rate)
            assert practice_link.link() == rate
            words = ["srun", "-N2", "--ntasks-per-node=2", "python", script, json.dumps(calls)]
            run = call(*words, env=env, cwd=SOURCE, timeout=150)
            assert run.returncode == 0, run.stderr
            result[rate] = dict(zip(calls, json.loads(run.stdout), strict=True))
    return result


@pytest.mark.parametrize("kind, ranks", [call for call, share in CALLS.items() if share])
@pytest.mark.parametrize("rate", ["200mbit", "100mbit"])
def test_no_call_is_shorter_than_latency_and_bytes_over_rate(measured, rate, kind, ranks):
    """And how much longer one takes depends on what else the machine does."""
    found = measured[rate][kind, ranks]
    assert found["link"] == rate
    seconds = cost.inter_node_bytes([entry(kind, ranks, SIZE)], plan(4), 2, "gloo") / practice_link.bytes_per_second(
        rate
    )
    assert found["seconds"] > 0.85 * (found["latency"] + seconds)


@pytest.mark.parametrize("kind, ranks", [call for call, share in CALLS.items() if share])
def test_bytes_at_the_interface_are_those_predicted(measured, kind, ranks):
    predicted = cost.inter_node_bytes([entry(kind, ranks, SIZE, REPEATED)], plan(4), 2, "gloo")
    for rate in measured:
        for sent, received in measured[rate][kind, ranks]["moved"]:
            assert sent == pytest.approx(predicted, rel=0.05)
            assert received == pytest.approx(predicted, rel=0.05)
