# SPDX-License-Identifier: BSD-3-Clause
"""The ladder's table and picture say what the records say; so do the README and docs/, which also list the chapters as they do."""

import re
import sys

import course
import ladder
import matplotlib.pyplot as plt
import pytest
import readme
from commands import refused
from labkit.measuring import records
from labkit.measuring.trace import CATEGORIES
from labkit.running import launch
from labkit.teaching import plots
from planner import gpus

from notebooks import PATHS, read

ROOT = launch.SOURCE.parent


@pytest.fixture(scope="module")
def reference():
    return ladder.read(readme.REFERENCE)


@pytest.mark.parametrize("path", readme.PAGES, ids=lambda path: path.stem)
def test_pages_show_the_committed_records(path):
    assert readme.with_tables(path.read_text()) == path.read_text(), "run: python images/readme.py"


def test_the_page_of_measuring_has_the_sums_of_the_ladder(reference):
    assert f"{sum(reference[1]['record']['memory']['peak'].values()):,}" in readme.PAGES[1].read_text()


def test_the_readme_is_short():
    """What needs more room is in docs/."""
    assert len(readme.PAGES[0].read_text().splitlines()) <= 150
    assert [each for each in course.chapters() if len(each.law().split()) > 12] == []


def test_the_fast_lane_is_that_of_chapter_00():
    (line,) = [line for line in read(PATHS[0]).cells[-1].source.splitlines() if "Fast lane" in line] or [""]
    assert {"00", *re.findall(r"\[(\d\d)\]", line)} == set(course.FAST_LANE)


def test_the_map_of_the_course_has_every_chapter():
    """What it draws of them: test_images.py."""
    assert [chapter.name for chapter in course.chapters()] == [path.stem for path in PATHS]


def test_the_first_picture_promises_what_its_records_hold():
    for way, record in readme.measured().items():
        config = {key: record["config"][key] for key in readme.WAYS[way]}
        assert config == readme.WAYS[way], way
        assert sum(record["memory"]["peak"].values()) == readme.expected(record), way
    ddp, fsdp, recomputed = (sum(terms.values()) / 2**30 for terms in readme.planned().values())
    room = gpus.GPUS["h100"].memory  # what the picture's words say of the three bars
    assert ddp > 2 * room and fsdp < 0.51 * room and recomputed < 0.26 * room


def less_right(record):
    return record | {"accuracy": {"correct": 949, "total": 1000}}


def a_byte_more(record):
    peak = record["memory"]["peak"]
    return record | {"memory": record["memory"] | {"peak": peak | {"temporary": peak["temporary"] + 1}}}


@pytest.mark.parametrize(("change", "words"), [(less_right, ("949", "1000", "95 %")), (a_byte_more, ("peak",))])
def test_the_readme_is_not_written_from_a_rung_that_breaks_its_promises(change, words, reference):
    """From those that are committed it is, see above."""
    for number, run in enumerate(reference):
        broken = [*reference[:number], run | {"record": change(run["record"])}, *reference[number + 1 :]]
        with refused(run["label"], *words):
            readme.kept(broken)


@pytest.mark.parametrize("sizes", [{"DDP": 0}, {"FSDP2, by size": 10**9}, {"FSDP1, by size": 3 * 10**7}], ids=str)
def test_nor_from_rungs_in_another_order(sizes, reference):
    def of_size(run):
        size = sizes.get(run["label"], run["predicted"])
        return run | {"predicted": size, "record": run["record"] | {"memory": {"peak": {"all": size}}}}

    with refused("README"):
        readme.kept([of_size(run) for run in reference])


@pytest.mark.parametrize(
    "path", sorted((launch.SOURCE / "results" / "reference").glob("*/*.json")), ids=lambda p: p.stem
)
def test_committed_records_are_readable_and_name_no_machine_path(path):
    record = records.load(path)
    assert record["hardware"]
    assert not any(isinstance(v, str) and v.startswith("/") for v in record["config"].values())


def test_bars_are_the_records(reference):
    """What is drawn: for each rung a stack as long as its measured peak, and an outline as long as the prediction."""
    _, axes = plt.subplots()
    off = 2**20  # were the two alike, as they are in the record, one could be drawn for the other
    plots.memory_bars(axes, [(r["label"], r["record"]["memory"]["peak"], r["predicted"] + off) for r in reference])
    for place, run in enumerate(reference):
        bars = [b for b in axes.patches if abs(b.get_y() + b.get_height() / 2 - place) < 0.01]
        stacked = sorted((b.get_x(), b.get_width()) for b in bars if b.get_fill())
        filled = 0
        for begin, width in stacked:
            assert begin == pytest.approx(filled)  # none hides another
            filled += width
        (outline,) = [b.get_width() for b in bars if not b.get_fill()]
        assert filled == pytest.approx(sum(run["record"]["memory"]["peak"].values()) / 2**20)
        assert outline == pytest.approx((run["predicted"] + off) / 2**20)
    plt.close()


@pytest.mark.parametrize(("batch", "words"), [(64, "batch 64 per rank"), (16, "batch 16 to 64 per rank")])
def test_a_caption_is_of_all_rows(batch, words, reference, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "show", drawn.append)
    record = reference[1]["record"]
    plots.memory([("a", record | {"batch_size": 64}, None), ("b", record | {"batch_size": batch}, None)], "title")
    assert words in drawn[0].axes[0].get_title("left")
    plt.close()


def test_picture_is_written_also_for_runs_too_short_to_time(reference, tmp_path):
    short = [
        run | {"record": run["record"] | {"time": {"step": None, "samples_per_second": None}}} for run in reference
    ]
    for name, runs in {"whole.png": reference, "short.png": short}.items():
        plots.ladder(runs, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    assert "–" in ladder.tables(short)


def test_every_category_has_a_colour_of_its_own():
    assert set(plots.COLOURS) == set(CATEGORIES)
    assert len(set(plots.COLOURS.values())) == len(CATEGORIES)
    strategies = set(plots.STRATEGY_COLOURS.values())
    assert len(strategies) == len(plots.STRATEGY_COLOURS) and not strategies & set(plots.COLOURS.values())


@pytest.mark.long
def test_climb_on_two_ranks(monkeypatch, tmp_path, capsys):
    """The real thing, as short as may be: every rung runs and is measured; the last one is stopped and resumed."""
    monkeypatch.setattr(ladder.launch, "RUNS", tmp_path)
    monkeypatch.setattr(ladder, "RUNGS", [rung for rung in ladder.RUNGS if rung[0] in ("DDP", "FSDP2, resumed")])
    runs = list(ladder.climb(ladder.Config(data="mnist-5k", epochs=1, ranks=2, batch_size=285)))
    ddp, resumed = (run["record"] for run in runs)
    assert len(ddp["losses"]) == ladder.FEWEST_STEPS
    assert (resumed["first_step"], len(resumed["losses"])) == (3, 4)
    assert all(sum(run["record"]["memory"]["peak"].values()) == run["predicted"] for run in runs)
    assert list(tmp_path.glob("checkpoints-*")) == []
    assert "FSDP2, resumed" in ladder.tables(runs)


@pytest.mark.parametrize(
    ("gpus", "asked", "ranks", "device"),
    [
        (0, None, 4, "cpu"),
        (1, None, 4, "cpu"),
        (1, 1, 1, "cuda"),
        (2, None, 2, "cuda"),
        (2, 3, 3, "cpu"),
        (8, 4, 4, "cuda"),
    ],
)
def test_a_climb_is_on_gpus_where_each_rank_has_one(gpus, asked, ranks, device, monkeypatch, capsys):
    monkeypatch.setattr(ladder.site, "gpus_here", lambda: gpus)
    common, _ = ladder.shared(ladder.Config(data="mnist-5k", ranks=asked))
    assert (common["ranks"], common["device"]) == (ranks, device)
    assert ("climbs on the CPU" in capsys.readouterr().out) == (0 < gpus < ranks)


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(ladder.site, "gpus_here", lambda: 0)


@pytest.mark.parametrize(("epochs", "batch_size", "steps"), [(1, 500, 2), (1, 1000, 1), (9, 1001, 0), (6, 1000, 6)])
def test_a_climb_too_short_to_be_measured_is_refused_before_it_begins(epochs, batch_size, steps, no_gpus, monkeypatch):
    monkeypatch.setattr(ladder.launch, "run", lambda *_, **__: pytest.fail("it began"))
    with refused(f"{steps} steps", "4 ranks", "7", "--batch-size"):
        next(ladder.climb(ladder.Config(data="mnist-5k", epochs=epochs, batch_size=batch_size)))


def test_a_climb_that_breaks_off_keeps_what_it_has(reference, no_gpus, monkeypatch, tmp_path, capsys):
    made = iter(reference[:3])

    def run(*_, **__):
        if (rung := next(made, None)) is None:
            raise launch.RunFailed("the fourth rung broke")
        return rung["record"]

    monkeypatch.setattr(ladder.launch, "run", run)
    monkeypatch.setattr(ladder.launch, "RUNS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--data", "mnist-5k"])
    with pytest.raises(SystemExit) as exit_:
        ladder.main()
    assert exit_.value.code == 2
    (folder,) = tmp_path.iterdir()
    assert [records.load(path) for path in sorted(folder.glob("*.json"))] == [r["record"] for r in reference[:3]]
    assert (folder / "ladder.md").read_text() == ladder.tables(reference[:3]) + "\n"
    printed = capsys.readouterr()
    assert "the fourth rung broke" in printed.err and str(folder) in printed.out
