# SPDX-License-Identifier: BSD-3-Clause
"""Query Slurm for the launcher: a site's options, the job that this process runs in, and the queue.

parse_srun_options("--qos=class --mem-per-cpu=4G")    FSDP_LABS_SRUN, parsed and checked
environment()                                         for srun and sbatch: without the variables of the current job
Queue(job)                                            why a pending job does not run yet
"""

import contextlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping

from labkit import UserError

# Variables that describe the tasks of the current job or step. srun would read each as an option: SLURM_NTASKS is
# --ntasks and SLURM_CPU_BIND --cpu-bind, so that it would start as many tasks, on the same cores.
TASKS_AROUND = re.compile(
    r"S(LURM|RUN)_(ARBITRARY|CPU|DIST|EXACT|EXCLUSIVE|EXPORT_ENV|GPU|GRES|HINT|MEM_|NNODES|NODELIST|NPROCS|NTASKS"
    r"|OVERCOMMIT|STEP_|STEPID|TASKS|THREADS|TRES)"
)
# Options that the course sets itself, {option: the variable that sets it, or None}
RESERVED = dict.fromkeys("nodes ntasks ntasks-per-node kill-on-bad-exit overlap overcommit".split())
RESERVED |= {name: f"FSDP_LABS_{name.upper()}" for name in ("partition", "account", "time")}
CPUS_AND_MEMORY = re.compile("--(cpus-per-|mem|exclusive|exact)")  # options that restrict a step to a part of its job
QUEUED = re.compile(r"^srun: job (\d+) queued and waiting for resources\n?", re.M)
GRANTED = re.compile(r"^srun: job \d+ has been allocated resources\n?", re.M)
ASK_SECONDS = 2  # between two queries to the controller, which must not be overloaded


def inside_a_job() -> bool:
    """Return whether this process runs in a Slurm job: in JupyterHub's notebooks, or under salloc."""
    return "SLURM_JOB_ID" in os.environ


def nodes(partition: str | None = None) -> int:
    """Return the number of nodes available to a run: the current job's, else those of the partition that respond.

    Args:
        partition: its name; None: all partitions.
    """
    if inside_a_job():
        return int(os.environ.get("SLURM_JOB_NUM_NODES", 1))
    sinfo = ["sinfo", "--noheader", "--responding", "--Node", "--format=%N"]
    sinfo += [f"--partition={partition}"] if partition else []
    return len(set(subprocess.run(sinfo, capture_output=True, text=True, timeout=30).stdout.split()))


def gpus_of_the_job() -> int:
    """Return the number of GPUs per node of the current job, from Slurm's variables."""
    if count := gpus_granted(os.environ):
        return count
    return len([gpu for gpu in os.environ.get("SLURM_JOB_GPUS", "").split(",") if gpu])


def gpus_granted(environ: Mapping[str, str]) -> int:
    """Return the number in SLURM_GPUS_ON_NODE, which a site may write as "gpu:4" or "4(S:0-1)"; 0 without one."""
    found = re.match(r"(?:[^\d(][^:(]*:)*(\d+)", environ.get("SLURM_GPUS_ON_NODE", ""))
    return int(found[1]) if found else 0


def environment() -> dict[str, str]:
    """Return the environment for srun and sbatch: this process's, without the variables of the current job's tasks."""
    return {n: v for n, v in os.environ.items() if not (inside_a_job() and TASKS_AROUND.match(n))}


@contextlib.contextmanager
def without_job_variables():
    """Set ``os.environ`` to ``environment()`` within this context, for a library that starts sbatch."""
    before = dict(os.environ)
    cleaned = environment()
    try:
        os.environ.clear()
        os.environ.update(cleaned)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def parse_srun_options(text: str | None) -> dict[str, str | bool]:
    """Parse a string of srun's options to {option: value, or True if it has none}.

    Raises:
        UserError: it cannot be parsed, or the course sets one of the options itself.
    """
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise UserError(f"FSDP_LABS_SRUN is {text!r}, which cannot be read ({error}): close the quotation") from None
    options = {}
    for word in words:
        match = re.fullmatch(r"--([a-z][a-z-]*)(?:=(.+))?", word)
        if not match:
            raise UserError(f"FSDP_LABS_SRUN has {word!r}: write each option as one word, --name or --name=value")
        name, value = match.groups()
        if name in RESERVED:
            where = f"set {RESERVED[name]} instead" if RESERVED[name] else "leave it out"
            raise UserError(f"FSDP_LABS_SRUN has --{name}, which the course sets itself: {where}")
        options[name] = value or True
    return options


def reason_of(job: str) -> str | None:
    """Return Slurm's reason for a pending job (``Resources``, ``Priority``, …); None if it is not pending."""
    squeue = ["squeue", "-h", "-t", "pending", "-j", job, "-o", "%r"]
    try:
        reason = subprocess.run(squeue, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if reason in ("", "None") else reason  # "None" until Slurm has considered a new job


class Queue:
    """Query the reason for a pending job, at most every ``ASK_SECONDS``.

    Args:
        job: a function that returns the job's number, or None as long as there is none.
    """

    def __init__(self, job):
        self.job, self._asked, self._reason = job, -ASK_SECONDS, None

    def reason(self) -> str | None:
        """Return the reason; None if the job is not pending."""
        if time.monotonic() - self._asked >= ASK_SECONDS:
            job = self.job()
            self._reason = reason_of(job) if job else None
            self._asked = time.monotonic()
        return self._reason


def queued_job(printed: str) -> str | None:
    """Return the number of the job that srun waits for, from its output; None if it does not wait."""
    match = QUEUED.search(printed)
    return match.group(1) if match and not GRANTED.search(printed) else None


def without_queueing(printed: str) -> str:
    """Return srun's output without its messages about the queue."""
    return GRANTED.sub("", QUEUED.sub("", printed))


HINTS = {  # what Slurm prints of a run that it has ended, or did not start: what to do
    r"DUE TO TIME LIMIT": "it ran until Slurm's time limit: set FSDP_LABS_TIME to more minutes",
    r"oom.kill|Out Of Memory": (
        "it was killed because it needed more memory than its job has: ask for more in FSDP_LABS_SRUN, such as "
        "--mem-per-cpu=8G, or take fewer ranks"
    ),
    r"job \d+ has expired|Invalid job id": (
        "SLURM_JOB_ID is that of a job that has ended: unset ${!SLURM_*} where you started Jupyter"
    ),
}


def hint(printed: str) -> str | None:
    """Return what to do about a run that Slurm has ended or did not start; None if its output does not say so."""
    return next((words for pattern, words in HINTS.items() if re.search(pattern, printed)), None)


def explained(command: list[str], printed: str) -> str | None:
    """Return a sentence if srun failed because the current job has too few resources; None for any other failure.

    Args:
        command: the srun command.
        printed: its output.
    """
    if not inside_a_job() or not re.search(r"srun: error: (Unable to create step|Only allocated)", printed):
        return None
    request = " ".join(word for word in command if word.startswith(("--nodes=", "--ntasks=", "--gres=")))
    why = re.findall(r"srun: error: (.*)", printed)[-1].split(": ")[-1]
    return (
        f"job {os.environ['SLURM_JOB_ID']}, in which this runs, has too few resources for srun {request} ({why}): "
        "request more when you start the job, or fewer ranks"
    )
