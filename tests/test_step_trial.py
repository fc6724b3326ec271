"""The trial of step times: what is predicted before the runs, the record that comes with the course."""

import json
import math
from datetime import datetime

import links
import pytest
import step_trial
from labkit import UserError
from labkit.measuring import records

REFERENCE = records.RESULTS / "reference" / "step-times-intel-xeon-2-cores.json"


@pytest.fixture(scope="module")
def reference():
    return json.loads(REFERENCE.read_text())


# The course's record


def test_every_step_time_is_within_15_percent(reference):
    found = {(row["rate"], row["strategy"]): row for row in reference["rows"]}
    assert set(found) == {(f"{rate}mbit", name) for rate in (100, 200, 400) for name in links.STRATEGIES}
    for place, row in found.items():
        assert len(row["steps"]) >= 5
        assert sorted(row["steps"])[0] <= row["measured"] <= sorted(row["steps"])[-1]
        assert row["difference"] == row["predicted"]["overlapped"] / row["measured"] - 1
        assert abs(row["difference"]) <= 0.15, place


def test_predictions_were_there_before_the_runs(reference):
    predicted = max(datetime.fromisoformat(row["predicted_at"]) for row in reference["rows"])
    began = datetime.fromisoformat(reference["measured_from"])
    measured = min(datetime.fromisoformat(row["measured_at"]) for row in reference["rows"])
    calibrated = datetime.fromisoformat(reference["calibration"]["record"]["date"])
    assert calibrated <= predicted <= began < measured


def test_the_planner_still_predicts_what_the_record_says(reference):
    for row in reference["rows"]:
        again = step_trial.predicted(reference["calibration"], row["strategy"], row["rate"])
        assert again["predicted"] == pytest.approx(row["predicted"])


def test_one_run_calibrates_them_all(reference):
    """On the link before it is slowed, by a strategy that waits for each of its collectives."""
    known = reference["calibration"]
    assert known["record"]["link"]["rate"] == "none"
    assert known["compute"] == pytest.approx(known["step"] - known["communication"])
    assert known["record"]["config"]["strategy"] == "fsdp2"
    assert {row["predicted"]["compute"] for row in reference["rows"]} == {pytest.approx(known["compute"])}


def test_what_gloo_hides_decided(reference):
    """DDP's steps are nearer to the walk than to its terms one after the other; FSDP's are their sum."""
    for row in reference["rows"]:
        times = row["predicted"]
        if row["strategy"] != "DDP":
            assert times["overlapped"] == pytest.approx(times["in turn"])
        elif row["rate"] == "100mbit":
            assert abs(times["overlapped"] - row["measured"]) < abs(times["in turn"] - row["measured"])


# The command


@pytest.fixture
def without_runs(reference, monkeypatch):
    """The trial with its runs replaced by what the record says of them; rank 1 is the slowest."""
    monkeypatch.setattr(step_trial, "calibration", lambda steps: reference["calibration"])

    def runs(rates, function, steps):
        assert function is step_trial.measure
        for rate in rates:
            slowest = {row["strategy"]: row["steps"] for row in reference["rows"] if row["rate"] == rate}
            others = {name: [0.9 * step for step in steps] for name, steps in slowest.items()}
            yield rate, [others, slowest, others, others]

    monkeypatch.setattr(links, "at_each_speed", runs)
    return runs


def test_predictions_are_on_disk_before_the_first_run(without_runs, monkeypatch, tmp_path):
    seen = []

    def runs(*arguments):
        seen.append(json.loads((tmp_path / "record.json").read_text()))
        yield from without_runs(*arguments)

    monkeypatch.setattr(links, "at_each_speed", runs)
    step_trial.main(step_trial.Config(rates="100mbit", record=str(tmp_path / "record.json")))
    (before,) = seen
    assert len(before["rows"]) == 4 and not any("measured" in row for row in before["rows"])
    after = json.loads((tmp_path / "record.json").read_text())
    for early, late in zip(before["rows"], after["rows"], strict=True):
        assert early.items() <= late.items() and late["measured"] > 0


def test_the_table_says_both_and_the_spread(without_runs, reference, tmp_path, capsys):
    step_trial.main(step_trial.Config(record=str(tmp_path / "record.json")))
    shown = capsys.readouterr().out
    for row in reference["rows"]:
        (line,) = (line for line in shown.splitlines() if f"{row['rate']}  {row['strategy']}  " in line)
        for number in (row["predicted"]["overlapped"], row["measured"], min(row["steps"]), max(row["steps"])):
            assert f"{number:.3f}" in line
        assert f"{row['difference']:+.1%}" in line


def test_where_there_is_no_link_it_says_how_to_make_one(monkeypatch, tmp_path):
    monkeypatch.delenv("FSDP_LABS_LINK", raising=False)
    with pytest.raises(UserError, match="make slurm LINK"):
        step_trial.main(step_trial.Config(record=str(tmp_path / "record.json")))
    assert not list(tmp_path.iterdir())


def test_a_faster_link_and_less_to_send_take_less(reference):
    def step(name, rate):
        return step_trial.predicted(reference["calibration"], name, rate)["predicted"]["overlapped"]

    for name in links.STRATEGIES:
        assert step(name, "400mbit") < step(name, "200mbit") < step(name, "100mbit") < math.inf
    assert step("HSDP 2x2", "100mbit") < step("FSDP2, kept", "100mbit") < step("FSDP2", "100mbit")
