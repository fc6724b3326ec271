"""A notebook's settings, and its labs and cells run with them.

  lab = Lab()                                     the settings; Lab(ranks=2, partition="gpu") changes some
  lab.run("mnist_fsdp.py", strategy="ddp")        a lab script to its end; returns its record
  lab.plan("mnist_fsdp.py", strategy="ddp")       what the planner says of that run
  lab.on_ranks(function)                          a function of the notebook, on every rank

Where a setting is not given, it comes from the environment, where an instructor can set it for a class:

  FSDP_LABS_RANKS, FSDP_LABS_DATASET, FSDP_LABS_DEVICE, and those of labkit/running/launch.py
"""

from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from planner import predict

from labkit import UserError
from labkit.running import cells, launch


@dataclass(frozen=True)
class Lab(launch.Cluster):
    """How the labs of a notebook run. device: "cpu", "cuda", or "auto" (GPUs where there are any)."""

    ranks: int = launch.from_environment("RANKS", "4")
    data: str = launch.from_environment("DATASET", "mnist-5k")
    device: str = launch.from_environment("DEVICE", "cpu")

    def __post_init__(self):
        try:
            object.__setattr__(self, "ranks", int(self.ranks))
        except ValueError:
            raise UserError(f"FSDP_LABS_RANKS is {self.ranks!r}: give a whole number") from None
        if self.ranks < 2:
            raise UserError(f"{self.ranks} ranks share nothing: the notebooks need at least 2")

    def __repr__(self):
        return "\n".join(f"{name:9}  {value}" for name, value in asdict(self).items() if value is not None)

    def run(self, script: str, **options) -> dict:
        """Run a lab script with these settings (``launch.run``); options given here come before them."""
        settings = {"cluster": self, "ranks": self.ranks, "device": self.device}
        if script == "mnist_fsdp.py":  # the other labs carry their data with them
            settings["data"] = self.data
        return launch.run(script, **settings | options)

    def plan(self, script: str, *, ranks: int | None = None, **options) -> predict.Plan:
        """What the planner says of the run that ``run`` starts with the same words."""
        ranks = ranks or (1 if options.get("strategy") == "single" else self.ranks)
        config = import_module(Path(script).stem).Config(**options)  # the defaults are the script's
        about = {"script": script, "config": asdict(config), "ranks": ranks, "device": self.device}
        if script == "mnist_fsdp.py":
            about["batch_size"] = config.batch_size_of(ranks)
        return predict.plan_of(about)

    def on_ranks(self, function, *arguments, ranks: int | None = None, nodes: int = 1) -> list:
        """[what ``function(me, *arguments)`` returned on rank 0, on rank 1, …] (``cells.on_ranks``)."""
        settings = {"ranks": ranks or self.ranks, "nodes": nodes, "device": self.device, "cluster": self}
        return cells.on_ranks(function, *arguments, **settings)
