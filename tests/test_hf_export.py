# SPDX-License-Identifier: BSD-3-Clause
"""What hf_fsdp.py saves: each tensor in the dtype and under the name of the source, with all that goes with it, or nothing."""

import dataclasses
import json
import sys

import cloudpickle
import hf_fsdp
import pytest
import torch
from commands import refused
from labkit.running import launch, notebook_ranks
from labkit.training import hf_export, hf_files, hf_lora
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

HERE = launch.Cluster(launcher="local")
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64}
FAMILIES = {"llama": {}, "apertus": {}}  # apertus has persistent buffers
FAMILIES["qwen3_moe"] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IDS = torch.arange(2 * 16).view(1, 2, 16)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in bf16 of each family, saved by the library."""
    folder = tmp_path_factory.mktemp("models")
    for family, shape in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **shape))
        model.to(torch.bfloat16).save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="module")
def published(folder):
    """A folder as people publish them."""
    given = folder / "llama"
    words = {word: n for n, word in enumerate(["<unk>", "good", "morning"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(given)
    GenerationConfig(max_new_tokens=7).save_pretrained(given)
    for name in ("LICENSE", "README.md", "preprocessor_config.json", "model.gguf", "pytorch_model.bin"):
        (given / name).write_text("{}")
    for name in ("original", ".cache"):
        (given / name).mkdir()
    (given / "original" / "params.json").write_text("{}")
    (given / "original" / "consolidated.00.pth").write_text("weights once more")
    return given


def config_of(source, folder=None, **options):
    save = folder and str(folder / "tuned")
    return hf_fsdp.Config(model=str(source), device="cpu", tokens="bytes", save=save, seq_len=16, **options)


def saved(config, me):
    """{name: tensor} of a model that was loaded, and saved at once."""
    model = hf_fsdp.build(config, me)
    hf_export.save(model, config.architecture, config, config.save)
    return load_file(f"{config.save}/model.safetensors")


def about(config):
    return json.loads(open(f"{config.save}/config.json").read())


def test_a_model_in_bf16_is_saved_in_bf16(folder, tmp_path, world_of_one):
    """Although it was trained in fp32; and a tensor that was in fp32 remains so."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text((folder / "llama" / "config.json").read_text())
    given = load_file(folder / "llama" / "model.safetensors")
    given["model.norm.weight"] = torch.randn(64)
    save_file(given, source / "model.safetensors", {"format": "pt"})
    config = config_of(source, tmp_path)
    found = saved(config, world_of_one)
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in given.items()}
    assert all(torch.equal(t, given[n]) for n, t in found.items())
    assert about(config)["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_another_dtype_is_that_of_the_parameters(name, folder, tmp_path, world_of_one):
    """Buffers remain as they are trained."""
    config = config_of(folder / "apertus", tmp_path, save_dtype=name)
    found = saved(config, world_of_one)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    model, loaded = AutoModelForCausalLM.from_pretrained(config.save, output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    buffers = {name for name, _ in model.named_buffers()} & found.keys()
    assert buffers and {found[name].dtype for name in buffers} == {torch.float32}
    assert {tensor.dtype for name, tensor in found.items() if name not in buffers} == {dtype}
    assert about(config)["dtype"] == hf_export.SAVED[name]


def test_all_that_goes_with_a_model_is_carried(published, tmp_path, world_of_one):
    config = config_of(published, tmp_path)
    saved(config, world_of_one)
    names = {str(path.relative_to(config.save)) for path in (tmp_path / "tuned").rglob("*") if path.is_file()}
    wanted = {"config.json", "generation_config.json", "LICENSE", "README.md", "preprocessor_config.json"}
    wanted |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"}
    assert names == wanted | {"original/params.json"}
    modes = {(tmp_path / "tuned" / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1  # who may read the one may read the other
    tokenizer = AutoTokenizer.from_pretrained(config.save)
    assert tokenizer("good morning")["input_ids"] == [1, 2]
    assert tokenizer.apply_chat_template([{"content": "good"}], tokenize=False).strip() == "good"
    assert AutoModelForCausalLM.from_pretrained(config.save).generation_config.max_new_tokens == 7


def test_with_adapters_goes_the_tokenizer(published, tmp_path, world_of_one):
    config = config_of(published, tmp_path, lora=2)
    hf_export.save(hf_fsdp.build(config, world_of_one), config.architecture, config, config.save)
    names = {path.name for path in (tmp_path / "tuned").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names == {hf_lora.FILE, hf_lora.SETTINGS} | tokenizer


@pytest.mark.parametrize("what", ["weights", "partial folder"])
def test_what_cannot_be_written_is_a_sentence_and_leaves_nothing(what, folder, tmp_path, monkeypatch, world_of_one):
    config = config_of(folder / "llama", tmp_path)
    model = hf_fsdp.build(config, world_of_one)
    if what == "weights":  # the third of several files no longer fits
        monkeypatch.setattr(hf_export, "LARGEST_FILE", 1)
        files = iter(range(2))
        write = hf_files.save_file

        def full(*arguments):
            if next(files, None) is None:
                raise OSError(28, "No space left on device")
            write(*arguments)

        monkeypatch.setattr(hf_files, "save_file", full)
    else:
        (tmp_path / "tuned.partial").write_text("a file")
    with refused("tuned could not be saved", "--save"):
        hf_export.save(model, config.architecture, config, config.save)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_model_is_not_lost_if_its_folder_appears_during_training(folder, tmp_path, world_of_one):
    config = config_of(folder / "llama", tmp_path)
    (tmp_path / "tuned").mkdir()
    with refused("has appeared during training", f"{config.save}.partial"):
        saved(config, world_of_one)
    AutoModelForCausalLM.from_pretrained(f"{config.save}.partial")


def test_a_models_folder_must_be_new(tmp_path):
    config = config_of("any", tmp_path, save_every=2)
    hf_export.check_new(config)
    (tmp_path / "tuned-step-2").mkdir()
    with refused("tuned-step-2 is there already"):
        hf_export.check_new(config)
    hf_export.check_new(dataclasses.replace(config, checkpoint=str(tmp_path), resume=True))
    (tmp_path / "file").write_text("")
    with refused("cannot be written", "--save"):
        hf_export.check_new(config_of("any", tmp_path / "file"))


def _on_two(me, folder):
    """Save experts that are spread; and adapters that a forward has left gathered in bf16."""
    config = config_of(folder / "qwen3_moe", folder / "experts", mesh="shard=2,expert=2")
    (folder / "experts").mkdir(exist_ok=True)
    hf_export.save(hf_fsdp.build(config, me), config.architecture, config, config.save)
    config = config_of(folder / "llama", folder / "adapters", lora=2, precision="bf16", reshard_after_forward="false")
    (folder / "adapters").mkdir(exist_ok=True)
    model = hf_fsdp.build(config, me)
    optimizer = hf_fsdp.make_optimizer(model, config)
    hf_fsdp.train_step(model, optimizer, IDS, IDS, config)
    trained = {name: p.detach().full_tensor() for name, p in hf_lora.stored(model).items()}
    with torch.no_grad():
        model(IDS[0], use_cache=False)
    hf_export.save(model, config.architecture, config, config.save)
    config = config_of(folder / "qwen3_moe", folder / "merged", lora=2, merge=True, mesh="shard=2,expert=2")
    (folder / "merged").mkdir(exist_ok=True)
    model = hf_fsdp.build(config, me)
    hf_fsdp.train_step(model, hf_fsdp.make_optimizer(model, config), IDS, IDS, config)
    hf_export.save(model, config.architecture, config, config.save)
    with torch.no_grad():
        return trained, model(IDS[0], use_cache=False).logits


@pytest.fixture(scope="module")
def trained(folder):
    return notebook_ranks.on_ranks(_on_two, folder, ranks=2, cluster=HERE, timeout=100)[0]


def test_experts_are_saved_one_by_one_as_they_were(trained, folder):
    given = load_file(folder / "qwen3_moe" / "model.safetensors")
    found = load_file(folder / "experts" / "tuned" / "model.safetensors")
    assert any("experts.3." in name for name in given)
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


def test_a_mixture_with_merged_adapters_is_saved(trained, folder):
    """Not its experts, but its attention was adapted; and the source is in bf16, so is what is saved."""
    again, about = AutoModelForCausalLM.from_pretrained(
        folder / "merged" / "tuned", dtype=torch.float32, output_loading_info=True
    )
    assert not about["missing_keys"] and not about["unexpected_keys"]
    given = load_file(folder / "qwen3_moe" / "model.safetensors")
    found = load_file(folder / "merged" / "tuned" / "model.safetensors")
    assert {n.split(".")[-2] for n in found if not torch.equal(found[n], given[n])} == {f"{x}_proj" for x in "qkvo"}
    with torch.no_grad():
        assert torch.allclose(again(IDS[0], use_cache=False).logits, trained[1], atol=0.02)


def test_adapters_are_saved_as_trained_not_as_gathered_in_bf16(trained, folder):
    found = load_file(folder / "adapters" / "tuned" / hf_lora.FILE)
    assert found.keys() == trained[0].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in trained[0].items())
    assert any(not torch.equal(t, t.bfloat16().float()) for t in trained[0].values())
