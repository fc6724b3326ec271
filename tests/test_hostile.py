# SPDX-License-Identifier: BSD-3-Clause
"""What nobody means to give, given: one sentence, exit code 2, nothing lost and nothing half-written.

Damaged checkpoints are in test_checkpoints.py, damaged data in test_datasets.py, slips of the command line in
test_bad_input.py, test_gpt.py and test_plan.py. Signals, which need ranks, are in test_signals.py.
"""

import contextlib
import dataclasses
import io
import json
import os
import random
import sys
from pathlib import Path

import ladder
import plan
import pytest
from commands import commands, options_class, refused
from labkit import UserError
from labkit.measuring import records
from labkit.running import launch, options
from labkit.running.options import Training
from labkit.training import checkpoints, datasets, manifest, saving
from labkit.training.checkpoint_folder import CheckpointFolder
from proofs import gpu as gpu_proof
from small_mnist import fill
from test_checkpoints import RUN, saver, training, values

# Options

REFUSED = ("nan", "inf", "-inf", "1" + "0" * 30, "9" * 5000, "1e308", "", "  ", "a\nb", "a\tb", "\x1b[2J", "--")


def parsed(command: str, words: list[str], monkeypatch):
    """(the options or None, what was said of them) of a command line."""
    monkeypatch.setattr(sys, "argv", [command])
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            return options.parse(options_class(command), "", words), said.getvalue()
        except SystemExit as exit_:
            assert exit_.code == 2
            return None, said.getvalue()


def free_fields(command: str) -> dict:
    """{name: type} of the options that are no switch and no choice of a few words."""
    found = {field.name: options._argument(field) for field in dataclasses.fields(options_class(command))}
    return {name: argument["type"] for name, argument in found.items() if "type" in argument}


@pytest.mark.parametrize("command", commands())
def test_no_option_takes_what_means_nothing(command, monkeypatch):
    """Numbers refuse all of these, texts what is empty or no line of text."""
    for name, kind in free_fields(command).items():
        for value in REFUSED:
            found, said = parsed(command, [f"{options.flag(name)}={value}"], monkeypatch)
            assert (found is None) == (len(said.splitlines()) == 1), (name, value, said)
            if kind is not str or not (value.strip() and value.isprintable()):
                assert found is None and said.startswith(f"{Path(command).name}: "), (name, value, found)


def test_every_command_with_options_is_found():
    """A file that is started and reads options by other means would not be among the commands above."""
    others = {"prepare_data.py", "export.py"}  # argparse itself; neither takes a number
    others |= {
        "proofs/families_page.py",
        "proofs/knobs_page.py",
        "proofs/planner_page.py",
        "proofs/gpu_page.py",
    }  # take none
    files = [*launch.SOURCE.glob("*.py"), *launch.SOURCE.glob("proofs/*.py")]
    started = {path for path in files if '__name__ == "__main__"' in path.read_text()}
    assert {str(path.relative_to(launch.SOURCE)) for path in started} == {*commands(), *others}


ABSURD_PLANS = [
    "--ranks 1000000000",
    "--seq-len 1000000000 --batch-size 1000000000",
    "--accumulate 10000 --batch-size 1000000000",
    "--flops 1e-300",
    "--efficiency 1e-320",
    "--link 1e-320",
    "--network 1e300",
    "--gpu-memory 1e300",
    "--mesh 999999999x999999999",
    "--mesh shard=1000000000000,tensor=8",
    "--reshard-after-forward 999999999",
    "--node-size 1000000000",
]


@pytest.mark.parametrize("words", ABSURD_PLANS)
def test_a_plan_is_refused_or_has_finite_figures(words, monkeypatch):
    found, said = parsed("plan.py", ["--json", *words.split()], monkeypatch)
    if found is None:
        assert len(said.splitlines()) == 1
        return
    try:
        answer = plan.answer(found)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert "Infinity" not in answer and "NaN" not in answer


# Folders for checkpoints


def to_a_file(folder):
    (folder / "it").write_text("in the way")
    return folder / "it"


def under_a_file(folder):
    (folder / "it").write_text("in the way")
    return folder / "it" / "checkpoints"


def to_nowhere(folder):
    (folder / "it").symlink_to(folder / "nowhere" / "at all")
    return folder / "it"


def in_circles(folder):
    (folder / "it").symlink_to(folder / "again")
    (folder / "again").symlink_to(folder / "it")
    return folder / "it" / "checkpoints"


def with_too_long_a_name(folder):
    return folder / ("x" * 300)


def where_nobody_may_write(_):
    return "/proc/fsdp-labs"


NO_FOLDERS = (to_a_file, under_a_file, to_nowhere, in_circles, with_too_long_a_name, where_nobody_may_write)


@pytest.mark.parametrize("where", NO_FOLDERS, ids=lambda where: where.__name__)
def test_what_is_no_folder_is_told_before_training(where, tmp_path):
    path = where(tmp_path)
    before = sorted(tmp_path.iterdir())
    with refused("--checkpoint", path):
        CheckpointFolder.of(Training(checkpoint=str(path)))
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture
def read_only(tmp_path):
    """A folder with a checkpoint in it, for somebody who may not write there; root may write everywhere, so not as root."""
    folder = tmp_path / "theirs"
    (folder / "step-000001").mkdir(parents=True)
    folder.chmod(0o555)
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(me)
    folder.chmod(0o755)


def test_a_folder_that_may_only_be_read(read_only):
    with refused(read_only, "(Permission denied)", "--checkpoint"):
        CheckpointFolder.of(Training(checkpoint=str(read_only), resume=True))
    with refused(read_only, "(Permission denied)", "--record"):
        records.check_writable(read_only / "run.json")


def with_spaces(folder):
    return folder / "my  check points"


def in_another_alphabet(folder):
    return folder / "Überprüfung 检查点 🙂"


def through_a_link(folder):
    (folder / "real").mkdir()
    (folder / "it").symlink_to(folder / "real")
    return folder / "it"


def through_a_link_to_what_is_not_there_yet(folder):
    return through_a_link(folder) / "deeper" / "still"


@pytest.mark.parametrize(
    "where",
    (with_spaces, in_another_alphabet, through_a_link, through_a_link_to_what_is_not_there_yet),
    ids=lambda where: where.__name__,
)
def test_what_is_a_folder_serves(where, tmp_path, world_of_one):
    folder = where(tmp_path)
    model, optimizer = training()
    run = saver(folder, model, optimizer, resume=True)
    assert run.resume(9) == 0
    run.save(1)
    run.finish()
    saved = values(model)
    another, optimizer = training()
    assert values(another) != saved
    assert saver(folder, another, optimizer, resume=True).resume(9) == 1
    assert values(another) == saved


def a_file(path):
    path.write_text("mine")


def a_link_to_nowhere(path):
    path.symlink_to(path.parent / "nowhere")


def a_link_to_itself(path):
    path.symlink_to(path)


def a_link_to_a_folder(path):
    (path.parent / "elsewhere").mkdir()
    (path.parent / "elsewhere" / "mine").touch()
    path.symlink_to(path.parent / "elsewhere")


IN_THE_WAY = (a_file, a_link_to_nowhere, a_link_to_itself, a_link_to_a_folder)


@pytest.mark.parametrize("name", ["step-000002", "step-000002.partial", "step-000001.removed"])
@pytest.mark.parametrize("what", IN_THE_WAY, ids=lambda what: what.__name__)
def test_what_has_a_checkpoints_name_and_is_none_costs_no_checkpoint(what, name, tmp_path, world_of_one):
    """The step is saved all the same, and what a link leads to is not touched."""
    model, optimizer = training()
    saving.save(tmp_path, 1, model, optimizer, RUN)
    what(tmp_path / name)
    saving.save(tmp_path, 2, model, optimizer, RUN, keep=1 if name.endswith("removed") else None)
    assert checkpoints.load(tmp_path / "step-000002", model, optimizer, RUN) == 2
    assert (tmp_path / "step-000001").is_dir() != name.endswith("removed")
    if what is a_link_to_a_folder:
        assert (tmp_path / "elsewhere" / "mine").exists()


# Manifests that are whole and say nonsense

NONSENSE = {
    "files": [
        [],
        "files",
        None,
        3,
        {"a": None},
        {"a": {"bytes": "many", "sha256": "x"}},
        {"a\0b": {"bytes": 1, "sha256": ""}},
    ],
    "run": [[], None, "this one"],
    "shapes": [[], None, {"model.0.weight": "wide"}],
    "format": ["1", None, 1e300, [1]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, each in NONSENSE.items() for value in each], ids=repr)
def test_a_manifest_that_says_nonsense_is_told(key, value, tmp_path, world_of_one):
    model, optimizer = training()
    saving.save(tmp_path, 1, model, optimizer, RUN)
    path, before = tmp_path / "step-000001", values(model)
    found = manifest.read(path) | {key: value}
    manifest.write(path, found.pop("files"), **{name: each for name, each in found.items() if name != "sha256"})
    with refused("step-000001"):
        checkpoints.load(path, model, optimizer, RUN)
    assert values(model) == before


# Records

RECORD = {"schema": 1, "script": "gpt_fsdp.py", "config": {}, "ranks": 2}
NO_RECORDS = {
    "empty": b"",
    "cut off": json.dumps(RECORD).encode()[:-9],
    "not text": bytes(range(256)),
    "another encoding": json.dumps(RECORD).encode("utf-16"),
    "a number": b"1",
    "nothing": b"null",
    "deep": b"[" * 100_000,
    "a number of many digits": b'{"schema": ' + b"9" * 5000 + b"}",
    "no schema": b"{}",
    "true for 1": json.dumps(RECORD | {"schema": True}).encode(),
    "a later one": json.dumps(RECORD | {"schema": 2}).encode(),
    "nothing but a schema": b'{"schema": 1}',
    "a config that is none": json.dumps(RECORD | {"config": "default"}).encode(),
    "no ranks": json.dumps(RECORD | {"ranks": 0}).encode(),
    "ranks that are none": json.dumps(RECORD | {"ranks": "two"}).encode(),
    "more ranks than there are": json.dumps(RECORD | {"ranks": 10**30}).encode(),
    "half a rank": json.dumps(RECORD | {"ranks": 0.5}).encode(),
    "ranks not a number": json.dumps(RECORD | {"ranks": float("nan")}).encode(),
    "a script that is none": json.dumps(RECORD | {"script": 3}).encode(),
}


@pytest.mark.parametrize("what", NO_RECORDS)
def test_what_is_no_record_is_told(what, tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(NO_RECORDS[what])
    with refused(path):
        records.load(path)
    assert path.read_bytes() == NO_RECORDS[what]


def test_a_record_that_is_a_folder_or_a_circle(tmp_path):
    (tmp_path / "circle.json").symlink_to(tmp_path / "circle.json")
    for path in (tmp_path, tmp_path / "circle.json", tmp_path / "run.json" / "run.json"):
        with refused(path):
            records.load(path)


def test_records_that_are_no_ladder(tmp_path):
    (tmp_path / "0.json").write_text(json.dumps(RECORD | {"memory": None}))
    with refused(tmp_path, "1", len(ladder.RUNGS)):
        ladder.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '[{"step": 1}]'])
def test_rows_of_a_part_that_are_none(text, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_proof.PARTS, "smoke", lambda config: [])
    config = gpu_proof.Config(device="cpu", folder=str(tmp_path))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "smoke.json").write_text(text)
    with refused("smoke.json", "proofs/gpu.py", "--force"):
        gpu_proof.run_part("smoke", config)


# Data that change while they are read


def cut(path):
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])


def take_away(path):
    path.unlink()


def put_another_in_its_place(path):
    path.write_bytes((path.parent / datasets.RESOURCES[1][0]).read_bytes() + b"\0")


def make_it_a_folder(path):
    path.unlink()
    path.mkdir()


def make_it_a_circle(path):
    path.unlink()
    path.symlink_to(path)


CHANGES = (cut, take_away, put_another_in_its_place, make_it_a_folder, make_it_a_circle)


@pytest.mark.parametrize("number", range(20))
def test_data_that_change_between_two_reads(number, small, tmp_path, monkeypatch):
    """prepare has found all well; then, before the n-th file is read, one is changed."""
    raw, chance = fill(tmp_path, small), random.Random(number)
    assert datasets.prepare("mnist", tmp_path) == "mnist"
    change, reads = CHANGES[number % len(CHANGES)], 0
    when = chance.randrange(4)
    victim = raw / datasets.RESOURCES[chance.randrange(when, 4)][0]  # read then, or later
    verified = datasets._verified

    def after_a_change(path, md5):
        nonlocal reads
        if reads == when:
            change(victim)
        reads += 1
        return verified(path, md5)

    monkeypatch.setattr(datasets, "_verified", after_a_change)
    with refused(raw):
        datasets.load("mnist", tmp_path)


def test_a_run_with_nothing_left_of_its_data(tmp_path, small, monkeypatch):
    """All files are gone between rank 0's prepare and a rank's load."""
    raw = fill(tmp_path, small)
    monkeypatch.setenv("FSDP_LABS_DATA", str(tmp_path))
    assert datasets.prepare("auto") == "mnist"
    for path in raw.iterdir():
        path.unlink()
    with refused("MNIST", raw):
        datasets.load("mnist")
