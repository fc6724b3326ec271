# SPDX-License-Identifier: BSD-3-Clause
"""The trial of step times: what is predicted before the runs, the record that comes with the course."""

import json
import math

import pytest
from commands import refused
from labkit.measuring import records
from proofs import link_sweep, step_time

REFERENCE = records.RESULTS / "reference" / "step-time-intel-xeon-2-cores.json"
SPEEDS = ("400mbit", "200mbit", "100mbit")


@pytest.fixture(scope="module")
def reference():
    return json.loads(REFERENCE.read_text())


# The course's record


def test_the_planner_predicts_what_the_record_says_and_what_was_measured(reference):
    """That all of it was predicted before, from one run, is how the command works: see below."""
    found = {(row["rate"], row["strategy"]) for row in reference["rows"]}
    assert found == {(rate, name) for rate in SPEEDS for name in link_sweep.STRATEGIES}
    for row in reference["rows"]:
        again = step_time.predicted(reference["calibration"], row["strategy"], row["rate"])
        assert again["predicted"] == pytest.approx(row["predicted"])
        measured = step_time.compared(again, [{row["strategy"]: row["steps"]}])
        assert len(row["steps"]) >= 5 and measured["measured"] == row["measured"]
        assert abs(measured["difference"]) <= step_time.WITHIN, row


# The command, with what notebook 10's records say in the place of runs


@pytest.fixture(scope="module")
def calibrated():
    (kept,) = (
        r for r in link_sweep.recorded() if (r["link"]["strategy"], r["link"]["rate"]) == ("FSDP2, kept", "none")
    )
    known = {"compute": 0.3, "network latency": 2e-4, "node latency": 1e-4}
    return known | {"record": kept, "node bandwidth": step_time.intra_node_bandwidth(kept, 0.1, 2e-4)}


def test_what_a_rank_sends_while_nothing_is_slowed(calibrated):
    """By hand, 3,412,480 bytes of parameters: 3/4 of them gathered, and under gloo 3/2 reduced, in 5 × (3 + 6) steps."""
    assert calibrated["node bandwidth"] == pytest.approx(2.25 * 3_412_480 / (0.1 - 45 * 2e-4))


def test_the_last_rank_to_call_says_how_long_a_call_takes():
    of_ranks = [{"small": [5.0, 1.0, 3.0]}, {"small": [2.0, 4.0, 9.0]}]
    assert step_time.median_of_fastest_rank(of_ranks, "small") == 2.0  # of 2, 1 and 3


def test_a_faster_link_and_less_to_send_take_less(calibrated):
    def step(name, rate):
        return step_time.predicted(calibrated, name, rate)["predicted"]["overlapped"]

    for name in link_sweep.STRATEGIES:
        assert step(name, "400mbit") < step(name, "200mbit") < step(name, "100mbit") < math.inf
    assert step("HSDP 2x2", "100mbit") < step("FSDP2, kept", "100mbit") < step("FSDP2", "100mbit")


def test_under_gloo_only_ddp_hides_something(calibrated):
    for name in link_sweep.STRATEGIES:
        times = step_time.predicted(calibrated, name, "100mbit")["predicted"]
        assert times["overlapped"] == pytest.approx(times["serial"]) or name == "DDP"
    assert times["compute"] == pytest.approx(0.3)
    times = step_time.predicted(calibrated, "DDP", "100mbit")["predicted"]
    assert times["overlapped"] < 0.9 * times["serial"]


STEPS = (0.8, 1.1, 1.0, 1.05, 1.4)  # a step of the slowest rank, over its prediction


@pytest.fixture
def without_runs(calibrated, monkeypatch):
    """Rank 1 is the slowest. Returns a function that sets how its steps compare with their predictions."""
    monkeypatch.setattr(step_time, "calibration", lambda steps: calibrated)

    def steps_are(ratios):
        def runs(rates, function, steps):
            assert function is step_time.measure
            for rate in rates:
                slowest, others = {}, {name: [0.01] * 5 for name in link_sweep.STRATEGIES}
                for name in link_sweep.STRATEGIES:
                    step = step_time.predicted(calibrated, name, rate)["predicted"]["overlapped"]
                    slowest[name] = [ratio * step for ratio in ratios]
                yield rate, [others, slowest, others, others]

        monkeypatch.setattr(link_sweep, "at_each_speed", runs)
        return runs

    steps_are(STEPS)
    return steps_are


def test_predictions_are_on_disk_before_the_first_run(without_runs, calibrated, monkeypatch, tmp_path):
    seen, runs = [], without_runs(STEPS)

    def watched(*arguments):
        seen.append(json.loads((tmp_path / "record.json").read_text()))
        yield from runs(*arguments)

    monkeypatch.setattr(link_sweep, "at_each_speed", watched)
    step_time.main(step_time.Config(rates="100mbit", record=str(tmp_path / "record.json")))
    (before,) = seen
    assert len(before["rows"]) == 4 and not any("measured" in row for row in before["rows"])
    after = json.loads((tmp_path / "record.json").read_text())
    assert after["calibration"] == json.loads(json.dumps(calibrated))  # one run, for all of them
    for early, late in zip(before["rows"], after["rows"], strict=True):
        assert early.items() <= late.items()
        assert late["measured"] == pytest.approx(1.05 * early["predicted"]["overlapped"])
        assert early["predicted"]["compute"] == pytest.approx(calibrated["compute"])
        assert late["predicted_at"] <= after["measured_from"] <= late["measured_at"]  # of one format, in UTC


@pytest.mark.parametrize(("ratio", "words"), [(1.17, None), (1.2, "16.7%"), (0.86, "16.3%")])
def test_a_prediction_that_is_more_than_15_percent_off_ends_in_an_error(ratio, words, without_runs, tmp_path):
    """With what was measured on disk all the same."""
    without_runs([ratio] * 5)
    config = step_time.Config(record=str(tmp_path / "record.json"))
    if words is None:
        step_time.main(config)
    else:
        with pytest.raises(SystemExit) as exit_:
            step_time.main(config)
        assert words in exit_.value.code and "15%" in exit_.value.code
    assert all("measured" in row for row in json.loads((tmp_path / "record.json").read_text())["rows"])


def test_the_table_says_what_was_predicted_and_measured_and_the_spread(without_runs, tmp_path, capsys):
    step_time.main(step_time.Config(record=str(tmp_path / "record.json")))
    shown = capsys.readouterr().out.splitlines()
    for row in json.loads((tmp_path / "record.json").read_text())["rows"]:
        (line,) = (line for line in shown if f"{row['rate']}  {row['strategy']}  " in line)
        step = row["predicted"]["overlapped"]
        words = (f"{step:.3f} s", f"{1.05 * step:.3f} s", f"{0.8 * step:.3f} to {1.4 * step:.3f} s", "-4.8%")
        assert all(word in line for word in words)


def test_where_there_is_no_link_it_says_how_to_make_one(monkeypatch, tmp_path):
    monkeypatch.delenv("FSDP_LABS_LINK", raising=False)
    with refused("make slurm LINK"):
        step_time.main(step_time.Config(record=str(tmp_path / "record.json")))
    assert not list(tmp_path.iterdir())
