# SPDX-License-Identifier: BSD-3-Clause
"""The exam's files: what is handed out, answers that cannot be judged, reports that were edited."""

import json
from contextlib import nullcontext

import diagnose_hang
import exam
import pytest
from commands import refused
from labkit import UserError
from labkit.exam import finding, losses, papers, plans, tasks
from proofs import diagnosis
from test_exam import fill, predicted


@pytest.fixture(scope="module")
def seven():
    return tasks.draw(7)


@pytest.fixture
def folder(tmp_path, seven):
    """A folder of seed 7 with two answers, one right, without evidence."""
    papers.write(tmp_path, 7, seven, {})
    fill(tmp_path, {"3": predicted(seven[2]), "4": {"peak_GiB": 1}})
    return tmp_path


def test_a_report_is_rechecked_and_an_edited_one_refused(folder):
    printed = exam.judge(folder, 7, False)
    path = folder / "exam-7.json"
    assert printed.startswith((folder / "exam-7.md").read_text()) and "Exam 7: 1 of 12" in printed
    stored = papers.recheck(path, 7)
    assert stored["score"] == 1 and stored == json.loads(path.read_text())
    verdict = {"right": True, "mistakes": []}
    edits = {
        "score": {"score": 12},
        "verdict": {"verdicts": [row | verdict for row in stored["verdicts"]]},
        "answer": {"answers": stored["answers"] | {"4": {"peak_GiB": 2}}},
    }
    for edit in edits.values():
        path.write_text(json.dumps(stored | edit))
        with refused(path, "edited"):
            papers.recheck(path)
    for name in ("score", "verdict"):  # with a digest that fits, as who reads this code can make it
        path.write_text(json.dumps(papers_digested(stored | edits[name])))
        with refused(path, "again"):
            papers.recheck(path)
    for broken in ({"verdicts": 3}, {"verdicts": [{}]}):
        path.write_text(json.dumps(papers_digested(stored | broken)))
        with refused(path, "damaged"):
            papers.recheck(path)


def papers_digested(content: dict) -> dict:
    return content | {"digest": papers.digest(content)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["JSON", "1"]),
        ('{"seed": 7,\n "answers": {"3": {"peak_GiB": 1,024}}}', ["JSON", "line 2", "commas"]),
        ('{"seed": 7,\n "answers": {"3": {"peak_GiB": 1.5GiB}}}', ["JSON", "line 2", "units"]),
        ('{"seed": 7,\n "answers": {"5": {"fault": killed}}}', ["JSON", "line 2", "quotes"]),
        ("\x00", ["JSON"]),
        ("[" * 100_000, ["JSON"]),
        ("7", ["no seed"]),
        ('{"seed": true, "answers": {}}', ["no seed"]),
        ('{"seed": 7}', ["no answers"]),
        ('{"seed": 7, "answers": {"1": 5}}', ["form"]),
        ('{"seed": 8, "answers": {}}', ["seed 8", "7"]),
        ('{"seed": 7, "answers": {}}', ["other tasks"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_answers_that_cannot_be_judged_are_refused(folder, text, words):
    (folder / papers.ANSWERS).write_text(text)
    with refused(papers.ANSWERS, *words):
        exam.judge(folder, 7, False)
    assert not (folder / "exam-7.json").exists()


def test_answers_of_another_seed_or_task_are_refused(folder):
    paper = json.loads((folder / papers.ANSWERS).read_text())
    (folder / papers.ANSWERS).write_text(json.dumps(paper | {"seed": 8}))
    with refused("other tasks", "seed 8"):
        exam.judge(folder, None, False)
    (folder / papers.ANSWERS).write_text(json.dumps(paper | {"answers": {"13": {}}}))
    with refused("task 13", "12"):
        exam.judge(folder, None, False)
    with refused("no verdicts"):
        papers.recheck(write_json(folder / "x.json", paper))


def write_json(path, content):
    path.write_text(json.dumps(content))
    return path


def test_numbers_that_json_does_not_have_do_not_damage_a_report(folder):
    text = (folder / papers.ANSWERS).read_text().replace('"peak_GiB": 1', '"peak_GiB": NaN, "traffic_GB": 1e999')
    (folder / papers.ANSWERS).write_text(text)
    exam.judge(folder, 7, False)
    stored = papers.recheck(folder / "exam-7.json", 7)
    assert stored["verdicts"][3]["mistakes"] == ["not a number", "not a number"]


def test_the_paper_gives_nothing_away(folder, seven):
    """It states no option of the labs for what has to be planned, and no fault but in the lists."""
    page = (folder / papers.TASKS).read_text()
    assert page.count("## Task") == 12 and "--precision" not in page
    for number in (5, 6, 7, 8):
        section = page.split("## Task ")[number]
        every = {5: finding.HANGS, 6: finding.HANGS, 7: losses.FAULTS, 8: finding.PROFILES}[number]
        assert all(section.count(f"`{kind}`") == 1 for kind in every)
    assert all(value is None for task in seven for value in task.fields.values())


def test_a_hybrid_layout_and_the_buckets_of_ddp_are_stated_in_the_courses_words():
    assert "HSDP" in finding.Hang(5, "killed", "mesh", 2, 3).statement()[0]
    ddp = {"script": "mnist_fsdp.py", "ranks": 4, "batch_size": 8, "config": {"strategy": "ddp"}}
    lines = plans.in_words(ddp)
    assert "4 ranks" in lines[0] and not any(
        "one gradient reduction" in line for line in lines
    )  # there are two buckets


def test_a_folder_that_exists_is_not_written_over(tmp_path):
    (tmp_path / "answers.json").write_text("mine")
    with refused(tmp_path, "exists"):
        exam.write_tasks(7, tmp_path)
    assert (tmp_path / "answers.json").read_text() == "mine"


def test_a_failed_run_leaves_no_half_of_an_exam(tmp_path, monkeypatch):
    def fails(*_):
        raise UserError("no rank started")

    monkeypatch.setattr(exam, "measure", fails)
    monkeypatch.setattr(exam, "record_hang", lambda task, folder: folder.mkdir())
    with refused("no rank started"):
        exam.write_tasks(7, tmp_path / "exam-7")
    assert [*tmp_path.iterdir()] == []


def test_records_that_do_not_show_their_fault_are_not_handed_out(tmp_path, monkeypatch):
    runs = []
    (tmp_path / "flight").mkdir()
    monkeypatch.setattr(diagnosis, "recorded", lambda draw: runs.append(draw) or nullcontext(tmp_path / "flight"))
    monkeypatch.setattr(diagnose_hang, "report", lambda folder: "rank 1 is dead: a process")
    with refused("task 5", "3 runs"):
        exam.record_hang(finding.Hang(5, "killed", "ddp", 2, 3), tmp_path / "task-05")
    assert len(runs) == exam.TRIES and not (tmp_path / "task-05").exists()
    exam.record_hang(finding.Hang(5, "killed", "ddp", 1, 3), tmp_path / "task-05")
    assert len(runs) == exam.TRIES + 1
