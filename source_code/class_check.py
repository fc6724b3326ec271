# SPDX-License-Identifier: BSD-3-Clause
"""Check a cluster before a class: what a learner would stumble over, and what to do about it.

  make class-check                          on a login node, with the class's FSDP_LABS_… settings
  python class_check.py --nodes 1           without a rendezvous between nodes
  python class_check.py --notebook none     without a notebook, which takes a minute or two

It writes only into a folder of its own in the folder of runs. Each line is a check: "ok", "NO" with what to do, or "--" where an
earlier failure leaves nothing to check. It exits with code 1 if a check failed.
"""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from labkit import UserError
from labkit.measuring import records
from labkit.running import launch, site, slurm
from labkit.running.lab import Lab
from labkit.running.options import Options, exit_with_error, option, parse

COURSE = launch.SOURCE.parent
SECONDS = 180  # for a step on all nodes, once it runs: importing torch from a cold file system takes minutes
MEETING_SECONDS = 45  # for ranks to meet, after that


@dataclass(frozen=True)
class Config(Options):
    nodes: int = option(2, "number of nodes of a class's largest run", least=1)
    notebook: str = option("00_start_here.ipynb", "notebook to run under nbval, in notebooks/; none: leave it out")
    token: str | None = option(
        None, "what the command itself runs on each node: report what it sees, this file among it"
    )


class Site:
    """Hold what the checks share. Each check returns what it has seen, in a few words.

    Attributes:
        config: the options.
        lab: the settings of the class's notebooks.
        folder: the check's own folder, in that of the runs; None until it is made.
    """

    def __init__(self, config: Config):
        self.config, self.lab, self.folder = config, Lab(), None

    def environment(self) -> str:
        """Check for variables that change what Python imports, or what a lab takes for its job."""
        for name in ("torch", "numpy"):
            origin = _origin(name)
            if origin and not Path(origin).is_relative_to(sysconfig.get_path("purelib")):
                raise UserError(
                    f"{name} is imported from {origin}, not from this installation: unset PYTHONPATH, "
                    "deactivate conda, and leave nothing in ~/.local"
                )
        job = os.environ.get("SLURM_JOB_ID")
        if job and self.lab.launcher != "local" and not _output("squeue", "-h", "-j", job):
            raise UserError(
                f"SLURM_JOB_ID is {job}, a job that has ended: unset ${{!SLURM_*}} (tmux and hubs keep them)"
            )
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != "1":
            raise UserError(
                f"this shell is one of {tasks} tasks of a step, and a lab would wait for the others: start the shell "
                "with srun -n 1, or on the login node"
            )
        threads, cores = os.environ.get("OMP_NUM_THREADS", ""), os.cpu_count()
        if threads.isdigit() and int(threads) > cores:
            raise UserError(f"OMP_NUM_THREADS is {threads} on {cores} cores, which slows every lab: unset it")
        return "nothing in the environment changes what is imported"

    def installation(self) -> str:
        """Check that other users may read the course and start its Python."""
        python = Path(sys.executable)
        needed = [python, python.resolve(), Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
        needed += [COURSE / name for name in ("Makefile", "source_code/labkit/__init__.py", "images", "notebooks")]
        needed += sorted((COURSE / "notebooks").glob("*.ipynb"))
        for path in needed:
            if closed := _closed_to_others(path):
                what = "is in a private folder" if closed != path else "is not readable for others"
                raise UserError(
                    f"{path} {what}: install with umask 022, from a Python outside of homes, or chmod o+rX {closed}"
                )
        return f"others may read the course and start {python.resolve()}"

    def runs(self) -> str:
        """Check that the folder of runs takes a megabyte."""
        parent = records.ensure_writable_dir(records.RUNS)
        self.folder = Path(tempfile.mkdtemp(prefix=".class-check-", dir=parent))
        try:
            with (self.folder / "token").open("wb") as file:
                file.write(bytes(2**20))
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{parent} takes no megabyte ({error.strerror}): make room, or set FSDP_LABS_RUNS to another folder"
            ) from None
        left = len(list(parent.glob(".progress-*")))
        more = f"; {left} folders .progress-… in it are of runs, or of kernels that were killed" if left else ""
        return f"{parent} takes what is written{more}"

    def partition(self) -> str:
        """Check that the class's partition exists, and has the nodes."""
        if not self.lab.uses_slurm():
            return "no Slurm here: the labs run on this machine"
        names = [line.split(",")[0].removeprefix("partition ") for line in site.partitions()]
        wanted = self.lab.partition.split(",") if self.lab.partition else []
        if missing := [name for name in wanted if name not in names]:
            raise UserError(f"there is no partition {missing[0]} here, but {', '.join(names)}: set FSDP_LABS_PARTITION")
        there = slurm.nodes(self.lab.partition)
        if there < self.nodes:
            raise UserError(f"{there} of {self.nodes} nodes respond: take fewer with --nodes, or wake the others")
        gpus = f", {self.lab.gpus} GPUs on a node" if self.lab.device != "cpu" else ""
        return f"{self.lab.partition or 'the default one'}, {there} nodes{gpus}"

    @property
    def nodes(self) -> int:
        """Number of nodes that the checks use: one without Slurm."""
        return self.config.nodes if self.lab.uses_slurm() else 1

    def a_step(self) -> str:
        """Check that each node sees the folder of runs and the data, and how long a step takes to start."""
        begin = time.monotonic()
        words = ["class_check.py", "--token", str(self.folder / "token")]
        output = launch.follow(
            launch.build_command(words, self.nodes, self.nodes, "cpu", self.lab), timeout=SECONDS, on_progress=_silent
        )
        seconds = time.monotonic() - begin
        found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if len(found) != self.nodes:
            raise UserError(f"{len(found)} of {self.nodes} nodes answered: {output[-300:]}")
        if blind := [each["node"] for each in found if not each["token"]]:
            raise UserError(
                f"{blind[0]} does not see {records.RUNS}: set FSDP_LABS_RUNS to a folder on a file system of all nodes"
            )
        if without := [each for each in found if each["data"]]:
            raise UserError(f"{without[0]['node']} has no data: {without[0]['data']}")
        importing = max(each["seconds"] for each in found)
        return f"{self.nodes} nodes see runs and data; {seconds:.0f} s to start, of which Python's imports are {importing:.0f}"

    def rendezvous(self) -> str:
        """Check that a rank on each node meets the others: hello.py."""
        device = self.lab.device_of(self.ranks, self.nodes)
        words = ["hello.py", "--device", device, "--ranks", str(self.ranks)]
        command = launch.build_command(words, self.ranks, self.nodes, device, self.lab)
        begin = time.monotonic()
        try:
            launch.follow(command, timeout=MEETING_SECONDS, on_progress=_silent)
        except UserError as error:
            reasons = [line for line in str(error).splitlines() if line.strip()] or ["no reason given"]
            why = next((line for line in reasons if "was not found" in line or "is in use" in line), reasons[-1])
            raise UserError(
                f"{self.ranks} ranks on {self.nodes} nodes did not meet ({why.strip()}): nodes must reach each other on ports "
                "12000 to 29999; set MASTER_ADDR to a name they all resolve, or GLOO_SOCKET_IFNAME to the right network"
            ) from None
        return f"{self.ranks} ranks on {self.nodes} nodes met after {time.monotonic() - begin:.0f} s"

    @property
    def ranks(self) -> int:
        """Number of ranks of the rendezvous: two, or one on each node."""
        return max(2, self.nodes)

    def notebook(self) -> str:
        """Check that a notebook runs, and that its verdicts stand."""
        name = self.config.notebook
        if name == "none":
            return "left out"
        path = COURSE / "notebooks" / name
        if not path.exists():
            raise UserError(f"there is no {path}: name one of notebooks/")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax", str(path)]
        begin = time.monotonic()
        done = subprocess.run(command, cwd=COURSE, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise UserError(f"{name} fails under nbval: see {' '.join(['pytest', '--nbval-lax', f'notebooks/{name}'])}")
        return f"{name} runs, and its verdicts stand, in {time.monotonic() - begin:.0f} s"


# In this order, {name: (check, what must have passed before)}
CHECKS = {
    "environment": (Site.environment, ()),
    "installation": (Site.installation, ()),
    "folder of runs": (Site.runs, ()),
    "partition": (Site.partition, ("environment",)),
    "a step": (Site.a_step, ("partition", "folder of runs")),
    "rendezvous": (Site.rendezvous, ("partition",)),
    "notebook": (Site.notebook, ("a step", "rendezvous")),
}


def seen_by_node(token: str) -> dict:
    """Return what a node sees: whether a file of another node is there, and why its data cannot be read, if so."""
    begin = time.monotonic()
    from labkit.training import datasets  # imports torch, which takes what a lab's start takes

    found = {"node": socket.gethostname(), "token": os.path.exists(token), "data": None}
    try:
        wanted = Lab().data
        datasets.load("mnist-5k" if wanted == "mnist-5k" else "mnist", datasets.root())
    except UserError as error:
        found["data"] = str(error)
    return found | {"seconds": time.monotonic() - begin}


def _silent(step: int, total: int):
    """Show no progress."""


def _origin(name: str) -> str | None:
    """Return the file from which a package would be imported by a new Python with this environment."""
    code = f"import importlib.util as u; s = u.find_spec({name!r}); print(s.origin if s else '')"
    return _output(sys.executable, "-c", code) or None


def _output(*words: str) -> str:
    """Return the output of a command, without spaces at its ends; "" if it fails."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.strip()
    return ""


def _closed_to_others(path: Path) -> Path | None:
    """Return the file or folder on the way to a path, or the path itself, that other users may not read or enter."""
    for part in [*reversed(path.absolute().parents), path]:
        mode = part.stat().st_mode
        needed = stat.S_IXOTH if part != path else stat.S_IROTH
        if part == path and stat.S_ISDIR(mode):
            needed |= stat.S_IXOTH
        if mode & needed != needed:
            return part
    return None


def check(config: Config) -> bool:
    """Run all checks, print a line for each, and return whether all passed."""
    here, passed = Site(config), {}
    try:
        for name, (function, before) in CHECKS.items():
            if not all(passed.get(each) for each in before):
                passed[name] = None
                print(f"--  {name:15} not tried, after what failed", flush=True)
                continue
            try:
                said, passed[name] = function(here), True
            except UserError as error:
                said, passed[name] = str(error), False
            print(f"{'ok' if passed[name] else 'NO'}  {name:15} {said}", flush=True)
    finally:
        if here.folder:
            for file in here.folder.iterdir():
                file.unlink()
            here.folder.rmdir()
    return all(passed.values())


def main():
    try:
        config = parse(Config, __doc__)
        if config.token:
            print(json.dumps(seen_by_node(config.token)))
            return
        passed = check(config)
    except UserError as error:  # a setting that no check can be made with
        exit_with_error(str(error))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
