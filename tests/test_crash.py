# SPDX-License-Identifier: BSD-3-Clause
"""Fault injection: a disturbed run resumes as if nothing had happened; and the proof notices where that is not so."""

import functools
import shutil
from collections import Counter
from pathlib import Path

import few_digits
import pytest
from forked import by_value
from labkit.running import launch
from labkit.training import checkpoints, manifest, ownership, saving
from labkit.training.checkpoint_folder import CheckpointFolder
from proofs import crash

pytestmark = pytest.mark.long
TRIALS = 1  # of each configuration: one of each kind. `make drill` tries 60
narrow, small_gpt = by_value(few_digits.narrow), few_digits.small_gpt


def on_small_models(me, function, *arguments):
    """A run is watched call by call, and each tensor has its own: what is tested does not depend on how many there are."""
    narrow()
    small_gpt()
    return function(me, *arguments)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where the trials' runs go: a folder that no other test writes to. The undisturbed run of each is made once."""
    attempt = crash.try_run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RUNS", tmp_path_factory.mktemp("runs"))
        patch.setattr(crash, "try_run", lambda *call: attempt(by_value(on_small_models), *call))
        patch.setattr(crash, "reference_run", functools.cache(crash.reference_run))
        yield launch.RUNS


@pytest.fixture(scope="module")
def rows(runs, seed):
    print(f"to repeat them: python -m proofs.crash --trials {TRIALS} --seed {seed}")
    return crash.run(TRIALS, seed)


@pytest.mark.parametrize("name", crash.CONFIGURATIONS)
def test_a_disturbed_run_goes_on_as_if_nothing_had_happened(name, rows):
    mine = [row for row in rows if row["configuration"] == name]
    assert len(mine) == TRIALS
    assert [row for row in mine if row["failures"]] == []
    assert all(row["equal"] and row["lost"] == 0 for row in mine)


def test_each_kind_is_tried_and_nothing_is_left(rows, runs):
    assert {row["kind"] for row in rows} == set(crash.KINDS)
    assert not list(runs.iterdir())


def phase_of(event: int, phases: dict) -> str:
    return next(phase for phase, spans in phases.items() if any(event in span for span in spans))


def test_many_are_meant_for_saving(rows, seed):
    """Half of them, whatever the seed: of so many draws that chance cannot bring it down to a third."""
    for row in rows:
        name = row["configuration"]
        expected = crash.reference_run(name, row["async_checkpoint"])  # that of its trial
        drawn = [crash.drawn_event(name, number, seed, expected) for number in range(400)]
        phases = Counter(phase_of(event, expected.events[victim]) for victim, event in drawn)
        assert phases["saving"] >= len(drawn) / 3 and set(phases) == set(crash.PHASES), phases


def test_circumstances_vary(seed):
    drawn = [
        crash.circumstances(name, n, seed, crash.kind_of(name, n)) for name in crash.CONFIGURATIONS for n in range(15)
    ]
    assert {each["async_checkpoint"] for each, _ in drawn} == {False, True}
    assert {each["keep_last"] for each, _ in drawn} == {None, 1, 2}
    assert 5 < sum(damaged for _, damaged in drawn) < 30
    assert all(each["keep_last"] != 1 for each, damaged in drawn if damaged)  # nothing would be left to fall back to


# It can fail


def forget_the_optimizers_state():
    load = checkpoints.load

    def and_forget(path, optimizer, **about):
        step = load(path, optimizer=optimizer, **about)
        optimizer.state.clear()
        return step

    checkpoints.load = and_forget


def go_on_a_step_too_late():
    load = checkpoints.load
    checkpoints.load = lambda path, **about: load(path, **about) + 1


def name_it_before_it_is_whole():
    write, commit, to_disk = manifest.write, CheckpointFolder.commit, saving.to_disk

    def final(partial: Path) -> Path:
        return partial.with_name(partial.name.partition(".")[0])

    def write_into_what_has_its_name(folder: Path, *files, **about):
        write(folder.rename(final(folder)), *files, **about)

    manifest.write = write_into_what_has_its_name
    saving.to_disk = lambda folder: to_disk(folder if folder.exists() else final(folder))
    CheckpointFolder.commit = lambda self, partial: commit(self, final(partial).rename(partial))


def make_room_before_it_is_whole():
    write = manifest.write

    def after_making_room(folder: Path, *files, **about):
        for old in checkpoints.stored(folder.parent):
            shutil.rmtree(old)
        write(folder, *files, **about)

    manifest.write = after_making_room


def leave_the_damaged_one():
    CheckpointFolder.set_aside = lambda *_: None


def let_everybody_in():
    ownership._why_over = lambda *_: "nobody asked"


def release_the_folder_at_once():
    acquire = ownership.acquire

    def and_release(folder):
        owner, over = acquire(folder)
        owner.release()
        return owner, over

    ownership.acquire = and_release


def save_whatever_it_is():
    saving.Saver._is_finite = lambda self: True


def give_up_at_once():
    saving.TRANSIENT = ()


BROKEN = {  # what is broken: the kind of trial that must see it, and what it says
    forget_the_optimizers_state: ("kill", "step-000006 has other weights than the undisturbed run's"),
    go_on_a_step_too_late: ("kill", "step-000006 has other weights than the undisturbed run's"),
    name_it_before_it_is_whole: ("kill", "step-000004 is not whole: manifest.json is not what this course writes"),
    make_room_before_it_is_whole: ("kill", "step-000002 was whole and is lost"),
    leave_the_damaged_one: ("damage", "was not set aside"),
    let_everybody_in: ("second run", "the second run was not refused"),
    release_the_folder_at_once: ("second run", "the second run was not refused"),
    save_whatever_it_is: ("NaN", "has numbers that are not finite"),
    give_up_at_once: ("I/O error", "an error that passes ended the run"),
}


def on_broken_code(me, break_it, function, *arguments):
    break_it()
    return function(me, *arguments)


@pytest.fixture
def tried(runs, monkeypatch):
    """A function: the row of a trial of a kind, of the GPT under DDP, at a moment that lets it show what is broken."""

    def of(kind: str) -> dict:
        expected = crash.reference_run("GPT, DDP", False)
        spans = expected.events[0]["saving"]
        manifest_of_the_second = spans[len(spans) * crash.EVERY // crash.STEPS :][1]
        middle = manifest_of_the_second[len(manifest_of_the_second) // 2]
        end = expected.events[0]["after the last save"][-1][0]
        monkeypatch.setattr(crash, "drawn_event", lambda *_: (0, end if kind == "damage" else middle))
        monkeypatch.setattr(crash, "poison", lambda *_: (0, crash.EVERY))  # just before a save
        monkeypatch.setattr(crash, "kind_of", lambda *_: "kill" if kind == "damage" else kind)
        options = {"async_checkpoint": False, "keep_last": None}
        monkeypatch.setattr(crash, "circumstances", lambda *_: (options, kind == "damage"))
        return crash.trial("GPT, DDP", 0, 1, crash.reference_run)

    return of


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda function: function.__name__)
def test_the_drill_sees_what_is_broken(break_it, tried, monkeypatch):
    kind, said = BROKEN[break_it]
    crash.reference_run("GPT, DDP", False)  # of the code as it is
    attempt = crash.try_run
    monkeypatch.setattr(crash, "try_run", lambda *call: attempt(by_value(on_broken_code), break_it, *call))
    row = tried(kind)
    assert any(said in failure for failure in row["failures"]), row


def test_and_sees_nothing_in_the_code_as_it_is(tried):
    row = tried("kill")
    assert (row["where"], row["whole"], row["redone"]) == ("manifest.write", ["step-000002"], 2)
    assert row["failures"] == []
    assert tried("damage")["failures"] == []
