"""The fault drill: a run of which a rank is killed goes on as if nothing had happened; and the drill sees what is not so."""

import shutil
from collections import Counter
from pathlib import Path

import drill
import pytest
from forked import by_value
from labkit.running import launch
from labkit.training import checkpoints, manifest

pytestmark = pytest.mark.long
TRIALS, SAMPLE = 15, 2  # of each configuration: in CI, and elsewhere


@pytest.fixture(scope="module")
def trials(require_all):
    return TRIALS if require_all else SAMPLE


@pytest.fixture(scope="module")
def rows(trials):
    return drill.run(trials, seed=1)


@pytest.mark.parametrize("name", drill.CONFIGURATIONS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(name, rows, trials):
    mine = [row for row in rows if row["configuration"] == name]
    assert len(mine) == trials
    assert [row for row in mine if row["failures"]] == []
    assert all(0 <= row["redone"] <= drill.EVERY and row["lost"] == 0 for row in mine)


def test_many_are_killed_while_saving(rows):
    phases = Counter(row["phase"] for row in rows)
    assert phases["saving"] >= len(rows) / 4, phases
    assert not list(launch.RUNS.glob(".drill-*"))


# It can fail


def forget_the_optimizer():
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    checkpoints.set_state_dict = lambda model, _, model_state_dict, **__: set_model_state_dict(model, model_state_dict)


def go_on_a_step_too_late():
    load = checkpoints.load
    checkpoints.load = lambda *about: load(*about) + 1


def name_it_before_it_is_whole():
    write, put_in_place = manifest.write, checkpoints.put_in_place

    def write_into_what_has_its_name(folder: Path, *files, **about):
        write(folder.rename(folder.with_suffix("")), *files, **about)

    def put_back_in_place(partial: Path, keep):
        put_in_place(partial.with_suffix("").rename(partial), keep)

    manifest.write, checkpoints.put_in_place = write_into_what_has_its_name, put_back_in_place


def remove_the_one_before_first():
    put_in_place = checkpoints.put_in_place

    def after_making_room(partial: Path, keep):
        for old in checkpoints.stored(partial.parent):
            shutil.rmtree(old)
        put_in_place(partial, keep)

    checkpoints.put_in_place = after_making_room


BROKEN = {
    forget_the_optimizer: "step-000006 has other weights than the undisturbed run's",
    go_on_a_step_too_late: "step-000006 has other weights than the undisturbed run's",
    name_it_before_it_is_whole: "step-000004 is not whole: manifest.json is not what this course writes",
    remove_the_one_before_first: "step-000002 was whole and is lost",
}


def on_broken_code(me, break_it, function, *arguments):
    break_it()
    return function(me, *arguments)


@pytest.fixture(scope="module")
def expected():
    return drill.undisturbed("GPT, DDP")


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda function: function.__name__)
def test_the_drill_sees_what_is_broken(break_it, expected, monkeypatch):
    """Rank 0 is killed in the middle of the second save: while it writes the manifest, or a little later."""
    attempt, spans = drill.attempt, expected.events[0]["saving"]
    second = spans[len(spans) // 3 :][1]
    monkeypatch.setattr(drill, "moment", lambda *_: (0, second[len(second) // 2]))
    monkeypatch.setattr(drill, "attempt", lambda *call: attempt(by_value(on_broken_code), break_it, *call))
    row = drill.trial("GPT, DDP", 0, 1, expected)
    assert any(BROKEN[break_it] in failure for failure in row["failures"]), row


def test_and_with_the_code_as_it_is_nothing(expected, monkeypatch):
    spans = expected.events[0]["saving"]
    second = spans[len(spans) // 3 :][1]
    monkeypatch.setattr(drill, "moment", lambda *_: (0, second[len(second) // 2]))
    row = drill.trial("GPT, DDP", 0, 1, expected)
    assert (row["where"], row["whole"], row["redone"]) == ("manifest.write", ["step-000002"], 2)
    assert row["failures"] == []
