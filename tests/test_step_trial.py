"""The trial of step times: what is predicted before the runs, the record that comes with the course."""

import json
import math
from datetime import datetime

import links
import pytest
import step_trial
from commands import refused
from labkit.measuring import records

REFERENCE = records.RESULTS / "reference" / "step-times-intel-xeon-2-cores.json"
SPEEDS = ("400mbit", "200mbit", "100mbit")


@pytest.fixture(scope="module")
def reference():
    return json.loads(REFERENCE.read_text())


# The course's record


def test_every_step_time_is_within_15_percent(reference):
    found = {(row["rate"], row["strategy"]): row for row in reference["rows"]}
    assert set(found) == {(rate, name) for rate in SPEEDS for name in links.STRATEGIES}
    for place, row in found.items():
        assert len(row["steps"]) >= 5
        assert min(row["steps"]) <= row["measured"] <= max(row["steps"])
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
    assert known["record"]["link"]["rate"] == "none" and known["record"]["config"]["strategy"] == "fsdp2"
    assert known["compute"] == pytest.approx(known["step"] - known["communication"])
    for row in reference["rows"]:
        assert row["predicted"]["compute"] == pytest.approx(known["compute"])


# The command, with what notebook 10's records say in the place of runs


@pytest.fixture(scope="module")
def calibrated():
    (kept,) = (r for r in links.recorded() if (r["link"]["strategy"], r["link"]["rate"]) == ("FSDP2, kept", "none"))
    known = {"compute": 0.3, "network latency": 2e-4, "node latency": 1e-4}
    return known | {"record": kept, "node bandwidth": step_trial.handed_over(kept, 0.1, 2e-4)}


def test_what_a_rank_sends_while_nothing_is_slowed(calibrated):
    """By hand, 3,412,480 bytes of parameters: 3/4 of them gathered, and under gloo 3/2 reduced, in 5 × (3 + 6) steps."""
    assert calibrated["node bandwidth"] == pytest.approx(2.25 * 3_412_480 / (0.1 - 45 * 2e-4))


def test_the_last_rank_to_call_says_how_long_a_call_takes():
    of_ranks = [{"small": [5.0, 1.0, 3.0]}, {"small": [2.0, 4.0, 9.0]}]
    assert step_trial.typical(of_ranks, "small") == 2.0  # of 2, 1 and 3


def test_a_faster_link_and_less_to_send_take_less(calibrated):
    def step(name, rate):
        return step_trial.predicted(calibrated, name, rate)["predicted"]["overlapped"]

    for name in links.STRATEGIES:
        assert step(name, "400mbit") < step(name, "200mbit") < step(name, "100mbit") < math.inf
    assert step("HSDP 2x2", "100mbit") < step("FSDP2, kept", "100mbit") < step("FSDP2", "100mbit")


def test_under_gloo_only_ddp_hides_something(calibrated):
    for name in links.STRATEGIES:
        times = step_trial.predicted(calibrated, name, "100mbit")["predicted"]
        assert times["overlapped"] == pytest.approx(times["in turn"]) or name == "DDP"
    assert times["compute"] == pytest.approx(0.3)
    times = step_trial.predicted(calibrated, "DDP", "100mbit")["predicted"]
    assert times["overlapped"] < 0.9 * times["in turn"]


@pytest.fixture
def without_runs(calibrated, monkeypatch):
    """Rank 1 is the slowest. Returns the function in the place of ``links.at_each_speed``."""
    monkeypatch.setattr(step_trial, "calibration", lambda steps: calibrated)
    slowest = {name: [0.5, 0.7, 0.6, 0.65, 0.9] for name in links.STRATEGIES}
    others = {name: [0.4] * 5 for name in links.STRATEGIES}

    def runs(rates, function, steps):
        assert function is step_trial.measure
        for rate in rates:
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
        assert early.items() <= late.items() and late["measured"] == 0.65


def test_the_table_says_what_was_predicted_and_measured_and_the_spread(without_runs, tmp_path, capsys):
    step_trial.main(step_trial.Config(record=str(tmp_path / "record.json")))
    shown = capsys.readouterr().out.splitlines()
    for row in json.loads((tmp_path / "record.json").read_text())["rows"]:
        (line,) = (line for line in shown if f"{row['rate']}  {row['strategy']}  " in line)
        words = (f"{row['predicted']['overlapped']:.3f} s", "0.650 s", "0.500 to 0.900 s", f"{row['difference']:+.1%}")
        assert all(word in line for word in words)


def test_where_there_is_no_link_it_says_how_to_make_one(monkeypatch, tmp_path):
    monkeypatch.delenv("FSDP_LABS_LINK", raising=False)
    with refused("make slurm LINK"):
        step_trial.main(step_trial.Config(record=str(tmp_path / "record.json")))
    assert not list(tmp_path.iterdir())
