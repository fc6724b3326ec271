"""Chapter 12: its verdicts fail when something else ran than was planned, and its exercise judges fairly."""

import pytest
from labkit.teaching.exercises import chapter_12, check
from labkit.teaching.plots import speed

from notebooks import run_broken

SHORT = {"ranks=2, max_steps=12)": "ranks=2, max_steps=9)", "variants, 5, ranks=2": "variants, 2, ranks=2"}
TRACE = "in the trace of a step"  # part of a claim, and of its cell


def failed(lines):
    return [line for line in lines if line.startswith("FAIL")]


@pytest.mark.long
def test_another_length_is_other_arithmetic():
    lines = run_broken("12", {"ranks=2, max_steps=12)": "ranks=2, max_steps=9, seq_len=64)"})
    (line,) = failed(lines)
    assert "floating-point operations per token" in line


@pytest.mark.long
def test_the_trace_counts_what_ran():
    """A step that is made twice, against the plan of one."""
    twice = {"steps[name] = run.step": "steps[name] = lambda step=run.step: (step(), step())"}
    less = {', "FSDP2, gathering ahead": {"prefetch": 1, "wait": False}}': "}"}  # of which no trace is judged
    lines = [line for line in run_broken("12", SHORT | twice | less, until=TRACE) if TRACE in line]
    assert len(lines) == 6 and failed(lines) == lines


@pytest.mark.long
def test_gathers_are_not_called_early_by_themselves():
    unasked = {'"FSDP2, gathering ahead": {"prefetch": 1, "wait": False}': '"FSDP2, gathering ahead": {}'}
    lines = run_broken("12", SHORT | unasked, until="gathers called early")
    waited, early = failed(lines)
    assert "not waited for on the spot any more" in waited and "gathering ahead, gathers called early" in early


@pytest.mark.long
def test_gradients_added_up_where_they_should_be_averaged_are_noticed():
    """With two micro-batches they are twice as large: as a learning rate twice as high."""
    summed = {"**by_sgd | options": '**by_sgd | {"lr": 0.1 * options.get("accumulate", 1)} | options'}
    skip = ("found =", "called_early", "waited_for", "adds", "works", "at_batches", "strong scaling")
    few = {"front_runs, configs, 5": "front_runs, configs, 2"}
    (line,) = failed(run_broken("12", SHORT | few | summed, until="the same steps of SGD", skip=skip))
    assert "largest relative difference of the losses after the same steps" in line


def test_every_lane_is_drawn_to_its_end(monkeypatch):
    def step(seconds):
        return {"begin": 5.0, "end": 5.0 + seconds, "operators": [(5.0, 5.0 + seconds)], "collectives": []}

    drawn = []
    monkeypatch.setattr(speed, "show", drawn.append)
    speed.lanes({"shorter": [step(0.1), step(0.2)], "longer": [step(0.3)]}, "", "")
    assert [panel.get_xlim() for panel in drawn[0].axes] == [pytest.approx((0, 300))] * 2


def test_the_front_has_no_mixtures_and_numbers_that_do_not_overprint(monkeypatch):
    def point(mib, rate):
        memory, step = {"peak": {"all": mib * 2**20}}, {"median": 1.0, "p10": 0.9, "p90": 1.1}
        about = {"config": {"strategy": "fsdp2"}, "time": {"step": step}}
        return about | {"memory": memory, "tokens_per_second": rate}

    drawn = []
    monkeypatch.setattr(speed, "show", drawn.append)
    points = [point(10, 100), point(20, 400), point(20, 395), point(20, 390), point(20, 350)]
    speed.pareto(points, list("abcde"), [0] * 5, [0, 1], "", "")
    axes = drawn[0].axes[0]
    (front,) = (line for line in axes.lines if line.get_drawstyle().startswith("steps"))
    assert front.get_drawstyle() == "steps-post" and list(front.get_xdata())[:2] == [10, 20]
    labels = {text.get_text(): text.xy for text in axes.texts}
    assert labels.keys() == {"1", "2, 3, 4", "5"}  # rings that overlap share a label, which stands at them
    assert labels["2, 3, 4"] == pytest.approx((20, 395)) and labels["5"] == (20, 350)


def length(intervals):
    return sum(end - begin for begin, end in intervals)


def hidden(communication, compute):
    """What both cover, by ticks."""
    both = [{t for b, e in spans for t in range(b, e)} for spans in (communication, compute)]
    return len(both[0] & both[1])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda communication, compute: hidden(communication, compute), "that is the hidden part"),
        (lambda communication, compute: float(length(communication)), "hidden or not"),
        (lambda communication, compute: max(0, length(communication) - length(compute)), "hides nothing"),
        (lambda communication, compute: length(communication) - hidden(communication, compute), "in flight only once"),
        (lambda communication, compute: communication[0][0], "one collective, nothing computes"),
        (lambda communication, compute: communication.nothing, "raises AttributeError"),
    ],
)
def test_a_wrong_share_hears_why(wrong, said, capsys):
    check("12.3", wrong)
    assert said in capsys.readouterr().out


STEPS = {  # what is said to 12.0: how its solution is broken
    "is the sum over the micro-batches": {" / len(batch)\n        right": "\n        right"},
    "do you run several micro-batches at once?": {
        "    loss, right": "    batch = [tuple(map(torch.cat, zip(*batch)))]\n    loss, right"
    },
    "is returned as a tensor": {"return loss.item(), right.item()": "return loss, right"},
    "unsharded gradients wait for a later": {
        "    for inputs": "    model.set_requires_gradient_sync(False)\n    for inputs",
        "        part.backward()": "        model.set_requires_gradient_sync(inputs is batch[-1][0])\n        part.backward()",
    },
}


@pytest.mark.long
@pytest.mark.parametrize("said", STEPS)
def test_a_step_is_told_its_first_difference(said, capsys):
    code, names = chapter_12.EXERCISES["12.0"].solution, {"__name__": "__main__"}
    for text, replacement in STEPS[said].items():
        assert text in code
        code = code.replace(text, replacement)
    exec(code, names)
    check("12.0", names["step"])
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "changed"),
    [
        ("runs forward 8 times", {"operations": 4, "forwards": 8}),
        ("the host reads 8 values", {"reads": 8}),
        ("are in float64", {"wide": 48}),
        ("filled with zeros", {"zeros": 30}),
        ("parameters stay gathered", {"peak": {"all-gather": 900}}),
    ],
)
def test_what_is_left_to_save_is_named(said, changed):
    nothing = dict.fromkeys(chapter_12.CATEGORIES, 0)
    slow = {"operations": 5, "forwards": 12, "reads": 8, "wide": 48, "zeros": 30, "peak": nothing | {"activations": 99}}
    mine = {"operations": 3, "forwards": 4, "reads": 2, "wide": 0, "zeros": 0, "peak": nothing}
    assert chapter_12.works_more(mine, slow) is None
    changed = changed | {"peak": nothing | changed.get("peak", {})}
    assert said in chapter_12.works_more(mine | changed, slow)
