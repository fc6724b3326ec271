# SPDX-License-Identifier: BSD-3-Clause
"""Families of third-party models: the planner counts as ``transformers`` does, and plans the peak of the library's own step."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from labkit.measuring.trace import StepTrace, peak, total
from planner import UserError, predict
from planner.models import huggingface, networks
from torch.utils.checkpoint import checkpoint
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

transformers.logging.set_verbosity_error()
SAMPLES = Path(huggingface.__file__).parents[2] / "samples"
PUBLISHED = json.loads((SAMPLES / "published.json").read_text())["models"]
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}  # tokens that a small vocabulary has
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4} | SPECIAL
SIZES |= {"vocab_size": 100, "num_key_value_heads": 2}
EVEN_HEADS = {"num_key_value_heads": 4}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 100} | SPECIAL
DRY = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
GEMMA_4 = {"head_dim": 16, "num_hidden_layers": 8, "vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 8}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
# {model_type: (a small configuration, variants of it)}
SMALL = {
    "llama": ({}, [{"attention_bias": True}, {"mlp_bias": True}, {"tie_word_embeddings": True}, {"head_dim": 32}]),
    "mistral": ({"sliding_window": 32}, [{"sliding_window": None}, {"head_dim": 32}]),
    "ministral3": ({"head_dim": 16}, [{"tie_word_embeddings": True}]),
    "qwen2": ({}, [{"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}]),
    "qwen3": ({"head_dim": 32}, [{"attention_bias": True}]),
    "gemma": ({"head_dim": 32}, [{"attention_bias": True}, {"tie_word_embeddings": False}]),
    "gemma2": ({"head_dim": 32}, [{"attention_bias": True}, {"attn_logit_softcapping": None}]),
    "gemma3_text": (
        {"head_dim": 32, "sliding_window": 32, "num_hidden_layers": 6, "num_key_value_heads": 1},
        [{"attention_bias": True, "num_key_value_heads": 2}],
    ),
    "gemma4_text": (
        GEMMA_4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        [
            {"attention_bias": True, "global_head_dim": 32},
            {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24},
        ],
    ),
    "qwen3_5_text": (LINEAR | {"head_dim": 16}, [{"attention_bias": True}, {"tie_word_embeddings": True}]),
    "phi": (EVEN_HEADS, [{"num_key_value_heads": None}, {"qk_layernorm": True}]),
    "phi3": ({}, [{"partial_rotary_factor": 0.5}, {"tie_word_embeddings": True}, {"sliding_window": 32}]),
    "gpt2": (DRY, [{"n_inner": 96}, {"tie_word_embeddings": False}, {"add_cross_attention": True}]),
    "gpt_neox": (EVEN_HEADS, [{"attention_bias": False}, {"use_parallel_residual": False}]),
    "smollm3": ({}, [{"attention_bias": True, "mlp_bias": True}, {"no_rope_layers": [1, 0, 1, 0]}]),
    "olmo2": ({}, [{"attention_bias": True}, {"tie_word_embeddings": True}]),
    "olmo3": ({"sliding_window": 32}, [{"attention_bias": True}, {"layer_types": ["full_attention"] * 4}]),
    "granite": ({}, [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}]),
    "cohere2": ({"sliding_window": 32}, [{"attention_bias": True}, {"num_key_value_heads": None}]),
    "starcoder2": ({}, [{"use_bias": False}, {"tie_word_embeddings": False}, {"sliding_window": 32}]),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, [{"head_dim": 32}, {"tie_word_embeddings": True}]),
    "qwen2_moe": (
        ROUTED | {"num_experts": 8, "shared_expert_intermediate_size": 96},
        [{"qkv_bias": False}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}],
    ),
    "qwen3_moe": (ROUTED | {"num_experts": 8, "head_dim": 32}, [{"attention_bias": True}, {"mlp_only_layers": [1]}]),
    "olmoe": ({"num_experts": 8, "num_experts_per_tok": 2}, [{"attention_bias": True}, {"clip_qkv": 8.0}]),
    "gpt_oss": ({"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}, [{"attention_bias": False}]),
    "deepseek_v3": (
        EVEN_HEADS | ROUTED | LATENT | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
        [{"q_lora_rank": None}, {"attention_bias": True}, {"first_k_dense_replace": 1, "n_shared_experts": 2}],
    ),
    "glm4_moe": (
        ROUTED | {"n_routed_experts": 8, "head_dim": 32},
        [{"attention_bias": True, "use_qk_norm": True}, {"first_k_dense_replace": 2}],
    ),
    "llama4_text": (
        {"num_local_experts": 4, "intermediate_size_mlp": 96, "head_dim": 16},
        [{"interleave_moe_layer_step": 2}, {"attention_bias": True, "use_qk_norm": False}, {"moe_layers": [1]}],
    ),
}


def small(family: str) -> dict:
    """Return a small configuration of a family."""
    return {"model_type": family} | (GPT2 if family == "gpt2" else SIZES) | SMALL[family][0]


def theirs(config: dict):
    """Return the library's own module of a configuration; of its language model, if it has a tower."""
    values = {name: value for name, value in config.items() if name != "model_type"}
    architecture = CONFIG_MAPPING[config["model_type"]](**values).get_text_config()
    return transformers.AutoModelForCausalLM.from_config(architecture)


def counts(config: dict) -> tuple[int, int]:
    """Return the parameters of the library's module on the meta device: (all, those that a token uses)."""
    with torch.device("meta"):
        model = theirs(config)
    every = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    names = ("num_experts_per_tok", "top_k_experts"), ("n_routed_experts", "num_experts", "num_local_experts")
    chosen, count = (next((values for name in kind if (values := config.get(name))), 1) for kind in names)
    return every, every - experts + (experts * chosen // count if experts else 0)


def planned(config: dict, seq_len: int = 64, recompute: str = "none") -> networks.Blueprint:
    return networks.gpt(huggingface.shape_of(config), 2, seq_len, recompute)


def test_there_is_a_small_configuration_of_every_family():
    assert set(SMALL) == set(huggingface.FAMILIES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters_are_counted_as_by_transformers(name):
    blueprint = planned(PUBLISHED[name])
    assert (blueprint.numel, blueprint.active_numel) == counts({"pad_token_id": 0} | PUBLISHED[name])


def test_published_mixtures_have_the_sizes_that_their_names_state():
    """In billions: all parameters, and those that a token uses."""
    stated = {"mixtral-8x7b": (46.7, 12.9), "mixtral-8x22b": (140.6, 39.1), "qwen1.5-moe-a2.7b": (14.3, 2.7)}
    stated |= {"qwen3-235b-a22b": (235, 22), "qwen3-30b-a3b": (30.5, 3.3), "olmoe-1b-7b": (6.9, 1.3)}
    for name, sizes in stated.items():
        blueprint = planned(PUBLISHED[name])
        assert (blueprint.numel / 1e9, blueprint.active_numel / 1e9) == pytest.approx(sizes, rel=0.02), name


@pytest.mark.parametrize("family", SMALL)
def test_variants_are_counted_as_by_transformers_or_refused(family):
    config = small(family)
    left_out = {name: value for name, value in config.items() if name != "num_key_value_heads"}
    more_heads = {"num_attention_heads": 32, "hidden_size": 128}  # which the default of each class divides
    defaulted = [left_out | more_heads] if left_out != config else []
    for variant in (config, *(config | change for change in SMALL[family][1]), *defaulted):
        try:
            blueprint = planned(variant)
        except UserError as error:
            assert "is not planned" in str(error)
            continue
        assert (blueprint.numel, blueprint.active_numel) == counts(variant), variant


@pytest.mark.parametrize("family", huggingface.FAMILIES)
def test_defaults_are_those_of_the_library_s_classes(family):
    theirs = CONFIG_MAPPING[family]().to_dict()
    for name, value in huggingface.FAMILIES[family][1].items():
        if value is None and name in ("num_key_value_heads", "layer_types"):
            continue  # the class has already computed it
        assert theirs[name] == value, name


def test_a_language_model_in_a_larger_configuration_has_the_defaults_of_its_class():
    for kind, (inner, sizes) in huggingface.NESTED.items():
        defaults = CONFIG_MAPPING[inner]()
        assert {name: getattr(defaults, name) for name in sizes} == sizes, kind


MODELED = [family for family in SMALL if not planned(small(family)).unmodeled]


RECOMPUTED = ("llama", "mistral", "gemma2", "gemma3_text", "phi3", "qwen2_moe", "glm4_moe")  # each walks differently
CASES = [(family, "none", {}) for family in MODELED] + [(family, "full", {}) for family in RECOMPUTED]
CASES += [("gpt2", "none", {"embd_pdrop": 0.1, "resid_pdrop": 0.1}), ("phi", "full", {"resid_pdrop": 0.1})]


@pytest.mark.parametrize(("family", "recompute", "dropout"), CASES)
def test_the_peak_is_that_of_the_library_s_own_step(family, recompute, dropout):
    config = small(family) | dropout
    torch.manual_seed(0)
    model = theirs(config)
    model.config.use_cache = False
    for block in model.base_model.h if family == "gpt2" else model.base_model.layers:
        if recompute == "full":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    tokens = torch.randint(0, 100, (2, 64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def compute_loss():
        logits = model(tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.view(-1, 100), tokens.view(-1))

    def step():
        compute_loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    trace = StepTrace(model, optimizer, torch.device("cpu"))
    trace.batch = (tokens,)
    with trace:
        step()
    plan = predict.Plan(planned(config, recompute=recompute), "single")
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert predict.total(plan.persistent()) == 12 * plan.blueprint.numel + 4 * len(list(model.parameters())) + buffers
    assert predict.total(plan.peak()[1]) == pytest.approx(total(peak(trace.timeline())[0]), rel=0.002)


@pytest.mark.parametrize("family", sorted(set(SMALL) - set(MODELED)))
def test_a_peak_that_is_not_modeled_is_refused_and_the_rest_is_planned(family):
    blueprint = planned(small(family))
    plan = predict.Plan(blueprint, "fsdp2", 2)
    with pytest.raises(UserError, match="no peak is planned by arithmetic for"):
        plan.peak()
    kept = 12 * blueprint.numel / 2
    assert kept <= predict.total(plan.persistent()) <= 1.02 * kept
    gathered = sum(item["bytes"] * item["count"] for item in plan.traffic() if item["kind"] == "all-gather")
    assert gathered > 4 * blueprint.numel
