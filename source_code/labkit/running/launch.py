"""Start a lab script from a notebook or a command: here, or on Slurm. Say the exact command; return the record.

  run("mnist_fsdp.py", ranks=4, wrap="size")            waits, with a progress bar; returns the record
  submit("mnist_fsdp.py", ranks=8, nodes=2)             a queued batch job, through submitit; returns a ``Job``

Where it runs is not written in the notebooks but in a ``Cluster``: one settings cell, or these variables,
which an instructor can set for a whole class:

  FSDP_LABS_LAUNCHER     auto (Slurm where this machine is set up for one), local, or slurm
  FSDP_LABS_PARTITION, FSDP_LABS_ACCOUNT, FSDP_LABS_TIME      passed to Slurm where set
  FSDP_LABS_RUNS         where records, logs and checkpoints go (see labkit/measuring/records.py)
  FSDP_LABS_SRUN         a site's own words for srun and the queue: "--qos=class --cpus-per-task=4 --mem-per-cpu=4G"

GPUs are asked for by the node (``--gres``), so that each rank sees all of its node and NCCL can copy from one to the
next. Of CPUs and memory Slurm gives what the site gives unasked; in a job, ranks share what the job has.
"""

import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from labkit import UserError
from labkit.measuring import records
from labkit.running import fork_server, gpus, options, progress, site, slurm
from labkit.running import lab_options as lab_options  # whoever runs labs can plan from their records

SOURCE = Path(__file__).resolve().parents[2]
RUNS = records.RUNS
OUTPUT_LINES = 40  # how much of a failed run's output is shown
# None on macOS. Looked up now: in a new process a lock may be held for ever, by a thread that was not forked with it.
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
ONE_PROCESS = ("gpt_jax.py",)  # labs in which one process drives as many devices as others have ranks
END_TOGETHER = "--kill-on-bad-exit=1"  # srun: else tasks would wait in a collective for one that has failed


class RunFailed(UserError):
    """A lab script ended with an error; the text is the end of what it printed."""


def from_environment(name: str, default: str | None = None):
    """A dataclass field that is FSDP_LABS_name where it is not given."""
    return field(default_factory=lambda: os.environ.get(f"FSDP_LABS_{name}", default))


@dataclass(frozen=True)
class Cluster:
    """Where to run. Every field can come from the environment (see this file's first lines)."""

    launcher: str = from_environment("LAUNCHER", "auto")
    partition: str | None = from_environment("PARTITION")
    account: str | None = from_environment("ACCOUNT")
    time: str | None = from_environment("TIME")  # as Slurm writes it: minutes, or hours:minutes:seconds
    slurm: str | None = from_environment("SRUN")  # a site's own words, each --name or --name=value

    def uses_slurm(self) -> bool:
        """Whether to start through Slurm. UserError if it does not answer, or was asked for and is not here."""
        if self.launcher not in ("auto", "local", "slurm"):
            raise UserError(f"FSDP_LABS_LAUNCHER is {self.launcher!r}: use auto, local or slurm")
        if self.launcher == "local":
            return False
        try:
            site.partitions()
        except site.NoSlurm as reason:
            if self.launcher == "slurm":
                raise UserError(
                    f"Slurm was asked for, but {reason}: use launcher 'local', or start where Slurm is"
                ) from None
            return False
        return True

    def request(self, ranks: int, nodes: int, device: str = "auto", tasks: int | None = None) -> dict:
        """What a run asks of Slurm, {option: value or True}, by srun or in the queue. device: "cpu" asks for no GPUs.

        tasks: processes (default: one per rank). Each rank computes on a GPU, whatever process drives it.
        A site's own words come last and win. Of ``--gres=gpu:a100:4`` only the type does: how many depends on the run.
        """
        if ranks % nodes:
            raise UserError(f"{ranks} ranks cannot be shared evenly by {nodes} nodes")
        site = slurm.site_words(self.slurm)
        gpu = re.sub(r":\d+$", "", str(site.pop("gres", "gpu")))
        tasks = tasks or ranks
        options = {
            "nodes": nodes,
            "ntasks": tasks,  # said, or the number of the job around a notebook would hold
            "ntasks-per-node": tasks // nodes,
            "gres": None if device == "cpu" else f"{gpu}:{ranks // nodes}",
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
        }
        return {name: value for name, value in options.items() if value} | site

    def words(self, ranks: int, nodes: int, device: str = "auto", tasks: int | None = None) -> list[str]:
        """The request as srun and sbatch take it."""
        request = self.request(ranks, nodes, device, tasks)
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in request.items()]

    def srun(self, ranks: int, nodes: int, device: str = "auto", tasks: int | None = None) -> list[str]:
        """The srun words that start one task per rank, or so many. Run them in ``slurm.environment()``."""
        words = self.words(ranks, nodes, device, tasks)
        if slurm.inside_a_job():  # ranks share its CPUs and memory with the notebook, be it much or little
            words = [word for word in words if not slurm.CPUS_AND_MEMORY.match(word)] + ["--overlap", "--overcommit"]
        return ["srun", *words, END_TOGETHER]


def script_words(script: str, ranks: int, record: Path, script_options: dict) -> tuple[list[str], int]:
    """The command line of the script itself, as started in ``source_code/``, and how many ranks it makes.

    It says how many even to ranks that Slurm starts: those of one task could not know, and start two. What makes ranks
    of one process are its devices.
    """
    if script in ONE_PROCESS:
        ranks = script_options.get("devices") or ranks
        script_options = {"devices": ranks} | script_options
    elif script_options.get("strategy") == "single":
        ranks = 1
    else:
        script_options = {"ranks": ranks} | script_options
    wanted = {k: shown(v) if isinstance(v, Path) else v for k, v in (script_options | {"record": record}).items()}
    return [script, *options.arguments(wanted)], ranks


def tasks_of(script: str, nodes: int) -> int | None:
    """How many processes a lab script is; None: one per rank. UserError: one cannot lie on several nodes."""
    if script in ONE_PROCESS and nodes > 1:
        raise UserError(f"{script} is one process, with the devices of one node: use nodes=1")
    return 1 if script in ONE_PROCESS else None


def shown(path: Path) -> str:
    """A path as seen from source_code/, where that is shorter."""
    path = path.resolve()
    return str(path.relative_to(SOURCE)) if path.is_relative_to(SOURCE) else str(path)


def new_record(script: str) -> Path:
    """A path for the next record in ``RUNS``, in order of time."""
    return RUNS / f"{datetime.now():%Y%m%d-%H%M%S-%f}-{Path(script).stem}.json"


def run(
    script: str,
    *,
    ranks: int = 2,
    nodes: int = 1,
    cluster: Cluster | None = None,
    record: Path | None = None,
    on_progress=None,
    timeout: float = 3600,
    quiet: bool = False,
    **script_options,
) -> dict:
    """Run a lab script to its end and return its record.

    ranks: in all (one, with strategy="single"); nodes: how many machines they are spread over (Slurm only).
    script_options: the script's own, as in ``wrap="size", dropout=False``. on_progress: called with (step, total)
    instead of showing a bar. timeout: seconds. Raises RunFailed with the end of the output if the script fails,
    UserError on bad input.
    """
    record = Path(record or new_record(script))
    words, ranks = script_words(script, ranks, record, script_options)
    device = script_options.get("device", "auto")
    command = started(words, ranks, nodes, device, cluster, tasks_of(script, nodes))
    if not quiet:
        print(_folded(["python" if word == sys.executable else word for word in command if word != "-u"]), flush=True)
    record.unlink(missing_ok=True)
    follow(command, on_progress, timeout, device)
    return records.load(record)


def _folded(command: list[str], width: int = 96) -> str:
    """A command as one types it, over several lines if it is long; an option stays with its value."""
    lines = ["$"]
    for part in re.split(r" (?=--)", shlex.join(command)):
        if len(lines[-1]) + len(part) > width:
            lines.append("   ")
        lines[-1] += f" {part}"
    return " \\\n".join(lines)


def started(
    words: list[str], ranks: int, nodes: int, device: str, cluster: Cluster | None, tasks: int | None = None
) -> list[str]:
    """The command that runs ``python words`` as ranks: srun's, a task per rank (or ``tasks``), or here, one process."""
    cluster = cluster or Cluster()
    command = [sys.executable, "-u", *words]
    if cluster.uses_slurm():
        return [*cluster.srun(ranks, nodes, device, tasks), *command]
    if nodes > 1:
        raise UserError(f"{nodes} nodes need Slurm: use nodes=1 here, or bring up the practice cluster (make slurm)")
    return command


def follow(command: list[str], on_progress=None, timeout: float = 3600, device: str = "auto") -> str:
    """Run a command in source_code/, show its progress, and return what it printed. RunFailed if it fails.

    device: "cpu" hides the GPUs. timeout: seconds; of what srun starts they count from when the first rank reports,
    not while Slurm lets it wait.
    """
    with tempfile.TemporaryDirectory(dir=records.ensure_writable_dir(RUNS), prefix=".progress-") as folder:
        mark, log = Path(folder) / "progress", Path(folder) / "output"
        environ = slurm.environment() | {progress.VARIABLE: str(mark)} | (gpus.HIDDEN if device == "cpu" else {})
        with log.open("w") as output:
            process = _start(command, environ, output)
        queue = slurm.Queue(lambda: slurm.queued_job(log.read_text(errors="replace"))) if command[0] == "srun" else None
        with _Bar(on_progress) as bar:
            _wait(process, lambda: bar.follow(mark, queue), timeout, command)
        printed = slurm.without_queueing(log.read_text(errors="replace")).strip()
        if process.returncode:
            end = "\n".join(printed.splitlines()[-OUTPUT_LINES:]) or f"exit code {process.returncode}"
            if why := records.why_full(RUNS):  # what it printed is lost, or the end of it
                end += f"\n{why}"
            raise RunFailed(slurm.explained(command, printed) or end)
        return printed


def _start(command, environ, output):
    """A process with the command, in source_code/, in a session of its own, which ends with this one."""
    if command[0] == sys.executable and fork_server.possible(environ):
        return fork_server.start(command, SOURCE, environ, output, output)
    return subprocess.Popen(
        command,
        cwd=SOURCE,
        env=environ,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_parent if PRCTL else None,
    )


def _end_with_parent():
    """In a new process: ask Linux to end it with its parent, or a restarted notebook leaves its ranks behind."""
    PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _wait(process, report, timeout, command):
    """Wait for a process; on time-out or interruption end it and the ranks it started.

    report: shows how far it is; returns whether the ranks run, which the time-out counts from.
    """
    deadline = None
    try:
        while True:
            try:
                process.wait(0.1)
                return report()
            except subprocess.TimeoutExpired:
                if report():
                    deadline = deadline or time.monotonic() + timeout
            if deadline and time.monotonic() > deadline:
                raise RunFailed(f"not finished after {timeout:.0f} s: {shlex.join(command)}")
    finally:
        if process.poll() is None:
            _signal_all(process, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                _signal_all(process, signal.SIGKILL)
                process.wait()


def _signal_all(process, number):
    """To a process and what it has started: its ranks, which only Linux would end with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # just ended; as macOS says it
        os.killpg(process.pid, number)


class _Bar:
    """Shows a run: (step, total) to the caller's function; or as a line of the notebook, or a bar in a terminal.

    The line and the bar also show why Slurm lets a run wait.
    """

    def __init__(self, on_progress):
        self.show = on_progress or (_NotebookLine() if _in_notebook() else _TerminalBar())

    def __enter__(self):
        return self

    def follow(self, mark: Path, queue: slurm.Queue | None) -> bool:
        """Show what is known now. mark: the file of ``progress``. Returns whether the ranks run."""
        running = queue is None or mark.exists()
        if (where := progress.read(mark)) is not None:
            self.show(*where)
        elif not running and hasattr(self.show, "wait") and (reason := queue.reason()):
            self.show.wait(f"waiting for Slurm ({reason})")
        return running

    def __exit__(self, *error):
        if hasattr(self.show, "close"):
            self.show.close()


class _TerminalBar:
    def __init__(self):
        self.bar = self.waiting = None

    def wait(self, why):
        if self.waiting is None:
            self.waiting = tqdm(desc=why, bar_format="{desc}, {elapsed}", leave=False)
        self.waiting.set_description_str(why)

    def __call__(self, step, total):
        if self.bar is None:
            self.close()
            self.bar = tqdm(total=total, unit="step", leave=False)
        self.bar.update(step - self.bar.n)

    def close(self):
        for bar in (self.bar, self.waiting):
            if bar is not None:
                bar.close()


def _in_notebook() -> bool:
    """Whether this is the kernel of a notebook, not a terminal or a script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


class _NotebookLine:
    """One line under the cell that is written again and again; what stays in the saved page is its last state."""

    def __init__(self):
        self.begin, self.line, self.waiting = time.monotonic(), None, False

    def __call__(self, step, total):
        self.waiting = False
        self.show(f"step {step} of {total}, {time.monotonic() - self.begin:.0f} s")

    def wait(self, why):
        self.waiting = True
        self.show(f"{why}, {time.monotonic() - self.begin:.0f} s")

    def close(self):
        if self.waiting:  # and no step followed: a page that says so for ever would be wrong
            self.show("")

    def show(self, text):
        from IPython.display import display

        content = {"text/plain": text}
        if self.line is None:
            self.line = display(content, raw=True, display_id=True)
        else:
            self.line.update(content, raw=True)


@dataclass
class Job:
    """A queued run. ``wait()`` returns its record; ``handle`` is submitit's job, with its logs and state."""

    handle: object
    path: Path
    mark: Path

    def wait(self, on_progress=None) -> dict:
        """Wait for the end, showing progress. Raises RunFailed with the end of the job's log if it failed."""
        queue = slurm.Queue(lambda: self.handle.job_id)
        with _Bar(on_progress) as bar:
            while not self.handle.done():
                bar.follow(self.mark, queue)
                time.sleep(0.5)
        try:
            self.handle.results()
        except Exception as error:  # submitit raises many kinds, all of which mean: look at the log
            log = (self.handle.stderr() or str(error)).strip().splitlines()[-OUTPUT_LINES:]
            raise RunFailed(f"job {self.handle.job_id} failed:\n" + "\n".join(log)) from None
        return records.load(self.path)


def submit(script: str, *, ranks: int, nodes: int = 1, cluster: Cluster | None = None, **script_options) -> Job:
    """Queue a lab script as a batch job through submitit: what ``run`` starts with srun, whatever the launcher.

    With ``checkpoint=…, resume=True`` it goes back to the queue when its time is up or it is preempted, and on from
    its checkpoint, until it is done.
    """
    import submitit  # only where there is Slurm

    from labkit.running import submitit_job

    cluster = replace(cluster or Cluster(), launcher="slurm")
    cluster.uses_slurm()
    resumes = script_options.get("resume", False)
    if resumes and not cluster.time:
        raise UserError("a job that is to come back needs to know when its time is up: set FSDP_LABS_TIME, in minutes")
    path = new_record(script)
    words, ranks = script_words(script, ranks, path, script_options)
    request = cluster.request(ranks, nodes, script_options.get("device", "auto"), tasks_of(script, nodes))
    mark = path.with_suffix(".progress")
    # A folder a job: another cluster, or this one installed anew, gives the same numbers to other jobs.
    executor = submitit.SlurmExecutor(
        folder=records.ensure_writable_dir(path.with_suffix(".job")), max_num_timeout=submitit_job.MAX_REQUEUES
    )
    executor.update_parameters(
        job_name=Path(script).stem,
        setup=[f"export {progress.VARIABLE}={shlex.quote(str(mark))}", f"cd {shlex.quote(str(SOURCE))}"],
        srun_args=[END_TOGETHER],
        nodes=request.pop("nodes"),
        ntasks_per_node=request.pop("ntasks-per-node"),
        time=submitit_job.minutes(request.pop("time", None)),  # none: not what submitit asks for unasked, five minutes
        additional_parameters=request,
        wckey=None,
    )
    command = submitit_job.Command([sys.executable, "-u", *words], resumes)
    try:
        with slurm.only_the_environment():
            handle = executor.submit(command)
    except submitit.core.utils.FailedJobError as error:  # what sbatch says, for instance of an option only srun knows
        raise RunFailed(str(error).strip()) from None
    print(
        f"$ sbatch {shown(Path(handle.paths.submission_file))}    # job {handle.job_id}: srun python {shlex.join(words)}"
    )
    return Job(handle, path, mark)
