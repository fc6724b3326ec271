# SPDX-License-Identifier: BSD-3-Clause
"""A lab whose first checkpoint takes as long as it is told: what comes meanwhile can be tried.

  python slow_save.py WRITES GOES_ON LAB WORDS…

WRITES: a file that rank 0 makes when the checkpoint's files are written, before the checkpoint has its name. GOES_ON: a
file that it then waits for. LAB: mnist_fsdp or gpt_fsdp. WORDS: the lab's own.
"""

import importlib
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "source_code"
SECONDS = 120  # after which it goes on unasked


def waits(commit, writes: Path, goes_on: Path):
    def slowly(folder, partial):
        writes.touch()
        deadline = time.monotonic() + SECONDS
        while not goes_on.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        commit(folder, partial)

    return slowly


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE))
    writes, goes_on, name = sys.argv[1:4]
    sys.argv = [sys.argv[0], *sys.argv[4:]]
    from labkit.running import options, ranks
    from labkit.training.checkpoint_folder import CheckpointFolder

    CheckpointFolder.commit = waits(CheckpointFolder.commit, Path(writes), Path(goes_on))
    lab = importlib.import_module(name)
    ranks.run(lab.main, options.parse(lab.Config, lab.__doc__))
