# SPDX-License-Identifier: BSD-3-Clause
"""Runs of chapter 19 with something replaced: the router's choice, how it is balanced, or how gradients are clipped."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from time import thread_time

import torch

from labkit.measuring.meters import Meter
from labkit.measuring.replaced import replaced
from labkit.running.progress import Progress
from labkit.training import experts, text

STEPS = 4  # the meters watch the second to fourth


def forced(me, gpt_fsdp, cases: list[tuple[float, float | None]], options: dict) -> list[dict]:
    """Train while experts are chosen at random, those of rank 0 more often. Collective.

    Each expert gets a random score in [0, 1) for each token, those of rank 0 a tilt more, and a token goes to the
    experts with the largest.

    Args:
        me: this rank.
        gpt_fsdp: the lab's module.
        cases: (tilt, capacity factor) of each run.
        options: of gpt_fsdp.py, with "experts" spread over all ranks.

    Returns:
        Of each case: what the meters see, "config", and "seconds", the CPU time of this rank's experts in forward.
    """
    generator, results = torch.Generator().manual_seed(me.rank), []
    for tilt, capacity in cases:
        results.append(_forced(me, gpt_fsdp, tilt, generator, options | {"capacity_factor": capacity}))
    return results


def _forced(me, gpt_fsdp, tilt: float, generator, options: dict) -> dict:
    router, compute = experts.Router.forward, experts.Experts.forward
    own, seconds, losses = options["experts"] // me.world_size, [], []

    def choose(self, x):
        liking = torch.rand(*x.shape[:2], options["experts"], generator=generator)
        liking[..., :own] += tilt
        return router(self, x)[0], liking.topk(self.top_k).indices

    def timed(self, rows, counts):
        begin = thread_time()
        outputs = compute(self, rows, counts)
        seconds.append(thread_time() - begin)
        return outputs

    config, data = gpt_fsdp.Config(**options), text.load(me.device).train
    with replaced(experts.Router, forward=choose), replaced(experts.Experts, forward=timed):
        model, optimizer, step = gpt_fsdp.prepare(config, me)
        meter = Meter(model, optimizer, me.device, progress=Progress(me, STEPS, 0))
        for inputs, targets in meter.watch(gpt_fsdp.training_batches(data, config, me, range(STEPS))):
            losses += step(inputs, targets)
        meter.finish()
    return meter.summary(config.batch_size) | {"config": asdict(config), "seconds": sum(seconds)}


def balanced(
    me, gpt_fsdp, coefficient: float, rate: float, options: dict, steps: int = 20
) -> dict[str, tuple[list, list]]:
    """Train with each way of balancing, on one rank.

    Args:
        me: this rank.
        gpt_fsdp: the lab's module.
        coefficient: of the auxiliary loss.
        rate: by which a step changes a bias.
        options: of gpt_fsdp.py, with "experts".
        steps: of each run.

    Returns:
        {way: (tokens of the fullest expert over the mean, averaged over blocks, of each step; losses)}.
    """
    results, data = {}, text.load(me.device).train
    with replaced(experts, AUXILIARY_COEFFICIENT=coefficient, BIAS_RATE=rate):
        for way in ("none", "loss", "bias"):
            config = gpt_fsdp.Config(balance=way, **options)
            model, _, step = gpt_fsdp.prepare(config, me)
            times, losses = [], []
            for inputs, targets in gpt_fsdp.training_batches(data, config, me, range(steps)):
                losses.append(sum(step(inputs, targets)).item())
                tokens = sum(model.routing).double()  # (blocks, experts)
                times.append((tokens.amax(1) / tokens.mean(1)).mean().item())
            results[way] = times, losses
    return results


def clipped(me, gpt_fsdp, ways: dict[str, Callable | None], options: dict, steps: int = 3) -> dict:
    """Train with gradients clipped in other ways. Collective.

    Args:
        me: this rank.
        gpt_fsdp: the lab's module.
        ways: {name: function of (model, maximal norm) that returns norms, in place of gpt_fsdp.py's; None: that one}.
        options: of gpt_fsdp.py, with "clip".
        steps: of each run.

    Returns:
        {name: (this rank's losses, the norms of each step), or the error's message}.
    """
    # A norm over two mesh dimensions is reduced along one after another; PyTorch 2.15 warns that one would be faster.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    results, right = {}, gpt_fsdp.clip
    config, data = gpt_fsdp.Config(**options), text.load(me.device).train
    for name, way in ways.items():
        losses, norms = [], []

        def clip(model, config, way=way, norms=norms):
            norms.append(way(model, config.clip) if way else float(right(model, config)))

        with replaced(gpt_fsdp, clip=clip):
            _, _, step = gpt_fsdp.prepare(config, me)
            try:
                for inputs, targets in gpt_fsdp.training_batches(data, config, me, range(steps)):
                    losses.append(sum(step(inputs, targets)).item())
                results[name] = losses, norms
            except RuntimeError as error:
                results[name] = str(error)
    return results
