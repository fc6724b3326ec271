"""Simulate a step of gpt_fsdp.py, mnist_fsdp.py or hf_fsdp.py, on one rank of a world that is not there.

Used by plan.py --simulate; labkit/measuring/simulate.py does the work, on tensors without memory.
"""

import gpt_fsdp
import mnist_fsdp
import torch
from labkit import UserError
from labkit.measuring import simulate
from labkit.measuring.gpu_operators import GpuOperators
from labkit.running.ranks import Rank
from labkit.training import models
from planner.models.shapes import GPTShape


def gpt(ranks: int, shape: GPTShape | None = None, gpu: GpuOperators | None = None, workspaces=True, **options) -> dict:
    """A step with the options of gpt_fsdp.py, on rank 0 of ``ranks``: what ``simulate.step`` returns.

    shape: another than the preset's. gpu, workspaces: see ``simulate.step``.
    """
    return simulate.step(setup_gpt(ranks, shape, **options), gpu, workspaces)


def setup_gpt(ranks: int, shape: GPTShape | None = None, **options):
    """What ``simulate.step`` calls for it; this process is rank 0 of ``ranks`` from here on."""
    config = gpt_fsdp.Config(**options)
    me = join(config, ranks)

    def setup():
        model = with_default(config.dtype, lambda: models.GPT(shape or config.shape))
        if config.lora:
            with_default(config.dtype, lambda: models.add_lora(model, config.lora))
        for number, block in enumerate(model.blocks):
            gpt_fsdp.change_forward(block, config, number)
        with simulate.ranks_are_real():
            if config.strategy == "fsdp1":
                model = gpt_fsdp.fsdp1(model, config, me)
            elif config.strategy == "fsdp2":
                gpt_fsdp.fsdp2(model, config, me)
        optimizer = gpt_fsdp.make_optimizer(model, config)
        tokens = torch.zeros(config.accumulate, config.batch_size, config.seq_len, dtype=torch.long)
        kept = []  # the last steps' losses, as in the lab's loop

        def train(inputs, targets):
            kept.extend(gpt_fsdp.train_step(model, optimizer, inputs, targets, config))

        return model, optimizer, (tokens, torch.zeros_like(tokens)), train

    return setup


def mnist(ranks: int, gpu: GpuOperators | None = None, workspaces=True, **options) -> dict:
    """The same with the options of mnist_fsdp.py."""
    config = mnist_fsdp.Config(**options)
    me = join(config, ranks)

    def setup():
        model = with_default(config.dtype, lambda: models.Net(config.dropout))
        if config.strategy != "single":
            with simulate.ranks_are_real():
                model = mnist_fsdp.parallelize(model, config, me)
        optimizer = torch.optim.Adadelta(model.parameters(), lr=config.lr)
        size = config.batch_size_of(ranks)
        images, labels = torch.zeros(size, 1, 28, 28, dtype=config.dtype), torch.zeros(size, dtype=torch.long)
        kept = []

        def train(images, labels):
            kept.append(mnist_fsdp.train_step(model, optimizer, images, labels, config))

        return model, optimizer, (images, labels), train

    return simulate.step(setup, gpu, workspaces)


def join(config, ranks: int) -> Rank:
    """This process becomes rank 0 of a world of ``ranks``."""
    if config.strategy == "ddp":
        raise UserError("DDP cannot be simulated: it looks inside the tensors; choose fsdp1 or fsdp2")
    simulate.join(ranks)
    return Rank(0, 0, ranks, "imagined", torch.device("cpu"), "fake")


def with_default(dtype: torch.dtype, make):
    """``make()`` with new parameters in that number format: on tensors without memory ``module.to`` does not work."""
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def hf(ranks: int, **options) -> dict:
    """The same with the options of hf_fsdp.py, and the CPU's kernels: the masks it gives to attention are not a GPU's here."""
    import hf_fsdp  # and with it transformers, which takes seconds
    from labkit.training import hf_models

    config = hf_fsdp.Config(**options)
    architecture = hf_models.configuration(config.model or config.config, "--config")
    me = join(config, ranks)

    def setup():
        model = hf_models.without_values(architecture, config.dtype, config.lora)
        with simulate.ranks_are_real():
            model = hf_fsdp.parallelize(model, config, me)
        optimizer = hf_fsdp.make_optimizer(model, config)
        tokens = torch.zeros(config.accumulate, config.batch_size, config.seq_len, dtype=torch.long)
        kept = []

        def train(inputs, targets):
            kept.extend(hf_fsdp.train_step(model, optimizer, inputs, targets, config))

        return model, optimizer, (tokens, torch.zeros_like(tokens)), train

    with hf_models.as_if_run():
        return simulate.step(setup)
