# SPDX-License-Identifier: BSD-3-Clause
"""What becomes of checkpoints: whole or not at all, the newest for all ranks, damage found and named, no code run."""

import dataclasses
import errno
import io
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import by_value
from labkit import UserError
from labkit.running.lab import Lab
from labkit.running.options import Training, option
from labkit.training import checkpoint_folder, checkpoints, dcp_reading, manifest, saving
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

LAB = Lab(launcher="local", ranks=2, device="cpu")
MUTATIONS = 48  # of every kind, spread over every file
RUN = {"--seed": 1}


def training(width=8):
    """(model, optimizer) after a step, so that there is a state to save."""
    model = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saver(folder, model, optimizer, run=RUN, **given) -> saving.Saver:
    """One with the options of a lab that bear on its checkpoints, as they are where they are not given."""
    return saving.Saver(Training(checkpoint=str(folder), **given), model, optimizer, run)


def values(model) -> list:
    return [parameter.tolist() for parameter in model.parameters()]


# One for all ranks


def resumed_by_a_rank_with_a_stale_listing(me, folder):
    """Two checkpoints are saved; then rank 1 still sees only the first, as a cache of NFS may show it."""
    model, optimizer = training()
    for step in (1, 2):
        saving.save(folder, step, model, optimizer, {})
    if me.rank == 1:
        checkpoints.stored = lambda folder: [min(Path(folder).glob("step-*"))]
    return saver(folder, model, optimizer, resume=True).resume(9)


def test_one_rank_looks_for_the_newest_checkpoint_and_all_take_it(tmp_path):
    assert LAB.on_ranks(by_value(resumed_by_a_rank_with_a_stale_listing), str(tmp_path)) == [2, 2]


def on_one_that_fails(me):
    def fails():
        raise OSError("the folder's server is away")

    with pytest.raises(OSError, match="server is away"):
        checkpoint_folder.rank0_then_broadcast(fails)


def test_whatever_goes_wrong_on_one_rank_all_are_told():
    LAB.on_ranks(by_value(on_one_that_fails))


def saved_where_nobody_else_looks(me, folder):
    """What each rank is told where its folder is a disk of its own node: before the training, and as it is saved."""
    mine = Path(folder, str(me.rank))
    mine.mkdir()
    checkpoint_folder.SEEN_SECONDS = 0.1
    said = []
    for function in (
        lambda: saver(mine, *training(), resume=True),
        lambda: saving.save(mine, 1, torch.distributed.fsdp.fully_shard(model := training()[0]), torch.optim.SGD(model.parameters())),
    ):  # fmt: skip
        with pytest.raises(UserError) as refused:
            function()
        said.append(str(refused.value))
    return said, [path.name for path in mine.iterdir()]


def test_a_folder_that_not_all_nodes_share_is_told_to_all(tmp_path):
    ranks = LAB.on_ranks(by_value(saved_where_nobody_else_looks), str(tmp_path))
    for (before, saving_it), left in ranks:
        assert "does not see rank 0's files in" in before and before.endswith("that all nodes share")
        assert "__1_0.distcp is not seen by rank 0's node" in saving_it
        assert left in ([], ["step-000001.partial"])  # the other node's is not rank 0's to clear


def told_of_damage_by_each_rank(me, folder):
    """The sentences on each rank: a file that rank 1 looks into is damaged; the manifest, which rank 0 reads, is gone."""
    model, optimizer = training()
    saving.save(folder, 1, model, optimizer, {})
    path = checkpoints.latest(folder)
    second = path / sorted(manifest.read(path)["files"])[1]
    said = []
    for accident in (lambda: second.write_bytes(b""), (path / manifest.NAME).unlink):
        torch.distributed.barrier()
        if me.rank == 0:
            accident()
        torch.distributed.barrier()
        with pytest.raises(manifest.Damaged) as refused:
            checkpoints.load(path, model, optimizer)
        said.append(str(refused.value))
    return said


def test_what_one_rank_finds_damaged_all_refuse(tmp_path):
    first, second = LAB.on_ranks(by_value(told_of_damage_by_each_rank), str(tmp_path))
    assert first == second
    assert "has 0 bytes instead of" in first[0] and "it has no manifest.json" in first[1]


# Whole, or not loaded


@pytest.fixture(scope="module")
def two_ranks_checkpoint(tmp_path_factory):
    """step-000001, written by two ranks that share its tensors, and step-000002, another of the same."""
    folder = tmp_path_factory.mktemp("sharded")
    LAB.on_ranks(by_value(save_twice), str(folder))
    return folder


def save_twice(me, folder):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, _ = training()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in (1, 2):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saving.save(folder, step, model, optimizer, RUN)


def mutate(path: Path, other: Path, how: str, chance: random.Random):
    """Damage a file of a checkpoint; other: the file that has its place in another checkpoint."""
    content = path.read_bytes()
    at = chance.randrange(len(content))
    if how == "truncate":
        path.write_bytes(content[:at])
    elif how == "flip a bit":
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :])
    elif how == "delete":
        path.unlink()
    elif how == "take another checkpoint's":
        path.write_bytes(other.read_bytes())
    elif how == "swap":
        neighbour = chance.choice([each for each in path.parent.iterdir() if each != path])
        path.write_bytes(neighbour.read_bytes())
        neighbour.write_bytes(content)
    elif how == "append":
        path.write_bytes(content + b"\0")


HOW = ("truncate", "flip a bit", "delete", "take another checkpoint's", "swap", "append")


@pytest.mark.parametrize("number", range(MUTATIONS))
def test_every_damage_is_found_and_nothing_is_loaded(number, two_ranks_checkpoint, tmp_path, world_of_one):
    whole, after = (two_ranks_checkpoint / f"step-00000{step}" for step in (1, 2))
    path = Path(shutil.copytree(whole, tmp_path / whole.name))
    names = sorted(each.name for each in path.iterdir())
    assert len(names) == 4  # two ranks' files, DCP's metadata, the manifest
    name, how = names[number % len(names)], HOW[number // len(names) % len(HOW)]
    mutate(path / name, after / name, how, random.Random(number))
    model, optimizer = training()
    before = values(model)
    with pytest.raises(manifest.Damaged, match=str(path)) as refused:
        checkpoints.load(path, model, optimizer, RUN)
    assert any(each in str(refused.value) for each in names)  # it names a file
    assert values(model) == before


def test_a_whole_one_is_loaded_by_another_number_of_ranks(two_ranks_checkpoint, world_of_one):
    model, optimizer = training()
    before = values(model)
    assert checkpoints.load(two_ranks_checkpoint / "step-000001", model, optimizer, RUN) == 1
    assert values(model) != before


def test_the_newest_whole_one_is_taken_if_asked_for(two_ranks_checkpoint, tmp_path, world_of_one, capsys):
    folder = Path(shutil.copytree(two_ranks_checkpoint, tmp_path / "copied"))
    (folder / "step-000002" / ".metadata").unlink()
    with pytest.raises(
        UserError, match=r"step-000002 is damaged \(.metadata: No such file or directory\): give --fall"
    ):
        resumed(folder)
    assert (folder / "step-000002").exists()
    assert resumed(folder, fallback=True) == 1
    assert "step-000002 is damaged (.metadata: No such file or directory): set aside" in capsys.readouterr().out
    assert (folder / "step-000002.damaged").exists() and not (folder / "step-000002").exists()
    (folder / "step-000001" / manifest.NAME).unlink()
    with pytest.raises(UserError, match="no checkpoint in .* is whole: name another --checkpoint"):
        resumed(folder, fallback=True)


def resumed(folder, run=RUN, **given) -> int:
    """The step from which a run goes on that ends there."""
    run = saver(folder, *training(), run, resume=True, **given)
    try:
        return run.resume(9)
    finally:
        run.folder.close()


# Storage that does not answer


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_storage_that_answers_after_a_while_is_waited_for(number, two_ranks_checkpoint, world_of_one, monkeypatch):
    answers = failing(monkeypatch, number, times=2)
    assert checkpoints.load(two_ranks_checkpoint / "step-000002", *training(), RUN) == 2
    assert answers.count(number) == 2


def test_storage_that_does_not_answer_is_no_damage(two_ranks_checkpoint, tmp_path, world_of_one, monkeypatch, capsys):
    """Without --fallback the run ends, to be started again later; with it an older one serves. No file is touched."""
    folder = Path(shutil.copytree(two_ranks_checkpoint, tmp_path / "copied"))
    with monkeypatch.context() as patch:
        failing(patch, errno.EIO, at="step-000002")
        with pytest.raises(manifest.Unreadable, match="cannot be read now .*Input/output error.*try again") as refused:
            resumed(folder)
        assert refused.value.exit_code == 75
        assert resumed(folder, fallback=True) == 1
        assert "step-000002 cannot be read now (Input/output error): trying the one before" in capsys.readouterr().out
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000001", "step-000002"]
    assert resumed(folder) == 2


def test_an_error_after_the_check_is_none_either(two_ranks_checkpoint, tmp_path, world_of_one, monkeypatch):
    folder = Path(shutil.copytree(two_ranks_checkpoint, tmp_path / "copied"))
    load = dcp.load

    def fails_once(*given, storage_reader, **about):
        if "step-000002" in str(storage_reader.path):
            raise OSError(errno.EIO, "Input/output error")
        load(*given, storage_reader=storage_reader, **about)

    monkeypatch.setattr(dcp, "load", fails_once)
    with pytest.raises(manifest.Unreadable):
        resumed(folder)
    assert resumed(folder, fallback=True) == 1


def failing(monkeypatch, number: int, times: int = 10**9, at: str = "") -> list[int]:
    """Have the first calls that hash a file of a checkpoint fail; return what they raised, call by call."""
    digest, raised = manifest.digest, []

    def fails(path):
        if at in str(path) and len(raised) < times:
            raised.append(number)
            raise OSError(number, os.strerror(number), str(path))
        return digest(path)

    monkeypatch.setattr(manifest, "digest", fails)
    monkeypatch.setattr(manifest, "WAITS", (0, 0))
    return raised


def test_metadata_is_read_once(two_ranks_checkpoint, world_of_one, monkeypatch):
    """It has an entry for each piece of each tensor on each rank: half a minute for a million."""
    loads, ours, plain = [], dcp_reading._Restricted.load, pickle.load
    monkeypatch.setattr(dcp_reading._Restricted, "load", lambda self: loads.append("ours") or ours(self))
    monkeypatch.setattr(pickle, "load", lambda file: loads.append("DCP's") or plain(file))
    checkpoints.load(two_ranks_checkpoint / "step-000001", *training(), RUN)
    assert loads == ["ours"]
    saving.save(Path(two_ranks_checkpoint) / "again", 1, *training(), RUN)
    assert loads == ["ours"]


# Of this run, this model, this version


def test_another_model_and_a_later_format_are_told(tmp_path, world_of_one):
    saving.save(tmp_path, 1, *training(), RUN)
    path = checkpoints.latest(tmp_path)
    with pytest.raises(
        UserError, match=r"is of another model: model.0.weight has the shape \[8, 8\], and here it has \[8, 5\]"
    ):
        checkpoints.load(path, *training(width=5), RUN)
    found = manifest.read(path)
    manifest.write(path, found.pop("files"), **found | {"format": 2})
    with pytest.raises(UserError, match="has format 2, and this version knows 1: update the course"):
        checkpoints.load(path, *training(), RUN)


def test_a_file_that_is_not_in_the_manifest_is_damage(two_ranks_checkpoint, tmp_path, world_of_one):
    """A manifest with a right checksum, made elsewhere, that leaves out what is read."""
    path = Path(shutil.copytree(two_ranks_checkpoint / "step-000001", tmp_path / "step-000001"))
    found = manifest.read(path)
    for left_out in ({}, {name: each for name, each in found["files"].items() if name != "__1_0.distcp"}):
        manifest.write(path, left_out, **{key: each for key, each in found.items() if key != "files"})
        with pytest.raises(manifest.Damaged, match="is not in its manifest.json"):
            checkpoints.load(path, *training(), RUN)


# What may change when a run resumes


@dataclasses.dataclass(frozen=True)
class Lab_(Training):
    lr: float = option(1.0, "learning rate", resumed="print")
    gamma: float = option(0.5, "its factor", resumed="print")


def test_what_changes_is_printed(tmp_path, world_of_one, capsys, monkeypatch):
    first = saving.Saver(Lab_(checkpoint=str(tmp_path)), *training(), RUN)
    first.save(1)
    first.finish()
    again = saving.Saver(Lab_(checkpoint=str(tmp_path), resume=True, lr=0.1), *training(), RUN)
    assert again.resume(9) == 1
    again.folder.close()
    printed = capsys.readouterr().out
    assert "torch" not in printed
    monkeypatch.setattr(torch, "__version__", "2.99")
    saving.Saver(Lab_(checkpoint=str(tmp_path), resume=True), *training(), RUN).resume(9)
    assert "step-000001 was saved with torch " in capsys.readouterr().out
    assert "--lr was 1 up to step-000001, and is 0.1 from here on" in printed and "--gamma" not in printed


@pytest.mark.parametrize(("saved", "here", "refused"), [("float64", "float32", True), ("float32", "bfloat16", True), ("float32", "float64", False), ("float32", "float32", False)])  # fmt: skip
def test_weights_are_not_narrowed_unless_one_says_so(saved, here, refused, tmp_path, world_of_one):
    model, optimizer = training()
    saving.save(tmp_path, 1, model.to(getattr(torch, saved)), optimizer, RUN)
    before = manifest.read(tmp_path / "step-000001")["formats"]
    assert before["model.0.weight"] == saved
    narrower = training()[0].to(getattr(torch, here))
    run = saver(tmp_path, narrower, torch.optim.SGD(narrower.parameters()), resume=True)
    if refused:
        with pytest.raises(UserError, match=f"in {saved}, and this run has {here}.*--allow-narrowing"):
            run.resume(9)
        run.folder.close()
        run = saver(tmp_path, narrower, torch.optim.SGD(narrower.parameters()), resume=True, allow_narrowing=True)
    assert run.resume(9) == 1


# From elsewhere: nothing in it is run


class Hostile:
    """Unpickled, it makes a file: it could do anything."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def with_digests_anew(path: Path):
    """Whoever makes a checkpoint to do harm makes its manifest, too."""
    found = json.loads((path / manifest.NAME).read_text())
    del found["sha256"]
    files = {name: manifest.digest(path / name) for name in found.pop("files")}
    manifest.write(path, files, **found)


def test_metadata_that_would_run_code_is_refused(tmp_path, world_of_one):
    saving.save(tmp_path, 1, *training(), RUN)
    path, trace = checkpoints.latest(tmp_path), tmp_path / "it ran"
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(trace)))
    with_digests_anew(path)
    with pytest.raises(UserError, match=r"its metadata names pathlib"):
        checkpoints.load(path, *training(), RUN)
    assert not trace.exists()


class Called:
    """It is pickled as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_metadata_of_every_python_is_read_and_getattr_serves_for_nothing_else():
    """Python 3.11.2, which is Debian 12's, pickles an enum's member as a call of getattr."""

    def read(value):
        return dcp_reading._Restricted(io.BytesIO(pickle.dumps(value))).load()

    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert read(Called(getattr, _MEM_FORMAT_ENCODING, member.name)) is read(member) is member
    path = pickle.dumps(Path("a file"), 0).replace(b"cpathlib\n", b"cpathlib._local\n")  # as Python 3.13 does
    assert dcp_reading._Restricted(io.BytesIO(path)).load() == Path("a file")
    with pytest.raises(pickle.UnpicklingError, match="its metadata names __init__ of"):
        read(Called(getattr, torch.Size, "__init__"))


def test_a_value_that_would_run_code_is_refused(tmp_path, world_of_one, monkeypatch):
    trace, save = tmp_path / "it ran", dcp.save
    monkeypatch.setattr(dcp, "save", lambda state, **about: save(state | {"step": Hostile(trace)}, **about))
    saving.save(tmp_path, 1, *training(), RUN)
    path = checkpoints.latest(tmp_path)
    with pytest.raises(UserError, match="cannot be read .*: name another --checkpoint"):
        checkpoints.load(path, *training(), RUN)
    assert not trace.exists()
    with pytest.raises(Exception):  # noqa: B017  DCP itself runs it, and then misses a number
        dcp.load({"step": 0}, checkpoint_id=path)
        raise RuntimeError
    assert trace.exists()
