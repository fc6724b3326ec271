"""What launching must know of a site's Slurm: words of its own, the job a notebook may run in, and the queue.

site_words("--qos=class --mem-per-cpu=4G")    FSDP_LABS_SRUN, read and checked
environment()                                 for srun and sbatch: without the tasks of the job around this process
Queue(log)                                    why what srun started does not run yet
"""

import contextlib
import os
import re
import shlex
import subprocess
import time

from labkit import UserError

# Variables that describe the tasks of the job or step around this process. To an srun inside it each is an option,
# SLURM_NTASKS is --ntasks and SLURM_CPU_BIND --cpu-bind: it would start as many tasks, on the same cores.
TASKS_AROUND = re.compile(
    r"S(LURM|RUN)_(ARBITRARY|CPU|DIST|EXACT|EXCLUSIVE|EXPORT_ENV|GPU|GRES|HINT|MEM_|NNODES|NODELIST|NPROCS|NTASKS"
    r"|OVERCOMMIT|STEP_|STEPID|TASKS|THREADS|TRES)"
)
# Options the course sets itself; each with the setting that is for it, where there is one.
TAKEN = dict.fromkeys("nodes ntasks ntasks-per-node kill-on-bad-exit overlap overcommit".split())
TAKEN |= {name: f"FSDP_LABS_{name.upper()}" for name in ("partition", "account", "time")}
CPUS_AND_MEMORY = re.compile("--(cpus-per-|mem|exclusive|exact)")  # by which a step asks for a part of its job
QUEUED = re.compile(r"^srun: job (\d+) queued and waiting for resources\n?", re.M)
GRANTED = re.compile(r"^srun: job \d+ has been allocated resources\n?", re.M)
ASK_SECONDS = 2  # between two questions to the controller, which has other work


def inside_a_job() -> bool:
    """Whether this process runs in a Slurm job: in a notebook of JupyterHub's, or under salloc."""
    return "SLURM_JOB_ID" in os.environ


def nodes(partition: str | None = None) -> int:
    """How many nodes a run may have: the job's inside a job, else those of the partition (all of them) that answer."""
    if inside_a_job():
        return int(os.environ.get("SLURM_JOB_NUM_NODES", 1))
    asked = ["sinfo", "--noheader", "--responding", "--Node", "--format=%N"]
    asked += [f"--partition={partition}"] if partition else []
    return len(set(subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.split()))


def gpus_of_the_job() -> int:
    """How many GPUs a node of the job around this process has for it, by what Slurm told the job."""
    if told := os.environ.get("SLURM_GPUS_ON_NODE"):
        return int(told)
    return len([gpu for gpu in os.environ.get("SLURM_JOB_GPUS", "").split(",") if gpu])


def environment() -> dict[str, str]:
    """The environment for srun and sbatch: this process's, but inside a job without what describes its tasks."""
    return {n: v for n, v in os.environ.items() if not (inside_a_job() and TASKS_AROUND.match(n))}


@contextlib.contextmanager
def only_the_environment():
    """While this lasts, ``os.environ`` is ``environment()``: for sbatch, which a library starts."""
    whole = dict(os.environ)
    kept = environment()
    try:
        os.environ.clear()
        os.environ.update(kept)
        yield
    finally:
        os.environ.clear()
        os.environ.update(whole)


def site_words(text: str | None) -> dict[str, str | bool]:
    """{option: value, or True where it has none} of a string of srun's options. UserError if they cannot be passed on."""
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
        if name in TAKEN:
            where = f"set {TAKEN[name]} instead" if TAKEN[name] else "leave it out"
            raise UserError(f"FSDP_LABS_SRUN has --{name}, which the course sets itself: {where}")
        options[name] = value or True
    return options


def reason_of(job: str) -> str | None:
    """Why Slurm lets a job wait, in its own word (``Resources``, ``Priority``, …); None if it does not wait."""
    asked = ["squeue", "-h", "-t", "pending", "-j", job, "-o", "%r"]
    try:
        reason = subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if reason in ("", "None") else reason  # Slurm says None until it has looked at a new job


class Queue:
    """A job that may wait. ``reason()``: why it does, asked anew every ``ASK_SECONDS``, or None.

    job: a function that returns the job's number, or None as long as there is none.
    """

    def __init__(self, job):
        self.job, self._asked, self._reason = job, -ASK_SECONDS, None

    def reason(self) -> str | None:
        if time.monotonic() - self._asked >= ASK_SECONDS:
            job = self.job()
            self._reason = reason_of(job) if job else None
            self._asked = time.monotonic()
        return self._reason


def queued_job(printed: str) -> str | None:
    """The number of the job that srun, by what it printed, waits for."""
    match = QUEUED.search(printed)
    return match.group(1) if match and not GRANTED.search(printed) else None


def without_queueing(printed: str) -> str:
    """What srun printed, less its words on the queue."""
    return GRANTED.sub("", QUEUED.sub("", printed))


def explained(command: list[str], printed: str) -> str | None:
    """A sentence where srun failed because the job around it has too little; None for any other failure."""
    if not inside_a_job() or not re.search(r"srun: error: (Unable to create step|Only allocated)", printed):
        return None
    asked = " ".join(word for word in command if word.startswith(("--nodes=", "--ntasks=", "--gres=")))
    why = re.findall(r"srun: error: (.*)", printed)[-1].split(": ")[-1]
    return (
        f"job {os.environ['SLURM_JOB_ID']}, in which this runs, has too little for srun {asked} ({why}): "
        "ask for more when you start the job, or for fewer ranks"
    )
