# SPDX-License-Identifier: BSD-3-Clause
"""A step extended from three models with few blocks is, to the byte, that of all the blocks."""

import dataclasses
import os
import random

import gpt_fsdp
import pytest
from forked import forked
from labkit import UserError
from labkit.measuring import equal_blocks
from labkit.running import simulated_lab

MANY = 200  # blocks: enough that only few of them are simulated
SMALL = {"device": "cpu", "batch_size": 2, "seq_len": 32}
SETTINGS = {
    "strategy": ["fsdp2", "fsdp2", "fsdp1", "single"],
    "recompute": ["none", "full", "selective", "alternate"],
    "recompute_every": [1, 1, 2],
    "wrap": ["blocks", "blocks+embeddings"],
    "reshard_after_forward": ["true", "false", "2"],
    "tied": [True, False],
    "precision": ["fp32", "bf16"],
    "weights": ["fp32", "fp32", "bf16"],
    "accumulate": [1, 1, 2],
    "sync": ["every", "last"],
    "prefetch": [0, 0, 1, 2],
    "optimizer": list(simulated_lab.EXTENDED_OPTIMIZERS),
    "lora": [0, 0, 4],
    "loss_chunks": [1, 1, 2],
    "cpu_offload": [False, False, True],
    "offload_activations": [False, False, True],
    "decay_1d": [True, False],
    "mesh": [None, None, "2x2", "shard=2,tensor=2", "shard=2,context=2"],
}


def config(**options):
    return simulated_lab.with_blocks(gpt_fsdp.Config(**SMALL | options), MANY)


def drawn(count: int, seed: int) -> list[dict]:
    """Draw options that the lab accepts."""
    draw, accepted = random.Random(seed), []
    while len(accepted) < count:
        options = {name: draw.choice(values) for name, values in SETTINGS.items() if draw.random() < 0.5}
        try:
            one = config(**options)
            one.arranged(1 if one.strategy == "single" else 4)
        except UserError:
            continue
        if simulated_lab.few_blocks(gpt_fsdp, one)[0]:
            accepted.append(options)
    return accepted


def differences(all_options: list[dict], further: int = 3) -> list[tuple]:
    """The options with which an extended step is not the whole one, or not extended. In a process of its own."""
    from labkit.measuring.gpu_operators import GpuOperators

    different = []
    for options in all_options:
        one, ranks = config(**options), 1 if options.get("strategy") == "single" else 4
        counts, _ = simulated_lab.few_blocks(gpt_fsdp, one)
        gpu = GpuOperators() if options.get("precision") == "bf16" else None
        total = counts[2] + further * (counts[2] - counts[1])
        *few, whole = (
            simulated_lab.traced(gpt_fsdp, simulated_lab.with_blocks(one, count), ranks, gpu)
            for count in [*counts, total]
        )
        extended = equal_blocks.extended(few, further)
        if extended != whole:
            different.append((options, "refused" if extended is None else "different"))
    return different


def test_an_extended_step_of_fsdp1_is_the_whole_one():
    """Its foreach operators allocate and free one tensor per block: the two kinds of events grow by themselves."""
    assert forked(differences, [{"strategy": "fsdp1"}]) == []


@pytest.mark.long
def test_drawn_steps_are_extended_to_the_byte_or_not_at_all(seed):
    """One, and 24 with a new seed."""
    count = 24 if "FSDP_LABS_SEED" in os.environ else 1
    others = forked(differences, drawn(count, seed), timeout=900)
    assert [options for options, what in others if what == "different"] == []
    assert len(others) <= count / 3  # refused


def summaries():
    from labkit.measuring import simulate

    options = dataclasses.replace(simulated_lab.with_blocks(config(), 16), recompute="full")
    whole = simulate.summary(*simulated_lab.traced(gpt_fsdp, options, 4))
    simulated, trace = [], simulated_lab.traced

    def watched(lab, config, *rest):
        simulated.append(config.shape.num_hidden_layers)
        return trace(lab, config, *rest)

    simulated_lab.traced = watched
    return whole, simulated_lab.step(gpt_fsdp, options, 4), simulated


def test_a_lab_with_many_blocks_simulates_few():
    whole, extended, blocks = forked(summaries)
    assert extended == whole
    assert blocks == [4, 5, 6]


@pytest.mark.parametrize(
    "options",
    [{"strategy": "ddp"}, {"optimizer": "muon"}, {"clip": 1.0}, {"experts": 4}],
    ids=lambda options: " ".join(map(str, options)),
)
def test_what_does_not_repeat_itself_is_simulated_whole(options):
    assert simulated_lab.few_blocks(gpt_fsdp, config(**options)) == ([], 0)
    assert simulated_lab.few_blocks(gpt_fsdp, simulated_lab.with_blocks(config(), 15)) == ([], 0)


def trace(blocks, start=None, sizes=lambda block: 4):
    events = [("forward", "mm", "activations", sizes(block)) for block in range(blocks)]
    return start or {"parameters": blocks}, [("forward", "embedding", "activations", 1), *events], {}


def test_other_growth_is_refused():
    three = [trace(blocks) for blocks in (4, 5, 6)]
    assert equal_blocks.extended(three, 10) == trace(16)
    assert equal_blocks.extended([*three[:2], trace(6, {"parameters": 7})], 10) is None
    assert equal_blocks.extended([*three[:2], trace(7, {"parameters": 6})], 10) is None
    assert equal_blocks.extended([trace(blocks, sizes=lambda block: block) for blocks in (4, 5, 6)], 10) is None
    assert equal_blocks.extended([(*trace(blocks)[:2], {"all-reduce": blocks**2}) for blocks in (4, 5, 6)], 10) is None
