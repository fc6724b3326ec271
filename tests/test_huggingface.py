"""Models of others: the planner counts their parameters as ``transformers`` does, and plans what their blocks do otherwise."""

import math

import plan
import pytest
import torch
import transformers
from commands import refused
from labkit.measuring.trace import StepTrace, peak, total
from planner import predict
from planner.models import huggingface, networks

# As they were published, but for what has nothing to do with shapes.
PUBLISHED = {
    "llama-2-7b": {"model_type": "llama"}
    | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "llama-3-8b": {"model_type": "llama"}
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "llama-3.1-70b": {"model_type": "llama"}
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {"model_type": "llama"}
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "mistral-7b": {"model_type": "mistral"}
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "mistral-nemo": {"model_type": "mistral"}
    | {
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen2-7b": {"model_type": "qwen2"}
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {"model_type": "qwen2"}
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {"model_type": "qwen3"}
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {"model_type": "qwen3"}
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    "gemma-2b": {"model_type": "gemma"}
    | {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 256000,
    },
    "gemma-7b": {"model_type": "gemma"}
    | {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "vocab_size": 256000,
    },
    "gemma-2-9b": {"model_type": "gemma2"}
    | {
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 256000,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma-3-1b": {"model_type": "gemma3_text"}
    | {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "phi-2": {"model_type": "phi"}
    | {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 51200,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "tie_word_embeddings": False,
    },
    "phi-3-mini": {"model_type": "phi3"}
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32064,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
    },
    "phi-4": {"model_type": "phi3"}
    | {
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "vocab_size": 100352,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "gpt2": {"model_type": "gpt2"}
    | {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
    "gpt2-xl": {"model_type": "gpt2"}
    | {"n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "vocab_size": 50257},
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LONG = {"precision": "bf16", "recompute": "full", "batch_size": 1}
GROUPED = SMALL | {"num_key_value_heads": 2}


def theirs(config: dict):
    """The library's own module of a configuration."""
    options = {name: value for name, value in config.items() if name != "model_type"}
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **options)
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_counted_as_by_transformers(name):
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in theirs(PUBLISHED[name]).parameters())
    assert networks.gpt(huggingface.shape_of(PUBLISHED[name]), batch_size=1, seq_len=128).numel == counted


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"} | GROUPED,
        {"model_type": "gemma", "head_dim": 32, "hidden_activation": "gelu"} | GROUPED,
        {"model_type": "qwen3", "head_dim": 32} | GROUPED,
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 100}
        | {"activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    ],
    ids=lambda config: config["model_type"],
)
def test_the_peak_is_near_that_of_transformers_modules(config):
    """Near, not equal: their modules compute some of it in other steps."""
    torch.manual_seed(0)
    model = theirs(config)
    model.config.use_cache = False
    tokens = torch.randint(0, 100, (3, 33))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step():
        logits = model(tokens).logits
        torch.nn.functional.cross_entropy(logits.view(-1, 100), tokens.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    trace = StepTrace(model, optimizer, torch.device("cpu"))
    trace.batch = (tokens,)
    with trace:
        step()
    planned = predict.Plan(networks.gpt(huggingface.shape_of(config), 3, 33), "single")
    assert predict.total(planned.peak()[1]) == pytest.approx(total(peak(trace.timeline())[0]), rel=0.02)


def test_a_window_saves_operations_and_no_parameters():
    wide = PUBLISHED["mistral-7b"] | {"sliding_window": None}
    shapes = [huggingface.shape_of(config) for config in (wide, PUBLISHED["mistral-7b"])]
    everything, near = (networks.gpt(shape, 1, 16384) for shape in shapes)
    assert everything.numel == near.numel
    saved = 12 * 32 * 4096 * (16384 - 4096)  # layers, width, tokens that none looks at
    assert everything.flops - near.flops == saved


def test_gemma_2_has_windows_in_every_other_layer_and_gemma_3_in_five_of_six():
    second, third = (huggingface.shape_of(PUBLISHED[name]) for name in ("gemma-2-9b", "gemma-3-1b"))
    assert second.attended_tokens(8192) == (4096 + 8192) / 2
    assert math.isclose(third.attended_tokens(8192), (22 * 512 + 4 * 8192) / 26)


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_can_be_planned_under_fsdp(name):
    shape = huggingface.shape_of(PUBLISHED[name])
    length = min(shape.learned_positions or 2048, 2048)
    for recompute in ("none", "full"):
        network = networks.gpt(shape, 1, length, recompute)
        planned = predict.Plan(network, "fsdp2", 8, precision="bf16", on_gpu=True)
        kept = 12 * network.numel / 8
        assert kept <= predict.total(planned.persistent()) <= 1.01 * kept
        assert predict.total(planned.peak()[1]) > kept


@pytest.mark.parametrize("family", huggingface.FAMILIES)
def test_dropout_is_seen_by_whatever_name_the_family_has_for_it(family):
    """Each probability of the library's configuration alone, except those of GPT-2's other heads."""
    theirs = transformers.AutoConfig.for_model(family).to_dict()
    names = [name for name in theirs if "drop" in name and not name.startswith("summary_")]
    assert names
    without = theirs | dict.fromkeys(names, 0.0)
    assert not huggingface.shape_of(without).dropout
    for name in names:
        assert huggingface.shape_of(without | {name: 0.1}).dropout, name
    left_to_the_default = {name: value for name, value in theirs.items() if name not in names}
    assert huggingface.shape_of(left_to_the_default).dropout == any(theirs[name] for name in names)


def test_an_answer_without_dropout_says_so(tmp_path):
    import json

    def answers(**options):
        given = {"config": str(tmp_path), "ranks": 2, "seq_len": 512, "gpu": "rtx4090"} | options
        return plan.answer(plan.Config(**LONG | given))

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["gpt2"]))
    for options in ({}, {"find": "batch-size"}):
        assert "fits without its dropout in 23.5 GiB" in answers(**options)
        assert ", this model's dropout" in answers(**options)
    assert ", this model's dropout" in answers(sweep=True)
    assert json.loads(answers(json=True))["not_modelled"] == ["dropout"]
    none = PUBLISHED["gpt2"] | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    (tmp_path / "config.json").write_text(json.dumps(none))
    assert "its dropout" not in answers() and "model's dropout" not in answers()
    assert json.loads(answers(json=True))["not_modelled"] == []


def test_a_family_that_is_not_known_is_refused():
    with refused("model_type 'rwkv'"):
        huggingface.shape_of(GROUPED | {"model_type": "rwkv"})
    with refused("n_positions"):
        huggingface.shape_of({"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100})


def test_a_folder_stands_for_its_config(tmp_path):
    import json

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3-0.6b"]))
    answer = plan.answer(plan.Config(**LONG, config=str(tmp_path), gpu="rtx4090", ranks=2, seq_len=2048))
    assert "596,049,920 parameters" in answer and "fits in 23.5 GiB of rtx4090" in answer
