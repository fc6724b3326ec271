# SPDX-License-Identifier: BSD-3-Clause
"""The exam's files: a learner's tasks and answers, the judge's report, and its recheck by an instructor.

A folder has exam.md (the tasks), answers.json (to fill in), and task-NN… (evidence). The judge adds exam-<seed>.json, the
report, and exam-<seed>.md, the same to read. A report has a digest of its content, which shows an edit. Whoever edits it can
also compute a new digest, so the recheck judges the answers again.
"""

import csv
import hashlib
import io
import json
import math
from dataclasses import asdict
from pathlib import Path

from labkit import UserError
from labkit.exam import finding, tasks
from labkit.exam.verdicts import Verdict
from labkit.measuring import records
from labkit.measuring.trace import CATEGORIES

TASKS, ANSWERS = "exam.md", "answers.json"
HOW_TO = """\
Fill in `answers.json`: replace each null by your answer, except where a task says that it stays null. Write numbers without
commas and units (1536.5), and words in double quotes ("fsdp2"). You may use all of the course. In `source_code/`:

- `python plan.py --help` plans a transformer; with `--json` its sizes are in bytes.
- `python gpt_fsdp.py --help` and `python mnist_fsdp.py --help` train one; with `--dry-run` they only plan.
- `python exam.py --judge FOLDER`, with this folder, judges your answers, as often as you like.
"""
RULES = "numbers have no commas or units, words are in double quotes, and no comma follows the last answer"


def evidence(drawn: list, profiles: dict[int, list[dict]]) -> dict[str, str]:
    """Return the files of evidence that are texts: {name: content}.

    Args:
        drawn: the tasks.
        profiles: {task: the measured timeline of a step, as a record's memory has it}.
    """
    files = {}
    for task in drawn:
        if isinstance(task, finding.Loss):
            names = [f"{what} {rank}" for what in ("training", "validation") for rank in range(finding.losses.RANKS)]
            rows = [[row["step"], *row["training"], *row["validation"]] for row in task.rows()]
            files[f"task-{task.number:02}.csv"] = _table(["step", *names], rows)
        if isinstance(task, finding.Memory):
            rows = highest(profiles[task.number])
            files[f"task-{task.number:02}.csv"] = _table(["phase", *CATEGORIES], rows)
    return files


def highest(timeline: list[list]) -> list[list]:
    """Return each phase of a timeline at its highest: [[phase, bytes by category …], …], in order."""
    found = {}
    for phase, *sizes in timeline:
        if phase not in found or sum(sizes) > sum(found[phase]):
            found[phase] = sizes
    return [[phase, *sizes] for phase, sizes in found.items()]


def _table(head: list[str], rows: list[list]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def page(seed: int, drawn: list) -> str:
    """Return exam.md."""
    parts = [f"# Exam {seed}", HOW_TO.strip()]
    for task in drawn:
        kind = tasks.kind_of(task.number)
        keys = ", ".join(f"`{name}`" for name in task.fields)
        parts.append("\n".join([f"## Task {task.number}: {kind}", "", *task.statement(), "", f"Answer: {keys}."]))
    return "\n\n".join(parts) + "\n"


def write(folder: Path, seed: int, drawn: list, files: dict[str, str]):
    """Write a learner's tasks into a folder that exists. files: see ``evidence``.

    Raises:
        UserError: they cannot be written.
    """
    answers = {str(task.number): dict(task.fields) for task in drawn}
    paper = {"seed": seed, "tasks": tasks.digest(drawn), "answers": answers}
    try:
        for name, text in files.items():
            (folder / name).write_text(text)
        (folder / TASKS).write_text(page(seed, drawn))
        (folder / ANSWERS).write_text(json.dumps(paper, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"the tasks cannot be written to {folder} ({error.strerror}): name another --folder") from None


def read(path: Path, expected: int | None = None) -> tuple[int, list, dict]:
    """Read answers, or a report: return (seed, its tasks, the file's content).

    Args:
        path: the file.
        expected: the seed that it must be of; None: any.

    Raises:
        UserError: the file cannot be read, is damaged, or answers other tasks.
    """
    try:
        paper = json.loads(path.read_text(), parse_constant=str, parse_float=_finite)  # a report has numbers only
    except OSError as error:
        writer = "--seed" if path.name == ANSWERS else "--judge"
        raise UserError(f"{path} cannot be read ({error.strerror}): give what exam.py {writer} has written") from None
    except (ValueError, RecursionError) as error:
        where = f" at line {error.lineno} ({error.msg})" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path} is not valid JSON{where}: {RULES}") from None
    seed = paper.get("seed") if isinstance(paper, dict) else None
    answers = paper.get("answers") if isinstance(paper, dict) else None
    if type(seed) is not int or not isinstance(answers, dict):
        raise UserError(f"{path} has no seed or no answers: it is not of an exam, or it is damaged")
    if not all(isinstance(answer, dict) for answer in answers.values()):
        raise UserError(f"{path} has an answer in another form than exam.py wrote it: a task's answer is {{...}}")
    if expected is not None and seed != expected:
        raise UserError(f"{path} is of seed {seed}, not of {expected}: give the --seed of this learner, or none")
    drawn = tasks.draw(seed)
    if paper.get("tasks") != tasks.digest(drawn):
        raise UserError(
            f"{path} answers other tasks than seed {seed} has here: its seed was edited, or another edition of the course wrote it"
        )
    if unknown := sorted({*answers} - {str(task.number) for task in drawn}):
        raise UserError(f"{path} has an answer to a task {unknown[0]}, and there are {len(drawn)}")
    return seed, drawn, paper


def _finite(text: str) -> float | str:
    """Return a number of a file, or its text if it is too large for a float."""
    return float(text) if math.isfinite(float(text)) else text


def judge(drawn: list, answers: dict, measure=None) -> list[Verdict]:
    """Judge all answers.

    Args:
        drawn: the tasks.
        answers: {task, as text: its answer}.
        measure: runs configurations: [one, …] → [a run's "memory" and "traffic", …]; None: plan instead.
    """
    given = {task.number: answers.get(str(task.number), {}) for task in drawn}
    runs = {task.number: task.to_run(given[task.number]) for task in drawn} if measure else {}
    runs = {number: one for number, one in runs.items() if one}
    measured = dict(zip(runs, measure([*runs.values()]), strict=True)) if runs else {}
    return [task.judge(given[task.number], measured.get(task.number)) for task in drawn]


def report(seed: int, drawn: list, answers: dict, verdicts: list[Verdict]) -> dict:
    """Return the report, ready for JSON."""
    rows = [
        {"task": task.number, "kind": tasks.kind_of(task.number)} | asdict(verdict)
        for task, verdict in zip(drawn, verdicts, strict=True)
    ]
    score = sum(verdict.right for verdict in verdicts)
    content = {"seed": seed, "tasks": tasks.digest(drawn), "score": score, "answers": answers, "verdicts": rows}
    content = json.loads(json.dumps(content))
    return content | {"digest": digest(content)}


def digest(content: dict) -> str:
    """Return the digest of a report's content, without the digest that it has."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def report_page(content: dict) -> str:
    """Return a report as a readable page."""
    lines = [f"# Exam {content['seed']}: {content['score']} of {len(content['verdicts'])}", ""]
    lines += ["| task | kind | | what is wrong | verdict | judged by |", "|--:|---|---|---|---|---|"]
    for row in content["verdicts"]:
        cells = [row["task"], row["kind"], "right" if row["right"] else "wrong", ", ".join(row["mistakes"])]
        cells += [row["sentence"].replace("|", "\\|"), row["judged_by"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def save(folder: Path, content: dict) -> list[Path]:
    """Write a report and its page into a folder, and return their paths.

    Raises:
        UserError: they cannot be written.
    """
    paths = [folder / f"exam-{content['seed']}.{ending}" for ending in ("json", "md")]
    records.write(paths[0], content)
    try:
        paths[1].write_text(report_page(content))
    except OSError as error:
        raise UserError(f"{paths[1]} cannot be written ({error.strerror}): make room, and judge again") from None
    return paths


def recheck(path: Path, expected: int | None = None, measure=None) -> dict:
    """Check a report: draw its tasks anew, judge its answers again, and return it.

    Args:
        path: the report.
        expected: the seed that it must be of; None: any.
        measure: see ``judge``.

    Raises:
        UserError: it cannot be read, was edited, or is judged otherwise.
    """
    seed, drawn, stored = read(path, expected)
    if "verdicts" not in stored:
        raise UserError(f"{path} has no verdicts: give the report that exam.py --judge has written")
    if stored.get("digest") != digest(stored):
        raise UserError(
            f"{path} was edited after it was written: its content does not have its digest; judge the answers again"
        )
    again = report(seed, drawn, stored["answers"], judge(drawn, stored["answers"], measure))
    try:
        kept, found = (
            [(row["task"], row["right"], row["mistakes"]) for row in each["verdicts"]] for each in (stored, again)
        )
        score = stored["score"]
    except (KeyError, TypeError):
        raise UserError(f"{path} is no report of exam.py --judge, or it is damaged: judge the answers again") from None
    if kept != found or score != again["score"]:
        other = next((row[0] for row, mine in zip(kept, found, strict=False) if row != mine), "")
        where = f"task {other}" if other else "the score"
        raise UserError(f"{path} has another verdict than its answers get here: look at {where}, and judge them again")
    return stored
