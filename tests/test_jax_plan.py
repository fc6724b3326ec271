# SPDX-License-Identifier: BSD-3-Clause
"""FSDP in JAX as the planner has it (planner/parallel/jax_sharding.py), without running it."""

from math import prod

import pytest
from commands import refused
from planner.models import networks
from planner.models.shapes import GPT_SHAPES
from planner.parallel import jax_sharding
from planner.parallel.jax_sharding import bytes_by_kind, leaves, persistent, traffic

TINY = GPT_SHAPES["tiny"]
WHOLE = 4 * networks.gpt(TINY, 1, 8).numel  # bytes of the model
NORMS = 4 * 128 * (2 * TINY.num_hidden_layers + 1)  # what is left whole by a threshold of 1,000
BLOCKS = 4 * sum(prod(dims) for name, dims in leaves(TINY).items() if len(dims) == 3)


@pytest.mark.parametrize("preset", GPT_SHAPES)
def test_the_leaves_are_the_parameters(preset):
    shape = GPT_SHAPES[preset]
    assert sum(map(prod, leaves(shape).values())) == networks.gpt(shape, 1, 8).numel


def test_a_leaf_is_cut_along_its_largest_dimension_that_divides():
    cut = jax_sharding.dimension
    assert cut("blocks.up", (4, 128, 384), 8, 0) == 2
    assert cut("blocks.output", (4, 128, 128), 8, 0) == 1  # of equal ones the first
    assert cut("blocks.norm", (4, 128), 8, 0) == 1
    assert cut("blocks.norm", (4, 128), 8, 512) == 1
    assert cut("blocks.norm", (4, 128), 8, 513) is None  # fewer numbers than the threshold
    assert cut("embedding", (255, 128), 8, 0) == 1
    with refused("blocks.norm", "(16, 12)", "8"):
        cut("blocks.norm", (16, 12), 8, 0)  # the layers would divide, and are not cut


def test_all_is_shared_without_a_threshold_and_nothing_above_all():
    for devices, threshold, kept in [(8, 0, WHOLE / 8), (1, 0, WHOLE), (8, 10**9, WHOLE)]:
        found = persistent(TINY, devices, threshold)
        assert found.pop(("optimizer state", "step counters")) == 4
        assert set(found.values()) == {kept}
    assert persistent(TINY, 8, 1000)["parameters", "parameters"] == (WHOLE - NORMS) / 8 + NORMS


def test_what_is_recomputed_is_gathered_twice_and_reduced_once():
    plain, again = (bytes_by_kind(traffic(TINY, 8, 0, recompute)) for recompute in (False, True))
    assert plain["all-gather", "fsdp"] == plain["reduce-scatter", "fsdp"] == WHOLE
    assert again["all-gather", "fsdp"] - WHOLE == BLOCKS + NORMS - 4 * 128  # the root is not recomputed
    assert again["reduce-scatter", "fsdp"] == WHOLE
    assert plain["all-reduce", "fsdp"] == again["all-reduce", "fsdp"] == 4


def test_what_is_below_the_threshold_is_all_reduced():
    found = bytes_by_kind(traffic(TINY, 8, 1000))
    assert found["all-reduce", "fsdp"] == NORMS + 4
    assert found["all-gather", "fsdp"] == WHOLE - NORMS


def test_replicas_all_reduce_the_shards_of_gradients():
    """After the reduce-scatter, so a fourth of the bytes with four shards; what is whole is summed over all devices."""
    alone, hsdp = bytes_by_kind(traffic(TINY, 4, 1000)), bytes_by_kind(traffic(TINY, 4, 1000, replicas=2))
    assert hsdp.pop(("all-reduce", "replicate")) == (WHOLE - NORMS) / 4
    assert hsdp.pop(("all-reduce", "replicate+fsdp")) == alone.pop(("all-reduce", "fsdp"))
    assert hsdp == alone


def test_the_cpus_compiler_sums_what_by_hand_is_scattered():
    by_hand, compiled = (bytes_by_kind(traffic(TINY, 8, 1000, True, scatters=s)) for s in (True, False))
    assert compiled["all-gather", "fsdp"] == by_hand["all-gather", "fsdp"]
    assert compiled["all-reduce", "fsdp"] == by_hand["all-reduce", "fsdp"] + by_hand["reduce-scatter", "fsdp"]
    assert ("reduce-scatter", "fsdp") not in compiled


def test_resharded_no_gathered_weight_stays():
    kept, freed = (jax_sharding.temporary(TINY, 2, 64, reshard=reshard) for reshard in (False, True))
    assert kept - freed == BLOCKS


def test_each_micro_batch_gathers_the_blocks_and_reduces():
    """The embedding and the head, which are no part of the model's loop, are gathered once."""
    one, four = (bytes_by_kind(traffic(TINY, 8, 1000, micro_batches=n)) for n in (1, 4))
    outside, gathered = 2 * 4 * 256 * 128, ("all-gather", "fsdp")
    assert four.pop(gathered) == 4 * (one.pop(gathered) - outside) + outside
    assert four == {key: 4 * size for key, size in one.items()}


@pytest.mark.parametrize("length", [64, 128, 1024])
def test_recomputation_keeps_inputs_of_blocks_and_the_values_of_one(length):
    """Kept of each block: all its values and its gathered weights; recomputed, its input."""
    plain, again = (jax_sharding.temporary(TINY, 2, length, recompute) for recompute in (False, True))
    values, inputs = 4 * sum(jax_sharding.saved_elements(TINY, 2, length).values()), 4 * 2 * length * 128
    assert plain - again == TINY.num_hidden_layers * (values + BLOCKS // TINY.num_hidden_layers - inputs)
    assert plain / again > 3
    replicated = jax_sharding.temporary(TINY, 2, length, sharded=False)
    assert (
        plain - replicated == BLOCKS + BLOCKS // TINY.num_hidden_layers - WHOLE
    )  # what is gathered stays, but no whole gradient
