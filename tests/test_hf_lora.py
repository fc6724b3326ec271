# SPDX-License-Identifier: BSD-3-Clause
"""hf_fsdp.py's adapters: where they are asked for, in fp32 on a base in bf16, continued, resumed, and merged as peft does."""

import json
import sys

import cloudpickle
import hf_fsdp
import pytest
import torch
from commands import refused
from labkit.measuring import meters
from labkit.measuring.trace import local
from labkit.running import launch, notebook_ranks
from labkit.training import checkpoints, dcp_reading, hf_lora, saving
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions
from transformers import AutoConfig, AutoModelForCausalLM

HERE = launch.Cluster(launcher="local")
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 256}  # its weights are transposed
GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LENGTH, STEPS, LR = 16, 3, 1e-2
INPUTS = torch.arange(4 * LENGTH).view(4, LENGTH) * 7 % 256
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models in fp32 and bf16, and adapters of peft's own, none of which are zero."""
    folder = tmp_path_factory.mktemp("models")
    for name, family, shape in (("llama", "llama", SHAPE), ("gpt2", "gpt2", GPT2)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
        model.save_pretrained(folder / name)
        model.to(torch.bfloat16).save_pretrained(folder / f"{name}-bf16")
        if name == "llama":
            (folder / "llama" / "tokenizer.json").write_text("{}")
            (folder / "llama" / "LICENSE").write_text("as you like")
        targets = ["q_proj", "down_proj"] if name == "llama" else ["c_attn"]
        adapted = get_peft_model(model.float(), LoraConfig(r=1, lora_alpha=3, target_modules=targets, use_rslora=True))
        with torch.no_grad():
            for tensor in (p for n, p in adapted.named_parameters() if "lora_" in n):
                tensor.copy_(0.1 * torch.randn_like(tensor))
        adapted.save_pretrained(folder / f"{name}-adapters")
    return folder


def config_of(folder, model="llama", **options):
    return hf_fsdp.Config(model=str(folder / model), device="cpu", tokens="bytes", seq_len=LENGTH, lr=LR, **options)


def built(config, me):
    model = hf_fsdp.build(config, me)
    return model, hf_fsdp.make_optimizer(model, config)


def step(model, optimizer, config, me):
    """One step on this rank's sequences; its loss, averaged over the ranks."""
    mine = INPUTS.view(1, me.world_size, -1, LENGTH)[:, me.rank]
    loss = sum(hf_fsdp.train_step(model, optimizer, mine, mine.roll(-1, -1), config))
    torch.distributed.all_reduce(loss)
    return loss.item() / me.world_size


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


# On two ranks


def _in_bf16(me, folder):
    """(losses, {dtype of parameters}, bytes on this rank, bytes by arithmetic, initial adapters)."""
    config = config_of(folder, "llama-bf16", lora=4, precision="bf16")
    model, optimizer = built(config, me)
    first = {name: whole(p) for name, p in hf_lora.stored(model).items()}
    dtypes = {("lora_" in name, p.dtype) for name, p in model.named_parameters()}
    losses = [step(model, optimizer, config, me) for _ in range(STEPS)]
    states = [local(t) for state in optimizer.state.values() for t in state.values() if t.dim()]
    dtypes |= {("state", t.dtype) for t in states}
    mine = mine_of(model) + sum(t.nbytes for t in states) + sum(local(p).nbytes for p in hf_lora.stored(model).values())
    base = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return losses, dtypes, mine, (2 * base + 16 * adapters) / me.world_size, first


def mine_of(model):
    return sum(local(p).nbytes for p in model.parameters())


def _continued(me, folder, model, **options):
    config = config_of(folder, model, adapters=str(folder / f"{model}-adapters"), **options)
    model, optimizer = built(config, me)
    with torch.no_grad():
        before = model(INPUTS, use_cache=False).logits
    step(model, optimizer, config, me)
    hf_fsdp.hf_export.save(model, config.architecture, config, config.save)
    with torch.no_grad():
        return before, model(INPUTS, use_cache=False).logits


def _trained(me, folder, runs):
    return [hf_fsdp.train(config_of(folder, lora=2, lora_dropout=0.3, **run), me)["losses"] for run in runs]


def _all(me, folder):
    saved = {"checkpoint": str(folder / "checkpoint"), "save_every": 1}
    runs = [{"max_steps": 4, "save": str(folder / "uninterrupted")}]
    runs.append({"max_steps": 4, "save": str(folder / "recomputed"), "recompute": "full"})
    runs.append({"max_steps": 2, "save": str(folder / "begun")} | saved)
    runs.append({"max_steps": 4, "resume": True, "save": str(folder / "resumed")} | saved)
    meters.TRACED_STEPS = range(0)  # tracing takes long
    return {
        "bf16": _in_bf16(me, folder),
        "adapters": _continued(me, folder, "llama", save=str(folder / "continued")),
        "merged": _continued(me, folder, "llama", save=str(folder / "merged"), merge=True),
        "transposed": _continued(me, folder, "gpt2", save=str(folder / "transposed"), merge=True),
        "resumed": _trained(me, folder, runs),
    }


@pytest.fixture(scope="module")
def on_two(folder):
    return notebook_ranks.on_ranks(_all, folder, ranks=2, cluster=HERE, timeout=120)


def test_a_base_in_bf16_has_adapters_and_their_state_in_fp32(on_two, folder):
    losses, dtypes, _, _, first = on_two[0]["bf16"]
    assert dtypes == {(False, torch.bfloat16), (True, torch.float32), ("state", torch.float32)}
    plain = AutoModelForCausalLM.from_pretrained(folder / "llama-bf16", dtype=torch.bfloat16)
    model = get_peft_model(plain, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, parameter in hf_lora.stored(model.base_model.model).items():
        parameter.data = first[name].clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    alone = []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=INPUTS, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), INPUTS.roll(-1, -1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.append(loss.item())
    assert alone[-1] < alone[0] - 0.1
    assert losses == pytest.approx(alone, abs=0.02)


def test_persistent_memory_is_two_bytes_of_the_base_and_sixteen_of_the_adapters(on_two):
    for rank in on_two:
        _, _, measured, planned, _ = rank["bf16"]
        assert measured == planned


@pytest.mark.parametrize(("what", "base"), [("adapters", "llama"), ("merged", "llama"), ("transposed", "gpt2")])
def test_adapters_of_peft_are_continued_and_saved(on_two, folder, what, base):
    """Of rank 1, so that one of the two ranks has no row of an adapter."""
    before, after = on_two[0][what]
    plain = AutoModelForCausalLM.from_pretrained(folder / base, dtype=torch.float32)
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(plain, folder / f"{base}-adapters")
        assert torch.allclose(theirs(INPUTS, use_cache=False).logits, before, atol=1e-5)
        theirs.unload()
        if what == "adapters":
            plain = AutoModelForCausalLM.from_pretrained(folder / base, dtype=torch.float32)
            again = PeftModel.from_pretrained(plain, folder / "continued")
        else:
            again, about = AutoModelForCausalLM.from_pretrained(folder / what, output_loading_info=True)
            assert not about["missing_keys"] and not about["unexpected_keys"]
        assert torch.allclose(again(INPUTS, use_cache=False).logits, after, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-3)


def test_merged_weights_are_pefts(on_two, folder):
    """Its adapters of this step, merged by peft into the base, are what --merge has written after the same step."""
    plain = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, folder / "continued").merge_and_unload().state_dict()
    ours = load_file(folder / "merged" / "model.safetensors")
    assert ours.keys() <= theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_what_goes_with_adapters_is_carried(on_two, folder):
    names = {path.name for path in (folder / "continued").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    about = json.loads((folder / "continued" / "adapter_config.json").read_text())
    wanted = {"r": 1, "lora_alpha": 3, "target_modules": ["down_proj", "q_proj"], "use_rslora": True}
    assert {name: about[name] for name in wanted} == wanted
    assert about["base_model_name_or_path"] == str(folder / "llama")
    assert "LICENSE" in {path.name for path in (folder / "merged").iterdir()}


def test_dropout_of_adapters_is_the_same_when_recomputed_and_when_resumed(on_two, folder):
    whole, recomputed, begun, resumed = on_two[0]["resumed"]
    assert begun + resumed == whole
    assert recomputed == whole
    files = [load_file(folder / name / "adapter_model.safetensors") for name in ("uninterrupted", "resumed")]
    assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())


def test_a_checkpoint_contains_what_is_trained(on_two, folder):
    names = dcp_reading.tensors(checkpoints.latest(folder / "checkpoint"), "model.")
    assert names and all("lora_" in name for name in names)


def test_models_of_steps_are_saved_next_to_the_last_one(on_two, folder):
    """The adapters after the second step are those of the run that ended there."""
    found = {path.name for pattern in ("begun*", "resumed*") for path in folder.glob(pattern)}
    assert found == {"begun", "begun-step-1", "resumed", "resumed-step-3"}
    files = [load_file(folder / name / "adapter_model.safetensors") for name in ("begun-step-1", "begun")]
    assert files[0].keys() == files[1].keys() and any(not torch.equal(t, files[1][n]) for n, t in files[0].items())


# On one


def test_a_checkpoint_that_contains_the_base_is_resumed(folder, tmp_path, monkeypatch, world_of_one):
    """As earlier versions wrote it."""
    config = config_of(folder, lora=2)
    model, optimizer = built(config, world_of_one)
    step(model, optimizer, config, world_of_one)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "TRAINED", StateDictOptions())
        saving.save(tmp_path, 1, model, optimizer)
    names = dcp_reading.tensors(checkpoints.latest(tmp_path), "model.")
    assert any("base_layer" in name for name in names)
    again, its = built(config, world_of_one)
    assert checkpoints.load(checkpoints.latest(tmp_path), again, its) == 1
    losses = [step(*each, config, world_of_one) for each in ((model, optimizer), (again, its))]
    assert losses[0] == losses[1]


def test_a_run_is_not_resumed_on_another_base_of_the_same_name(folder, tmp_path):
    import shutil

    first = hf_lora.identity(config_of(folder, lora=2))
    assert first and first == hf_lora.identity(config_of(folder, lora=2))
    assert not hf_lora.identity(config_of(folder))  # a checkpoint contains the model
    shutil.copytree(folder / "llama", tmp_path / "llama")
    assert hf_lora.identity(config_of(tmp_path, lora=2)) == first
    file = tmp_path / "llama" / "model.safetensors"
    tensors = {name: tensor + 0.01 for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    assert hf_lora.identity(config_of(tmp_path, lora=2)) != first


def test_targets_alpha_and_dropout_are_those_given(folder, world_of_one):
    model = hf_fsdp.build(
        config_of(folder, lora=2, lora_targets="q_proj, up_proj", lora_alpha=6.0, lora_dropout=0.25), world_of_one
    )
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    layers = [f"model.layers.{n}." for n in (0, 1)]
    assert set(adapted) == {n + part for n in layers for part in ("self_attn.q_proj", "mlp.up_proj")}
    for module in adapted.values():
        assert module.scaling["default"] == 3 and module.lora_dropout["default"].p == 0.25
    every = hf_fsdp.build(config_of(folder, lora=2), world_of_one)
    assert sum(hasattr(module, "base_layer") for module in every.modules()) == 2 * 7
    trained = {name for name, p in every.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in every.named_parameters() if "lora_" in name}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora": 2, "lora_targets": "nowhere"}, "not found in the base model"),
        ({"lora": 2, "lora_targets": "q_proj,v_prj"}, "no module of the model is called 'v_prj'"),
        ({"lora": 2, "lora_targets": "lm_head"}, "lm_head cannot be adapted"),
        ({"lora": 2, "lora_targets": "embed_tokens"}, "embed_tokens cannot be adapted"),
        ({"adapters": "nowhere"}, "has no adapter_config.json"),
    ],
    ids=str,
)
def test_what_cannot_be_adapted_is_a_sentence(options, words, folder, world_of_one):
    with refused(words):
        hf_fsdp.build(config_of(folder, **options), world_of_one)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("missing", "has no tensor base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"),
        ("more", "does not have, such as base_model.model.lm_head.weight"),
        ("shape", "has the shape [1, 32] instead of [1, 64]"),
        ("nan", "no value for"),
        ("damaged", "is not whole"),
        ("no weights", "has no adapter_model.safetensors"),
        ("use_dora", "set use_dora to True, which this lab does not train"),
        ("pissa", "set init_lora_weights to 'pissa'"),
        ("kind", "are of the kind"),
        ("json", "adapter_config.json cannot be read"),
    ],
)
def test_adapters_that_do_not_fit_are_a_sentence(changed, words, folder, tmp_path, world_of_one):
    given = folder / "llama-adapters"
    tensors, about = load_file(given / hf_lora.FILE), json.loads((given / hf_lora.SETTINGS).read_text())
    last = max(tensors)
    if changed == "missing":
        del tensors[last]
    elif changed == "more":
        tensors["base_model.model.lm_head.weight"] = torch.ones(1)
    elif changed == "shape":
        name = next(name for name in tensors if "q_proj.lora_A" in name)
        tensors[name] = torch.ones(1, 32)
    elif changed == "nan":
        tensors[last].fill_(torch.nan)
    about |= {"use_dora": {"use_dora": True}, "pissa": {"init_lora_weights": "pissa"}}.get(changed, {})
    about |= {"peft_type": "IA3"} if changed == "kind" else {}
    save_file(tensors, tmp_path / hf_lora.FILE)
    (tmp_path / hf_lora.SETTINGS).write_text("{" if changed == "json" else json.dumps(about))
    if changed == "damaged":
        (tmp_path / hf_lora.FILE).write_bytes(b"x" * 100)
    elif changed == "no weights":
        (tmp_path / hf_lora.FILE).unlink()
    with refused(words):
        hf_fsdp.build(config_of(folder, adapters=str(tmp_path)), world_of_one)
