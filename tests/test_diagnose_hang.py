# SPDX-License-Identifier: BSD-3-Clause
"""Whoever the others wait for is named, with the line it is at; from gloo's records, and from dumps as NCCL writes them."""

import contextlib
import json
import os
import pickle
import re
import resource
import signal
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import diagnose_hang
import psutil
import pytest
import torch
import torch.distributed as dist
from commands import script
from forked import by_value, forked
from labkit import UserError
from labkit.measuring import flight_recorder
from labkit.running import fork_server, launch, notebook_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HERE = launch.Cluster(launcher="local")
QUIET = 1.0  # seconds


def shared(me, folder, of_this_rank):
    """Two all-reduces, then what this test has for the rank, on a group with a short time-out."""
    with flight_recorder.recorder(folder, quiet=QUIET):
        group = dist.new_group(timeout=timedelta(seconds=4))
        for _ in range(2):
            dist.all_reduce(torch.ones(4), group=group)
        of_this_rank(me, group)


def skips(me, group):
    if me.rank == 2:
        asleep()
    dist.all_reduce(torch.ones(4), group=group)


def asleep():
    time.sleep(600)


def calls_another(me, group):
    if me.rank == 2:
        dist.all_gather_into_tensor(torch.ones(16), torch.ones(4), group=group)
    dist.all_reduce(torch.ones(4), group=group)


def has_another_shape(me, group):
    dist.all_reduce(torch.ones(3 if me.rank == 1 else 4), group=group)


def is_killed(me, group):
    if me.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4), group=group)


def raises(me, group):
    if me.rank == 1:
        raise ValueError("no such file")
    dist.all_reduce(torch.ones(4), group=group)


def holds_the_interpreter(me, group):
    if me.rank == 0:
        re.match(r"(a+)+b", "a" * 40)  # for ever, and no other thread of this rank can run
    dist.all_reduce(torch.ones(4), group=group)


def agree(me, group):
    """Also where only one rank has a list."""
    dist.all_reduce(torch.ones(4), group=group)
    parts = [torch.ones(4) for _ in range(me.world_size)] if me.rank == 0 else None
    dist.gather(torch.ones(4), parts, group=group)
    dist.scatter(torch.ones(4), parts, group=group)
    dist.all_gather_object([None] * me.world_size, "x" * me.rank, group=group)


def after(folder, case) -> str:
    """What is said of a run of four ranks in which ``case`` happens. It has 60 s in all."""
    by_value(shared)
    try:
        notebook_ranks.on_ranks(shared, str(folder), case, ranks=4, cluster=HERE, timeout=60)
    except launch.RunFailed:
        assert case is not agree
    return diagnose_hang.report(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "first", "places"),
    [
        (skips, "rank 2 did not arrive at collective 3 ", {"skips": "ranks 0-1, 3 called", "asleep": "rank 2 is at"}),
        (calls_another, "rank 2 and ranks 0-1, 3 differ in what they called at collective 3 ", {"calls_another": ""}),
        (has_another_shape, "rank 1 and ranks 0, 2-3 differ in the shape of the tensors at collective 3 ", {}),
        (is_killed, "rank 3 is dead", {}),
        (raises, "rank 1 failed: ValueError: no such file", {"raises": "rank 1 failed"}),
        (holds_the_interpreter, "these were ended from outside, ", {"holds_the_interpreter": "rank 0"}),
        (agree, "no rank is missing", {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_one_that_is_missing_is_named_with_its_line(case, first, places, tmp_path):
    said = after(tmp_path, case)
    assert said.startswith(first), said
    for function, who in places.items():
        lines = said.splitlines()
        assert any(f" in {function}" in below and who in line for line, below in pairwise(lines)), said


def receives(me, group):
    if me.rank == 0:
        asleep()
    if me.rank == 1:
        dist.recv(torch.ones(4), 0, group=group)
    dist.all_reduce(torch.ones(4), group=group)


@pytest.mark.long
def test_a_wait_that_gloo_does_not_record_is_pointed_at(tmp_path):
    said = after(tmp_path, receives)
    assert said.startswith("ranks 0-1 did not arrive at collective 3 "), said
    of_rank_0, _, of_rank_1 = said.partition("  rank 1 ")
    assert "in asleep" in of_rank_0 and "it waits there" not in of_rank_0, said
    assert " in receives" in of_rank_1 and "it waits there, in recv() of torch.distributed" in of_rank_1, said


def on_a_mesh(me, folder, case):
    """HSDP on 2 x 2 ranks; before the second step rank 3 does what ``case`` is."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    with flight_recorder.recorder(folder, quiet=QUIET):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for name in mesh.mesh_dim_names:
            _set_pg_timeout(timedelta(seconds=4), mesh[name].get_group())
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
        for step in range(2):
            if step == 1 and me.rank == 3:
                if case == "leaves":
                    return
                if case == "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                asleep()
            model(torch.ones(2, 8)).sum().backward()


@pytest.mark.long
@pytest.mark.parametrize("case", ["sleeps", "leaves", "is killed"])
def test_of_a_mesh_the_rank_is_named_for_which_all_wait(case, tmp_path):
    by_value(on_a_mesh)
    with pytest.raises(launch.RunFailed):
        notebook_ranks.on_ranks(on_a_mesh, str(tmp_path), case, ranks=4, cluster=HERE, timeout=60)
    said = diagnose_hang.report(tmp_path)
    if case == "is killed":
        assert said.startswith("rank 3 is dead: process ") and "did not arrive" not in said, said
        return
    first, _, rest = said.partition("these wait because of that:\n")
    assert said.startswith("rank 3 did not arrive at collective 3 of group mesh_shard (ranks 2-3)\n  rank 2 called "), (
        said
    )
    assert ("in asleep" if case == "sleeps" else "rank 3 had left (finished)") in first, said
    assert re.search(r"^  rank 0 is waiting in group mesh_replicate, collective \d, for rank 2: all_reduce", rest), said
    assert said.count("rank 3 did not arrive") == said.count("did not arrive") == 2, said


def destroys(me, folder):
    """Rank 0 is done, and has destroyed its process groups; rank 1 calls one collective more than it."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    with flight_recorder.recorder(folder, quiet=QUIET):
        dist.all_reduce(torch.ones(4), group=group)
        if me.rank == 0:
            return dist.destroy_process_group(group)
        dist.all_reduce(torch.ones(4), group=group)


@pytest.mark.long
def test_a_rank_that_has_destroyed_its_groups_is_still_compared(tmp_path):
    by_value(destroys)
    with pytest.raises(launch.RunFailed):
        notebook_ranks.on_ranks(destroys, str(tmp_path), ranks=2, cluster=HERE, timeout=60)
    said = diagnose_hang.report(tmp_path)
    assert (
        said.startswith("rank 0 did not arrive at collective 2 of group ") and "rank 0 had left (finished)" in said
    ), said


def pauses(me, folder, is_killed_at_once):
    """Rank 2 is quiet for so long that all ranks leave what they have; it goes on, and is killed."""
    kept = Path(folder, "flight_2")
    with flight_recorder.recorder(folder, quiet=QUIET):
        dist.all_reduce(torch.ones(4))
        if me.rank == 2:
            until(kept.exists)
        dist.all_reduce(torch.ones(4))
        if me.rank == 2:
            if not is_killed_at_once:
                until(lambda: not kept.exists())
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))


def until(true):
    end = time.monotonic() + 30
    while not true() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("is_killed_at_once", [True, False])
def test_a_rank_that_paused_before_it_was_killed_is_dead(is_killed_at_once, tmp_path):
    by_value(pauses)
    with pytest.raises(launch.RunFailed):
        notebook_ranks.on_ranks(pauses, str(tmp_path), is_killed_at_once, ranks=3, cluster=HERE, timeout=60)
    assert is_killed_at_once or not (tmp_path / "flight_2").exists()
    said = diagnose_hang.report(tmp_path)
    assert said.startswith("rank 2 is dead: process") and "did not arrive" not in said, said


def computes_for_long(folder) -> str:
    """What is written of a rank that runs Python, and calls no collective, for longer than ``quiet``."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    with flight_recorder.recorder(folder, quiet=QUIET):
        until(Path(folder, "flight_0").exists)
        return Path(folder, "where_0").read_text()


def test_stacks_that_change_are_read_while_they_stand_still(tmp_path):
    """Else the process may crash: the watcher writes them, which holds the interpreter; faulthandler's thread cannot."""
    text = forked(computes_for_long, tmp_path)
    assert f"\n{flight_recorder.IS_QUIET} " in text and " in computes_for_long\n" in text and "Timeout" not in text, (
        text
    )


def is_written_to_by_a_handler(folder) -> str:
    """Return a rank's file after a call of a collective, if something else than the watcher has written to it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    where = Path(folder, "where_0")
    with flight_recorder.recorder(folder, quiet=QUIET):
        with where.open("a") as file:
            file.write("a handler's stack")
        os.utime(where, (0, 0))
        dist.all_reduce(torch.ones(4))
        until(lambda: where.stat().st_mtime > 0)  # heartbeats of the watcher,
        os.utime(where, (0, 0))
        until(lambda: where.stat().st_mtime > 0)  # the second of which has seen the call
        return where.read_text()


def test_the_stack_of_a_signal_that_comes_right_after_a_collective_stays(tmp_path):
    assert "a handler's stack" in forked(is_written_to_by_a_handler, tmp_path)


def raises_without_room(folder) -> str:
    """What a training that fails says, where nothing more can be written."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(ValueError) as error, flight_recorder.recorder(folder, quiet=0.1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # bytes a file may have
        time.sleep(0.3)  # the watcher, too, wants to write
        raise ValueError("the training's own")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(error.value)


def test_a_recorder_that_cannot_write_changes_nothing(tmp_path):
    assert forked(raises_without_room, tmp_path) == "the training's own"


@contextlib.contextmanager
def rank_1(code: str, folder: Path):
    """Rank 1 that runs a program with the recorder, into folder/flight; forked, as it need not import torch again."""
    if not fork_server.possible():
        pytest.skip("forks, which Linux can")
    (folder / "rank.py").write_text(code)
    words = [sys.executable, "-u", str(folder / "rank.py"), str(launch.SOURCE), str(folder / "flight")]
    with (folder / "said").open("w") as said:
        rank = fork_server.start(words, launch.SOURCE, os.environ | {"RANK": "1"}, said, said)
        try:
            yield rank
        finally:
            if rank.poll() is None:
                os.kill(rank.pid, signal.SIGKILL)
                rank.wait(60)


STUCK = """
import re, sys
sys.path.insert(0, sys.argv[1])
from labkit.measuring import flight_recorder
with flight_recorder.recorder(sys.argv[2], quiet=0.4):
    re.match(r"(a+)+b", "a" * 60)
"""


def test_a_rank_that_holds_the_interpreter_is_told_and_says_where_when_it_is_ended(tmp_path):
    with rank_1(STUCK, tmp_path) as rank:
        until((where := tmp_path / "flight" / "where_1").exists)
        until(lambda: time.time() - where.stat().st_mtime > 0.5)
        said = diagnose_hang.report(tmp_path / "flight")
        assert said.startswith("rank 1 is there (process ") and "none of its Python runs" in said, said
        os.kill(rank.pid, signal.SIGTERM)
        rank.wait(60)
    said = diagnose_hang.report(tmp_path / "flight")
    assert said.startswith("these were ended from outside") and "rank.py:6 in <module>:  re.match" in said, said


WAITING = """
import sys, time
sys.path.insert(0, sys.argv[1])
from labkit.measuring import flight_recorder
with flight_recorder.recorder(sys.argv[2]):
    print("in", flush=True)
    time.sleep(600)
"""


def test_a_process_that_is_stopped_is_told_from_one_that_is_dead(tmp_path):
    flight = tmp_path / "flight"
    with rank_1(WAITING, tmp_path) as rank:
        until((tmp_path / "said").read_text)
        assert diagnose_hang.report(flight).startswith(f"rank 1 is there (process {rank.pid} on ")
        os.kill(rank.pid, signal.SIGSTOP)
        until(lambda: psutil.Process(rank.pid).status() == psutil.STATUS_STOPPED)
        assert diagnose_hang.report(flight).startswith(f"rank 1 is stopped: process {rank.pid} ")
        about = flight / "where_1"  # as if it were of another node: then its date tells
        about.write_text(about.read_text().replace(Path("/proc/sys/kernel/random/boot_id").read_text()[:36], "x"))
        assert diagnose_hang.report(flight).startswith(f"rank 1 is there (process {rank.pid} on ")
        os.utime(about, (time.time() - 61,) * 2)
        assert diagnose_hang.report(flight).startswith(f"rank 1 is dead or stopped: process {rank.pid} ")


def test_a_rank_of_another_node_without_a_sign_of_life_is_dead_or_stopped(tmp_path):
    dumped(tmp_path, [[entry(1), entry(2, state="started")]] * 2 + [[entry(1)]], flight_recorder.FLIGHT)
    for rank, age in enumerate((0, 1, 30)):
        where = tmp_path / f"where_{rank}"
        where.write_text(f'process 7 on node-{rank}\n{{"beat": 1, "on": null}}\n')
        os.utime(where, (10**9 - age,) * 2)
    said = diagnose_hang.report(tmp_path)
    assert said.startswith("rank 2 is dead or stopped: process 7 on node-2 "), said
    assert "  ranks 0-1 are waiting in group default_pg, collective 2, for rank 2: all_reduce of [8] Float" in said


@pytest.mark.parametrize(
    ("left", "why"), [("left: ValueError: bad\n", "perhaps the launcher ended it"), ("", "see the launcher's output")]
)
def test_a_rank_that_is_gone_may_have_been_ended_because_another_one_failed(left, why, tmp_path):
    (tmp_path / "where_0").write_text(f'process 1 on here\n{{"beat": 1, "on": null}}\n{left}')
    known = {"on": flight_recorder._machine(), "pid": os.getpid(), "began": "another time"}
    (tmp_path / "where_1").write_text(f"process 2 on here\n{json.dumps(known)}\n")
    os.utime(tmp_path / "where_0", (1, 1))
    said = diagnose_hang.report(tmp_path)
    assert re.search(f"rank 1 is dead: process 2 on here ended without a word; .*{why}", said), said


@pytest.mark.parametrize("age", [3, -3])
def test_a_record_says_nothing_of_what_came_after_it(age, tmp_path):
    """Ended before the recorder saw that it had gone on, rank 1 lacks a collective in its record alone."""
    waiting = [entry(1), entry(2, state="started")]
    dumped(tmp_path, [waiting, [entry(1)]], flight_recorder.FLIGHT)
    for rank in range(2):
        stack = '  File "/home/me/train.py", line 7 in train\n'
        (tmp_path / f"where_{rank}").write_text(f"process 7 on node\n{{}}\n{flight_recorder.SIGNAL}\n{stack}")
        os.utime(tmp_path / f"flight_{rank}", (10**9 - age,) * 2)
    said = diagnose_hang.report(tmp_path)
    assert ("rank 1 did not arrive at collective 2 " in said) == (age < 0), said
    assert ("these were ended from outside" in said) == (age > 0), said


def test_a_rank_that_was_ended_in_the_recorder_is_at_no_line_of_the_program(tmp_path):
    frames = [(flight_recorder.__file__, 90, "recorder"), ("/usr/lib/python3.12/contextlib.py", 158, "__exit__")]
    frames.append(("/home/me/train.py", 254, "main"))
    stack = "\n".join(f'  File "{file}", line {line} in {function}' for file, line, function in frames)
    (tmp_path / "where_0").write_text(f"process 7 on node-1\n{{}}\n{flight_recorder.SIGNAL}\n{stack}\n")
    said = diagnose_hang.report(tmp_path)
    assert said.startswith("these were ended from outside, "), said
    assert said.endswith(":\n  rank 0"), said


def recorded(folder, environ: dict, of_group=None, group_is_first=True) -> list[str]:
    """The files that a recorder leaves, in a process of its own. of_group: its rank in its process group, if any."""
    for name in ("RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        os.environ.pop(name, None)
    os.environ.update(environ)

    def join(now):
        if now and of_group is not None:
            dist.init_process_group("fake", store=dist.HashStore(), rank=of_group, world_size=8)

    join(group_is_first)
    try:
        with flight_recorder.recorder(folder):
            join(not group_is_first)
    except UserError as error:
        return [str(error)]
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("environ", "of_group", "left"),
    [
        ({}, 3, ["flight_3", "where_3"]),
        ({"RANK": "0"}, 3, ["flight_3", "where_3"]),
        ({"RANK": "5"}, None, ["flight_5", "where_5"]),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, None, ["flight_2", "where_2"]),
        ({"SLURM_PROCID": "0"}, None, ["the flight recorder does not know its rank: "]),
        ({"RANK": "two"}, None, ["the flight recorder does not know its rank: "]),
    ],
)
def test_the_recorder_knows_its_rank_or_refuses(environ, of_group, left, tmp_path):
    found = forked(recorded, tmp_path, environ, of_group)
    assert [name[: len(start)] for name, start in zip(found, left, strict=True)] == left


def test_a_record_is_not_left_in_the_name_of_another_rank(tmp_path):
    assert forked(recorded, tmp_path, {"RANK": "0"}, 1, False) == ["where_0"]
    assert "the environment's rank is 0, the process group 1" in (tmp_path / "where_0").read_text()


# Dumps in the form that NCCL's have: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html


def entry(number, kind="all_reduce", shape=(8,), state="completed", dtype="Float", line=7) -> dict:
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{kind}", "time_created_ns": 10**18 + number,
        "input_sizes": [list(shape)], "input_dtypes": [dtype], "output_sizes": [list(shape)], "output_dtypes": [dtype],
        "state": state, "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": False,
        "timeout_ms": 600000, "is_p2p": False,
        "frames": [{"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/c.py", "line": 1},
                   {"name": "train", "filename": "/home/me/train.py", "line": line}],
    }  # fmt: skip


def dumped(folder: Path, of_ranks: list[list[dict]], prefix="nccl_trace_rank_", world=None) -> str:
    ranks = list(range(world or len(of_ranks)))
    for rank, entries in enumerate(of_ranks):
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(ranks)}}
        dump = {"version": "2.10", "pg_config": config, "nccl_version": "2.27.5", "pg_status": {}, "entries": entries}
        (folder / f"{prefix}{rank}").write_bytes(pickle.dumps(dump))
    return diagnose_hang.report(folder, prefix)


def test_a_dump_of_nccl_names_who_did_not_arrive_and_its_last_line(tmp_path):
    waiting = [entry(4), entry(5), entry(6, state="started")]
    said = dumped(tmp_path, [waiting, waiting, [entry(4), entry(5, line=99)]])
    assert said.startswith("rank 2 did not arrive at collective 6 of group default_pg (ranks 0-2)")
    last = "rank 2 last called collective 5 of group default_pg, all_reduce of [8] Float\n      train.py:99 in train"
    assert "train.py:7 in train" in said and last in said


def test_another_form_of_as_many_numbers_and_uneven_sizes_are_no_difference(tmp_path):
    even = [entry(1), entry(2, "all_to_all", state="started")]
    uneven = [entry(1, shape=(2, 4)), entry(2, "all_to_all", (5,), "started")]
    assert dumped(tmp_path, [even, uneven]).startswith("no rank is missing")


def test_differences_that_nccl_went_on_with_are_told_and_so_is_the_hang_after_them(tmp_path):
    others = [entry(1), entry(2), entry(3, state="started")]
    said = dumped(tmp_path, [others, others, [entry(1), entry(2, shape=(3,))]])
    assert said.startswith("rank 2 and ranks 0-1 differ in the shape of the tensors at collective 2 "), said
    assert "went on all the same, probably with wrong numbers\nrank 2 did not arrive at collective 3 " in said


@pytest.mark.parametrize("barrier", ["all_reduce_barrier", "all_reduce"])
@pytest.mark.parametrize("deep", [False, True], ids=["another line", "another caller"])
def test_calls_that_fitted_by_accident_long_before_are_shown(barrier, deep, tmp_path):
    """Rank 0 reduces its accuracy alone, with the others' losses, and its losses with the others' barriers."""
    loss, alone = (7, 99) if not deep else (7, 7)

    def call(number, of):
        if of == "barrier":
            return entry(number, barrier, (1,), line=20)
        called = entry(number, shape=(), line=alone if of == "accuracy" else loss)
        called["frames"].append({"name": "main", "filename": "/home/me/train.py", "line": 40 + (of == "accuracy")})
        return called

    others = ["loss", "loss", "loss", "barrier", "barrier"]
    mine = ["loss", "accuracy", "loss", "loss", "barrier", "barrier"]
    of_ranks = [[call(number, of) for number, of in enumerate(some, 1)] for some in (mine, others, others)]
    of_ranks[0][-1]["state"] = "started"
    said = dumped(tmp_path, of_ranks)
    assert said.count("they diverged earlier") == 1
    hint = said.partition("they diverged earlier: at number 2 the calls happen to match")[2].splitlines()
    assert hint[1:3] == ["  rank 0 called all_reduce of [] Float", f"      train.py:{alone} in train"], said
    assert ("      train.py:41 in main" in hint) == deep, said


def test_lines_that_differ_by_design_are_no_accident(tmp_path):
    """if rank == 0: broadcast(a) else: broadcast(b)"""
    of_ranks = [[entry(n, "broadcast", line=line) for n in (1, 2)] + [entry(3, "all_reduce")] for line in (1, 2)]
    of_ranks[0][-1]["state"] = "started"
    said = dumped(tmp_path, [of_ranks[0], of_ranks[1][:-1]])
    assert said.startswith("rank 1 did not arrive at collective 3 ") and "apart before" not in said, said


def test_kinds_that_differ_are_named_even_if_nccl_went_on(tmp_path):
    """Its barrier is an all-reduce of one number: it goes on with somebody's all-reduce, and hangs later."""
    others = [entry(1), entry(2, "all_reduce_barrier", shape=())]
    said = dumped(tmp_path, [[entry(1), entry(2), entry(3, "all_reduce_barrier", (), "started")], others, others])
    assert said.startswith("rank 0 and ranks 1-2 differ in what they called at collective 2")


def test_types_that_differ_are_named(tmp_path):
    said = dumped(tmp_path, [[entry(1, state="started", dtype=name)] for name in ("Float", "Float", "BFloat16")])
    assert said.startswith("rank 2 and ranks 0-1 differ in the type of the numbers at collective 1")


def test_ranks_that_keep_different_stretches_are_compared_where_they_overlap(tmp_path):
    assert dumped(tmp_path, [[entry(n) for n in range(s, 9)] for s in (1, 5, 3)]).startswith("no rank is missing")


def test_a_rank_that_is_slow_again_and_again_is_named_where_none_is_missing(tmp_path):
    def called(number, rank):
        return entry(number) | {"time_created_ns": 10**18 + (number if rank == 2 else number - 1) * 10**9 + 10**7}

    said = dumped(tmp_path, [[called(number, rank) for number in range(1, 21)] for rank in range(4)])
    assert said.startswith("rank 2 is a straggler: of 19.00 s it spends 17.00 s between collectives, the others "), said
    assert "train.py:7 in train" in said and "\nno rank is missing" in said


def left(folder: Path, text: str) -> str:
    (folder / "where_0").write_text(f"process 7 on node-1\n{{}}\n{text}")
    return diagnose_hang.report(folder)


def test_a_gpu_that_fails_is_told_from_a_script_that_does(tmp_path):
    said = left(tmp_path, "left: RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    assert said.splitlines()[1] == diagnose_hang.gpu_errors.HINT
    assert "Xid" not in left(tmp_path, "left: RuntimeError: CUDA error: device-side assert triggered\n")


def test_a_rank_that_gloo_aborted_is_not_called_the_one_that_failed(tmp_path):
    frames = '  File "/x/site-packages/torch/distributed/c.py", line 5 in all_reduce\n  File "/home/me/train.py", line 7 in train\n'
    said = left(tmp_path, f"Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n{frames}")
    assert said.startswith("rank 0 was aborted in all_reduce(): gloo aborts") and "train.py:7 in train" in said, said
    assert "failed:" not in said and "ended from outside" not in said


# Several process groups


MESH = {"default_pg": [[0, 1, 2, 3]], "tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}


def of_groups(folder: Path, of_ranks: list, groups: dict = MESH, clocks: dict | None = None, torn=()) -> str:
    """What is said of ranks that have called these, in their order: (group, number, what entry() takes).

    groups: {description: the ranks of each such group}. clocks: {rank: by how many seconds its clock is ahead}.
    torn: ranks without a dump.
    """
    for rank, called in enumerate(of_ranks):
        mine = {d: (f"{d} {ranks}", ranks) for d, some in groups.items() for ranks in some if rank in ranks}
        entries = []
        for order, (description, number, about) in enumerate(called):
            name, _ = mine[description]
            about = dict(about)
            peer = about.pop("peer", None)
            extra = {"record_id": order, "process_group": (name, description)}
            extra["time_created_ns"] = 10**18 + int(1e9 * ((clocks or {}).get(rank, 0) + order / 1e3))
            if peer is not None:
                kind, arrow = about["kind"], "->" if about["kind"] == "send" else "<-"
                place = mine[description][1].index
                about["kind"] = f"{kind} {place(rank)}{arrow}{peer if peer == '?' else place(peer)}"
            if peer is not None or about.get("kind") == "coalesced":
                extra |= {"is_p2p": True, "p2p_seq_id": number, "collective_seq_id": 0}
            entries.append(entry(number, **about) | extra)
        config = {name: {"desc": description, "ranks": str(ranks)} for description, (name, ranks) in mine.items()}
        if rank not in torn:
            (folder / f"comm_lib_trace_rank_{rank}").write_bytes(
                pickle.dumps({"pg_config": config, "entries": entries})
            )
    return diagnose_hang.report(folder)


DONE, HANGS = {"state": "completed"}, {"state": "started"}
STUCK_BEFORE_THE_SECOND = [
    [("tp", 1, DONE), ("tp", 2, DONE), ("dp", 1, HANGS)],
    [("tp", 1, DONE), ("tp", 2, DONE), ("dp", 1, HANGS | {"line": 12})],
    [("tp", 1, DONE), ("tp", 2, HANGS)],
    [("tp", 1, DONE)],
]


@pytest.mark.parametrize("odd", [2, 3])
def test_of_two_ranks_that_differ_the_odd_one_is_found_by_the_other_groups(odd, tmp_path):
    calls = [[("tp", 1, DONE)], [("tp", 1, DONE)], [("tp", 1, HANGS)], [("tp", 1, HANGS)]]
    calls[odd] = [("tp", 1, HANGS | {"shape": (1,), "line": 99})]
    title = "differ in the shape of the tensors at collective 1 of group tp (ranks 2-3), called from different lines\n"
    assert of_groups(tmp_path, calls).startswith(f"rank {odd} and rank {5 - odd} {title}")


@pytest.mark.parametrize("ahead", [-1, 0, 1])
def test_a_rank_that_waits_in_another_group_is_not_blamed_whatever_its_clock_says(ahead, tmp_path):
    said = of_groups(tmp_path, STUCK_BEFORE_THE_SECOND, clocks={2: ahead})
    first, _, rest = said.partition("these wait because of that:\n")
    assert said.startswith("rank 3 did not arrive at collective 2 of group tp (ranks 2-3)\n  rank 2 called "), said
    assert "rank 3 did not arrive at collective 1 of group dp (ranks 1, 3)\n  rank 1 called " in first, said
    assert first.count("rank 3 last called collective 1 of group tp") == 1 and "rank 2 did not arrive" not in said, said
    assert rest.startswith("  rank 0 is waiting in group dp, collective 1, for rank 2: all_reduce of [8] Float\n"), said


def test_a_rank_that_died_is_the_root_also_with_several_groups(tmp_path):
    said = of_groups(tmp_path, STUCK_BEFORE_THE_SECOND, torn=[3])
    assert said.startswith("rank 3 is dead, or "), said
    for line in ("rank 2 is waiting in group tp, collective 2, for rank 3", "collective 1, for rank 2", "for rank 3"):
        assert line in said.partition("these wait because of that:\n")[2], said
    assert "did not arrive" not in said, said


@pytest.mark.parametrize("onlooker", [False, True])
def test_ranks_that_call_two_groups_in_different_order_are_a_deadlock(onlooker, tmp_path):
    groups = {"a": [[0, 1]], "b": [[0, 1]], "default_pg": [[0, 1, 2]]}
    of_ranks = [[("a", 1, HANGS)], [("b", 1, HANGS | {"line": 12})]]
    of_ranks += [[("default_pg", 1, HANGS)]] if onlooker else [[]]
    said = of_groups(tmp_path, of_ranks, groups).splitlines()
    assert said[:5] == [
        "deadlock: ranks 0-1 wait for each other, in a circle",
        "  rank 0 is waiting in group a, collective 1, for rank 1: all_reduce of [8] Float",
        "      train.py:7 in train",
        "  rank 1 is waiting in group b, collective 1, for rank 0: all_reduce of [8] Float",
        "      train.py:12 in train",
    ], said
    rest = ["these wait because of that:", "  rank 2 is waiting in group default_pg, collective 1, for ranks 0-1: "]
    assert len(said) == (8 if onlooker else 5), said
    assert not onlooker or [line[: len(start)] for line, start in zip(said[5:7], rest, strict=True)] == rest, said


def test_ranks_that_wait_for_some_whose_calls_differ_are_consequences(tmp_path):
    of_ranks = [
        [("tp", 1, HANGS | {"shape": (3,)})],
        [("tp", 1, HANGS)],
        [("dp", 1, HANGS)],
        [("dp", 1, HANGS)],
    ]
    said = of_groups(tmp_path, of_ranks)
    assert said.startswith(
        "rank 1 and rank 0 differ in the shape of the tensors at collective 1 of group tp (ranks 0-1)"
    )
    rest = said.partition("these wait because of that:\n")[2]
    assert "rank 2 is waiting in group dp, collective 1, for rank 0: " in rest and "did not arrive" not in said, said


def called_together(number: int, *calls: dict, state: str) -> list:
    """As NCCL records sends and receives of one batch: only the entry at the end has a state."""
    return [("pp", number, call | {"state": "scheduled"}) for call in calls] + [
        ("pp", number, {"kind": "coalesced", "state": state})
    ]


@pytest.mark.parametrize("batched", [False, True])
def test_stages_of_a_pipeline_that_wait_for_an_earlier_one_are_not_blamed(batched, tmp_path):
    """Stage 0 is stuck before it sends the second micro-batch; stage 3 waits for all in the end."""

    def recv(number, peer, state):
        call = {"kind": "recv", "peer": peer, "line": number}
        return called_together(number, call, state=state) if batched else [("pp", number, call | {"state": state})]

    def send(number, peer, state):
        call = {"kind": "send", "peer": peer, "line": number}
        return called_together(number, call, state=state) if batched else [("pp", number, call | {"state": state})]

    of_ranks = [
        send(1, 1, "completed"),
        recv(1, 0, "completed") + send(2, 2, "completed") + recv(3, 0, "started"),
        recv(1, 1, "completed") + send(2, 3, "completed") + recv(3, 1, "started"),
        recv(1, 2, "completed") + [("default_pg", 1, HANGS)],
    ]
    said = of_groups(tmp_path, of_ranks, {"default_pg": [[0, 1, 2, 3]], "pp": [[0, 1, 2, 3]]})
    first, _, rest = said.partition("these wait because of that:\n")
    assert (
        "rank 0 did not arrive at rank 1's recv from rank 0 in group pp (ranks 0-3)\n  rank 1 called recv of " in first
    )
    assert "rank 0 did not arrive at collective 1 of group default_pg" in first, said
    assert "rank 1 did not" not in said and "rank 2 did not" not in said and "deadlock" not in said, said
    assert rest.startswith("  rank 2 is waiting in group pp, in a recv, for rank 1: recv of [8] Float\n"), said


def test_a_receive_from_anybody_blames_nobody(tmp_path):
    of_ranks = [[("pp", 1, HANGS | {"kind": "recv", "peer": "?"})], [("default_pg", 1, HANGS)]]
    said = of_groups(tmp_path, of_ranks, {"default_pg": [[0, 1]], "pp": [[0, 1]]})
    assert "rank 0 is waiting in group pp, in a recv, for any rank: recv of [8] Float" in said, said
    assert "did not arrive" not in said and "deadlock" not in said, said


def test_groups_with_the_same_name_and_ranks_are_kept_apart(tmp_path):
    """As of a mesh that was made twice: each numbers its own collectives."""
    config = {name: {"desc": "mesh_dp", "ranks": "[0, 1]"} for name in "12"}
    both = [entry(1) | {"process_group": ("1", "mesh_dp")}]
    for rank in range(2):
        entries = [*both, entry(1, state="started", line=12) | {"process_group": ("2", "mesh_dp")}][: 2 - rank]
        (tmp_path / f"flight_{rank}").write_bytes(pickle.dumps({"pg_config": config, "entries": entries}))
    said = diagnose_hang.report(tmp_path)
    assert said.startswith("rank 1 did not arrive at collective 1 of group mesh_dp (ranks 0-1)"), said


def test_a_rank_whose_record_has_lost_a_call_is_not_missing(tmp_path):
    """Rank 1 has called more since, in a group of its own; gloo's calls all stay "scheduled"."""
    retired = {"process_group": ("w", "world"), "profiling_name": "gloo:barrier", "state": "scheduled", "retired": True}
    config = {"w": {"desc": "world", "ranks": "[0, 1]"}, "o": {"desc": "own", "ranks": "[1]"}}
    later = [entry(n) | {"process_group": ("o", "own")} for n in (2, 3)]
    mine = {"w": config["w"]}
    for rank, (known, entries) in enumerate([(mine, [entry(1) | retired]), (config, later)]):
        (tmp_path / f"flight_{rank}").write_bytes(pickle.dumps({"pg_config": known, "entries": entries}))
    assert diagnose_hang.report(tmp_path).startswith("no rank is missing")
    hangs = entry(1) | retired | {"retired": False}
    (tmp_path / "flight_0").write_bytes(pickle.dumps({"pg_config": mine, "entries": [hangs]}))
    assert diagnose_hang.report(tmp_path).startswith("rank 1 did not arrive at collective 1 of group world (ranks 0-1)")


@pytest.mark.parametrize(
    ("config", "name"),
    [({"0": [0, 1], "1": [0, 1]}, ""), ({"": [0, 1]}, "0")],
    ids=["TORCH_DISTRIBUTED_DEBUG=DETAIL", "gloo's own dump"],
)
def test_calls_of_which_the_group_is_not_recorded_are_refused(config, name, tmp_path):
    config = {name: {"desc": name, "ranks": str(ranks)} for name, ranks in config.items()}
    entries = [entry(1) | {"process_group": (name, "")}]
    (tmp_path / "flight_0").write_bytes(pickle.dumps({"pg_config": config, "entries": entries}))
    with pytest.raises(
        UserError, match=r"gloo does not record in which process group .*: record with labkit/measuring"
    ):
        diagnose_hang.report(tmp_path)


def test_a_rank_without_a_dump_is_told(tmp_path):
    said = dumped(tmp_path, [[entry(1, state="started")]] * 2, world=3)
    assert said.startswith("rank 2 is dead, or has not begun, or waits in no collective, or writes elsewhere"), said
    assert "ranks 0-1 are waiting in group default_pg, collective 1, for rank 2: all_reduce" in said


@pytest.mark.parametrize("where", ["nccl", "nccl2", "before 2.15"])
def test_what_nccl_is_in_this_pytorch_does_not_matter(where, monkeypatch):
    """Each implementation of it has a recorder of its own; here functions stand in for them."""

    def recorders(collectives, stacks, active, backend="gloo"):
        return pickle.dumps({"entries": [{"record_id": 7}] if backend == where else []})

    def of_gloo_alone(collectives, stacks, active):
        return recorders(collectives, stacks, active)

    c10d = torch._C._distributed_c10d
    own = pickle.dumps({"entries": [] if where == "nccl2" else [{"record_id": 7}]})
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda *_: own, raising=False)
    monkeypatch.setattr(c10d, "_dump_fr_trace", of_gloo_alone if where == "before 2.15" else recorders)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert flight_recorder._last_call() == 7


def dumps_a_trace(environ: dict) -> list[str]:
    """The path that PyTorch writes a dump to, and where it is looked for."""
    os.environ.update(environ)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._C._distributed_c10d._dump_fr_trace_file(0)
    folder, prefix = flight_recorder.located()
    return [str(path) for path in folder.glob(f"{prefix}*")]


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_file"), reason="this PyTorch dumps at a time-out only"
)
@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        ("HOME", "", ".cache/torch/comm_lib_trace_rank_0"),
        ("XDG_CACHE_HOME", "cache", "cache/torch/comm_lib_trace_rank_0"),
        ("TORCH_FR_DUMP_TEMP_FILE", "mine_", "mine_0"),
    ],
)
def test_dumps_are_looked_for_where_this_pytorch_writes_them(name, value, path, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    found = forked(dumps_a_trace, {name: str(tmp_path / value)})
    assert found == [str(tmp_path / path)]


@pytest.mark.parametrize(
    ("environ", "folder", "there", "found"),
    [
        ({"TORCH_FR_DUMP_TEMP_FILE": "{}/a_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "{}/b_"}, False, "a_1 b_1", "a_"),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "{}/b_"}, False, "b_1 flight_1", "b_"),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/elsewhere/a_"}, True, "a_0 b_0", "a_"),
        ({}, True, "nccl_trace_rank_0 nccl_trace_rank_x", "nccl_trace_rank_"),
        ({}, True, "comm_lib_trace_rank_12", "comm_lib_trace_rank_"),
        ({}, True, "where_3", "flight_"),
        ({}, True, "flight_0 nccl_trace_rank_0", "has dumps of 2 kinds (flight_, nccl_trace_rank_): give the --prefix"),
        (
            {},
            True,
            "other_0",
            "there is no dump (flight_<rank>, comm_lib_trace_rank_<rank>, nccl_trace_rank_<rank>) in",
        ),
        ({"XDG_CACHE_HOME": "{}"}, False, "flight_0", "/torch: give the dumps' --folder"),
    ],
)
def test_the_kind_of_dumps_that_is_there_is_found_or_asked_for(environ, folder, there, found, tmp_path):
    for name in there.split():
        (tmp_path / name).touch()
    environ = {name: value.format(tmp_path) for name, value in environ.items()}
    try:
        assert flight_recorder.located(tmp_path if folder else None, None, environ) == (tmp_path, found)
    except UserError as error:
        assert found in str(error)


def test_the_command_says_what_it_has_read(tmp_path):
    (tmp_path / "torch").mkdir()
    dumped(tmp_path / "torch", [[entry(1)]] * 3, "comm_lib_trace_rank_")
    run = script("diagnose_hang.py", env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)})
    assert run.stdout.splitlines()[0] == f"read the dumps comm_lib_trace_rank_* of ranks 0-2 in {tmp_path}/torch"


def test_dumps_of_an_earlier_run_are_left_out_and_said_to_be(tmp_path):
    """Eight ranks before, of which rank 2 of the four now has left its old dump, as it waits in no collective."""
    dumped(tmp_path, [[entry(3, state="started")]] * 8)
    waiting = [entry(1), entry(2, state="started")]
    fresh = [2 * 10**9] * 8
    dumped(tmp_path, [waiting, waiting, [entry(1)], waiting])
    for rank, date in enumerate(fresh):
        os.utime(tmp_path / f"nccl_trace_rank_{rank}", (date - 999 * (rank > 3),) * 2)
    said = diagnose_hang.report(tmp_path)
    assert said.startswith("rank 2 did not arrive at collective 2 of group default_pg (ranks 0-3)\n"), said
    old = "left out, as of an earlier run: what ranks 4-7 left (of a run of 8 ranks; nccl_trace_rank_"
    assert said.splitlines()[-1].startswith(old) and said.endswith("is of one of 4); remove it"), said
    os.utime(tmp_path / "nccl_trace_rank_2", (10**9 - 60,) * 2)
    said = diagnose_hang.report(tmp_path)
    assert said.startswith("rank 2 is dead, or has not begun, or waits in no collective"), said
    assert "earlier run: what rank 2 left (written 60 s before the first call in nccl_trace_rank_" in said, said


def test_what_a_larger_run_has_left_in_the_recorders_folder_is_left_out(tmp_path):
    dumped(tmp_path, [[entry(1)]] * 4, flight_recorder.FLIGHT)
    dumped(tmp_path, [[entry(1)]] * 2, flight_recorder.FLIGHT)
    for rank in range(4):
        (tmp_path / f"where_{rank}").write_text("process 7 on node-1\n{}\nleft: finished\n")
        os.utime(tmp_path / f"flight_{rank}", (10**9 + (rank < 2),) * 2)
    said = diagnose_hang.report(tmp_path)
    assert said.startswith("no rank is missing: ") and "earlier run: what ranks 2-3 left (of a run of 4" in said, said


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("/home/ann/torch/train.py", True),
        ("/home/ann/labkit/train.py", True),
        (f"{Path(torch.__file__).parent}/distributed/distributed_c10d.py", False),
        (f"{launch.SOURCE}/../source_code/labkit/running/ranks.py", False),
        ("/opt/env/lib/python3.12/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3.11/threading.py", False),
        ("<frozen runpy>", False),
        (f"{launch.SOURCE}/faults.py", True),
    ],
)
def test_a_program_is_told_from_libraries_by_where_they_are(file, is_own):
    some = flight_recorder.Line("/usr/lib/python3.11/queue.py", 1, "get"), flight_recorder.Line(file, 2, "f")
    assert flight_recorder.own(list(some)) == (some[1:] if is_own else some[:1])


def calls_often(folder) -> int:
    """How many of 500 calls are kept."""
    os.environ["RANK"] = "0"
    with flight_recorder.recorder(folder):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(500):
            dist.all_reduce(torch.ones(1))
    (calls,) = flight_recorder.read(folder).dumps[0].calls.values()
    return len(calls)


def test_a_record_holds_more_than_a_step_of_a_deep_model(tmp_path):
    """FSDP2 with 80 units calls 240 collectives in a step: what went wrong is often in the step before."""
    assert forked(calls_often, tmp_path) == 500


class Hostile:
    def __reduce__(self):
        return os.system, ("touch caught",)


def spoilt(how: str, folder: Path):
    dumped(folder, [[entry(1)]] * 2, "flight_")
    path = folder / "flight_1"
    whole = path.read_bytes()
    match how:
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "empty":
            path.write_bytes(b"")
        case "hostile":
            path.write_bytes(pickle.dumps({"entries": [Hostile()], "pg_config": {}}))
        case "another thing":
            path.write_bytes(pickle.dumps([1, 2]))
        case "another run's":
            path.rename(folder / "flight_7")
        case "no dump":
            for dump in folder.iterdir():
                dump.unlink()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut", "flight_1 is not a flight record, or is damaged"),
        ("empty", "flight_1 is not a flight record, or is damaged"),
        ("hostile", "it refers to posix.system, and a flight record contains only plain data"),
        ("another thing", "flight_1 is not a flight record, or is damaged"),
        ("another run's", "flight_7 is of a run without a rank 7: remove the dumps of other runs"),
        ("no dump", "there is no dump (flight_<rank>, comm_lib_trace_rank_<rank>, nccl_trace_rank_<rank>) in"),
    ],
)
def test_a_damaged_or_hostile_dump_is_one_sentence(how, said, tmp_path):
    spoilt(how, tmp_path)
    run = script("diagnose_hang.py", "--folder", tmp_path)
    assert run.returncode == 2 and run.stdout == ""
    assert len(run.stderr.splitlines()) == 1 and said in run.stderr, run.stderr
    assert not list(Path(launch.SOURCE).glob("caught"))


def test_a_folder_that_cannot_be_written_to_is_told_before_the_work_begins(tmp_path, world_of_one):
    (tmp_path / "flight").touch()
    with pytest.raises(UserError, match=r"cannot be written to .*flight \(File exists\): name another folder"):
        with flight_recorder.recorder(tmp_path / "flight"):
            pytest.fail("it began")
