# SPDX-License-Identifier: BSD-3-Clause
"""Sharding by the library's plans: units, a weight that embedding and head share, experts that are fewer than the ranks."""

import contextlib
import io
import json

import hf_fsdp
import pytest
import torch
from labkit.measuring import simulate
from labkit.running.ranks import Rank
from labkit.training import hf_models
from proofs import families
from torch.distributed.fsdp import FSDPModule


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the configurations of some families."""
    path = tmp_path_factory.mktemp("families")
    for name in ("qwen2", "qwen3_moe", "mamba", "gpt2", "gpt_neox", "biogpt", "gpt_oss"):
        families.configuration(name).save_pretrained(path / name)
    return path


@pytest.fixture(autouse=True)
def world_left():
    yield
    torch.distributed.destroy_process_group()


def sharded(folder, family, ranks, mesh):
    """(whether the head's weight is the embedding's, units, what is printed or refused) of rank 0 in a simulated world."""
    simulate.join(ranks)
    me = Rank(0, 0, ranks, "simulated", torch.device("cpu"), "fake")
    config = hf_fsdp.Config(config=f"{folder}/{family}", device="cpu", mesh=mesh)
    with torch.device("meta"), contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            model = hf_fsdp.fsdp2(hf_fsdp.unsharded(config), config, me)
        except hf_fsdp.UserError as error:
            return None, None, f"refused: {error}"
    units = [name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)]
    return hf_models.tied(model), units, printed.getvalue()


@pytest.mark.parametrize(
    ("family", "units"),
    [
        ("gpt2", ["transformer.h.0", "transformer.h.1"]),  # the library's rules name other modules
        ("biogpt", ["biogpt.layers.0", "biogpt.layers.1"]),  # it has none
        ("gpt_neox", ["gpt_neox.embed_in", "gpt_neox.layers.0", "gpt_neox.layers.1", "lm_head"]),  # nor of these ends
    ],
)
def test_blocks_are_units_whatever_the_library_names(folder, family, units):
    assert sharded(folder, family, 2, "shard=2")[1] == units


@pytest.mark.parametrize("mesh", ["tensor=4", "shard=2,tensor=2", "shard=4"])
def test_embedding_and_head_share_their_weight_on_every_mesh(folder, mesh):
    assert json.loads((folder / "qwen2" / "config.json").read_text())["tie_word_embeddings"]
    assert sharded(folder, "qwen2", 4, mesh)[0]


@pytest.mark.parametrize(
    ("family", "mesh", "ranks", "holders"),
    [
        ("gpt_oss", "shard=8", 8, "so 4 ranks hold 1 each"),
        ("gpt_oss", "shard=3", 3, "so 2 ranks hold 2 each"),
        ("gpt_oss", "shard=8,expert=2", 8, "so 4 ranks hold 1 each"),
        ("gpt_oss", "shard=4", 4, ""),
        ("gpt_oss", "replicate=2,shard=4", 8, ""),
        ("gpt_oss", "shard=4,tensor=2", 8, ""),
        ("mamba", "shard=300", 300, ""),  # its convolutions have three dimensions, too
    ],
)
def test_ranks_without_experts_are_a_warning(folder, family, mesh, ranks, holders):
    printed = sharded(folder, family, ranks, mesh)[2]
    assert holders in printed if holders else not printed


def test_ranks_without_experts_are_refused_if_files_have_each_on_its_own(folder):
    printed = sharded(folder, "qwen3_moe", 8, "shard=8")[2]
    assert printed.startswith("refused: model.layers.0") and "replicate or tensor of --mesh" in printed
    assert not sharded(folder, "qwen3_moe", 4, "shard=4")[2]
