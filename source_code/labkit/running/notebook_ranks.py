# SPDX-License-Identifier: BSD-3-Clause
"""Run a function of a notebook on several ranks, and return each rank's result.

  on_ranks(function, 3.0, ranks=4)      calls function(me, 3.0) on every rank; me: a ``ranks.Rank``

The ranks are new processes with a process group, started like those of a lab script: locally or by srun. The function is
pickled by value (cloudpickle), so a cell may define it, and it may refer to other objects of the notebook.
This file is also the program that those processes run.
"""

import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from labkit.measuring import records
from labkit.running import launch, ranks


@dataclasses.dataclass(frozen=True)
class Call:
    """The options that ``ranks.run`` reads. folder: of the pickled function and its results."""

    folder: str
    ranks: int
    device: str
    backend: str = "auto"
    quiet: bool = True
    spawn: bool = False


def on_ranks(
    function,
    *arguments,
    ranks: int,
    nodes: int = 1,
    device: str = "cpu",
    cluster=None,
    timeout: float = 120,
    spawn: bool = False,
) -> list:
    """Run ``function(me, *arguments)`` on every rank, and print what the ranks print.

    Args:
        function: called with a ``ranks.Rank`` and the arguments.
        ranks: the number of ranks.
        nodes: the number of nodes to distribute them over (Slurm only).
        device: "cpu" or "cuda".
        cluster: where to run (default: ``launch.Cluster()``).
        timeout: seconds, without the time in Slurm's queue.
        spawn: start each local rank as a new Python with its own hash seed, as torchrun does; seconds slower than a fork.

    Returns:
        [the result on rank 0, on rank 1, …], with tensors on the CPU.

    Raises:
        launch.RunFailed: a rank failed; the message is that of the first error.
    """
    import cloudpickle  # only a notebook needs it

    # On a shared file system, so that ranks on other nodes can read it
    with tempfile.TemporaryDirectory(dir=records.ensure_writable_dir(launch.RUNS), prefix=".call-") as folder:
        (Path(folder) / "function").write_bytes(cloudpickle.dumps((function, arguments)))
        words = ["-m", "labkit.running.notebook_ranks", folder, str(ranks), device, *(["spawn"] if spawn else [])]
        printed = launch.follow(launch.build_command(words, ranks, nodes, device, cluster), None, timeout, device)
        if printed:
            print(printed)
        return [torch.load(_result(folder, r), map_location="cpu", weights_only=False) for r in range(ranks)]


def _result(folder, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}"


def main(call, me):
    import cloudpickle

    dist.init_process_group(me.backend, device_id=me.device if me.device.type == "cuda" else None)
    ranks.deprioritize_gloo_threads()
    function, arguments = cloudpickle.loads((Path(call.folder) / "function").read_bytes())
    torch.save(function(me, *arguments), _result(call.folder, me.rank))
    dist.barrier()


if __name__ == "__main__":
    if spawn := "spawn" in sys.argv[4:]:
        os.environ["PYTHONHASHSEED"] = "random"  # in the ranks, even if it is set here
    ranks.run(main, Call(sys.argv[1], int(sys.argv[2]), sys.argv[3], spawn=spawn))
