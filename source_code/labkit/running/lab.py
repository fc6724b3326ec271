# SPDX-License-Identifier: BSD-3-Clause
"""Run labs and functions of a notebook with one set of settings.

  lab = Lab()                                     the settings; Lab(ranks=2, partition="gpu") changes some
  lab.run("mnist_fsdp.py", strategy="ddp")        run a lab script; returns its record
  lab.plan("mnist_fsdp.py", strategy="ddp")       plan that run; import mnist_fsdp first, for its defaults
  lab.on_ranks(function)                          run a function of the notebook on every rank

The defaults come from environment variables, which an instructor can set for a class:

  FSDP_LABS_RANKS, FSDP_LABS_DATASET, FSDP_LABS_DEVICE, and those of labkit/running/launch.py

With the device "auto", a run computes on GPUs if there is one for each of its ranks, else on the CPU. With one GPU, runs
of a single rank use it, and runs of several ranks use the CPU. A notebook never fails for lack of GPUs.
"""

from dataclasses import InitVar, asdict, dataclass
from functools import cached_property
from importlib.metadata import version

from planner import predict

from labkit import UserError
from labkit.running import launch, notebook_ranks, site, slurm
from labkit.running.lab_options import LABS


@dataclass(frozen=True)
class Lab(launch.Cluster):
    """The settings of a notebook's runs.

    Attributes:
        at_least: the fewest ranks that the notebook runs on.
        ranks: number of ranks.
        data: data set of the MNIST lab.
        device: "cpu", "cuda", or "auto" (GPUs if there are enough).
    """

    at_least: InitVar[int] = 2
    ranks: int = launch.from_environment("RANKS", "4")
    data: str = launch.from_environment("DATASET", "mnist-5k")
    device: str = launch.from_environment("DEVICE", "cpu")

    def __post_init__(self, at_least):
        try:
            object.__setattr__(self, "ranks", int(self.ranks))
        except ValueError:
            raise UserError(f"FSDP_LABS_RANKS is {self.ranks!r}: give a whole number") from None
        if self.ranks < at_least:
            few = "1 rank shares nothing" if self.ranks == 1 else f"there are no {self.ranks} ranks"
            raise UserError(f"{few}: this notebook needs at least {at_least}")
        if self.device not in ("cpu", "cuda", "auto"):
            raise UserError(f"FSDP_LABS_DEVICE is {self.device!r}: use cpu, cuda or auto")

    def __repr__(self):
        lines = [f"{name:9}  {value}" for name, value in asdict(self).items() if value is not None]
        return "\n".join([*lines, *self._where_runs_compute()])

    @cached_property
    def gpus(self) -> int:
        """Number of GPUs per node for a run: of this machine, the current job, or the partition's largest node."""
        if self.device == "cpu":
            return 0
        if not self.uses_slurm():
            return site.gpus_here()
        if site.is_practice_cluster():
            return 0
        return slurm.gpus_of_the_job() if slurm.inside_a_job() else site.gpus_of_a_node(self.partition)

    def device_of(self, ranks: int | None = None, nodes: int = 1) -> str:
        """Return the device of a run with ``ranks`` ranks (default: the settings'): "cuda" or "cpu"."""
        if self.device != "auto":
            return self.device
        return "cuda" if (ranks or self.ranks) <= self.gpus * nodes else "cpu"

    def _where_runs_compute(self) -> list[str]:
        if self.device == "cpu" and site.gpus_here():
            return [f'{"":9}  this machine\'s GPUs stay unused; Lab(device="auto") computes on them']
        if self.device != "auto":
            return []
        if not self.gpus:
            return [f"{'':9}  there is no GPU here: all runs compute on the CPU"]
        few = "single ranks compute on the GPU" if self.gpus == 1 else f"up to {self.gpus} ranks compute on a GPU each"
        rest = "on GPUs, too" if self.ranks <= self.gpus else "on the CPU"
        return [f"{'':9}  {few}; this notebook's runs of {self.ranks} {rest}"]

    def run(self, script: str, **options) -> dict:
        """Run a lab script with these settings and return its record (``launch.run``).

        Args:
            script: the lab's file name.
            options: options of the script, and of ``launch.run``; they override the settings.
        """
        ranks = 1 if options.get("strategy") == "single" else options.get("devices") or options.get("ranks", self.ranks)
        settings = {"cluster": self, "ranks": ranks, "device": self.device_of(ranks, options.get("nodes", 1))}
        if script in LABS and LABS[script].takes_dataset:  # the other labs carry their data with them
            settings["data"] = self.data
        if script in launch.ONE_PROCESS and settings["device"] == "cuda" and self.device == "auto":
            settings["device"] = "auto"  # PyTorch sees the GPUs; the lab itself finds out whether JAX does
        return launch.run(script, **settings | options)

    def plan(self, script: str, *, ranks: int | None = None, nodes: int = 1, **options) -> predict.Plan:
        """Plan the run that ``run`` starts with the same options.

        Raises:
            UserError: the planner does not know the lab.
        """
        predict.check_planned(script)
        ranks = ranks or (1 if options.get("strategy") == "single" else self.ranks)
        config = LABS[script](**options)
        planned = {"script": script, "config": asdict(config), "ranks": ranks, "device": self.device_of(ranks, nodes)}
        return predict.plan_of(planned | {"versions": {"torch": version("torch")}})

    def on_ranks(self, function, *arguments, ranks: int | None = None, nodes: int = 1, **settings) -> list:
        """Run ``function(me, *arguments)`` on every rank, and return each rank's result (``notebook_ranks.on_ranks``).

        Args:
            function: called with a ``ranks.Rank`` and the arguments.
            ranks: number of ranks (default: the settings').
            nodes: number of nodes (Slurm only).
            settings: further arguments of ``notebook_ranks.on_ranks``.
        """
        ranks = ranks or self.ranks
        defaults = {"ranks": ranks, "nodes": nodes, "device": self.device_of(ranks, nodes), "cluster": self}
        return notebook_ranks.on_ranks(function, *arguments, **defaults | settings)
