# SPDX-License-Identifier: BSD-3-Clause
"""Launch a lab script from a notebook or a command, locally or on Slurm; print the exact command, return the record.

  run("mnist_fsdp.py", ranks=4, wrap="size")            wait, with a progress bar; returns the record
  submit("mnist_fsdp.py", ranks=8, nodes=2)             queue a batch job, through submitit; returns a ``Job``

A ``Cluster`` defines where it runs: the settings cell of a notebook, or these variables, which an instructor can set
for a class:

  FSDP_LABS_LAUNCHER     auto (Slurm if this machine is configured for it), local, or slurm
  FSDP_LABS_PARTITION, FSDP_LABS_ACCOUNT, FSDP_LABS_TIME      passed to Slurm if set
  FSDP_LABS_RUNS         folder for records, logs and checkpoints (see labkit/measuring/records.py)
  FSDP_LABS_SRUN         further options for srun and sbatch: "--qos=class --cpus-per-task=4 --mem-per-cpu=4G"

GPUs are requested per node (``--gres``), so that each rank sees all GPUs of its node and NCCL can copy between them.
CPUs and memory are the site's defaults; within a job, the ranks share the job's.
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
OUTPUT_LINES = 40  # lines of a failed run's output to show
# None on macOS. Looked up now: after a fork, a thread that no longer exists may hold the loader's lock forever.
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
ONE_PROCESS = ("gpt_jax.py",)  # labs in which one process drives all devices, instead of one rank per device
END_TOGETHER = "--kill-on-bad-exit=1"  # srun: or tasks would wait in a collective for one that has failed


class RunFailed(UserError):
    """A lab script ended with an error; the text is the end of its output."""


def from_environment(name: str, default: str | None = None):
    """Return a dataclass field whose default is the variable FSDP_LABS_``name``, or ``default`` if it is not set."""
    return field(default_factory=lambda: os.environ.get(f"FSDP_LABS_{name}", default))


@dataclass(frozen=True)
class Cluster:
    """Where to run. The default of every field comes from the environment (see this file's docstring)."""

    launcher: str = from_environment("LAUNCHER", "auto")
    partition: str | None = from_environment("PARTITION")
    account: str | None = from_environment("ACCOUNT")
    time: str | None = from_environment("TIME")  # as Slurm writes it: minutes, or hours:minutes:seconds
    slurm: str | None = from_environment("SRUN")  # further options, each --name or --name=value

    def uses_slurm(self) -> bool:
        """Return whether to launch through Slurm.

        Raises:
            UserError: Slurm does not respond, or was requested and is not available.
        """
        if self.launcher not in ("auto", "local", "slurm"):
            raise UserError(f"FSDP_LABS_LAUNCHER is {self.launcher!r}: use auto, local or slurm")
        if self.launcher == "local":
            return False
        try:
            site.partitions()
        except site.NoSlurm as reason:
            if self.launcher == "slurm":
                raise UserError(
                    f"Slurm was requested, but {reason}: use launcher 'local', or a machine with Slurm"
                ) from None
            return False
        return True

    def request(self, ranks: int, nodes: int, device: str = "auto", tasks: int | None = None) -> dict:
        """Return the Slurm options of a run, {option: value or True}, for srun or sbatch.

        Further options of the site override these. Of its ``--gres=gpu:a100:4`` only the type counts: the number of GPUs
        depends on the run.

        Args:
            ranks: in total. Each computes on its own GPU.
            nodes: to distribute them over.
            device: "cpu" requests no GPUs.
            tasks: number of processes (default: one per rank).

        Raises:
            UserError: the ranks cannot be distributed evenly.
        """
        if ranks % nodes:
            raise UserError(f"{ranks} ranks cannot be distributed evenly over {nodes} nodes")
        site = slurm.parse_srun_options(self.slurm)
        gpu = re.sub(r":\d+$", "", str(site.pop("gres", "gpu")))
        tasks = tasks or ranks
        options = {
            "nodes": nodes,
            "ntasks": tasks,  # explicitly, or srun would use the number of the job that it runs in
            "ntasks-per-node": tasks // nodes,
            "gres": None if device == "cpu" else f"{gpu}:{ranks // nodes}",
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
        }
        return {name: value for name, value in options.items() if value} | site

    def words(self, ranks: int, nodes: int, device: str = "auto", tasks: int | None = None) -> list[str]:
        """Return ``request`` as command-line options of srun and sbatch."""
        request = self.request(ranks, nodes, device, tasks)
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in request.items()]

    def srun(self, ranks: int, nodes: int, device: str = "auto", tasks: int | None = None) -> list[str]:
        """Return the srun command that starts one task per rank, or ``tasks``. Run it in ``slurm.environment()``."""
        words = self.words(ranks, nodes, device, tasks)
        if slurm.inside_a_job():  # the ranks share the job's CPUs and memory with the notebook
            words = [word for word in words if not slurm.CPUS_AND_MEMORY.match(word)] + ["--overlap", "--overcommit"]
        return ["srun", *words, END_TOGETHER]


def script_argv(script: str, ranks: int, record: Path, script_options: dict) -> tuple[list[str], int]:
    """Return the argv of a lab script, run in ``source_code/``, and its number of ranks.

    ``--ranks`` is passed even under Slurm: a single task would otherwise start its own default of two. For
    ``ONE_PROCESS`` labs, ``--devices`` takes its place.
    """
    if script in ONE_PROCESS:
        ranks = script_options.get("devices") or ranks
        script_options = {"devices": ranks} | script_options
    elif script_options.get("strategy") == "single":
        ranks = 1
    else:
        script_options = {"ranks": ranks} | script_options
    script_options = script_options | {"record": record}
    values = {k: relative_to_source(v) if isinstance(v, Path) else v for k, v in script_options.items()}
    return [script, *options.arguments(values)], ranks


def tasks_of(script: str, nodes: int) -> int | None:
    """Return the number of processes of a lab script; None: one per rank.

    Raises:
        UserError: a single process cannot run on several nodes.
    """
    if script in ONE_PROCESS and nodes > 1:
        raise UserError(f"{script} is one process, with the devices of one node: use nodes=1")
    return 1 if script in ONE_PROCESS else None


def relative_to_source(path: Path) -> str:
    """Return a path relative to source_code/ if it is inside of it, else the absolute path."""
    path = path.resolve()
    return str(path.relative_to(SOURCE)) if path.is_relative_to(SOURCE) else str(path)


def new_record(script: str) -> Path:
    """Return a path in ``RUNS`` for a new record; names sort by time."""
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

    Args:
        script: the lab's file name.
        ranks: in total (one, with strategy="single").
        nodes: number of nodes to distribute them over (Slurm only).
        cluster: where to run (default: ``Cluster()``).
        record: path of the record (default: a new one in ``RUNS``).
        on_progress: called with (step, total) instead of showing a bar.
        timeout: seconds.
        quiet: do not print the command.
        script_options: options of the script, as in ``wrap="size", dropout=False``.

    Raises:
        RunFailed: the script failed; the message is the end of its output.
        UserError: an option is invalid.
    """
    record = Path(record or new_record(script))
    words, ranks = script_argv(script, ranks, record, script_options)
    device = script_options.get("device", "auto")
    command = build_command(words, ranks, nodes, device, cluster, tasks_of(script, nodes))
    if not quiet:
        print(_folded(["python" if word == sys.executable else word for word in command if word != "-u"]), flush=True)
    record.unlink(missing_ok=True)
    follow(command, on_progress, timeout, device)
    return records.load(record)


def _folded(command: list[str], width: int = 96) -> str:
    """Return a command as a user would type it, on several lines if it is long; an option stays with its value."""
    lines = ["$"]
    for part in re.split(r" (?=--)", shlex.join(command)):
        if len(lines[-1]) + len(part) > width:
            lines.append("   ")
        lines[-1] += f" {part}"
    return " \\\n".join(lines)


def build_command(
    words: list[str], ranks: int, nodes: int, device: str, cluster: Cluster | None, tasks: int | None = None
) -> list[str]:
    """Return the command that runs ``python words`` on all ranks.

    With Slurm it is an srun command with one task per rank, or ``tasks``; locally one process, which starts the ranks.

    Raises:
        UserError: several nodes were requested without Slurm.
    """
    cluster = cluster or Cluster()
    command = [sys.executable, "-u", *words]
    if cluster.uses_slurm():
        return [*cluster.srun(ranks, nodes, device, tasks), *command]
    if nodes > 1:
        raise UserError(f"{nodes} nodes need Slurm: use nodes=1 here, or bring up the practice cluster (make slurm)")
    return command


def follow(command: list[str], on_progress=None, timeout: float = 3600, device: str = "auto") -> str:
    """Run a command in source_code/, show its progress, and return its output.

    Args:
        command: as ``build_command`` returns it.
        on_progress: called with (step, total) instead of showing a bar.
        timeout: seconds. Under Slurm they count from the start of the first rank, without the time in the queue.
        device: "cpu" hides the GPUs.

    Raises:
        RunFailed: the command failed; the message is the end of its output.
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
            end = _end_of(printed) or f"exit code {process.returncode}"
            if why := records.why_full(RUNS):  # then the end of the output is lost
                end += f"\n{why}"
            if command[0] == "srun" and (what := slurm.hint(printed)):
                end += f"\n{what}"
            raise RunFailed(slurm.explained(command, printed) or end)
        return printed


def _end_of(printed: str) -> str:
    """Return the last lines of a failed run's output, without C++ frames.

    A rank that asks the store after rank 0 has failed makes PyTorch print some 50 frames below the reason.
    """
    lines = [line for line in printed.strip().splitlines() if not re.match(r"frame #\d+: ", line)]
    return "\n".join(lines[-OUTPUT_LINES:])


def _start(command, environ, output):
    """Start a command in source_code/, in its own session, so that it ends with this process."""
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
    """Make Linux end this (new) process with its parent, or ranks would survive the restart of a notebook."""
    PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _wait(process, report, timeout, command):
    """Wait for a process; on timeout or interruption end it and its ranks.

    Args:
        process: a ``Popen`` or a ``fork_server.Process``.
        report: shows the progress and returns whether the ranks run; the timeout counts from then on.
        timeout: seconds.
        command: for the error message.

    Raises:
        RunFailed: the timeout has expired.
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
    """Send a signal to a process and its ranks (its process group)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended; macOS raises the second
        os.killpg(process.pid, number)


class _Bar:
    """Show the progress of a run: to the caller's function, as a line in a notebook, or as a bar in a terminal.

    The line and the bar also show Slurm's reason for a pending job.
    """

    def __init__(self, on_progress):
        self.show = on_progress or (_NotebookLine() if _in_notebook() else _TerminalBar())

    def __enter__(self):
        return self

    def follow(self, mark: Path, queue: slurm.Queue | None) -> bool:
        """Update the display from ``progress``'s file ``mark`` or the queue, and return whether the ranks run."""
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
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


class _NotebookLine:
    """Show one line under the cell and update it; a saved notebook has its last state."""

    def __init__(self):
        self.begin, self.line, self.waiting = time.monotonic(), None, False

    def __call__(self, step, total):
        self.waiting = False
        self.show(f"step {step} of {total}, {time.monotonic() - self.begin:.0f} s")

    def wait(self, why):
        self.waiting = True
        self.show(f"{why}, {time.monotonic() - self.begin:.0f} s")

    def close(self):
        if self.waiting:  # no step followed: the saved page must not show a pending job
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
    """A queued run.

    Attributes:
        handle: submitit's job, with its logs and state.
        path: of the record.
        mark: of the file of ``progress``.
    """

    handle: object
    path: Path
    mark: Path

    def wait(self, on_progress=None) -> dict:
        """Wait for the end of the job, show its progress, and return its record.

        Raises:
            RunFailed: the job failed; the message is the end of its log.
        """
        queue = slurm.Queue(lambda: self.handle.job_id)
        with _Bar(on_progress) as bar:
            while not self.handle.done():
                bar.follow(self.mark, queue)
                time.sleep(0.5)
        try:
            self.handle.results()
        except Exception as error:  # submitit raises many types of exceptions; the reason is in the log
            log = _end_of(self.handle.stderr() or str(error))
            raise RunFailed(f"job {self.handle.job_id} failed:\n{log}") from None
        return records.load(self.path)


def submit(script: str, *, ranks: int, nodes: int = 1, cluster: Cluster | None = None, **script_options) -> Job:
    """Queue a lab script as a Slurm batch job, through submitit.

    With ``checkpoint=…, resume=True`` the job is requeued at its time limit or when it is preempted, and resumes from its
    checkpoint, until training is complete.

    Args:
        script, ranks, nodes, cluster, script_options: as for ``run``.

    Raises:
        RunFailed: sbatch failed.
        UserError: an option is invalid, or Slurm is not available.
    """
    import submitit  # only where there is Slurm

    from labkit.running import submitit_job

    cluster = replace(cluster or Cluster(), launcher="slurm")
    cluster.uses_slurm()
    resumes = script_options.get("resume", False)
    if resumes and not cluster.time:
        raise UserError("a job that resumes needs a time limit: set FSDP_LABS_TIME, in minutes")
    path = new_record(script)
    words, ranks = script_argv(script, ranks, path, script_options)
    request = cluster.request(ranks, nodes, script_options.get("device", "auto"), tasks_of(script, nodes))
    mark = path.with_suffix(".progress")
    # One folder per job: another cluster, or a reinstalled one, reuses job numbers.
    executor = submitit.SlurmExecutor(
        folder=records.ensure_writable_dir(path.with_suffix(".job")), max_num_timeout=submitit_job.MAX_REQUEUES
    )
    executor.update_parameters(
        job_name=Path(script).stem,
        setup=[f"export {progress.VARIABLE}={shlex.quote(str(mark))}", f"cd {shlex.quote(str(SOURCE))}"],
        srun_args=[END_TOGETHER],
        nodes=request.pop("nodes"),
        ntasks_per_node=request.pop("ntasks-per-node"),
        time=submitit_job.minutes(request.pop("time", None)),  # None overrides submitit's default, five minutes
        additional_parameters=request,
        wckey=None,
    )
    command = submitit_job.Command([sys.executable, "-u", *words], resumes)
    try:
        with slurm.without_job_variables():
            handle = executor.submit(command)
    except submitit.core.utils.FailedJobError as error:  # sbatch's error, for instance an option that only srun has
        raise RunFailed(str(error).strip()) from None
    print(
        f"$ sbatch {relative_to_source(Path(handle.paths.submission_file))}    # job {handle.job_id}: srun python {shlex.join(words)}"
    )
    return Job(handle, path, mark)
