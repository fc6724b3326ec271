# SPDX-License-Identifier: BSD-3-Clause
"""How ranks are arranged: dimensions by name, in one order whatever order they were written in."""

import pytest
from commands import refused
from planner.parallel.mesh import Mesh, arrange


@pytest.mark.parametrize(
    ("ranks", "text", "mesh"),
    [
        (4, None, Mesh(shard=4)),
        (8, "2x4", Mesh(replicate=2, shard=4)),
        (8, "tensor=2,shard=4", Mesh(shard=4, tensor=2)),
        (4, "pipeline=4", Mesh(pipeline=4)),
        (12, "tensor=2,context=3,shard=2", Mesh(shard=2, context=3, tensor=2)),
        (16, "pipeline=2,replicate=2,shard=2,tensor=2", Mesh(2, 2, 2, tensor=2)),
    ],
)
def test_what_is_written_is_what_is_arranged(ranks, text, mesh):
    assert arrange(ranks, text) == mesh
    assert mesh.ranks == ranks


@pytest.mark.parametrize(
    ("ranks", "text", "reshard", "words"),
    [
        (2, "2x4", "true", ("--mesh 2x4", "8 ranks", "2")),
        (8, "shard=2,tensor=2", "true", ("--mesh shard=2,tensor=2", "4 ranks", "8")),
        (4, "shards=4", "true", ("--mesh shards=4", "pipeline, replicate, shard, context, tensor")),
        (4, "shard=2,shard=2", "true", ("--mesh shard=2,shard=2", "once")),
        (8, "shard=2,tensor=4", "4", ("--reshard-after-forward 4", "2 ranks")),
    ],
)
def test_what_does_not_fit_is_refused(ranks, text, reshard, words):
    with refused(*words):
        arrange(ranks, text, reshard)


def test_ranks_of_a_tensor_group_and_stages_of_a_pipeline_see_the_same_part_of_a_batch():
    mesh = Mesh(pipeline=2, replicate=2, shard=2, tensor=2)
    assert mesh.data == 4
    assert [mesh.data_part(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2


def test_ranks_of_a_context_group_see_parts_of_the_same_sequences():
    mesh = Mesh(replicate=2, shard=2, context=2, tensor=2)
    assert (mesh.data, mesh.shards) == (4, 4)
    assert [mesh.data_part(rank) for rank in range(16)] == [part for part in range(4) for _ in range(4)]
    assert [mesh.context_part(rank) for rank in range(16)] == [0, 0, 1, 1] * 4
