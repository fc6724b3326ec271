# SPDX-License-Identifier: BSD-3-Clause
"""hf_fsdp.py: other people's models train under FSDP2 as in one process, are read part by part, and saved for everybody."""

import dataclasses
import json
import re
import sys
from dataclasses import asdict

import cloudpickle
import hf_fsdp
import plan
import pytest
import torch
import transformers
from commands import script
from labkit import UserError
from labkit.measuring import meters, records, trace
from labkit.running import launch, notebook_ranks, preflight, simulated_lab
from labkit.training import checkpoints, dcp_reading, hf_export, hf_initial, hf_models
from peft import PeftModel
from planner import predict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = launch.Cluster(launcher="local")
COMMON = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
COMMON |= {"num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128, "pad_token_id": 0}
COMMON |= {"bos_token_id": 1, "eos_token_id": 2}
NARROW = COMMON | {"head_dim": 16}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 320, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
FAMILIES = {
    "llama": COMMON,
    "mistral": COMMON | {"sliding_window": 32},
    "qwen2": COMMON | {"tie_word_embeddings": True},
    "qwen3": NARROW,
    "gemma": NARROW,
    "gemma2": NARROW | {"sliding_window": 32, "attention_dropout": 0.0},
    "gemma3_text": NARROW | {"sliding_window": 32},
    "gpt2": GPT2,
    "phi": COMMON | {"num_key_value_heads": 4},
    "phi3": COMMON,
}
IN_FP64 = ("llama", "gemma2", "gpt2")  # on two ranks, which show more than in fp32; and in fp32 on four
STEPS, LR, SEQUENCES, LENGTH = 6, 1e-2, 8, 48
transformers.logging.set_verbosity_error()
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """{family: the folder of its config.json}."""
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        AutoConfig.for_model(family, **FAMILIES[family]).save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def weights(shapes, tmp_path_factory):
    """{family: a folder with weights in several files}, as the library saves them."""
    folders = {}
    for family in ("llama", "qwen2", "gpt2"):  # head apart; tied; with the base model's own names
        torch.manual_seed(0)
        folders[family] = tmp_path_factory.mktemp(f"{family}-weights")
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shapes[family]))
        model.save_pretrained(folders[family], max_shard_size="200KB")
    return folders


def _trained(me, runs):
    """[(losses, the peak of each rank)] of some runs, one after the other; peaks of those in fp32 on several ranks."""
    found = []
    for options in runs:
        strategy = "single" if me.world_size == 1 else "fsdp2"
        config = hf_fsdp.Config(
            device="cpu", strategy=strategy, batch_size=SEQUENCES // me.world_size, seq_len=LENGTH, max_steps=STEPS, lr=LR, **options
        )  # fmt: skip
        measured = me.world_size > 1 and config.precision == "fp32"
        meters.TRACED_STEPS = range(1, 4) if measured else range(0)  # tracing takes long
        with _kept_wide(config.precision):
            record = hf_fsdp.train(config, me)
        found.append((record["losses"], record["memory"] and record["memory"]["peak_by_rank"]))
    return found


def _kept_wide(precision):
    """The library casts fp64 to fp32 in its norms, where a last bit may tip a rounding: here it is kept from that."""
    import contextlib

    from torch.utils._python_dispatch import TorchDispatchMode

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            casts = operator is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64
            if casts and kwargs and kwargs.get("dtype") == torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
            return operator(*args, **(kwargs or {}))

    return Wide() if precision == "fp64" else contextlib.nullcontext()


def ranks_of(family, precision="fp32"):
    """On how many ranks a family is compared with one process."""
    return 4 if family in IN_FP64 and precision == "fp32" else 2


@pytest.fixture(scope="module")
def runs(shapes, selected):
    """{(family, precision): {ranks: (losses, peaks)}}."""
    families = selected(FAMILIES)
    keys = [(family, "fp32") for family in families] + [(family, "fp64") for family in IN_FP64 if family in families]
    options = {key: {"config": str(shapes[key[0]]), "precision": key[1]} for key in keys}
    found = {key: {} for key in keys}
    for ranks in (1, 2, 4):
        some = [key for key in keys if ranks in (1, ranks_of(*key))]
        given = [options[key] for key in some]
        results = notebook_ranks.on_ranks(_trained, given, ranks=ranks, cluster=HERE, timeout=240)[0]
        for key, result in zip(some, results, strict=True):
            found[key][ranks] = result
    return found


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_one_process(runs, family):
    for precision, limit in (("fp32", 1e-4), ("fp64", 1e-9)):
        if precision == "fp32" or family in IN_FP64:
            (alone, _), (shared, _) = runs[family, precision].values()
            assert alone[-1] < alone[0] - 1  # it has learnt: equal losses mean something
            assert shared == pytest.approx(alone, rel=0, abs=limit)


PLANNED = ("llama", "qwen2", "qwen3", "gemma")  # the others' modules, windows and caps keep more: only simulated
SIMULATED = [family for family in FAMILIES if family not in PLANNED[1:]]  # plan and simulation of qwen2: below


def peak_of(runs, family):
    """The highest peak of a rank."""
    return max(runs[family, "fp32"][ranks_of(family)][1])


@pytest.mark.long
@pytest.mark.parametrize("family", SIMULATED)
def test_peaks_are_the_simulations(runs, shapes, family):
    ranks = ranks_of(family)
    options = {"strategy": "fsdp2", "batch_size": SEQUENCES // ranks, "seq_len": LENGTH, "device": "cpu"}
    simulated = simulated_lab.step(hf_fsdp, hf_fsdp.Config(config=str(shapes[family]), **options), ranks=ranks)
    torch.distributed.destroy_process_group()
    assert peak_of(runs, family) == pytest.approx(sum(simulated["peak"].values()), rel=2e-3)


def record(ranks, **options):
    """What the planner wants to know of a run."""
    config = hf_fsdp.Config(**options)
    return {
        "script": "hf_fsdp.py",
        "config": asdict(config),
        "ranks": ranks,
        "device": "cpu",
        "versions": {"torch": torch.__version__},
    }


@pytest.mark.long
@pytest.mark.parametrize("family", PLANNED)
def test_peaks_are_the_plans_where_it_knows_the_operators(runs, shapes, family):
    ranks = ranks_of(family)
    options = {"config": str(shapes[family]), "batch_size": SEQUENCES // ranks, "seq_len": LENGTH}
    planned = predict.total(predict.plan_of(record(ranks, **options)).peak()[1])
    assert peak_of(runs, family) == pytest.approx(planned, rel=2e-3)


def test_adapters_are_not_planned(shapes):
    with pytest.raises(UserError, match="peft's adapters, on every linear layer, are not planned"):
        predict.plan_of(record(4, config=str(shapes["llama"]), lora=4))


def test_a_plan_by_config_has_the_librarys_own_step_beside_it(shapes):
    options = {"batch_size": 1, "seq_len": 48, "ranks": 4, "device": "cpu", "simulate": True, "json": True}
    facts = json.loads(plan.answer(plan.Config(config=str(shapes["qwen2"]), **options)))
    torch.distributed.destroy_process_group()
    assert facts["simulated"] == pytest.approx(facts["peak"], rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_first_values_are_the_librarys_kind(shapes, family):
    """Each parameter and buffer has one; buffers and norms the library's own, the rest as spread as the library's."""
    config = hf_models.configuration(str(shapes[family]), "--config")
    theirs = AutoModelForCausalLM.from_config(config)
    theirs = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    ours = dict(hf_initial.initial_weights(hf_models.on_meta(config, torch.float32), seed=1))
    assert set(theirs) <= set(ours)
    for name, value in theirs.items():
        if value.numel() < 100 or value.std() == 0:
            assert torch.equal(ours[name], value.detach()), name
        else:
            assert ours[name].std().item() == pytest.approx(value.std().item(), rel=0.2), name


def _tuned(me, runs):
    """Of each run: the losses of two steps, what its model says of a text then, and what else to judge."""
    found = []
    for options in runs:
        config = hf_fsdp.Config(device="cpu", strategy="fsdp2", batch_size=2, seq_len=LENGTH, tokens="bytes", **options)
        model = hf_fsdp.build(config, me)
        before = {name: trace.local(p).clone() for name, p in model.named_parameters()}
        mapped = {n for n, p in model.named_parameters() if _storage(p) > trace.local(p).nbytes}
        optimizer = hf_fsdp.make_optimizer(model, config)
        inputs, targets = torch.arange(2 * 2 * LENGTH).view(2, 1, 2, LENGTH) % 256
        for _ in range(2):
            hf_fsdp.train_step(model, optimizer, inputs, targets, config)
        changed = {n for n, p in model.named_parameters() if not torch.equal(before[n], trace.local(p))}
        with torch.no_grad():
            logits = model(inputs[0], use_cache=False).logits
        hf_export.save(model, config.architecture, config, config.save)
        found.append((logits, changed, mapped))
    return found


def _storage(parameter):
    return trace.local(parameter).untyped_storage().nbytes()


@pytest.fixture(scope="module")
def tuned(weights, tmp_path_factory):
    """{(family, lora): (folder, logits before, names of parameters that changed, names of views of a mapped file)}."""
    keys = [(family, lora) for family in weights for lora in (None, 4)]
    folders = [tmp_path_factory.mktemp("tuned") / "model" for _ in keys]
    options = [
        {"model": str(weights[family]), "lora": lora, "save": str(folder)}
        for (family, lora), folder in zip(keys, folders, strict=True)
    ]
    ranks = notebook_ranks.on_ranks(_tuned, options, ranks=2, cluster=HERE, timeout=120)
    return {
        key: (folder, each[0][0], each[0][1] | each[1][1], each[0][2] | each[1][2])
        for key, folder, *each in zip(keys, folders, *ranks, strict=True)
    }


INPUTS = torch.arange(2 * LENGTH).view(2, LENGTH) % 256


@pytest.mark.long
@pytest.mark.parametrize("lora", (None, 4))
@pytest.mark.parametrize("family", ("llama", "qwen2", "gpt2"))
def test_a_rank_keeps_its_shards_and_not_the_file_that_they_were_mapped_from(family, lora, tuned):
    *_, mapped = tuned[family, lora]
    assert mapped == set()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_what_is_saved_is_read_without_this_course(tuned, family):
    folder, logits, changed, _ = tuned[family, None]
    model, about = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(model(INPUTS).logits, logits)  # to the last bit
    assert len(changed) > 20


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_adapters_alone_are_trained_and_saved_as_peft_has_them(tuned, weights, family):
    folder, logits, changed, _ = tuned[family, 4]
    assert changed and all("lora_" in name for name in changed)
    assert all("lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
    plain = AutoModelForCausalLM.from_pretrained(weights[family])
    with torch.no_grad():
        untrained = plain(INPUTS).logits
        model = PeftModel.from_pretrained(plain, folder)
        assert torch.equal(model(INPUTS).logits, logits)
    assert not torch.equal(untrained, logits)


# Families in which more is stored, or otherwise, than in those above, and what each is here for
GEMMA4 = NARROW | {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320}
GEMMA4 |= {
    "num_kv_shared_layers": 0,
    "sliding_window": 32,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
}
GEMMA3N = NARROW | {"num_hidden_layers": 5, "intermediate_size": [96] * 5, "num_kv_shared_layers": 2}
GEMMA3N |= {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
    "laurel_rank": 8,
    "sliding_window": 32,
}
GEMMA3N |= {"altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 5}
GEMMA3N |= {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
}
BERT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
BERT |= {"max_position_embeddings": 130, "pad_token_id": 0, "is_decoder": True}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "vocab_size": 320, "state_size": 8}
MAMBA |= {"n_groups": 1, "chunk_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STORED = {
    "apertus": COMMON,  # numbers of the activation, without dimensions, are persistent buffers
    "gemma4_text": GEMMA4,  # a persistent buffer in each block
    "gemma3n_text": GEMMA3N,  # initialized by the model inside the model
    "camembert": BERT,  # the shared weight's first name is not the stored one
    "mamba2": MAMBA,  # config.json has an infinity
    "gpt2": GPT2,
    "qwen2": FAMILIES["qwen2"],
}


def any_weights(family, shape, folder):
    """A model of the library with no value that an initialization would have given it, saved."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in model.state_dict().values()}.values():
            tensor.add_(0.02 * torch.randn_like(tensor) + 0.01)
    model.save_pretrained(folder)


def named_tensors(model):
    """{name: whole tensor} of all parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in named}


@pytest.mark.parametrize("family", STORED)
def test_a_model_is_loaded_and_saved_as_by_the_library(family, tmp_path, world_of_one):
    """To the last bit: parameters, all buffers, and logits."""
    any_weights(family, STORED[family], tmp_path / "given")
    config = hf_fsdp.Config(
        model=str(tmp_path / "given"), device="cpu", tokens="bytes", save=str(tmp_path / "saved"), seq_len=LENGTH
    )
    model = hf_fsdp.build(config, world_of_one).eval()
    theirs = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    ours, wanted = named_tensors(model), named_tensors(theirs)
    assert ours.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []
    hf_export.save(model, config.architecture, config, config.save)
    again, about = AutoModelForCausalLM.from_pretrained(config.save, dtype=torch.float32, output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]
    with torch.no_grad():
        logits = [each(INPUTS, use_cache=False).logits for each in (theirs, model, again)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


OLD = {
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    "gpt2": {"h.0.attn.bias": torch.ones(1, 1, 128, 128)},
    "qwen2": {"lm_head.weight": None},  # what it is tied to, once more
}


@pytest.mark.parametrize("family", OLD)
def test_tensors_that_the_library_leaves_out_are_left_out(family, weights, tmp_path, world_of_one):
    import shutil

    copy = shutil.copytree(weights[family], tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(copy)
    for name, value in OLD[family].items():
        add_tensor(copy, name, theirs.get_input_embeddings().weight.detach() if value is None else value)
    config = hf_fsdp.Config(model=str(copy), strategy="single", device="cpu", tokens="bytes")
    model = hf_fsdp.build(config, world_of_one)
    assert [name for name, p in theirs.named_parameters() if not torch.equal(p, model.get_parameter(name))] == []


def test_a_family_whose_modules_do_not_initialize_a_tensor_is_refused(tmp_path, world_of_one):
    """Apertus has numbers that only its constructor knows, and they are in no file where there is none."""
    AutoConfig.for_model("apertus", **COMMON).save_pretrained(tmp_path)
    config = hf_fsdp.Config(config=str(tmp_path), strategy="single", device="cpu")
    with pytest.raises(UserError, match="no value for model.layers.0.mlp.act_fn.*its module does not initialize it"):
        hf_fsdp.build(config, world_of_one)


# ---- dropout


DROPPING = {"device": "cpu", "batch_size": 2, "seq_len": 16, "lr": 1e-2, "max_steps": 4}


def _resumed(me, folder):
    """(losses of an uninterrupted run, of a begun one and of its end, the refusal to go on, what saves all the same)."""
    meters.TRACED_STEPS = range(0)  # tracing takes long

    def train(**run):
        config = hf_fsdp.Config(config=f"{folder}/config.json", **DROPPING | run)
        result = hf_fsdp.train(config, me)
        records.report(config.script, config, me, result, elapsed=0.0)
        return result

    kept = {"checkpoint": f"{folder}/c", "resume": True}
    losses = [train(save=f"{folder}/uninterrupted")["losses"]]
    losses += [train(**kept, max_steps=2)["losses"], train(**kept)["losses"]]
    with pytest.raises(UserError) as refusal:
        train(**kept)
    return *losses, str(refusal.value), train(**kept, save=f"{folder}/resumed", record=f"{folder}/record.json")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A folder with models and a checkpoint, and what ``_resumed`` returns."""
    folder = tmp_path_factory.mktemp("resumed")
    dropout = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
    AutoConfig.for_model("gpt2", **GPT2 | dropout).save_pretrained(folder)
    return folder, *notebook_ranks.on_ranks(_resumed, str(folder), ranks=2, cluster=HERE, timeout=120)[0]


def test_a_resumed_run_with_dropout_is_the_uninterrupted_one(resumed):
    """To the last bit, on as many ranks."""
    folder, whole, begun, rest, *_ = resumed
    assert len(begun) == 2 and begun + rest == whole
    models = [load_file(folder / name / "model.safetensors") for name in ("uninterrupted", "resumed")]
    assert [name for name, value in models[0].items() if not torch.equal(value, models[1][name])] == []


def test_a_run_that_was_ended_after_its_last_step_still_saves_its_model(resumed):
    folder, *_, refusal, saved = resumed
    assert "nothing left to train: the checkpoint is at step 4 of 4" in refusal
    trained = dcp_reading.tensors(checkpoints.latest(folder / "c"), "model.")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "resumed").state_dict()
    assert trained and all(torch.equal(loaded[name.removeprefix("model.")], value) for name, value in trained.items())
    about = json.loads((folder / "record.json").read_text())
    for result in (saved, about):
        assert result["first_step"] == 4 and result["losses"] == []


# ---- what does not fit


@pytest.mark.parametrize("given", [{"strategy": "single"}, {"strategy": "ddp"}, {}, {"lora": 4}], ids=str)
def test_what_does_not_fit_is_refused_before_it_is_built(given, shapes, monkeypatch, world_of_one):
    me = dataclasses.replace(world_of_one, world_size=1 if given.get("strategy") == "single" else 4)
    config = hf_fsdp.Config(config=str(shapes["llama"]), device="cpu", **given)
    run = {"script": "hf_fsdp.py", "config": asdict(config), "ranks": me.world_size, "device": "cpu"}
    needed = predict.total(predict.plan_of(run, at_least=True).peak()[1])
    monkeypatch.setattr(meters, "free_memory_of_a_rank", lambda *_: needed)
    preflight.refuse_if_too_big(config, me)
    monkeypatch.setattr(meters, "free_memory_of_a_rank", lambda *_: needed - 1)
    with pytest.raises(UserError, match=f"--config {shapes['llama']} with --strategy .* needs .*take a smaller model"):
        hf_fsdp.build(config, me)


def test_what_is_not_planned_is_not_refused(tmp_path, monkeypatch, world_of_one):
    AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2, vocab_size=256).save_pretrained(tmp_path)
    monkeypatch.setattr(meters, "free_memory_of_a_rank", lambda *_: 1)
    preflight.refuse_if_too_big(hf_fsdp.Config(config=str(tmp_path)), world_of_one)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_adapters_need_no_less_than_what_is_refused_by(recompute, shapes, world_of_one):
    config = hf_fsdp.Config(config=str(shapes["llama"]), device="cpu", strategy="single", lora=4, recompute=recompute)
    model = hf_fsdp.build(config, world_of_one)
    optimizer, batch = hf_fsdp.make_optimizer(model, config), (torch.arange(256).view(1, 2, 128),) * 2
    hf_fsdp.train_step(model, optimizer, *batch, config)
    step = trace.StepTrace(model, optimizer, torch.device("cpu"))
    step.batch = batch
    with step:
        hf_fsdp.train_step(model, optimizer, *batch, config)
    run = {"script": "hf_fsdp.py", "config": asdict(config), "ranks": 1, "device": "cpu"}
    least, measured = predict.total(predict.plan_of(run, at_least=True).peak()[1]), trace.peak(step.timeline())[1]
    assert 0.7 * measured < least <= measured


# ---- what a user can get wrong: a sentence, exit code 2


def rename(folder, new):
    """Rename the tensors of a model's files; those without a new name are left out."""
    for each in folder.glob("model*.safetensors"):
        tensors = {new(name): tensor for name, tensor in load_file(each).items() if new(name)}
        save_file(tensors, each, {"format": "pt"})


def broken(folder, what, tmp_path):
    """A copy of a model's folder in which something is not right; and a word of the sentence that says so."""
    import shutil

    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    about = json.loads((copy / "config.json").read_text())
    file = copy / "model-00002-of-00004.safetensors"
    match what:
        case "no config":
            (copy / "config.json").unlink()
        case "no json":
            (copy / "config.json").write_text("{")
        case "unknown":
            (copy / "config.json").write_text(json.dumps(about | {"model_type": "mine"}))
        case "no model's":
            (copy / "config.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
        case "remote code":
            remote = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
            (copy / "config.json").write_text(json.dumps(about | remote))
            (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        case "no language model":
            (copy / "config.json").write_text(json.dumps({"model_type": "vit"}))
        case "several models":
            parts = {"text_config": about, "vision_config": {}}
            (copy / "config.json").write_text(json.dumps({"model_type": "gemma3"} | parts))
        case "quantized":
            how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
            (copy / "config.json").write_text(json.dumps(about | {"quantization_config": how}))
        case "scales":  # of weights in 8 bits, without a word in config.json
            add_tensor(copy, "model.layers.0.mlp.up_proj.weight_scale_inv", torch.ones(2, 1))
        case "missing file":
            file.unlink()
        case "truncated file":
            file.write_bytes(file.read_bytes()[:-100])
        case "another model":
            (copy / "config.json").write_text(json.dumps(about | {"hidden_size": 128, "head_dim": 16}))
        case "more layers":
            (copy / "config.json").write_text(json.dumps(about | {"num_hidden_layers": 4}))
        case "fewer layers":
            (copy / "config.json").write_text(json.dumps(about | {"num_hidden_layers": 2}))
        case "other names":
            rename(copy, lambda name: name.replace("layers.1.mlp.up_", "layers.1.mlp.upper_"))
        case "prefix":
            rename(copy, lambda name: f"module.{name}")
        case "no head":
            rename(copy, lambda name: None if name == "lm_head.weight" else name)
        case "two values of one weight":
            (copy / "config.json").write_text(json.dumps(about | {"tie_word_embeddings": True}))
        case "no value":
            add_tensor(copy, "model.norm.weight", torch.full((64,), torch.nan))
        case "no weights":
            for each in copy.glob("model*"):
                each.unlink()
        case "damaged index":
            (copy / "model.safetensors.index.json").write_text("[]")
        case "small vocabulary":
            (copy / "config.json").write_text(json.dumps(about | {"vocab_size": 100}))
        case "damaged tokenizer":
            (copy / "tokenizer.json").write_text("{}")
    return copy


def add_tensor(folder, name, value):
    """Put a tensor into a file of its own in a model's folder, in the place of another of that name."""
    index = folder / "model.safetensors.index.json"
    about = json.loads(index.read_text())
    about["weight_map"][name] = "more.safetensors"
    index.write_text(json.dumps(about))
    save_file({name: value}, folder / "more.safetensors")


SENTENCES = {
    "no config": "cannot be read",
    "no json": "is not JSON",
    "no model's": "has no model_type, so it is no model's",
    "unknown": "'mine' is not one it knows",
    "remote code": "code of its own, which is never run here",
    "no language model": "no causal language model",
    "several models": "has no tensor model.language_model.layers.0",
    "quantized": "its weights are quantized (fp8): take the model in bf16 or fp32",
    "scales": "does not have, such as model.layers.0.mlp.up_proj.weight_scale_inv: its config.json",
    "missing file": "model-00002-of-00004.safetensors is missing",
    "truncated file": "is not whole",
    "another model": "has the shape",
    "more layers": "has no tensor model.layers.3",
    "fewer layers": "does not have, such as model.layers.2",
    "other names": "has no tensor model.layers.1.mlp.up_proj.weight, but has model.layers.1.mlp.upper_proj.weight",
    "prefix": "save it without the prefix module.",
    "no head": "it is a base model",
    "two values of one weight": "has two values of one weight",
    "no value": "no value for model.norm.weight: is a file damaged?",
    "no weights": "there is no model.safetensors in",
    "damaged index": "index.json cannot be read",
    "small vocabulary": "vocabulary ends at 99",
    "no tokenizer": "give --tokens bytes",
    "damaged tokenizer": "cannot read the tokenizer of",
}


@pytest.mark.parametrize("what", SENTENCES)
def test_bad_input_is_a_sentence(what, weights, tmp_path, world_of_one):
    copy = broken(weights["llama"], what, tmp_path)
    tokens = "model" if "tokenizer" in what else "bytes"
    config = hf_fsdp.Config(model=str(copy), strategy="single", device="cpu", seq_len=32, tokens=tokens)
    with pytest.raises(UserError, match=re.escape(SENTENCES[what])):
        hf_fsdp.train(config, world_of_one)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give --model FOLDER"),
        (["--model", "a", "--config", "b"], "give --model FOLDER"),
        (["--config", "nowhere"], "cannot be read"),
        (["--config", "nowhere", "--tokens", "model"], "--tokens model needs --model"),
        (["--config", "CONFIG", "--data", "nowhere", "--seq-len", "64"], "--data nowhere cannot be read"),
        (["--config", "CONFIG", "--data", "SHORT", "--seq-len", "64"], "it has too few tokens"),
        (
            ["--config", "CONFIG", "--seq-len", "4000"],
            "more than the 128 positions that the model supports: give --seq-len 128",
        ),
        (["--config", "CONFIG", "--save", "."], "is there already"),
    ],
)
def test_a_wrong_command_is_a_sentence(words, sentence, shapes, tmp_path):
    (tmp_path / "short").write_text("l")
    place = {"CONFIG": str(shapes["llama"] / "config.json"), "SHORT": str(tmp_path / "short")}
    words = [place.get(word, word) for word in words]
    run = script("hf_fsdp.py", "--strategy", "single", "--device", "cpu", *words)
    assert run.returncode == 2 and sentence in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_a_package_that_a_model_needs_is_named(shapes, monkeypatch):
    def needs_timm(*_, **__):
        raise ImportError("TimmWrapperModel requires the timm library but it was not found.\n`pip install timm`")

    monkeypatch.setattr(hf_models.AutoModelForCausalLM, "from_config", needs_timm)
    architecture = hf_models.configuration(str(shapes["llama"]), "--config")
    with pytest.raises(UserError, match="^llama: TimmWrapperModel requires the timm library but it was not found.$"):
        hf_models.on_meta(architecture, torch.float32)
