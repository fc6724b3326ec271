# SPDX-License-Identifier: BSD-3-Clause
"""How checkpoints are written: whole or not at all, meanwhile, on a full disk, by a run that is asked to end; the export."""

import contextlib
import errno
import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import few_digits
import pytest
import torch
from commands import script
from forked import by_value, forked
from labkit import Diverged, UserError
from labkit.measuring import records
from labkit.running import fork_server, launch, preemption, progress
from labkit.running.lab import Lab
from labkit.training import checkpoint_folder, checkpoints, dcp_reading, dcp_writing, hf_files, manifest, saving
from proofs import crash
from test_checkpoints import RUN, saver, training

LAB = Lab(launcher="local", ranks=2, device="cpu")
by_value(training)  # ranks make one, too
FEW_DIGITS = Path(__file__).with_name("few_digits.py")
MNIST = [FEW_DIGITS, 40, "mnist_fsdp", "--data", "mnist-5k", "--ranks", 2, "--batch-size", 2]  # an epoch has 10 steps
OF_GPT = ["--ranks", 2, "--batch-size", 2, "--seq-len", 16, "--checkpoint-every", 5]
GPT = [FEW_DIGITS, 40, "gpt_fsdp", *OF_GPT]
ENDLESS = {"mnist": ["--epochs", 10**5], "gpt": ["--max-steps", 10**6]}
LABS = {"mnist": MNIST, "gpt": GPT}


def names(folder) -> list[str]:
    """What is in a folder, without the file that says whose it is."""
    return sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith(".owner-"))


# Whole or not at all


def test_only_the_newest_are_kept(tmp_path, world_of_one):
    model, optimizer = training()
    for step in (1, 2, 3):
        saving.save(tmp_path, step, model, optimizer, RUN, keep=2)
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_only_whole_ones_count(tmp_path, world_of_one, capsys):
    """A damaged checkpoint between the one resumed from and the one just written is set aside, and costs no other."""
    for step in (6, 7):
        saving.save(tmp_path, step, *training(), RUN)
    (tmp_path / "step-000007" / "__0_0.distcp").write_bytes(b"")
    for last, kept in ((8, ["step-000006", "step-000008"]), (9, ["step-000008", "step-000009"])):
        run = saver(tmp_path, *training(), resume=True, fallback=True, keep_last=2)
        assert run.resume(99) == last - (2 if last == 8 else 1)
        run.save(last)
        run.finish()
        assert names(tmp_path) == [*kept[:1], "step-000007.damaged", *kept[1:]] if last == 8 else True
        assert [path.name for path in checkpoints.stored(tmp_path)] == kept[::-1]
    assert "step-000007 is damaged (__0_0.distcp has 0 bytes instead of" in capsys.readouterr().out


def test_one_that_nobody_has_looked_at_yet_is_looked_at_before_it_counts(tmp_path, world_of_one):
    for step in (1, 2, 3):
        saving.save(tmp_path, step, *training(), RUN)
    (tmp_path / "step-000002" / manifest.NAME).unlink()
    saving.save(tmp_path, 4, *training(), RUN, keep=3)
    assert names(tmp_path) == ["step-000001", "step-000002.damaged", "step-000003", "step-000004"]


def test_one_that_cannot_be_read_now_neither_counts_nor_goes(tmp_path, world_of_one, monkeypatch):
    for step in (1, 2, 3):
        saving.save(tmp_path, step, *training(), RUN)
    answer_with(errno.EIO, monkeypatch, at="step-000002")
    saving.save(tmp_path, 4, *training(), RUN, keep=2)
    assert names(tmp_path) == ["step-000002", "step-000003", "step-000004"]


def answer_with(number: int, monkeypatch, at: str, times: int = 10**9):
    """Have the storage fail so many times where a manifest is read whose path contains ``at``; it is not waited for."""
    read, left = Path.read_bytes, [times]

    def fails(path):
        if at in str(path) and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fails)
    monkeypatch.setattr(manifest, "WAITS", (0, 0))


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (2, None, [11, 12]),
        (1, 5, [1, 6, 11, 12]),
        (2, 4, [1, 5, 9, 11, 12]),
        (20, None, [*range(1, 13)]),
    ],
)
def test_some_stay_for_good(keep, keep_every, left):
    """As they come, one by one: those that stay do not depend on what has been removed before."""
    stored = []
    for step in range(1, 13):
        stored.append(step)
        stored = [each for each in stored if each not in checkpoint_folder.surplus(stored, keep, keep_every)]
    assert stored == left


def test_a_save_that_is_interrupted_costs_nothing(tmp_path, world_of_one, monkeypatch):
    """Whenever it ends before the last step, which is a rename: the checkpoint before is the newest."""
    model, optimizer = training()
    saving.save(tmp_path, 1, model, optimizer, RUN, keep=1)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for name in ("dcp.save", "to_disk", "manifest.write", "CheckpointFolder.commit"):
        with monkeypatch.context() as patch:
            patch.setattr(f"labkit.training.saving.{name}", interrupted)
            with pytest.raises(KeyboardInterrupt):
                saving.save(tmp_path, 2, model, optimizer, RUN, keep=1)
        assert checkpoints.latest(tmp_path).name == "step-000001"
        assert checkpoints.load(checkpoints.latest(tmp_path), model, optimizer, RUN) == 1
    saving.save(tmp_path, 2, model, optimizer, RUN, keep=1)
    assert names(tmp_path) == ["step-000002"]


def test_what_an_ended_run_left_is_adopted_if_it_is_whole_and_else_cleared(tmp_path, world_of_one):
    saving.save(tmp_path, 3, *training(), RUN)
    (tmp_path / "step-000003").rename(tmp_path / "step-000003.0123abcd.partial")  # all but the name
    (tmp_path / "step-000002.01234567.partial").mkdir()
    (tmp_path / "step-000001.removed").mkdir()
    (tmp_path / "step-notes.txt").touch()
    assert saver(tmp_path, *training(), resume=True).resume(9) == 3
    assert names(tmp_path) == ["step-000003", "step-notes.txt"]


def test_every_name_is_on_the_disk_before_the_checkpoint_has_its_own(tmp_path, world_of_one, monkeypatch):
    """A rename of a folder is no promise that what is in it outlasts a loss of power."""
    seen, sync, rename = [], os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda number: seen.append(os.readlink(f"/proc/self/fd/{number}")) or sync(number))
    monkeypatch.setattr(Path, "rename", lambda path, to: seen.append(f"rename {path}") or rename(path, to))
    folder = tmp_path / "new" / "folder"
    run = saver(folder, *training())
    run.save(1)
    run.finish()
    partial = next(
        each.removeprefix("rename ") for each in seen if each.startswith("rename") and each.endswith(".partial")
    )
    before, after = seen[: seen.index(f"rename {partial}")], seen[seen.index(f"rename {partial}") :]
    written = {f"{partial}/{name}" for name in names(folder / "step-000001") if name != ".metadata"}
    assert {*written, partial, str(tmp_path), str(tmp_path / "new")} <= set(before)
    assert str(folder) in after


# No room


def save_without_room(folder, options, must):
    """What is said of the second save, which no file may take; and which checkpoints there are afterwards."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, optimizer = training()
    tried = saver(folder, model, optimizer, **options)
    tried.save(1)
    tried._wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # bytes a file may have
    try:
        tried.save(2)
        tried.finish(2)
        tried.save(2, must=must)  # again: what could not be saved is not taken for saved
        tried.finish(2, must=must)
        said = None
    except UserError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tried.save(3)
    tried.finish(3)
    found = names(folder)
    manifest.read(folder / "step-000001")
    dist.destroy_process_group()
    return said, found, checkpoints.checked(folder / "step-000001", RUN)["ranks"]


@pytest.mark.parametrize("meanwhile", [False, True], ids=["at once", "meanwhile"])
@pytest.mark.parametrize(("on_save_error", "must"), [("stop", False), ("continue", False), ("continue", True)])
def test_without_room_the_one_before_is_intact(tmp_path, on_save_error, must, meanwhile):
    """must: a run that is asked to end and to come back cannot go on without what it could not save."""
    options = {"on_save_error": on_save_error, "async_checkpoint": meanwhile}
    said, found, ranks = forked(save_without_room, tmp_path, options, must)
    assert found == ["step-000001", "step-000003"] and ranks == 1
    if on_save_error == "continue" and not must:
        assert said is None
    else:
        assert said.startswith("step-000002 could not be saved to") and "(File too large)" in said
        assert "older checkpoints are as they were" in said


def test_a_thread_that_saves_begins_on_the_ranks_own_gpu(monkeypatch):
    """A new thread is on GPU 0, where its first call would take memory. (No GPU here: what it is told is looked at.)"""
    told = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append((device, threading.get_ident())))
    with saving._thread() as thread:
        assert told == [(3, thread.submit(threading.get_ident).result())]


@pytest.mark.long
def test_a_full_disk_ends_the_run_or_not_as_the_option_says(small_disk):
    """Saved at once, or meanwhile; the other two combinations are in the test of one process above."""
    words = ["gpt_fsdp.py", *OF_GPT, "--checkpoint", small_disk]
    words += ["--optimizer", "sgd", "--max-steps", 15]  # 3.4 MB each: there is room for two
    stopped = script(*words)
    assert stopped.returncode == 2, stopped.stderr
    sentence = stopped.stderr.strip()
    assert "\n" not in sentence, sentence
    assert "step-000015 could not be saved to" in sentence and "No space left on device" in sentence
    assert names(small_disk) == ["step-000005", "step-000010"]
    for path in checkpoints.stored(small_disk):
        assert manifest.difference(path, manifest.read(path)["files"]) is None

    goes_on = script(*words, "--async-checkpoint", "--resume", "--max-steps", 20, "--on-save-error", "continue")
    assert goes_on.returncode == 0, goes_on.stderr
    assert "step-000015 could not be saved" in goes_on.stdout and "; training goes on" in goes_on.stdout
    assert "after step 20" in goes_on.stdout
    assert names(small_disk) == ["step-000005", "step-000010"]


def asked_without_room(folder):
    """A gpt_fsdp.py that is asked to end in its third step, where nothing can be written any more."""
    import gpt_fsdp
    from labkit.running import options, ranks

    sys.argv = ["gpt_fsdp.py"]
    step, calls = gpt_fsdp.train_step, itertools.count(1)

    def last(*given):
        if next(calls) == 3:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(*given)

    gpt_fsdp.train_step = last
    words = ["--strategy", "single", "--device", "cpu", "--batch-size", "1", "--seq-len", "16", "--max-steps", "99"]
    words += ["--checkpoint", str(folder), "--on-save-error", "continue", "--resume"]
    ranks.run(gpt_fsdp.main, options.parse(gpt_fsdp.Config, "", words))


def test_a_run_that_is_to_come_back_says_so_only_if_it_has_saved(tmp_path):
    """Else it would come back to where it began, for ever."""
    (tmp_path / "lab.py").write_text(
        f"import sys; sys.path[:0] = [{str(launch.SOURCE)!r}, {str(Path(__file__).parent)!r}]\n"
        f"from test_saving import asked_without_room\nasked_without_room({str(tmp_path / 'c')!r})\n"
    )
    run = script(tmp_path / "lab.py")
    assert run.returncode == 2 and "could not be saved" in run.stderr, run.stdout + run.stderr
    assert "asked to end" not in run.stdout and names(tmp_path / "c") == []


# Numbers that are not finite


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("where", ["a weight", "the optimizer's state"])
def test_what_is_not_finite_replaces_no_checkpoint(where, value, tmp_path, world_of_one):
    model, optimizer = training()
    run = saver(tmp_path, model, optimizer, keep_last=1)
    run.save(1)
    with torch.no_grad():
        state = next(iter(optimizer.state.values()))["momentum_buffer"]
        (model[1].bias if where == "a weight" else state).view(-1)[-1] = value
    with pytest.raises(
        Diverged, match="after step 2 .* not finite: not saved, the newest checkpoint is that of step 1"
    ):
        run.save(2)
    assert names(tmp_path) == ["step-000001"]


def one_rank_is_not_finite(me, folder):
    model, _ = training()
    torch.distributed.fsdp.fully_shard(model)
    run = saver(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
    if me.rank == 1:
        with torch.no_grad():
            next(model.parameters()).to_local().fill_(math.nan)
    with pytest.raises(Diverged):
        run.save(1)


def test_all_ranks_refuse_what_is_not_finite_on_one(tmp_path):
    LAB.on_ranks(by_value(one_rank_is_not_finite), str(tmp_path))
    assert names(tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("lab", LABS)
def test_a_run_that_diverges_ends_with_its_own_code_and_keeps_what_was_good(lab, tmp_path):
    """And its record is JSON, as every reader understands it."""
    words = [*LABS[lab], "--checkpoint", tmp_path / "c", "--resume", "--keep-last", 1, "--record", tmp_path / "r.json"]
    good = script(*words, *{"mnist": ["--max-steps", 10], "gpt": ["--max-steps", 5]}[lab])
    assert good.returncode == 0, good.stderr
    bad = script(*words, "--lr", "1e18", *{"mnist": ["--epochs", 9], "gpt": ["--max-steps", 100]}[lab])
    assert bad.returncode == Diverged.exit_code == 65, bad.stdout + bad.stderr
    (sentence,) = bad.stderr.splitlines()
    assert "the loss is nan in step" in sentence and "no checkpoint was saved after it" in sentence
    assert len(names(tmp_path / "c")) == 1
    crash.fingerprint(checkpoints.latest(tmp_path / "c"))
    assert all(tensor.isfinite().all() for tensor in dcp_reading.tensors(checkpoints.latest(tmp_path / "c")).values())

    def no_constant(name):
        raise ValueError(f"{name} is no JSON")

    written = json.loads((tmp_path / "r.json").read_text(), parse_constant=no_constant)
    assert None in written["losses"]
    read = records.load(tmp_path / "r.json")["losses"]
    assert math.isnan(read[written["losses"].index(None)]) and math.isfinite(read[0])


# A disk that is slow, or fails once


def fails(monkeypatch, number: int, times: int):
    """Have the first files that are written fail; return the attempts."""
    attempts, create = [], dcp_writing._Hashing.create_stream

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        attempts.append(path)
        with create(self, path, mode) as stream:
            if len(attempts) <= times:
                raise OSError(number, os.strerror(number))
            yield stream

    monkeypatch.setattr(dcp_writing._Hashing, "create_stream", create_stream)
    monkeypatch.setattr(saving, "WAITS", (0, 0))
    return attempts


@pytest.mark.parametrize("at", ["a rank's file", "the manifest"])
def test_what_passes_is_tried_again(at, tmp_path, world_of_one, monkeypatch):
    if at == "a rank's file":
        fails(monkeypatch, errno.EIO, times=2)
    else:
        write, left = manifest.write, [2]

        def sometimes(*given, **about):
            if left[0]:
                left[0] -= 1
                raise OSError(errno.EIO, "Input/output error")
            write(*given, **about)

        monkeypatch.setattr(manifest, "write", sometimes)
        monkeypatch.setattr(saving, "WAITS", (0, 0))
    saving.save(tmp_path, 1, *training(), RUN)
    assert names(tmp_path) == ["step-000001"]
    assert saver(tmp_path, *training(), resume=True).resume(9) == 1


@pytest.mark.parametrize(("number", "tries"), [(errno.EIO, 3), (errno.ENOSPC, 1), (errno.EDQUOT, 1), (errno.EACCES, 1)])
def test_what_does_not_pass_is_told_by_its_cause(number, tries, tmp_path, world_of_one, monkeypatch):
    attempts = fails(monkeypatch, number, times=99)
    with pytest.raises(saving.SaveFailed, match=re.escape(f"could not be saved to {tmp_path} ({os.strerror(number)})")):
        saving.save(tmp_path, 1, *training(), RUN)
    assert len(attempts) == tries and names(tmp_path) == []


def test_after_a_save_that_failed_meanwhile_what_is_in_hand_is_written_at_once(
    tmp_path, world_of_one, monkeypatch, capsys
):
    """Not only the next after it: the state is there, and the disk may be well again."""
    write, failing = saving.write, {2, 4}

    def sometimes(folder, step, *about):
        if step in failing:
            failing.remove(step)
            raise saving.SaveFailed(f"step {step} could not be saved")
        write(folder, step, *about)

    monkeypatch.setattr(saving, "write", sometimes)
    run = saver(tmp_path, *training(), async_checkpoint=True)
    for step in (1, 2):
        run.save(step)
    while not run.writing.done():
        time.sleep(0.01)
    assert "step 2 could not be saved; what the next save writes is tried at once" in capsys.readouterr().out
    run.save(3)
    assert run.writing is None and names(tmp_path) == ["step-000001", "step-000003"]
    run.save(4)
    run.finish(4)  # the last: tried once more
    assert names(tmp_path) == ["step-000001", "step-000003", "step-000004"]


def test_a_run_that_ends_after_a_save_that_failed_meanwhile_writes_where_it_is(tmp_path, world_of_one, monkeypatch):
    write, failing = saving.write, {10}
    monkeypatch.setattr(saving, "write", lambda folder, step, *about: fail(failing) if step in failing else write(folder, step, *about))  # fmt: skip
    run = saver(tmp_path, *training(), async_checkpoint=True)
    run.save(10)
    run.save(15, must=True)
    run.finish(15, must=True)
    assert names(tmp_path) == ["step-000015"]


def fail(steps):
    raise saving.SaveFailed(f"{steps} could not be saved")


def test_a_writer_that_hangs_is_reported(tmp_path, world_of_one, monkeypatch, capsys):
    goes_on, write = threading.Event(), saving.write
    monkeypatch.setattr(saving, "REPORT_SECONDS", 0.01)
    monkeypatch.setattr(saving, "write", lambda *about: goes_on.wait(60) and write(*about))
    run = saver(tmp_path, *training(), async_checkpoint=True)
    run.save(7)
    printed, deadline = "", time.monotonic() + 60
    while "step-000007 is still being written" not in printed and time.monotonic() < deadline:
        time.sleep(0.01)
        printed += capsys.readouterr().out
    goes_on.set()
    run.finish(7)
    assert "step-000007 is still being written" in printed and names(tmp_path) == ["step-000007"]


def saved_by_a_slow_disk(me, folder, seconds):
    """Rank 1's disk takes longer than the messages of training may."""
    from datetime import timedelta

    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
    create = dcp_writing._Hashing.create_stream

    def slowly(self, path, mode):
        if me.rank == 1:
            time.sleep(2 * seconds)
        return create(self, path, mode)

    dcp_writing._Hashing.create_stream = slowly
    model, _ = training()
    torch.distributed.fsdp.fully_shard(model)
    run = saver(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.save(1)
    run.finish(1)


@pytest.mark.long
def test_a_save_may_take_longer_than_a_collective_of_the_training(tmp_path):
    LAB.on_ranks(by_value(saved_by_a_slow_disk), str(tmp_path), 3)
    assert names(tmp_path) == ["step-000001"]


def test_checksums_are_taken_while_the_files_are_written(tmp_path, world_of_one, monkeypatch):
    """Nothing is read again; large pieces, which a thread hashes, are as right as small ones."""
    read = []
    monkeypatch.setattr(manifest, "digest", lambda path: read.append(path))
    model, optimizer = training(width=100_000)
    assert model[0].weight.nbytes > 2 * dcp_writing.TOGETHER
    saving.save(tmp_path, 1, model, optimizer, RUN)
    assert read == []
    monkeypatch.undo()
    found = manifest.read(tmp_path / "step-000001")
    assert sorted(found["files"]) == [".metadata", "__0_0.distcp"]
    assert manifest.difference(tmp_path / "step-000001", found["files"]) is None


# Meanwhile


def saved_meanwhile(me, folder):
    """Training changes the weights before the writing has begun: what is written is what was there."""
    model, _ = training()
    torch.distributed.fsdp.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin, write = threading.Event(), saving.write

    def waits(*given):
        begin.wait(60)
        return write(*given)

    saving.write = waits
    background = saver(folder, model, optimizer, async_checkpoint=True)
    before = [p.full_tensor().clone() for p in model.parameters()]
    background.save(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    there = checkpoints.latest(folder)
    begin.set()
    background.finish()
    read = dcp_reading.tensors(checkpoints.latest(folder), "model.")
    return there, all(torch.equal(a, b) for a, b in zip(before, read.values(), strict=True)), background.summary()


def test_what_is_saved_meanwhile_is_the_state_of_its_step(tmp_path):
    for there, equal, summary in LAB.on_ranks(by_value(saved_meanwhile), str(tmp_path)):
        assert there is None  # training went on before anything was written
        assert equal
        assert summary["asynchronous"] and summary["saves"] == 1 and summary["stall"] > 0


@pytest.mark.long
@pytest.mark.parametrize(("lab", "steps", "saves"), [("mnist", 12, 2), ("gpt", 12, 3)], ids=LABS)
def test_both_ways_write_the_same(lab, steps, saves, tmp_path):
    for way, words in {"sync": [], "async": ["--async-checkpoint"]}.items():
        run = script(*LABS[lab], "--max-steps", steps, "--checkpoint", tmp_path / way, *words)
        assert run.returncode == 0, run.stderr
    assert names(tmp_path / "sync") == names(tmp_path / "async")
    assert len(names(tmp_path / "sync")) == saves
    for path in checkpoints.stored(tmp_path / "sync"):
        assert crash.fingerprint(path) == crash.fingerprint(tmp_path / "async" / path.name)


# Asked to end


def asked(words, at: int, number: int, whom: str, tmp_path) -> subprocess.CompletedProcess:
    """Run a lab; in its ``at``-th step send a signal to the process that was started, or to its last rank only."""
    mark = tmp_path / "progress"
    command = [sys.executable, "-u", *map(str, words)]
    with open(tmp_path / "out", "w+") as out, open(tmp_path / "err", "w+") as err:
        process = fork_server.start(command, launch.SOURCE, os.environ | {progress.VARIABLE: str(mark)}, out, err)
        try:
            while process.poll() is None:
                if (where := progress.read(mark)) and where[0] >= at:
                    os.kill(process.pid if whom == "launcher" else children(process.pid)[-1], number)
                    break
                time.sleep(0.01)
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())


def children(process: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.long
@pytest.mark.skipif(not fork_server.possible(), reason="forks, which Linux can")
@pytest.mark.parametrize(
    ("lab", "number", "whom"),
    [("mnist", signal.SIGUSR2, "rank"), ("gpt", signal.SIGTERM, "launcher")],
    ids=["mnist, USR2 to a rank", "gpt, TERM to all"],
)
def test_a_run_that_is_asked_to_end_saves_and_comes_back_to_the_same_weights(lab, number, whom, tmp_path):
    """However late the signal comes: the run that nobody asks is made afterwards, five steps longer."""
    words = [*LABS[lab], "--checkpoint", tmp_path / "asked", "--resume"]
    ended = asked([*words, *ENDLESS[lab]], at := 6, number, whom, tmp_path)
    assert ended.returncode == preemption.EXIT_REQUEUE, ended.stdout + ended.stderr
    assert ended.stderr == ""
    saved = int(checkpoints.latest(tmp_path / "asked").name.removeprefix("step-"))
    assert at <= saved and f"asked to end ({signal.Signals(number).name}): saved at step {saved} of" in ended.stdout
    whole = script(*LABS[lab], "--max-steps", saved + 5, "--checkpoint", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    again = script(*words, "--max-steps", saved + 5)
    assert again.returncode == 0, again.stderr
    assert f"resumed at step {saved} of" in again.stdout
    whole, asked_to = (crash.fingerprint(checkpoints.latest(tmp_path / name)) for name in ("whole", "asked"))
    assert whole == asked_to


def votes(me, asked_in):
    """In which step each rank ends, if only rank 1 is asked, in that step."""
    stop = preemption.Stop(SimpleNamespace(checkpoint="somewhere"))
    for step, _ in enumerate(stop.until_preempted(range(9))):
        if me.rank == 1 and step == asked_in:
            os.kill(os.getpid(), signal.SIGUSR1)
    return step, stop.agreed


def test_ranks_agree_on_the_step(tmp_path):
    assert LAB.on_ranks(by_value(votes), 3) == [(4, "SIGUSR1"), (4, "SIGUSR1")]


def asked_during_the_evaluation(folder):
    """An mnist_fsdp.py that is asked to end in the first batch of its first evaluation; it prints how many there are."""
    import mnist_fsdp
    from labkit.running import options, ranks

    sys.argv = ["mnist_fsdp.py"]
    few_digits.narrow()
    loss, seen = mnist_fsdp.compute_loss, []

    def asked(*given, reduction="mean"):
        if reduction == "sum":
            seen.append(len(given[1]))
            print("evaluated", len(seen), flush=True)
            if len(seen) == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
        return loss(*given, reduction=reduction)

    mnist_fsdp.compute_loss = asked
    words = ["--strategy", "single", "--device", "cpu", "--data", "mnist-5k", "--batch-size", "400", "--epochs", "3"]
    ranks.run(mnist_fsdp.main, options.parse(mnist_fsdp.Config, "", [*words, "--checkpoint", str(folder), "--resume"]))


@pytest.mark.long
def test_a_run_that_is_asked_while_it_evaluates_does_not_evaluate_to_the_end(tmp_path):
    """On a large test set it takes longer than the warning leaves."""
    (tmp_path / "lab.py").write_text(
        f"import sys; sys.path[:0] = [{str(launch.SOURCE)!r}, {str(Path(__file__).parent)!r}]\n"
        f"from test_saving import asked_during_the_evaluation\nasked_during_the_evaluation({str(tmp_path / 'c')!r})\n"
    )
    run = script(tmp_path / "lab.py")
    assert run.returncode == preemption.EXIT_REQUEUE, run.stdout + run.stderr
    assert run.stdout.count("evaluated") <= 2 and "saved at step 10 of 30" in run.stdout
    assert names(tmp_path / "c") == ["step-000010"]


# Taken out


@pytest.mark.long
def test_the_export_is_read_without_the_course(tmp_path):
    run = script(*GPT, "--checkpoint", tmp_path / "c", "--max-steps", 2)
    assert run.returncode == 0, run.stderr
    made = script("export.py", tmp_path / "c", tmp_path / "model.safetensors")
    assert made.returncode == 0, made.stderr
    (tmp_path / "read.py").write_text(f"""
import safetensors.torch, sys
tensors = safetensors.torch.load_file({str(tmp_path / "model.safetensors")!r})
assert not any(name.startswith("labkit") for name in sys.modules)
print(len(tensors), sum(t.numel() for t in tensors.values()), sum(t.double().sum().item() for t in tensors.values()))
""")
    count, numbers, total = script(tmp_path / "read.py").stdout.split()
    trained = dcp_reading.tensors(checkpoints.latest(tmp_path / "c"), "model.")
    assert (int(count), int(numbers)) == (len(trained), sum(t.numel() for t in trained.values()))
    assert float(total) == sum(t.double().sum().item() for t in trained.values())


def test_what_cannot_be_exported_is_told_and_leaves_no_file(tmp_path, world_of_one, monkeypatch):
    import export

    with pytest.raises(UserError, match="no checkpoint in .*: name a folder that a run was given as --checkpoint"):
        export.export(tmp_path, tmp_path / "out")
    saving.save(tmp_path, 1, *training(), RUN)
    with pytest.raises(UserError, match="is a folder.*name another file"):
        export.export(tmp_path, tmp_path)
    monkeypatch.setattr(hf_files, "save_file", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(UserError, match="full"):
        export.export(tmp_path, tmp_path / "out")
    path = checkpoints.latest(tmp_path)
    (path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(UserError, match="has 0 bytes instead of"):
        export.export(path, tmp_path / "out")
    assert names(tmp_path) == ["step-000001"]


def test_words_that_are_missing_are_told_in_a_sentence():
    told = script("export.py", "somewhere")
    assert told.returncode == 2
    assert told.stderr == "export.py: the following arguments are required: file (see --help)\n"
