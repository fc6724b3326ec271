# SPDX-License-Identifier: BSD-3-Clause
"""Kill a rank of a run that torchrun has started: fault injection for restarts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from labkit.running import launch


def kill_one_rank(words: list[str], ready: Callable, **variables: str) -> list[str]:
    """Run a Python command that starts ranks of a lab script, and kill its last rank as soon as ``ready()`` is true.

    Args:
        words: arguments of Python, with the name of the lab script among them.
        ready: called without arguments, again and again.
        variables: environment variables of the command.

    Returns:
        The lines that the command printed.

    Raises:
        RuntimeError: the command failed; the message is the end of what it printed.
    """
    import psutil

    script = next(word for word in words if word.endswith(".py"))
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": launch.SOURCE}
    agent = subprocess.Popen([sys.executable, *words], env=os.environ | variables, **options)
    while agent.poll() is None and not ready():
        time.sleep(0.01)
    children = psutil.Process(agent.pid).children() if agent.poll() is None else []
    if ranks := [child for child in children if script in child.cmdline()]:
        os.kill(ranks[-1].pid, signal.SIGKILL)
    printed, _ = agent.communicate(timeout=100)
    if agent.returncode:
        raise RuntimeError(printed[-3000:])
    return printed.splitlines()
