# SPDX-License-Identifier: BSD-3-Clause
"""Take the course's exam: twelve tasks drawn by a seed, judged by running and planning. Each learner takes another seed.

  python exam.py --seed 7                    write the tasks of seed 7 to exam-7/: exam.md, answers.json, evidence
  python exam.py --judge exam-7              judge the answers; write the report exam-7/exam-7.json, and exam-7.md to read
  python exam.py --recheck exam-7/exam-7.json --seed 7      for instructors: judge a report's answers again

Four tasks ask for a prediction of peak memory and traffic within 5 %, four for the fault in a run's evidence, and four for
a configuration that fits a budget. You may use all of the course: plan.py, the labs, diagnose_hang.py.

Evidence comes from runs on this machine, which take a minute or several: flight records and a memory profile of 4 ranks with a
fault. Records are handed out if diagnose_hang.py names the fault in them. To judge, small configurations run here and are
measured; with --no-run they are planned, like the large ones.
"""

import contextlib
import io
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from labkit import UserError
from labkit.exam import finding, papers, tasks
from labkit.running import launch
from labkit.running.options import Conflict, Options, exit_with_error, option, parse

TRIES = 3  # runs for a hang's records, until they show their fault


@dataclass(frozen=True)
class Config(Options):
    """Define the command line by these fields."""

    conflicts = (
        Conflict(
            {"seed": None, "judge": None},
            {"recheck": None},
            "give --seed N for tasks, --judge FOLDER for a verdict, or --recheck FILE for a report",
        ),
        Conflict(
            {"judge": lambda given: given is not None},
            {"recheck": lambda given: given is not None},
            "--judge and --recheck are two different things to do: give one of them",
        ),
        Conflict(
            {"folder": lambda given: given is not None},
            {"writes": False},
            "--folder is where tasks are written: leave it out with --judge and --recheck",
        ),
        Conflict(
            {"run": False},
            {"writes": True},
            "--no-run is how answers are judged: leave it out, since the tasks' evidence comes from runs",
        ),
    )

    seed: int | None = option(
        None, "of the tasks to write; with --judge and --recheck, the seed that the answers must be of", least=0
    )
    folder: str | None = option(None, "new folder for the tasks (default: exam-<seed>)")
    judge: str | None = option(None, "folder whose answers are judged")
    recheck: str | None = option(None, "report whose answers are judged again")
    run: bool = option(True, "run small configurations to judge, instead of planning them")

    @property
    def writes(self) -> bool:
        """Whether tasks are written."""
        return self.judge is None and self.recheck is None


# Runs


def measure(some: list[dict]) -> list[dict]:
    """Train in each configuration, and return what rank 0's meters report: [{"memory", "traffic", …}, …], in order."""
    from labkit.running import notebook_ranks
    from proofs import memory

    found = {}
    for count in sorted({one["ranks"] for one in some}):
        mine = [number for number, one in enumerate(some) if one["ranks"] == count]
        cluster = launch.Cluster(launcher="local")
        configs = [some[number] for number in mine]
        of_ranks = notebook_ranks.on_ranks(memory.measure, configs, ranks=count, cluster=cluster, timeout=300)
        found |= dict(zip(mine, of_ranks[0], strict=True))
    return [found[number] for number in range(len(some))]


def record_hang(task: finding.Hang, folder: Path):
    """Run a training with a task's fault, and copy its flight records into a new folder.

    Raises:
        UserError: the records of all ``TRIES`` runs do not show the fault.
    """
    from proofs import diagnosis

    wanted = (diagnosis.NOTHING, []) if task.kind == finding.CONTROL else (task.kind, [task.rank])
    for _ in range(TRIES):
        with diagnosis.recorded(diagnosis.Draw(task.kind, task.layout, task.rank, task.step)) as flight:
            shutil.copytree(flight, folder)  # now: at its end, a run writes over the files that it wrote in the hang
        if diagnosis.named(diagnosis.diagnose_hang.report(folder)) == wanted:
            return
        shutil.rmtree(folder)
    raise UserError(
        f"the records of task {task.number} did not show its fault in {TRIES} runs: try again when this machine is less busy"
    )


# What the command does


def write_tasks(seed: int, folder: Path) -> str:
    """Draw the tasks of a seed, run for their evidence, and write them to a new folder. Return the sentence to print.

    Raises:
        UserError: the folder exists, or cannot be made, or a run failed.
    """
    drawn = tasks.draw(seed)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{folder} exists, perhaps with answers: name another --folder, or remove it") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}): name another --folder") from None
    hangs = [task for task in drawn if isinstance(task, finding.Hang)]
    print("the tasks' evidence comes from runs, which take a minute, or several on a busy machine", flush=True)
    profiled = [task for task in drawn if isinstance(task, finding.Memory)]
    try:
        # The ranks' output would give the faults away. All run at once, since most of the time they wait.
        with contextlib.redirect_stdout(io.StringIO()), ThreadPoolExecutor(len(hangs)) as threads:
            recorded = [threads.submit(record_hang, task, folder / f"task-{task.number:02}") for task in hangs]
            measured = measure([task.run_with(task.fault) for task in profiled])
            for each in recorded:
                each.result()
        profiles = {task.number: run["memory"]["timeline"] for task, run in zip(profiled, measured, strict=True)}
        papers.write(folder, seed, drawn, papers.evidence(drawn, profiles))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # half a set of tasks would be in the way of the next try
        raise
    return f"{len(drawn)} tasks of seed {seed} are in {folder / papers.TASKS}; fill in {folder / papers.ANSWERS}"


def judge(folder: Path, seed: int | None, runs: bool) -> str:
    """Judge a folder's answers, write the report, and return its page."""
    seed, drawn, paper = papers.read(folder / papers.ANSWERS, seed)
    verdicts = papers.judge(drawn, paper["answers"], measure if runs else None)
    content = papers.report(seed, drawn, paper["answers"], verdicts)
    paths = papers.save(folder, content)
    return f"{papers.report_page(content)}\nreport: {paths[0]}; page: {paths[1]}"


def main():
    config = parse(Config, __doc__)
    try:
        if config.writes:
            print(write_tasks(config.seed, Path(config.folder or f"exam-{config.seed}")))
        elif config.judge is not None:
            print(judge(Path(config.judge), config.seed, config.run))
        else:
            stored = papers.recheck(Path(config.recheck), config.seed, measure if config.run else None)
            print(
                f"seed {stored['seed']}: {stored['score']} of {len(stored['verdicts'])}; judged again, with the same verdicts"
            )
    except UserError as error:
        exit_with_error(str(error))


if __name__ == "__main__":
    main()
