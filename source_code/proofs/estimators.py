# SPDX-License-Identifier: BSD-3-Clause
"""Ask other estimators about the course's GPT, each by its own code: notebook 11 puts them beside the plan.

  python -m proofs.estimators --preset tiny --ranks 4 --batch-size 8 --seq-len 128

Prints JSON: {name: bytes that a rank needs at its peak, or a sentence where it cannot be asked}.

  PyTorch      FSDPMemTracker: a step of fully_shard on tensors without memory, with the CPU's operators; what is alive
  DeepSpeed    estimate_zero3_model_states_mem_needs: parameters, gradients and Adam's state shared, and the largest layer
  Accelerate   what its estimate-memory command prints for training with Adam: the most of weights, gradients, optimizer
               state and step, of one process
"""

import contextlib
import importlib.util
import json
import os
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from labkit.measuring import simulate
from labkit.running import gpus, simulated_lab
from labkit.running.options import Options, option, parse
from labkit.training import models
from planner.models import networks
from planner.models.shapes import GPT_SHAPES


@dataclass(frozen=True)
class Config(Options):
    """The model and the run to estimate. The command line is made from these fields."""

    preset: Literal[tuple(GPT_SHAPES)] = option("tiny", "size of the model")
    ranks: int = option(4, "how many ranks share it", least=1, at_most=4096)
    batch_size: int = option(8, "sequences on each rank", least=1)
    seq_len: int = option(128, "tokens in a sequence", least=1)
    precision: Literal["fp32", "bf16"] = option("fp32", "number format of the computation")
    recompute: Literal[networks.RECOMPUTE] = option("none", "what backward computes again")
    tracker: bool = option(True, "ask PyTorch's, which walks through a step: minutes for billions of parameters")


def pytorch(config: Config) -> int:
    import gpt_fsdp

    about = {"batch_size": config.batch_size, "seq_len": config.seq_len, "precision": config.precision}
    about |= {"preset": config.preset, "recompute": config.recompute}
    return simulate.tracked_peak(simulated_lab.setup(gpt_fsdp, gpt_fsdp.Config(**about), config.ranks))


def deepspeed(config: Config) -> int:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    network = networks.gpt(GPT_SHAPES[config.preset], 1, 1)
    largest = max(prod(shape) for module in network.modules for shape in module.parameters.values())
    nodes = {"num_gpus_per_node": config.ranks, "num_nodes": 1}
    whole = {"cpu_offload": False, "cpu_offload_params": False, "zero_init": True}
    _, on_gpu, _ = estimate_zero3_model_states_mem_needs(network.numel, largest, **nodes, **whole)
    return on_gpu


def accelerate(config: Config) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        model = models.GPT(GPT_SHAPES[config.preset])
    size, _ = calculate_maximum_sizes(model)
    return max(estimate_training_usage(size, "float32").values())


ESTIMATORS = {
    "PyTorch's tracker": ("torch", pytorch),
    "DeepSpeed": ("deepspeed", deepspeed),
    "Accelerate": ("accelerate", accelerate),
}


def ask_all(config: Config) -> dict:
    """{name: bytes, or a sentence}"""
    estimates = {}
    for name, (package, ask) in ESTIMATORS.items():
        if ask is pytorch and not config.tracker:
            continue
        if importlib.util.find_spec(package) is None:
            estimates[name] = f"not installed: pip install {package}"
        else:
            with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):  # DeepSpeed greets
                estimates[name] = ask(config)
    return estimates


if __name__ == "__main__":
    options = parse(Config, __doc__)
    gpus.hide()
    print(json.dumps(ask_all(options)))
