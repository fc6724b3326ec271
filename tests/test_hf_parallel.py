"""Sharding by the library's plans: units, a weight that embedding and head share, experts that are fewer than the ranks."""

import json

import pytest
from forked import forked
from proofs import families


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the configurations of some families."""
    path = tmp_path_factory.mktemp("families")
    for name in ("qwen2", "qwen3_moe", "mamba", "gpt2", "gpt_neox", "biogpt"):
        families.configuration(name).save_pretrained(path / name)
    return path


def sharded(folder, family, ranks, mesh):
    """(whether the head's weight is the embedding's, warning, units) of rank 0 in a simulated world."""
    import hf_fsdp
    import torch
    from labkit.measuring import simulate
    from labkit.running.ranks import Rank
    from labkit.training import hf_models, hf_parallel
    from torch.distributed.fsdp import FSDPModule

    simulate.join(ranks)
    me = Rank(0, 0, ranks, "simulated", torch.device("cpu"), "fake")
    config = hf_fsdp.Config(config=f"{folder}/{family}", device="cpu", mesh=mesh)
    with torch.device("meta"):
        model = hf_fsdp.fsdp2(hf_fsdp.unsharded(config), config, me)
    units = [name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)]
    return hf_models.tied(model), hf_parallel.few_experts(model), units


@pytest.mark.parametrize(
    ("family", "units"),
    [
        ("gpt2", ["transformer.h.0", "transformer.h.1"]),  # the library's rules name other modules
        ("biogpt", ["biogpt.layers.0", "biogpt.layers.1"]),  # it has none
        ("gpt_neox", ["gpt_neox.embed_in", "gpt_neox.layers.0", "gpt_neox.layers.1", "lm_head"]),  # nor of these ends
    ],
)
def test_blocks_are_units_whatever_the_library_names(folder, family, units):
    assert forked(sharded, folder, family, 2, "shard=2")[2] == units


@pytest.mark.parametrize("mesh", ["tensor=4", "shard=2,tensor=2", "shard=4"])
def test_embedding_and_head_share_their_weight_on_every_mesh(folder, mesh):
    assert json.loads((folder / "qwen2" / "config.json").read_text())["tie_word_embeddings"]
    assert forked(sharded, folder, "qwen2", 4, mesh)[:2] == (True, "")


@pytest.mark.parametrize(
    ("family", "mesh", "ranks", "holders"),
    [
        ("qwen3_moe", "shard=8", 8, "4 of 8 ranks hold 1 each"),
        ("qwen3_moe", "shard=3", 3, "2 of 3 ranks hold 2 each"),
        ("qwen3_moe", "shard=8,expert=2", 8, "4 of 8 ranks hold 1 each"),
        ("qwen3_moe", "shard=4", 4, None),
        ("qwen3_moe", "replicate=2,shard=4", 8, None),
        ("qwen3_moe", "shard=4,tensor=2", 8, None),
        ("mamba", "shard=8", 8, None),  # its convolutions have three dimensions, too
    ],
)
def test_ranks_without_experts_are_a_warning(folder, family, mesh, ranks, holders):
    _, warning, _ = forked(sharded, folder, family, ranks, mesh)
    assert (holders in warning) if holders else not warning
