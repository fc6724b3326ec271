# SPDX-License-Identifier: BSD-3-Clause
"""Launch what a notebook launches once for all tests: a launch that is the same has the files and output of the first.

A notebook is run whole, and then with one cell broken, again and again: all but what the break changes is computed from
the same code, options, functions, and variables. Two launches of one execution are never the same, even of one command.
What is named by a path (checkpoints, profiles), fails, or runs on Slurm, is always launched.
"""

import functools
import hashlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

VARIABLE = "FSDP_LABS_ONCE"  # the folder of what has been launched; conftest.py sets it
SOURCE = Path(__file__).resolve().parents[1] / "source_code"
PATH = re.compile(rb"PosixPath|(?<![\w.<])/[\w.-]+/")  # in a pickled function
OTHERWISE = (VARIABLE, "FSDP_LABS_WARM", "FSDP_LABS_DOUBTS")  # variables that do not change what is computed


def install(shell=None):
    """Launch through the folder from now on, in this process. shell: a kernel's, whose cells are then named by ``file_of``."""
    from labkit.running import launch

    if shell:
        shell.compile.get_code_name = lambda raw, code, number: file_of(code)
    if VARIABLE in os.environ:
        launch.follow = functools.partial(_once, launch.follow, Counter())


def file_of(cell: str) -> str:
    """Return the file name of a cell's code, which goes with its functions: the same wherever the cell is executed."""
    return f"<cell {hashlib.sha256(cell.strip().encode()).hexdigest()[:16]}>"


def _once(follow, launched: Counter, command: list[str], *about, **more) -> str:
    """Do what ``launch.follow`` does, or put down the files of the same launch, and return its output."""
    results = _results(command)
    what = _what(command, results) if results is not None else None
    if what is None:
        return follow(command, *about, **more)
    launched[what] += 1
    kept = Path(os.environ[VARIABLE], hashlib.sha256(f"{what} {launched[what]}".encode()).hexdigest())
    if not kept.exists():
        printed = follow(command, *about, **more)
        _keep(kept, results, printed)
        return printed
    for number, result in enumerate(results):
        shutil.copyfile(kept / str(number), result)
    return (kept / "printed").read_text()


def _keep(kept: Path, results: list[Path], printed: str):
    """Write a folder whole, or not at all: others look for it at the same time."""
    folder = kept.with_name(f"{kept.name}.{os.getpid()}")
    folder.mkdir(parents=True)
    for number, result in enumerate(results):
        shutil.copyfile(result, folder / str(number))
    (folder / "printed").write_text(printed)
    try:
        folder.rename(kept)
    except OSError:  # there by now
        shutil.rmtree(folder)


def _results(command: list[str]) -> list[Path] | None:
    """Return the files in which a launch returns what it has computed; None: it may have others."""
    if command[:2] != [sys.executable, "-u"]:
        return None
    if command[2:4] == ["-m", "labkit.running.notebook_ranks"]:
        return [Path(command[4], f"rank-{rank}") for rank in range(int(command[5]))]
    paths = [word for word in command[3:] if "/" in word]
    at = command.index("--record") + 1 if "--record" in command else None
    return [SOURCE / command[at]] if at and paths in ([], [command[at]]) else None


def _what(command: list[str], results: list[Path]) -> str | None:
    """Return what a launch computes from, as a text; None: a function that is given a path."""
    words = [word for word in command[2:] if SOURCE / word not in (results[0], results[0].parent)]
    function = results[0].with_name("function") if command[2] == "-m" else None
    pickled = function.read_bytes() if function else b""
    if PATH.search(pickled):
        return None
    read = {name: value for name, value in os.environ.items() if _matters(name)}
    return json.dumps([words, hashlib.sha256(pickled).hexdigest(), read, _code()], sort_keys=True)


def _matters(name: str) -> bool:
    from labkit.running import fork_server

    return name.startswith(("FSDP_LABS_", *fork_server.READ_AT_IMPORT)) and name not in OTHERWISE


@functools.cache
def _code() -> str:
    """Return a text that changes with any file of source_code/."""
    files = sorted(path for path in SOURCE.rglob("*.py"))
    return hashlib.sha256(str([(str(path), path.stat().st_mtime_ns) for path in files]).encode()).hexdigest()
