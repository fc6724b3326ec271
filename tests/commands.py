# SPDX-License-Identifier: BSD-3-Clause
"""Run commands in tests: always with a time-out, never leaving a process behind."""

import contextlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from labkit import UserError
from labkit.running import fork_server, launch

PARSED = re.compile(r"\bparse\(([\w.]+), __doc__\)")


def call(*command, env=None, cwd=None, timeout=60) -> subprocess.CompletedProcess:
    """Run a command and return it with its output. It is ended, with all it started, when the time is up."""
    process = subprocess.Popen(
        [str(word) for word in command],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 15)  # torchrun's ranks have groups of their own: it ends them, if it can
        try:
            out, err = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, err = process.communicate(timeout=60)
        pytest.fail(f"not finished after {timeout} s: {command}\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def script(*words, env=os.environ, timeout=60) -> subprocess.CompletedProcess:
    """Run ``python words`` in source_code/ and return it with its output, for what it says and does.

    Forked from the tests' fork server, where there can be one: what is tested is not how it starts. It is ended when
    the time is up.
    """
    command = [sys.executable, "-u", *map(str, words)]
    if not fork_server.possible():
        return call(*command, env=env, cwd=launch.SOURCE, timeout=timeout)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = fork_server.start(command, launch.SOURCE, env, out, err)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(timeout)
            timed_out = True
        else:
            timed_out = False
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())
    if timed_out:
        pytest.fail(f"not finished after {timeout} s: {command}\n{done.stdout}\n{done.stderr}")
    return done


@contextlib.contextmanager
def refused(*words: str):
    """Expect a UserError: one sentence that is about all of these words. Yields what ``pytest.raises`` does."""
    with pytest.raises(UserError) as caught:
        yield caught
    assert len(str(caught.value).splitlines()) == 1, caught.value
    assert_about(str(caught.value), *words)


def assert_about(sentence: str, *words: str):
    """Words: options, values, names, files. How a sentence is put is not a test's business; see messages.txt."""
    for word in words:
        assert re.search(rf"(?<![\w-]){re.escape(str(word))}", sentence), (word, sentence)


def options_class(command: str) -> type:
    """Return the class of a command's options: what its file hands to ``options.parse``."""
    module = importlib.import_module(command.removesuffix(".py").replace("/", "."))
    return eval(PARSED.search((launch.SOURCE / command).read_text())[1], vars(module))


def commands() -> list[str]:
    """Return the files, seen from source_code/, of all commands that parse their options by ``labkit.running.options``."""
    files = [*launch.SOURCE.glob("*.py"), *launch.SOURCE.glob("proofs/*.py")]
    return sorted(str(path.relative_to(launch.SOURCE)) for path in files if PARSED.search(path.read_text()))


def command(path: Path, does: str):
    """Write a shell script that does what a test wants of a command, such as one of Slurm's."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)


def ways(names) -> list:
    """Parameters for tests of ways to start; those with srun in their name need a Slurm."""
    return [pytest.param(name, marks=pytest.mark.slurm) if "srun" in name else name for name in names]


def run_job(*command, env, cwd: Path, logs: Path | None = None) -> tuple[list[str], str]:
    """Submit a batch job, wait for its end, return (states, output). `sbatch --wait` looks only every half minute."""
    logs = logs or cwd
    submitted = call("sbatch", "--parsable", f"--output={logs}/%x-%j.out", *command, env=env, cwd=cwd)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    deadline = time.monotonic() + 120
    while call("squeue", "-h", "-j", job, env=env).stdout:
        if time.monotonic() > deadline:
            call("scancel", job, env=env)
            pytest.fail(f"job {job} was not over after 120 s")
        time.sleep(0.1)
    accounts = call("sacct", "-o", "JobID,State,NodeList", "--parsable2", "-j", job, env=env).stdout.splitlines()
    assert accounts[0] == "JobID|State|NodeList"
    (output,) = logs.glob(f"*-{job}.out")
    return [line.split("|")[1] for line in accounts[1:]], output.read_text()
