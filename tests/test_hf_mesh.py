# SPDX-License-Identifier: BSD-3-Clause
"""hf_fsdp.py on every mesh and with every option trains as one process of the plain library does, and reads the same values."""

import sys

import cloudpickle
import hf_fsdp
import plan
import pytest
import torch
import torch.distributed as dist
from labkit import UserError
from labkit.measuring.differences import largest_difference
from labkit.running import launch, notebook_ranks
from labkit.training import hf_export, hf_initial
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

HERE = launch.Cluster(launcher="local")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 256, "head_dim": 16, "max_position_embeddings": 128}
FAMILIES = {
    "llama": SIZES,
    "qwen3": SIZES,
    "qwen3_moe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
RUNS = {
    ("llama", "replicated and sharded"): {"mesh": "replicate=2,shard=2"},
    # Their norms of single heads have gradients that the tensor-parallel ranks sum
    ("qwen3", "split, micro-batches, fp64"): {
        "mesh": "shard=2,tensor=2",
        "accumulate": 2,
        "sync": "last",
        "precision": "fp64",
    },
    ("qwen3_moe", "split and sharded"): {"mesh": "shard=2,tensor=2", "clip": 0.05},
    ("qwen3_moe", "experts spread"): {"mesh": "shard=4,expert=4", "clip": 0.05},
    ("qwen3_moe", "experts spread and sharded"): {"mesh": "replicate=2,shard=2,expert=2"},
}
ON_TWO = {  # four ranks show nothing more of these
    ("llama", "DDP"): {"strategy": "ddp", "accumulate": 2, "sync": "last"},
    ("llama", "micro-batches, synchronized last"): {"accumulate": 2, "sync": "last"},
    ("llama", "gathered ahead, kept, loss in chunks"): {
        "prefetch": 1,
        "reshard_after_forward": "false",
        "loss_chunks": 3,
    },
    ("llama", "offloaded"): {"cpu_offload": True},
    ("llama", "recomputed, clipped"): {"recompute": "selective", "clip": 0.05},
    ("qwen3_moe", "experts in fp64"): {"precision": "fp64"},
}
LENGTH, STEPS, LR = 16, 3, 1e-2
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: a folder with weights that no initialization would give}."""
    found = {}
    for family, sizes in FAMILIES.items():
        torch.manual_seed(0)
        found[family] = tmp_path_factory.mktemp(family)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(0.02 * torch.randn_like(tensor) + 0.01)
        model.save_pretrained(found[family])
    return found


def tokens_of(sequences):
    """(inputs, targets) of every step, so that the loss falls."""
    torch.manual_seed(0)
    tokens = torch.randint(256, (sequences, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def experts_of(config):
    return {"experts_implementation": config.experts_implementation} if config.experts_implementation else {}


def one_process(folder, config, sequences):
    """(losses, model) of the plain library, without any of this course."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=config.dtype, **experts_of(config)).train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LR), []
    for _ in range(STEPS):
        inputs, targets = tokens_of(sequences)
        loss = cross_entropy(model(input_ids=inputs, use_cache=False).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        if config.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def not_as_read(folder, dtype, ours):
    """The names of tensors that the library reads otherwise."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return [name for name, t in hf_initial.tensors(theirs).items() if not torch.equal(ours[name], t)]


def _trained(me, runs, saved):
    """Of each run: losses, those of one process, names of tensors read otherwise than by the library, and how far off
    the logits of what is saved are; all but the losses are rank 0's.
    """
    found = []
    for n, (folder, options) in enumerate(runs):
        config = hf_fsdp.Config(model=folder, device="cpu", tokens="bytes", seq_len=LENGTH, lr=LR, **options)
        model = hf_fsdp.build(config, me)
        inner = getattr(model, "module", model)
        ours = {name: whole(tensor) for name, tensor in hf_initial.tensors(inner).items()}
        wrong = not_as_read(folder, config.dtype, ours) if me.rank == 0 else None
        optimizer, mesh, losses = hf_fsdp.make_optimizer(model, config), config.arranged(me.world_size), []
        shape = config.accumulate, mesh.data, config.batch_size, LENGTH
        sequences = config.accumulate * mesh.data * config.batch_size
        for _ in range(STEPS):
            mine = [x.view(shape)[:, mesh.data_part(me.rank)] for x in tokens_of(sequences)]
            loss = sum(hf_fsdp.train_step(model, optimizer, *mine, config))
            dist.all_reduce(loss)
            losses.append(loss.item() / me.world_size)
        alone, theirs = one_process(folder, config, sequences) if me.rank == 0 else ([], None)
        hf_export.save(inner, config.architecture, config, f"{saved}/{n}")
        off = None
        if me.rank == 0:
            again, about = AutoModelForCausalLM.from_pretrained(
                f"{saved}/{n}", dtype=config.dtype, output_loading_info=True, **experts_of(config)
            )
            assert not about["missing_keys"] and not about["unexpected_keys"]
            with torch.no_grad():
                logits = [each(input_ids=tokens_of(2)[0], use_cache=False).logits for each in (again, theirs)]
            off = largest_difference(*logits)
        found.append((losses, alone, wrong, off))
    return found


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory, selected):
    found = {}
    for ranks, every in ((4, RUNS), (2, ON_TWO)):
        some = {run: every[run] for run in selected(every)}
        runs = [(str(folders[family]), options | {"batch_size": 2}) for (family, _), options in some.items()]
        saved = str(tmp_path_factory.mktemp("saved"))
        results = notebook_ranks.on_ranks(_trained, runs, saved, ranks=ranks, cluster=HERE, timeout=240)
        found |= dict(zip(some, results[0], strict=True))
    return found


@pytest.mark.long
@pytest.mark.parametrize("run", [*RUNS, *ON_TWO], ids=" ".join)
def test_a_run_is_that_of_one_process_of_the_library(trained, run):
    losses, alone, wrong, off = trained[run]
    assert wrong == []  # to the last bit, as read
    assert alone[-1] < alone[0] - 0.2  # it has learned: equal losses mean something
    assert losses == pytest.approx(alone, rel=0, abs=1e-9 if "fp64" in run[1] else 1e-4)
    assert off < 1e-2  # saved, read by the library, and asked


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mesh": "shard=2,expert=2"}, "no expert-parallel plan for llama: leave expert out"),
        ({"mesh": "shard=4,expert=3"}, "expert must divide shard x context x tensor"),
        ({"mesh": "shard=4,tensor=2"}, "is for 8 ranks, but there are"),
        ({"mesh": "shard=2,tensor=2", "lora": 4}, "does not support --lora"),
    ],
    ids=str,
)
def test_what_cannot_be_sharded_is_a_sentence(options, sentence, folders, world_of_one):
    import dataclasses

    with pytest.raises(UserError, match=sentence):
        config = hf_fsdp.Config(model=str(folders["llama"]), device="cpu", tokens="bytes", **options)
        with torch.device("meta"):
            model = hf_fsdp.unsharded(config)
        ranks = 2 if options["mesh"] == "shard=2,expert=2" else 4
        hf_fsdp.fsdp2(model, config, dataclasses.replace(world_of_one, world_size=ranks))


def test_the_lab_plans_a_mesh_as_plan_py_does_and_refuses_what_arithmetic_cannot(folders):
    given = {"model": str(folders["llama"]), "mesh": "shard=2,tensor=2", "batch_size": 2, "seq_len": LENGTH}
    ours = hf_fsdp.Config(**given).plan(4, on_gpu=False).peak()
    assert ours == plan.plan_from_options(plan.Config(**given, ranks=4, device="cpu")).peak()
    for more, why in {
        ("mesh", "shard=2,expert=2"): "leave expert out",
        ("clip", 1.0): "the norm of split gradients",
    }.items():
        with pytest.raises(UserError, match=why):
            hf_fsdp.Config(**given | dict([more])).plan(4, on_gpu=False)
