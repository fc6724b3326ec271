# SPDX-License-Identifier: BSD-3-Clause
"""Every launch line that a learner can read, run as it stands on the practice cluster: none can drift from the course.

In place of ``python`` and ``torchrun`` stand two that write down how they were called. So a line is judged by what
Slurm made of it, its tasks, nodes and GPUs, and by what the lab script says to its options; nobody trains. Those of
the cluster guide then train for two steps.
"""

import ast
import importlib
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import call
from labkit.running import options, ranks
from torch.distributed.run import get_args_parser

from notebooks import PATHS, read

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "source_code"
LABS = ("hello.py", "mnist_fsdp.py", "gpt_fsdp.py", "gpt_zero.py", "gpt_pipeline.py", "hf_fsdp.py", "faults.py")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ONE_PROCESS = ("one_rank.py", "gpt_jax.py")  # labs whose own text says nothing of launching
# A line that looks at a job that hangs starts no lab: it has nothing to start here.
LAUNCH = re.compile(r"(cd source_code && )?(srun|sbatch|salloc|torchrun)\b(?! --jobid)")


def commands(text: str) -> list[str]:
    """The lines of a text that start something, each with those it goes on in, by a backslash or an open quotation."""
    found, lines = [], [line.strip() for line in text.splitlines()]
    while lines:
        line = lines.pop(0)
        if LAUNCH.match(line):
            while lines and (line.endswith("\\") or not closed(line)):
                line += "\n" + lines.pop(0)
            found.append(line)
    return found


def closed(line: str) -> bool:
    try:
        return bool(shlex.split(line, comments=True))
    except ValueError:
        return False


def in_fences(markdown: str) -> str:
    return "\n".join(re.findall(r"^ *```[a-z]*\n(.*?)^ *```", markdown, re.S | re.M))


def texts() -> dict[str, str]:
    """{where: text} of all in which launch lines stand."""
    fenced = {path.name: in_fences(path.read_text()) for path in PAGES}
    found = {name: text for name, text in fenced.items() if commands(text)}
    for lab in LABS:
        found[lab] = ast.get_docstring(ast.parse((SOURCE / lab).read_text()))
    for path in sorted((SOURCE / "slurm").glob("*.sbatch")):
        found[path.name] = re.sub("^#", "", path.read_text().partition("set -e")[0], flags=re.M)
    for path in [path for path in PATHS if path.stem != "16_break_it"]:  # which launches by its own cells
        prose = (cell.source for cell in read(path).cells if cell.cell_type == "markdown")
        found[path.stem] = "\n".join(map(in_fences, prose))
    return found


LINES = [(where, line) for where, text in texts().items() for line in commands(text)]


def test_lines_are_found_everywhere():
    """If the search broke, the other tests would have nothing to say."""
    assert {where for where, _ in LINES} == set(texts())
    ways = {where: {LAUNCH.match(line).group(2) for place, line in LINES if place == where} for where, _ in LINES}
    assert ways["cluster.md"] == {"srun", "sbatch", "salloc", "torchrun"}
    assert "srun" in ways["README.md"] and "srun" in ways["your_model.md"]


@dataclass
class Call:
    """How ``python`` or ``torchrun`` was called: as which task of how many, where, with which GPUs and words."""

    program: str
    job: str
    tasks: int  # of its step; 1 outside of one
    node: str
    gpus: list[str]
    cpus: int  # of its step, on its node
    words: list[str]

    def ranks_on_node(self) -> int:
        """Of a torchrun; a python is one, or starts its own."""
        return int(get_args_parser().parse_args(self.words).nproc_per_node) if self.program == "torchrun" else 1

    def script(self) -> list[str]:
        """The lab script and its words."""
        if self.program != "torchrun":
            return self.words
        parsed = get_args_parser().parse_args(self.words)
        return [parsed.training_script, *parsed.training_script_args]


STUB = """#!/bin/bash
printf '%s\\n' "${0##*/}" "$SLURM_JOB_ID" "${SLURM_STEP_NUM_TASKS:-1}" "$SLURMD_NODENAME" "$CUDA_VISIBLE_DEVICES" \
  "${SLURM_CPUS_ON_NODE:-0}" "$@" > "$CALLS/${SLURM_JOB_ID:-0}.${SLURM_STEP_ID:-0}.${SLURM_PROCID:-0}"
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the job templates, and a ``python`` and a ``torchrun`` that only write down their call."""
    (tmp_path / "calls").mkdir()
    shutil.copytree(SOURCE / "slurm", tmp_path / "source_code" / "slurm")
    for name in ("python", "torchrun"):
        program = tmp_path / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(STUB)
        program.chmod(0o755)
    (tmp_path / ".venv" / "bin" / "activate").touch()  # the templates use it where it is
    return tmp_path


def run_line(line: str, checkout: Path, env: dict, timeout=60) -> str:
    """Type a line where it says, in source_code/ if it says nothing; wait for the job it queues. Returns its output."""
    folder = checkout if line.startswith("cd source_code") else checkout / "source_code"
    environ = env | {"PATH": f"{checkout}/.venv/bin:{env['PATH']}", "CALLS": str(checkout / "calls")}
    done = call("bash", "-c", line, env=environ, cwd=folder, timeout=timeout)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    if queued := re.search(r"Submitted batch job (\d+)", done.stdout):
        waited = ["srun", "--immediate=60", "--ntasks=1", f"--dependency=afterany:{queued.group(1)}", "true"]
        assert call(*waited, env=env).returncode == 0
        return (checkout / "source_code" / next(iter(checkout.glob("source_code/*.out")))).read_text()
    return done.stdout


def calls_of(checkout: Path) -> list[Call]:
    found = []
    for path in sorted((checkout / "calls").iterdir()):
        program, job, tasks, node, gpus, cpus, *words = path.read_text().splitlines()
        found.append(Call(program, job, int(tasks), node, gpus.split(",") if gpus else [], int(cpus), words))
    return found


@pytest.mark.parametrize(("where", "line"), LINES, ids=[f"{where}: {line[:60]}" for where, line in LINES])
def test_a_line_starts_what_it_says(where, line, slurm, checkout):
    run_line(line, checkout, slurm)
    calls = calls_of(checkout)
    if LAUNCH.match(line).group(2) == "salloc":
        return
    assert calls and len(calls) == calls[0].tasks
    for each in calls:
        script, *words = each.script()
        assert script in (*LABS, *ONE_PROCESS)
        options_of = options.Start if script == "hello.py" else importlib.import_module(script[:-3]).Config
        config = options.parse(options_of, "", words)
        if each.job:
            there = sum(other.ranks_on_node() for other in calls if other.node == each.node)
            if each.tasks == 1 and each.program == "python":
                there = 1 if script == "one_rank.py" else 4  # it starts one on each of its four GPUs, or drives all
            # All its node's GPUs, one for each rank, and not only its own; and as many CPUs
            assert config.device == "cpu" or len(each.gpus) == there
            assert each.cpus >= there
            assert "--gres" not in line or "-p gpu" in line  # the default partition may have none
        if each.program == "torchrun":
            check_meeting(each, len(calls))


def check_meeting(each: Call, agents: int):
    """Of several agents: at the first node of their job, by its number, so that two jobs never meet."""
    parsed = get_args_parser().parse_args(each.words)
    if agents == 1:
        assert parsed.nnodes in ("1", "1:1")
        return
    host, _, port = parsed.rdzv_endpoint.partition(":")
    assert int(parsed.nnodes) == agents and parsed.rdzv_backend == "c10d" and parsed.rdzv_id == each.job
    assert host == ranks.first_host("127.0.0.[1-2]") and int(port) == 20000 + int(each.job) % 10000


REAL = """#!/bin/bash
exec {python} "$@" --data mnist-5k --max-steps 2 --batch-size 8
"""
TRAINS = sorted(
    {line for where, line in LINES if (where == "cluster.md" and "mnist_fsdp" in line) or where == "hello.py"}
)


@pytest.mark.parametrize("line", TRAINS)
def test_a_line_of_the_cluster_guide_trains(line, slurm, tmp_path):
    """The same lines with the programs themselves, told to take two steps."""
    shutil.copytree(SOURCE, tmp_path / "source_code", ignore=shutil.ignore_patterns("results", "__pycache__"))
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    python = shlex.quote(sys.executable)
    for name, real in {"python": python, "torchrun": f"{python} -m torch.distributed.run"}.items():
        text = REAL if "mnist" in line else REAL.partition(" --data")[0] + "\n"
        (programs / name).write_text(text.format(python=real))
        (programs / name).chmod(0o755)
    said = run_line(line, tmp_path, dict(slurm), timeout=150)
    if "mnist" in line:
        assert said.count("accuracy") == 1  # one world, not one per rank
    else:
        assert said.count("the sum of 1 … ") == 1


def test_a_script_that_requeues_its_job_asks_that_it_may_be_and_for_a_warning():
    """Many sites forbid it unless a job asks (JobRequeue=0 in slurm.conf), and the practice cluster is none of them."""
    requeue = [path for path in (SOURCE / "slurm").glob("*.sbatch") if "run_and_requeue" in path.read_text()]
    assert len(requeue) == 3
    for path in requeue:
        asked = {
            line.split()[1].partition("=")[0] for line in path.read_text().splitlines() if line.startswith("#SBATCH ")
        }
        assert {"--requeue", "--open-mode"} <= asked, path.name
        assert ("--signal" in asked) == ("torchrun" not in path.name)  # which would be ended by it
