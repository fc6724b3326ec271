# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 12: its verdicts fail when something else ran than was planned, and its exercises judge fairly."""

import inspect
import re

import pytest
from answers import altered
from labkit.teaching import step_lanes, turns
from labkit.teaching.exercises import chapter_12, check
from labkit.teaching.plots import speed
from torch.distributed import run as torchrun

from notebooks import FOLDER, read, run_broken

TRACED = (
    "cell-01",
    "cell-14",
    "cell-15",
    "cell-18",
    "cell-21",
    "cell-27",
)  # the cells that trace, and judge the traces
LAST = "again = ahead"  # in the last of them
ALONE = {  # without the lab's run, whose record only captions the figure
    'record["hardware"] if record["device"] == "cpu" else "CPU"': '"CPU"',
    "record['data']['name']": "'text'",
    "tiny.num_hidden_layers": "4",
    "variants, 15, ranks=2": "variants, 2, ranks=2",
}


def failed(lines):
    return [line for line in lines if line.startswith("FAIL")]


@pytest.mark.breaks
def test_another_length_is_other_arithmetic():
    lines = run_broken("12", {"ranks=2, max_steps=12)": "ranks=2, max_steps=9, seq_len=64)"})
    (line,) = failed(lines)
    assert "floating-point operations per token" in line


@pytest.mark.breaks
def test_the_trace_counts_what_ran():
    """A step that is made twice, against the plan of one."""
    twice = {"trace_steps(steps[name], 3)": "trace_steps(lambda step=steps[name]: (step(), step()), 3)"}
    lines = [
        line for line in run_broken("12", ALONE | twice, until=LAST, only=TRACED) if "in the trace of a step" in line
    ]
    assert len(lines) == 6 and failed(lines) == lines


@pytest.mark.breaks
def test_gathers_are_not_called_early_by_themselves():
    unasked = {'"FSDP2, gathering ahead": {"prefetch": 1, "wait": False}': '"FSDP2, gathering ahead": {}'}
    early, waited = failed(run_broken("12", ALONE | unasked, until=LAST, only=TRACED))
    assert "gathering ahead, gathers called early" in early and "not waited for on the spot any more" in waited


@pytest.mark.breaks
def test_gradients_added_up_where_they_should_be_averaged_are_noticed():
    """With two micro-batches they are twice as large: as a learning rate twice as high."""
    summed = {"**by_sgd | options": '**by_sgd | {"lr": 0.1 * options.get("accumulate", 1)} | options'}
    two = 'configs = {name: configs[name] for name in ("FSDP2", "FSDP2, 2 micro-batches")}\n'
    few = {"front_runs, configs, 7": "front_runs, configs, 2", "def sent(": f"{two}def sent("}
    cells = ("cell-01", "cell-14", "cell-15", "cell-46", "cell-48", "cell-53")
    (line,) = failed(run_broken("12", few | summed, only=cells))
    assert "largest relative difference of the losses after the same step" in line


def test_the_quoted_warning_is_torchruns():
    text = "".join(cell.source for cell in read(*FOLDER.glob("12*.ipynb")).cells if cell.cell_type == "markdown")
    (quoted,) = re.findall(r"```\n(Setting OMP_NUM_THREADS.*?)\n```", text, re.DOTALL)
    source = re.sub(r'"\s*f?"', "", inspect.getsource(torchrun))  # literals that Python joins
    assert " ".join(quoted.split()) in " ".join(source.replace("%s in default", "1 in default").split())


def event(name, begin, end, thread=1):
    return {"name": name, "ts": begin, "dur": end - begin, "tid": thread}


def test_a_trace_is_reduced_to_what_happened():
    """Two gathers: one waited for where it is called, the other called early and unpacked after a matmul."""
    step = event(step_lanes.STEP, 0, 100)
    events = [
        event("FSDP::all_gather (a)", 0, 10),
        event("gloo:all_gather", 2, 8, thread=2),
        event("FSDP::all_gather_copy_out (a)", 10, 11),
        event("FSDP::all_gather (b)", 12, 14),
        event("c10d::_allgather_base_", 13, 14),
        event("gloo:all_gather", 13, 25, thread=2),
        event("aten::linear", 15, 30),
        event("aten::mm", 16, 29),
        event("FSDP::all_gather_copy_out (b)", 31, 32),
        event("aten::add", 99, 103),  # begins within the step
        event("aten::mm", 101, 120),  # and this one does not
    ]
    seen = step_lanes.lanes_of(step, events)
    assert seen["early"] == 1 and seen["waited"] == {"gather": 1, "reduction": 0}
    assert seen["calls"] == {"all-gather": 1}
    assert seen["operators"] == [(15e-6, 30e-6), (99e-6, 103e-6)]
    assert seen["collectives"] == [("all-gather", 2e-6, 8e-6), ("all-gather", 13e-6, 25e-6)]


def test_a_step_divides_into_three_parts():
    step = {"begin": 0.0, "end": 10.0, "operators": [(0, 4)], "collectives": [("all-gather", 3, 6)]}
    parts, hidden = turns.parts_of(step, altered("12.0"))
    assert parts == pytest.approx({"operators": 0.4, "exposed communication": 0.2, "rest": 0.4})
    assert hidden == pytest.approx(1 / 3)


def test_a_ratio_is_taken_within_each_round():
    """Where the machine slows down between rounds, medians of the steps would say something else."""
    times = {"a": [2, 20, 6], "b": [1, 10, 6]}
    assert turns.ratio(times, "a", "b")["median"] == 2


def test_every_lane_is_drawn_to_its_end(monkeypatch):
    def step(seconds):
        return {"begin": 5.0, "end": 5.0 + seconds, "operators": [(5.0, 5.0 + seconds)], "collectives": []}

    drawn = []
    monkeypatch.setattr(speed, "show", drawn.append)
    speed.lanes({"shorter": [step(0.1), step(0.2)], "longer": [step(0.3)]}, "", "")
    for panel in drawn[0].axes:
        left, right = panel.get_xlim()
        assert left == 0 and 300 < right < 330  # milliseconds, with a margin


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
    check("12.0", wrong)
    assert said in capsys.readouterr().out


STEPS = {  # what is said to 12.1: how its solution is broken
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
    check("12.1", altered("12.1", *STEPS[said].items()))
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


SHIFTED = "begin - shift for begin, _ in trace"
WAITS = {  # what is said to 12.2: how its solution is broken
    "the clocks differ": (SHIFTED, "begin for begin, _ in trace"),
    "one end is an outlier": ("statistics.median", "statistics.mean"),
    "that is all their time in collectives": ("end - begin for begin, end in zip(of_rank, last)", "e - b for b, e in ranks[calls.index(of_rank)]"),
    "that is how late each rank comes": ("end - begin for begin, end in zip(of_rank, last)", "max(0, begin - min(each)) for begin, each in zip(of_rank, zip(*calls))"),
    "0 numbers; there are 2 ranks": ("for of_rank in calls]", "for of_rank in calls if not calls]"),
}  # fmt: skip


@pytest.mark.parametrize("said", WAITS)
def test_wrong_waits_hear_why(said, capsys):
    check("12.2", altered("12.2", WAITS[said]))
    assert said in capsys.readouterr().out


FASTEST = {  # what is said to 12.3: how its solution is broken
    "MiB at its peak": ("batch * saved > room", "saved > room"),
    "fits, too, and takes": ("(False, True)", "(False,)"),
    "but no choice fits": ("return best and best[1]", "return best[1] if best else (1, sequences, True)"),
    "is not a tuple": ("return best and best[1]", "return best"),
    "sequences": ("sequences % batch or ", ""),
    "takes": ("factor * batch * costs", "batch * costs"),
    "None is returned, but": ("return best and best[1]", "return best[1] if best and not best[1][2] else None"),
}


@pytest.mark.parametrize("said", FASTEST)
def test_a_wrong_choice_hears_why(said, capsys):
    check("12.3", altered("12.3", FASTEST[said]))
    out = capsys.readouterr().out
    assert "not quite" in out and said in out
