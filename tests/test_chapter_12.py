"""Chapter 12: its verdicts fail when something else ran than was planned, and its exercise judges fairly."""

import pytest
from labkit.teaching.exercises import check
from labkit.teaching.plots import speed

from notebooks import run_broken

SHORT = {"ranks=2, max_steps=18)": "ranks=2, max_steps=9)", "variants, 12, ranks=2": "variants, 2, ranks=2"}
TRACE = "in the trace of a step"  # part of a claim, and of its cell


def failed(lines):
    return [line for line in lines if line.startswith("FAIL")]


@pytest.mark.long
def test_another_length_is_other_arithmetic():
    lines = run_broken("12", {"ranks=2, max_steps=18)": "ranks=2, max_steps=9, seq_len=64)"})
    (line,) = failed(lines)
    assert "floating-point operations a token" in line


@pytest.mark.long
def test_the_trace_counts_what_ran():
    """A step that is made twice, against the plan of one."""
    twice = {"steps[name] = run.step": "steps[name] = lambda step=run.step: (step(), step())"}
    lines = [line for line in run_broken("12", SHORT | twice, until=TRACE) if TRACE in line]
    assert len(lines) == 6 and failed(lines) == lines


@pytest.mark.long
def test_gathers_are_not_called_early_by_themselves():
    unasked = {'"FSDP2, gathering ahead": {"prefetch": 1}': '"FSDP2, gathering ahead": {}'}
    lines = run_broken("12", SHORT | unasked, until="gathers called early")
    (line,) = failed(lines)
    assert "gathering ahead, gathers called early" in line


def test_every_lane_is_drawn_to_its_end(monkeypatch):
    def step(seconds):
        return {"begin": 5.0, "end": 5.0 + seconds, "operators": [(5.0, 5.0 + seconds)], "collectives": []}

    drawn = []
    monkeypatch.setattr(speed, "show", drawn.append)
    speed.lanes({"shorter": [step(0.1), step(0.2)], "longer": [step(0.3)]}, "", "")
    assert [panel.get_xlim() for panel in drawn[0].axes] == [pytest.approx((0, 300))] * 2


def length(intervals):
    return sum(end - begin for begin, end in intervals)


def hidden(communication, compute):
    """What both cover, by ticks."""
    both = [{t for b, e in spans for t in range(b, e)} for spans in (communication, compute)]
    return len(both[0] & both[1])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda communication, compute: hidden(communication, compute), "that is what is hidden"),
        (lambda communication, compute: float(length(communication)), "hidden or not"),
        (lambda communication, compute: max(0, length(communication) - length(compute)), "hides nothing"),
        (lambda communication, compute: length(communication) - hidden(communication, compute), "is one moment"),
        (lambda communication, compute: communication[0][0], "one collective, nothing computes"),
        (lambda communication, compute: communication.nothing, "raises AttributeError"),
    ],
)
def test_a_wrong_share_hears_why(wrong, said, capsys):
    check("12.3", wrong)
    assert said in capsys.readouterr().out
