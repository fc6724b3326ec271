"""Shapes of other people's models, from the config.json that Hugging Face keeps beside the weights. Imports no torch.

What a family does otherwise than Llama is said here, once. Numbers of parameters are those of the ``transformers``
library's modules. Operators are the course's (planner/networks.py), as if the model were written in PyTorch's fused ones:
its own modules may compute the same in more steps, and keep more. Compared with them, on the CPU: Llama, Qwen and Gemma
agree; a window shorter than the sequence, soft caps, GPT-2 and Phi keep more without recomputation (plan.py --simulate).

Not in it: dropout; soft-capping inside attention (Gemma 2), which no fused kernel does; rotary positions of a part of each head
(Phi) are counted as if of the whole.
"""

import json
from pathlib import Path

from planner import UserError
from planner.shapes import GPTShape

ALL_BIASES = frozenset({"query", "output", "feed_forward"})


def _llama(c: dict) -> dict:
    biases = {"query", "output"} if c.get("attention_bias") else set()
    return {"biases": frozenset(biases | ({"feed_forward"} if c.get("mlp_bias") else set()))}


def _mistral(c: dict) -> dict:
    return {"window": c.get("sliding_window")}


def _qwen2(c: dict) -> dict:
    return {"biases": frozenset({"query"})} | _qwen_windows(c)


def _qwen3(c: dict) -> dict:
    biases = frozenset({"query", "output"}) if c.get("attention_bias") else frozenset()
    return {"biases": biases, "normed_heads": True, "head_width": c.get("head_dim") or 128} | _qwen_windows(c)


def _qwen_windows(c: dict) -> dict:
    layers = c["num_hidden_layers"]
    if not c.get("use_sliding_window"):
        return {}
    return {"window": c.get("sliding_window"), "windowed": 1 - min(c.get("max_window_layers", 0), layers) / layers}


def _gemma(c: dict) -> dict:
    return {"head_width": c.get("head_dim") or 256, "tied": c.get("tie_word_embeddings", True)}


def _gemma2(c: dict) -> dict:
    capped = c.get("final_logit_softcapping", 30.0) is not None
    return _gemma(c) | {"norms": 4, "window": c.get("sliding_window") or 4096, "windowed": 0.5, "softcap": capped}


def _gemma3(c: dict) -> dict:
    every = c.get("sliding_window_pattern") or 6  # of so many layers one sees all
    layers = c["num_hidden_layers"]
    windows = {"window": c.get("sliding_window") or 4096, "windowed": 1 - layers // every / layers}
    return _gemma(c) | {"norms": 4, "normed_heads": True} | windows


def _phi(c: dict) -> dict:
    if c.get("qk_layernorm"):
        raise UserError("a Phi with qk_layernorm is not planned: this course knows none that is published")
    return {"biases": ALL_BIASES | {"head"}, "gated": False, "norm": "layer", "norms": 1}


def _phi3(c: dict) -> dict:
    return {"window": c.get("sliding_window")}


def _gpt2(c: dict) -> dict:
    special = {"biases": ALL_BIASES, "gated": False, "norm": "layer"}
    return special | {"positions": c["n_positions"], "tied": c.get("tie_word_embeddings", True)}


FAMILIES = {
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
# What each field of a shape is called: in most configurations, and in GPT-2's.
NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "hidden": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size", "vocab_size"),
}
LARGEST = 10**9  # of any number: a larger one is a slip


def load(path: str, option: str = "--config") -> GPTShape:
    """The shape that a config.json, or the folder it lies in, describes. UserError, which names the option: there is none, or it is not known."""
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
    """The shape of a configuration. UserError where it is of no known family, or lacks a number."""
    family = config.get("model_type")
    experts = next((name for name in EXPERTS if config.get(name)), None)
    if experts:
        raise UserError(f"{family} is a mixture of experts ({experts}), which is not planned: take a dense model")
    if family not in FAMILIES:
        raise UserError(f"model_type {family!r} is not planned: take one of {', '.join(FAMILIES)}")
    numbers = {ours: _number(config, names[family == "gpt2"], family) for ours, names in NAMES.items()}
    if family == "gpt2":
        _number(config, "n_positions", family)
    heads = config.get("num_key_value_heads")
    numbers["kv_heads"] = numbers["heads"] if heads is None else _number(config, "num_key_value_heads", family)
    common = {"tied": bool(config.get("tie_word_embeddings", False)), "head_width": config.get("head_dim")}
    common["dropout"] = _drops(config, family)
    return GPTShape(**numbers | common | FAMILIES[family](config))


def _drops(config: dict, family: str) -> bool:
    """Return whether a model drops elements in training; GPT-2 does where its configuration does not say."""
    given = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1) if family == "gpt2" else {}
    given |= {name: value for name, value in config.items() if "drop" in name}
    return any(value for name, value in given.items() if not name.startswith("summary_"))  # of GPT-2's other heads


def _number(config: dict, name: str, family: str) -> int:
    """A positive whole number of the configuration; GPT-2's hidden width may be left out."""
    value = config.get(name)
    if name == "n_inner" and value is None:
        return 4 * _number(config, "n_embd", family)
    if type(value) is not int or not 1 <= value <= LARGEST:
        found = "is missing" if value is None else f"is {value!r}"
        raise UserError(f"{name} {found}, but must be a whole number from 1 to {LARGEST:,} in a {family} configuration")
    return value
