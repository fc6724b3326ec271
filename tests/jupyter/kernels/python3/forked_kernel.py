# SPDX-License-Identifier: BSD-3-Clause
"""Start a notebook's kernel in a fork of the tests' fork server, which has already imported PyTorch and Matplotlib.

The kernel.json next to this file makes Jupyter start this program instead of a kernel. Both end together.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "source_code"))

from labkit.running import fork_server

kernel = [sys.executable, "-u", "-m", "ipykernel_launcher", *sys.argv[1:]]
process = fork_server.start(kernel, os.getcwd(), os.environ, sys.stdout, sys.stderr)
signal.signal(
    signal.SIGINT, lambda *_: os.kill(process.pid, signal.SIGINT)
)  # nbval interrupts a cell that takes too long
sys.exit(process.wait())
