# SPDX-License-Identifier: BSD-3-Clause
"""A lab that comes back: in its first start something ends it after a few steps; then it goes on as always.

  python coming_back.py LAB MARK WHAT WORDS…

LAB: mnist_fsdp or gpt_fsdp. MARK: a file that rank 0 makes when it has come so far; MARK.pid has
its process. WHAT: "asked", it waits for a signal; "killed", its last rank kills itself; "fails", its last rank ends with
an exception; "always fails", so does it in every start, at the same step. WORDS: the lab's own.
"""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "source_code"
STEPS = 3  # before it waits
SECONDS = 600  # after which it goes on unasked


def first_life() -> bool:
    return {os.environ.get(name, "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")} == {"0"}


def interrupted(train_step, mark: Path, what: str):
    """train_step, that is interrupted in the first start, or in every."""
    import torch.distributed as dist
    from labkit.running import preemption

    steps = iter(range(10**9))

    def step(*given):
        if next(steps) == (STEPS if first_life() else 1) and (first_life() or what == "always fails"):
            last = dist.get_rank() == dist.get_world_size() - 1
            if what == "killed" and last:
                os.kill(os.getpid(), signal.SIGKILL)
            if what in ("fails", "always fails") and last:
                raise RuntimeError("as planned")
            if what == "asked" and dist.get_rank() == 0:
                mark.with_suffix(".pid").write_text(str(os.getpid()))
                mark.touch()
                deadline = time.monotonic() + SECONDS
                while not preemption._received and time.monotonic() < deadline:
                    time.sleep(0.01)
        return train_step(*given)

    return step


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE))
    name, mark, what = sys.argv[1:4]
    sys.argv = [f"{name}.py", *sys.argv[4:]]
    from labkit.running import options, ranks

    lab = importlib.import_module(name)
    lab.train_step = interrupted(lab.train_step, Path(mark), what)
    ranks.run(lab.main, options.parse(lab.Config, lab.__doc__))
