"""Run a function of a notebook on several ranks, and return each rank's result.

  on_ranks(function, 3.0, ranks=4)      calls function(me, 3.0) on every rank; me: a ``ranks.Rank``

The ranks are new processes with a process group, started like those of a lab script: here, or by srun. The
function travels by value (cloudpickle), so it may be one that a cell has defined, with whatever it refers to.
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
    """The options that ``ranks.run`` reads. folder: where the function is, and where its results go."""

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
        nodes: the number of nodes that they are spread over (Slurm only).
        device: "cpu" or "cuda".
        cluster: how to launch (default: ``launch.Cluster()``).
        timeout: seconds, without those in Slurm's queue.
        spawn: start each rank here as a new Python with its own hash seed, as torchrun does; seconds slower than a fork.

    Returns:
        [the result on rank 0, on rank 1, …], with tensors on the CPU.

    Raises:
        launch.RunFailed: with the first error's text.
    """
    import cloudpickle  # only a notebook needs it

    # On a shared file system, so that the ranks of another node find it too
    with tempfile.TemporaryDirectory(dir=records.ensure_writable_dir(launch.RUNS), prefix=".call-") as folder:
        (Path(folder) / "function").write_bytes(cloudpickle.dumps((function, arguments)))
        words = ["-m", "labkit.running.notebook_ranks", folder, str(ranks), device, *(["spawn"] if spawn else [])]
        printed = launch.follow(launch.started(words, ranks, nodes, device, cluster), None, timeout, device)
        if printed:
            print(printed)
        return [torch.load(_result(folder, r), map_location="cpu", weights_only=False) for r in range(ranks)]


def _result(folder, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}"


def main(call, me):
    import cloudpickle

    dist.init_process_group(me.backend, device_id=me.device if me.device.type == "cuda" else None)
    function, arguments = cloudpickle.loads((Path(call.folder) / "function").read_bytes())
    torch.save(function(me, *arguments), _result(call.folder, me.rank))
    dist.barrier()


if __name__ == "__main__":
    if spawn := "spawn" in sys.argv[4:]:
        os.environ["PYTHONHASHSEED"] = "random"  # in the ranks, also where somebody has set one
    ranks.run(main, Call(sys.argv[1], int(sys.argv[2]), sys.argv[3], spawn=spawn))
