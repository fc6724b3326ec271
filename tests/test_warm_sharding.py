# SPDX-License-Identifier: BSD-3-Clause
"""A filled cache of shardings: a lab's step finds in it what it needs, and nothing else of the filling is left."""

import os
import sys

import psutil
import pytest
import torch
from forked import forked
from labkit.running import warm_sharding

NEW_PYTHON = os.environ | {"PYTHONHASHSEED": "1"}  # not forked from the tests' fork server, which has filled its cache
EDITED = {
    "not Python": "def",
    "raises": "raise ValueError",
    "exits": "exit(1)",
    "no lab": "",
    "prints": "print('here')",
}


def computed_after(fill: tuple, *steps: tuple) -> list[int]:
    """How many operators' shardings each step computes after the fill: of (lab, ranks)."""
    import importlib

    from labkit.measuring import simulate
    from labkit.running.ranks import Rank
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    compute, calls = ShardingPropagator.propagate_op_sharding_non_cached, []

    def counted(self, schema):
        calls.append(schema)
        return compute(self, schema)

    warm_sharding.fill(*fill)
    ShardingPropagator.propagate_op_sharding_non_cached = counted
    numbers = []
    for name, ranks in steps:
        lab, rank = importlib.import_module(name), Rank(0, 0, ranks, "here", torch.device("cpu"), "fake")
        simulate.join(ranks)
        config = lab.Config(strategy="fsdp2")
        model = lab.fsdp2(lab.unsharded(config), config, rank)
        optimizer = lab.make_optimizer(model, config)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        numbers.append(len(calls))
        calls.clear()
    return numbers


def test_a_step_computes_what_has_not_been_filled_and_nothing_else():
    steps = ("gpt_fsdp", 2), ("gpt_fsdp", 4), ("mnist_fsdp", 2)
    filled, *others = forked(computed_after, ("gpt_fsdp", 2), *steps, env=NEW_PYTHON)
    assert filled == 0 and min(others) > 0


def left_by_a_fill(folder: str, lab: str) -> list[str]:
    """What is different in the process afterwards."""
    sys.path.insert(0, folder)

    def state():
        return {
            "the course's modules": {name for name in sys.modules if name.startswith(("labkit", "planner", lab))},
            "random numbers": torch.get_rng_state().tolist(),
            "the hook for tracebacks": sys.excepthook,
            "threads": psutil.Process().num_threads(),
            "a process group": torch.distributed.is_initialized(),
        }

    before = state()
    warm_sharding.fill(lab, 2)
    after = state()
    return [name for name in before if before[name] != after[name]]


@pytest.mark.parametrize("lab", ["gpt_fsdp", *EDITED])
def test_nothing_else_is_left(lab, tmp_path):
    """By a lab that somebody is editing, neither: its runs say what is wrong with it."""
    (tmp_path / "edited.py").write_text(EDITED.get(lab, ""))
    assert forked(left_by_a_fill, str(tmp_path), "edited" if lab in EDITED else lab) == []
