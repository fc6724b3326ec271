# SPDX-License-Identifier: BSD-3-Clause
"""Shapes of third-party models, from the config.json that Hugging Face stores with the weights. Imports no torch.

planner/models/families.py states what each family differs in. Parameter counts are those of the ``transformers`` library's
modules, and operators are those modules' own (planner/models/library.py): with and without recomputation, the peak is
that of the library's own step. Of a family whose operators are not modeled (``Blueprint.unmodeled``), only what persists
and the traffic can be planned. Of a model with an image or audio tower, the shape is that of its language model.
"""

import json
from pathlib import Path

from planner import UserError
from planner.models import families
from planner.models.shapes import GPTShape

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
NARROW_WINDOWS = {"sliding_window": 4096, "layer_types": None}

# model_type: (its function, the defaults of the library's class, as far as they matter here). A configuration that is
# part of another one leaves out more: see NESTED.
FAMILIES = {
    "llama": (families.llama, UNTIED),
    "mistral": (families.mistral, UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral3": (families.ministral3, UNTIED | {"num_key_value_heads": 8, "head_dim": 128}),
    "qwen2": (families.qwen2, UNTIED | {"num_key_value_heads": 32, "max_window_layers": 28}),
    "qwen3": (families.qwen3, UNTIED | {"num_key_value_heads": 32, "max_window_layers": 28, "head_dim": 128}),
    "qwen3_5_text": (
        families.qwen3_5,
        UNTIED
        | {"num_key_value_heads": 4, "head_dim": 256, "attention_bias": False, "linear_conv_kernel_dim": 4}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    ),
    "gemma": (families.gemma, TIED | {"num_key_value_heads": 16, "head_dim": 256}),
    "gemma2": (
        families.gemma2,
        TIED
        | NARROW_WINDOWS
        | {"num_key_value_heads": 4, "head_dim": 256}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": (
        families.gemma3,
        TIED
        | NARROW_WINDOWS
        | {"num_key_value_heads": 4, "head_dim": 256}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma4_text": (
        families.gemma4,
        TIED
        | {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512, "final_logit_softcapping": None}
        | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 0}
        | {"attention_bias": False, "attention_k_eq_v": False}
        | {"use_double_wide_mlp": False, "enable_moe_block": False},
    ),
    "phi": (families.phi, UNTIED | {"num_key_value_heads": None, "qk_layernorm": False, "hidden_act": "gelu_new"}),
    "phi3": (families.phi3, UNTIED | {"num_key_value_heads": None}),
    "gpt2": (families.gpt2, TIED | {"activation_function": "gelu_new"}),
    "gpt_neox": (
        families.gpt_neox,
        UNTIED | {"attention_bias": True, "use_parallel_residual": True, "hidden_act": "gelu"},
    ),
    "smollm3": (families.smollm3, TIED | {"num_key_value_heads": 4, "no_rope_layer_interval": 4}),
    "olmo2": (families.olmo2, UNTIED),
    "olmo3": (families.olmo3, UNTIED | NARROW_WINDOWS),
    "granite": (families.granite, UNTIED),
    "cohere2": (families.cohere2, TIED | NARROW_WINDOWS),
    "starcoder2": (
        families.starcoder2,
        TIED | {"num_key_value_heads": 2, "use_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "mixtral": (
        families.mixtral,
        UNTIED | {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        families.qwen2_moe,
        UNTIED
        | {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | {"decoder_sparse_step": 1, "qkv_bias": True},
    ),
    "qwen3_moe": (
        families.qwen3_moe,
        UNTIED
        | {"num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False}
        | {"moe_intermediate_size": 768, "decoder_sparse_step": 1},
    ),
    "olmoe": (families.olmoe, UNTIED | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}),
    "gpt_oss": (
        families.gpt_oss,
        UNTIED
        | {"num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4}
        | {"attention_bias": True, "sliding_window": 128, "layer_types": None},
    ),
    "deepseek_v3": (
        families.deepseek_v3,
        UNTIED
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048}
        | {"first_k_dense_replace": 3, "norm_topk_prob": True, "attention_bias": False, "q_lora_rank": 1536}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    ),
    "glm4_moe": (
        families.glm4_moe,
        UNTIED
        | {"num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1}
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "norm_topk_prob": True}
        | {"attention_bias": False, "use_qk_norm": False},
    ),
    "llama4_text": (
        families.llama4,
        UNTIED
        | {"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1}
        | {"intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4}
        | {"use_qk_norm": True, "attention_chunk_size": 8192, "attn_temperature_tuning": True},
    ),
}
# model_type of a model with a tower: (model_type of its language model, sizes of that class, which text_config may leave out).
NESTED = {
    "gemma3": (
        "gemma3_text",
        {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216}
        | {"num_hidden_layers": 26, "num_attention_heads": 8},
    ),
    "gemma4": (
        "gemma4_text",
        {"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216}
        | {"num_hidden_layers": 30, "num_attention_heads": 8},
    ),
    "llama4": (
        "llama4_text",
        {"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192}
        | {"num_hidden_layers": 48, "num_attention_heads": 40},
    ),
    "mistral3": ("mistral", {}),
    "qwen3_5": (
        "qwen3_5_text",
        {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288}
        | {"num_hidden_layers": 32, "num_attention_heads": 16},
    ),
}
# The key of each size: in most configurations, and in GPT-2's.
KEYS = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size", "vocab_size"),
}
LARGEST = 10**9  # a larger size is a mistake


def load(path: str, option: str = "--config") -> GPTShape:
    """Read the shape that a configuration describes.

    Args:
        path: a config.json, or the folder it is in.
        option: that the path is from, for messages.

    Raises:
        UserError: it cannot be read, or its family is not known.
    """
    try:
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        config = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"{option} {path} cannot be read ({error.strerror}): name a model's config.json") from None
    except (ValueError, RecursionError):
        raise UserError(f"{option} {path} is not JSON: name a model's config.json") from None
    if not isinstance(config, dict):
        raise UserError(f"{option} {path} has no named values: name a model's config.json")
    try:
        return shape_of(config)
    except UserError as error:
        raise UserError(f"{option} {path}: {error}") from None


def shape_of(config: dict) -> GPTShape:
    """Return the shape that a configuration describes; of a model with a tower, that of its language model.

    Raises:
        UserError: its family is not known, or a size is missing.
    """
    family = config.get("model_type")
    if family in NESTED and isinstance(config.get("text_config"), dict):
        kind, sizes = NESTED[family]
        return shape_of({"model_type": kind} | sizes | config["text_config"])
    if family not in FAMILIES:
        raise UserError(f"model_type {family!r} is not planned: take one of {', '.join(FAMILIES)}")
    fields_of, defaults = FAMILIES[family]
    sizes = {field: _size(config, keys[family == "gpt2"], family) for field, keys in KEYS.items()}
    if family == "gpt2":
        _size(config, "n_positions", family)
    config = defaults | config | sizes
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = sizes["num_attention_heads"]
    common = {
        "num_key_value_heads": _size(config, "num_key_value_heads", family),
        "tie_word_embeddings": bool(config["tie_word_embeddings"]),
        "explicit_head_dim": config.get("head_dim"),
        "biases": families.biases(config),
        "dropout": _dropped(config, family),
        "library": True,
    }
    try:
        return GPTShape(**sizes | common | fields_of(config))
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
    ) as error:  # a value of a kind that the family does not have
        raise UserError(f"its values do not describe a {family} model ({type(error).__name__}: {error})") from None


# What a probability is of, by the names that the families have for it
DROPOUTS = {
    "embd_pdrop": {"embedding"},
    "embedding_dropout": {"embedding"},
    "resid_pdrop": {"residual"},
    "residual_dropout": {"residual"},
    "hidden_dropout": {"embedding", "residual"},
    "attn_pdrop": {"attention"},
    "attention_dropout": {"attention"},
}


def _dropped(config: dict, family: str) -> frozenset:
    """Return ``GPTShape.dropout``; GPT-2 drops elements where its configuration does not say, and Phi-3 none of embeddings."""
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1) if family == "gpt2" else {}
    rates |= {name: value for name, value in config.items() if "drop" in name}
    ignored = ("summary_", "classifier_", *(["embd_"] if family == "phi3" else []))  # heads of GPT-2, and of GPT-NeoX
    chosen = (name for name, rate in rates.items() if rate and not name.startswith(ignored))
    return frozenset().union(*(DROPOUTS.get(name, {"other"}) for name in chosen))


def _size(config: dict, key: str, family: str) -> int:
    """Return a positive whole number of the configuration; GPT-2's intermediate size may be left out."""
    value = config.get(key)
    if key == "n_inner" and value is None:
        return 4 * _size(config, "n_embd", family)
    if type(value) is not int or not 1 <= value <= LARGEST:
        problem = "is missing" if value is None else f"is {value!r}"
        raise UserError(
            f"{key} {problem}, but must be a whole number from 1 to {LARGEST:,} in a {family} configuration"
        )
    return value
