"""The fault drill: a run of which a rank is killed goes on as if nothing had happened; and the drill sees what is not so."""

import functools
import shutil
from collections import Counter
from pathlib import Path

import drill
import pytest
from forked import by_value
from labkit.running import launch
from labkit.training import checkpoints, manifest, saving

pytestmark = pytest.mark.long
TRIALS = 1  # of each configuration


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where the trials' runs go: a folder that no other test writes to. The undisturbed run of each is made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RUNS", tmp_path_factory.mktemp("runs"))
        patch.setattr(drill, "undisturbed", functools.cache(drill.undisturbed))
        yield launch.RUNS


@pytest.fixture(scope="module")
def rows(runs, seed):
    print(f"to repeat them: python drill.py --trials {TRIALS} --seed {seed}")
    return drill.run(TRIALS, seed)


@pytest.mark.parametrize("name", drill.CONFIGURATIONS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(name, rows):
    mine = [row for row in rows if row["configuration"] == name]
    assert len(mine) == TRIALS
    assert [row for row in mine if row["failures"]] == []
    assert all(0 <= row["redone"] <= drill.EVERY and row["lost"] == 0 for row in mine)


def test_each_is_killed_in_the_phase_it_was_meant_for(rows, runs):
    """But for a few events at a phase's end, as a run does not always have equally many."""
    expected = {row["configuration"]: drill.undisturbed(row["configuration"]).events for row in rows}
    meant = [phase_of(row["event"], expected[row["configuration"]][row["victim"]]) for row in rows]
    elsewhere = [row for row, phase in zip(rows, meant, strict=True) if row["phase"] != phase]
    assert len(elsewhere) <= len(rows) / 4, elsewhere
    assert not list(runs.iterdir())


def phase_of(event: int, phases: dict) -> str:
    return next(phase for phase, spans in phases.items() if any(event in span for span in spans))


def test_many_are_meant_for_saving(rows, seed):
    """Half of them, whatever the seed: of so many draws that chance cannot bring it down to a third."""
    for name in drill.CONFIGURATIONS:
        expected = drill.undisturbed(name)
        drawn = [drill.moment(name, number, seed, expected) for number in range(400)]
        phases = Counter(phase_of(event, expected.events[victim]) for victim, event in drawn)
        assert phases["saving"] >= len(drawn) / 3 and set(phases) == set(drill.PHASES), phases


# It can fail


def forget_the_optimizers_state():
    load = checkpoints.load

    def and_forget(path, model, optimizer, *about):
        step = load(path, model, optimizer, *about)
        optimizer.state.clear()
        return step

    checkpoints.load = and_forget


def go_on_a_step_too_late():
    load = checkpoints.load
    checkpoints.load = lambda *about: load(*about) + 1


def name_it_before_it_is_whole():
    write, put_in_place = manifest.write, saving.put_in_place

    def write_into_what_has_its_name(folder: Path, *files, **about):
        write(folder.rename(folder.with_suffix("")), *files, **about)

    def put_back_in_place(partial: Path, keep):
        put_in_place(partial.with_suffix("").rename(partial), keep)

    manifest.write, saving.put_in_place = write_into_what_has_its_name, put_back_in_place


def make_room_before_it_is_whole():
    write = manifest.write

    def after_making_room(folder: Path, *files, **about):
        for old in checkpoints.stored(folder.parent):
            shutil.rmtree(old)
        write(folder, *files, **about)

    manifest.write = after_making_room


BROKEN = {
    forget_the_optimizers_state: "step-000006 has other weights than the undisturbed run's",
    go_on_a_step_too_late: "step-000006 has other weights than the undisturbed run's",
    name_it_before_it_is_whole: "step-000004 is not whole: manifest.json is not what this course writes",
    make_room_before_it_is_whole: "step-000002 was whole and is lost",
}


def on_broken_code(me, break_it, function, *arguments):
    break_it()
    return function(me, *arguments)


@pytest.fixture(scope="module")
def expected(runs):
    return drill.undisturbed("GPT, DDP")


@pytest.fixture
def killed(expected, monkeypatch):
    """A function: the row of a trial in which rank 0 is killed as it writes the second checkpoint's manifest."""
    spans = expected.events[0]["saving"]
    manifest_of_the_second = spans[len(spans) * drill.EVERY // drill.STEPS :][1]
    middle = manifest_of_the_second[len(manifest_of_the_second) // 2]
    monkeypatch.setattr(drill, "moment", lambda *_: (0, middle))
    return lambda: drill.trial("GPT, DDP", 0, 1, expected)


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda function: function.__name__)
def test_the_drill_sees_what_is_broken(break_it, killed, monkeypatch):
    attempt = drill.attempt
    monkeypatch.setattr(drill, "attempt", lambda *call: attempt(by_value(on_broken_code), break_it, *call))
    row = killed()
    assert any(BROKEN[break_it] in failure for failure in row["failures"]), row


def test_and_sees_nothing_in_the_code_as_it_is(killed):
    row = killed()
    assert (row["where"], row["whole"], row["redone"]) == ("manifest.write", ["step-000002"], 2)
    assert row["failures"] == []
