"""Shapes of third-party models, from the config.json that Hugging Face stores with the weights. Imports no torch.

Everything in which a family differs from Llama is stated here, once. Parameter counts are those of the ``transformers``
library's modules. Operators are the course's (planner/models/networks.py), as if the model were written with PyTorch's
fused ones: the library's own modules may take more steps, and save more tensors. Compared with them, on the CPU: Llama,
Qwen, and Gemma agree; a window shorter than the sequence, logit soft-capping, GPT-2, and Phi save more without
recomputation (plan.py --simulate).

Not modeled: dropout; soft-capping inside attention (Gemma 2), which no fused kernel does. Rotary positions of a part of
each head (Phi) are counted as if of the whole.
"""

import json
from pathlib import Path

from planner import UserError
from planner.models.shapes import GPTShape

ALL_BIASES = frozenset({"query", "output", "feed_forward"})


# What each family differs in: c is the configuration, the result are fields of GPTShape.


def _llama(c: dict) -> dict:
    biases = {"query", "output"} if c.get("attention_bias") else set()
    return {"biases": frozenset(biases | ({"feed_forward"} if c.get("mlp_bias") else set()))}


def _mistral(c: dict) -> dict:
    return {"sliding_window": c.get("sliding_window")}


def _qwen2(c: dict) -> dict:
    return {"biases": frozenset({"query"})} | _qwen_windows(c)


def _qwen3(c: dict) -> dict:
    biases = frozenset({"query", "output"}) if c.get("attention_bias") else frozenset()
    return {"biases": biases, "qk_norm": True, "explicit_head_dim": c.get("head_dim") or 128} | _qwen_windows(c)


def _qwen_windows(c: dict) -> dict:
    layers = c["num_hidden_layers"]
    if not c.get("use_sliding_window"):
        return {}
    return {
        "sliding_window": c.get("sliding_window"),
        "windowed_share": 1 - min(c.get("max_window_layers", 0), layers) / layers,
    }


def _gemma(c: dict) -> dict:
    return {"explicit_head_dim": c.get("head_dim") or 256, "tie_word_embeddings": c.get("tie_word_embeddings", True)}


def _gemma2(c: dict) -> dict:
    capped = c.get("final_logit_softcapping", 30.0) is not None
    return _gemma(c) | {
        "norms_per_block": 4,
        "sliding_window": c.get("sliding_window") or 4096,
        "windowed_share": 0.5,
        "softcaps_logits": capped,
    }


def _gemma3(c: dict) -> dict:
    every = c.get("sliding_window_pattern") or 6  # one layer in N has no window
    layers = c["num_hidden_layers"]
    windows = {"sliding_window": c.get("sliding_window") or 4096, "windowed_share": 1 - layers // every / layers}
    return _gemma(c) | {"norms_per_block": 4, "qk_norm": True} | windows


def _phi(c: dict) -> dict:
    if c.get("qk_layernorm"):
        raise UserError("a Phi with qk_layernorm is not planned: no published model is known to have it")
    return {"biases": ALL_BIASES | {"head"}, "gated": False, "norm": "layer", "norms_per_block": 1}


def _phi3(c: dict) -> dict:
    return {"sliding_window": c.get("sliding_window")}


def _gpt2(c: dict) -> dict:
    special = {"biases": ALL_BIASES, "gated": False, "norm": "layer"}
    return special | {"learned_positions": c["n_positions"], "tie_word_embeddings": c.get("tie_word_embeddings", True)}


FAMILIES = {  # model_type: its function
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
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
    """Return the shape that a configuration describes.

    Raises:
        UserError: its family is not known, or a size is missing.
    """
    family = config.get("model_type")
    experts = next((name for name in EXPERTS if config.get(name)), None)
    if experts:
        raise UserError(f"{family} is a mixture of experts ({experts}), which is not planned: take a dense model")
    if family not in FAMILIES:
        raise UserError(f"model_type {family!r} is not planned: take one of {', '.join(FAMILIES)}")
    sizes = {field: _size(config, keys[family == "gpt2"], family) for field, keys in KEYS.items()}
    if family == "gpt2":
        _size(config, "n_positions", family)
    has_kv_heads = config.get("num_key_value_heads") is not None
    key = "num_key_value_heads"
    sizes[key] = _size(config, key, family) if has_kv_heads else sizes["num_attention_heads"]
    common = {
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "explicit_head_dim": config.get("head_dim"),
        "dropout": _has_dropout(config, family),
    }
    return GPTShape(**sizes | common | FAMILIES[family](config))


def _has_dropout(config: dict, family: str) -> bool:
    """Return whether a model drops elements in training; GPT-2 does where its configuration does not say."""
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1) if family == "gpt2" else {}
    rates |= {name: value for name, value in config.items() if "drop" in name}
    return any(value for name, value in rates.items() if not name.startswith("summary_"))  # of GPT-2's other heads


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
