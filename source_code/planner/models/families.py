# SPDX-License-Identifier: BSD-3-Clause
"""What each family of Hugging Face's transformers differs in from Llama, stated once. Imports no torch.

Each function takes a configuration (the values of a config.json, over the defaults of the family's class), and returns
fields of ``GPTShape``. Parameters are those of the library's modules.
"""

from planner import UserError
from planner.models.shapes import Experts, LatentAttention, Layer

ATTENTION = frozenset({"query", "output"})
ALL_BIASES = ATTENTION | {"feed_forward"}


def biases(c: dict) -> frozenset:
    """Return the layers that ``attention_bias`` gives a bias."""
    return ATTENTION if c.get("attention_bias") else frozenset()


def _windowed(c: dict, pattern: int | None = None) -> dict:
    """Return the fields of windows in the layers that ``layer_types`` names, or in all except each ``pattern``-th."""
    types = c.get("layer_types") or [
        "sliding_attention" if pattern and (number + 1) % pattern else "full_attention"
        for number in range(c["num_hidden_layers"])
    ]
    if len(types) != c["num_hidden_layers"]:
        raise UserError(f"layer_types names {len(types)} layers of {c['num_hidden_layers']}: it must name each")
    layers = tuple(Layer(windowed=kind in ("sliding_attention", "chunked_attention")) for kind in types)
    window = c.get("sliding_window") if any(layer.windowed for layer in layers) else None
    return {"sliding_window": window, "layers": layers if window else ()}


def _rotary_share(c: dict, default: float) -> float:
    parameters = c.get("rope_parameters") or {}
    named = (parameters.get("partial_rotary_factor"), c.get("partial_rotary_factor"), c.get("rotary_pct"), default)
    return next(share for share in named if share is not None)


def llama(c):
    return {"biases": biases(c) | ({"feed_forward"} if c.get("mlp_bias") else set())}


def mistral(c):
    return {"sliding_window": c.get("sliding_window"), "biases": frozenset()}


def ministral3(c):
    return mistral(c) | {"scales": frozenset({"query"})}


def qwen2(c):
    window, layers = c.get("sliding_window") if c.get("use_sliding_window") else None, c["num_hidden_layers"]
    if window and not c.get("layer_types"):
        first = c["max_window_layers"]
        kinds = ["sliding_attention" if number >= first else "full_attention" for number in range(layers)]
        c = c | {"layer_types": kinds}
    windows = _windowed(c) if window else {}
    return {"biases": frozenset({"query"})} | windows


def qwen3(c):
    return qwen2(c) | {"biases": biases(c), "qk_norm": "head"}


def gemma(c):
    if c.get("use_bidirectional_attention"):
        raise UserError("use_bidirectional_attention is not planned: a causal language model does not have it")
    activation = c.get("hidden_activation") or c.get("hidden_act") or "gelu_pytorch_tanh"
    scale = {"scales": frozenset({"embedding"}), "other_buffers": 4}
    return scale | {"activation": activation, "norm": "rms plus one", "in_fp32": frozenset({"norm"})}


def gemma2(c):
    attention = "softcapped" if c["attn_logit_softcapping"] is not None else "steps"
    capped = c["final_logit_softcapping"] is not None
    return gemma(c) | _windowed(c, 2) | {"norms": "around", "attention": attention, "softcaps_logits": capped}


def gemma3(c):
    capped = c["final_logit_softcapping"] is not None
    if c["attn_logit_softcapping"] is not None:
        raise UserError("attn_logit_softcapping is not planned for Gemma 3: no published model has it")
    pattern = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or 6
    own = {"norms": "around", "qk_norm": "head", "softcaps_logits": capped, "rotary_tables": 2}
    return gemma(c) | _windowed(c, pattern) | own


def gemma4(c):
    """Its layers differ in their heads; some take the keys and values of an earlier one, or an input of their own."""
    layers, hidden_size, size = c["num_hidden_layers"], c["hidden_size"], c["hidden_size_per_layer_input"]
    kinds = c.get("layer_types") or ["sliding_attention" if (n + 1) % 6 else "full_attention" for n in range(layers)]
    kinds = [*kinds[:-1], "full_attention"]
    outside = ()
    if size:
        outside = (
            ("embedding_per_layer.weight", (c["vocab_size_per_layer_input"], layers * size)),
            ("per_layer_projection.weight", (layers * size, hidden_size)),
            ("per_layer_norm.weight", (size,)),
        )
    routed = bool(c["enable_moe_block"])
    fields = {
        "norm": "rms",
        "norms": "around",
        "layers": tuple(_gemma4_layer(c, number, kind) for number, kind in enumerate(kinds)),
        "sliding_window": c["sliding_window"],
        "softcaps_logits": c["final_logit_softcapping"] is not None,
        "other_parameters": outside,
        "unmodeled": "Gemma 4's layers, which share keys and values or have an input of their own",
    }
    if routed:
        fields["experts"] = Experts(c["num_experts"], c["top_k_experts"], c["moe_intermediate_size"])
    return gemma(c) | fields


def _gemma4_layer(c, number, kind):
    hidden_size, full = c["hidden_size"], kind == "full_attention"
    own = {"head_dim": c["head_dim"], "num_key_value_heads": c["num_key_value_heads"]}
    if full:
        own["head_dim"] = c.get("global_head_dim") or 512
        if c["attention_k_eq_v"] and c.get("num_global_key_value_heads"):
            own["num_key_value_heads"] = c["num_global_key_value_heads"]
    own |= {int(layer): values for layer, values in (c.get("per_layer_config") or {}).items()}.get(number, {})
    query, key = (own["head_dim"] * heads for heads in (c["num_attention_heads"], own["num_key_value_heads"]))
    takes_keys = number >= c["num_hidden_layers"] - c["num_kv_shared_layers"]
    projections = {"query": query}
    if not takes_keys:
        projections |= {"key": key} if c["attention_k_eq_v"] and full else {"key": key, "value": key}
    parameters = {"query_norm.weight": (own["head_dim"],)}
    parameters |= {} if takes_keys else {"key_norm.weight": (own["head_dim"],)}
    parameters |= {f"{name}.weight": (outs, hidden_size) for name, outs in projections.items()}
    parameters["output.weight"] = (hidden_size, query)
    if c["attention_bias"]:
        parameters |= {f"{name}.bias": (outs,) for name, outs in (projections | {"output": hidden_size}).items()}
    intermediate_size = c["intermediate_size"] * (2 if c["use_double_wide_mlp"] and takes_keys else 1)
    parameters |= {f"{name}.weight": (intermediate_size, hidden_size) for name in ("gate", "up")}
    parameters["down.weight"] = (hidden_size, intermediate_size)
    norms = ["attention", "after_attention", "feed_forward", "after_feed_forward"]
    if size := c["hidden_size_per_layer_input"]:
        parameters |= {"input_gate.weight": (size, hidden_size), "input_projection.weight": (hidden_size, size)}
        norms.append("after_input")
    if c["enable_moe_block"]:
        count, expert = c["num_experts"], c["moe_intermediate_size"]
        parameters |= {"router.weight": (count, hidden_size), "router.scales": (count,), "router.scale": (hidden_size,)}
        parameters |= {"experts.gate_up.weight": (count, 2 * expert, hidden_size)}
        parameters |= {"experts.down.weight": (count, hidden_size, expert)}
        norms += ["experts", "after_experts", "after_dense"]
    parameters |= {f"{name}_norm.weight": (hidden_size,) for name in norms}
    return Layer(windowed=not full, parameters=tuple(parameters.items()), query_size=query)


def phi(c):
    if c["qk_layernorm"]:
        raise UserError("a Phi with qk_layernorm is not planned: no published model is known to have it")
    special = {"biases": ALL_BIASES | {"head"}, "gated": False, "norm": "layer", "norms": "shared"}
    special |= {"norm_with_head": False}
    return special | {"activation": c["hidden_act"], "rotary_share": _rotary_share(c, 0.5)}


def phi3(c):
    fused = frozenset({"query_key_value", "gate_up"})
    return mistral(c) | {"fused": fused, "rotary_share": _rotary_share(c, 1.0)}


def gpt2(c):
    if c.get("add_cross_attention"):
        raise UserError("a GPT-2 with add_cross_attention is not planned: a causal language model does not have it")
    special = {"biases": ALL_BIASES, "gated": False, "norm": "layer", "fused": frozenset({"query_key_value"})}
    special |= {"norm_with_head": False}
    return special | {"learned_positions": c["n_positions"], "activation": c["activation_function"]}


def smollm3(c):
    count, interval = c["num_hidden_layers"], c["no_rope_layer_interval"]
    rotary = c.get("no_rope_layers") or [(number + 1) % interval != 0 for number in range(count)]
    if len(rotary) < count:
        raise UserError(f"no_rope_layers names {len(rotary)} layers of {count}: it must name each")
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    kinds = c.get("layer_types") or ["full_attention" if rotates else "sliding_attention" for rotates in rotary[:count]]
    pairs = zip(kinds, rotary, strict=False)
    layers = (Layer(bool(window) and kind == "sliding_attention", bool(rotates)) for kind, rotates in pairs)
    return llama(c) | {"layers": tuple(layers), "sliding_window": window}


def olmo2(c):
    return {"biases": biases(c), "norms": "after", "qk_norm": "projection", "in_fp32": frozenset({"norm", "tables"})}


def olmo3(c):
    return olmo2(c) | _windowed(c, 4) | {"rotary_tables": 2}


def granite(c):
    return llama(c) | {"scales": frozenset({"embedding", "residual", "logits"})}


def cohere2(c):
    """Its layers without a window have no rotary positions."""
    fields = _windowed(c, c.get("sliding_window_pattern") or 4)
    layers = fields["layers"] or [Layer()] * c["num_hidden_layers"]
    fields["layers"] = tuple(Layer(layer.windowed, rotary=layer.windowed) for layer in layers)
    own = {"norm": "unbiased layer", "norms": "shared", "scales": frozenset({"logits"}), "explicit_head_dim": None}
    return fields | own | {"in_fp32": frozenset({"rotary"})}


def starcoder2(c):
    special = {"biases": ALL_BIASES if c["use_bias"] else frozenset(), "gated": False, "norm": "layer"}
    return special | {"sliding_window": c.get("sliding_window"), "activation": c["hidden_act"]}


def gpt_neox(c):
    special = {"biases": biases(c) | {"feed_forward"}, "gated": False, "norm": "layer", "explicit_head_dim": None}
    special |= {"norm_with_head": False}
    norms = "parallel" if c["use_parallel_residual"] else "before"
    special |= {"fused": frozenset({"query_key_value"}), "norms": norms, "activation": c["hidden_act"]}
    return special | {"num_key_value_heads": c["num_attention_heads"], "rotary_share": _rotary_share(c, 0.25)}


def qwen3_5(c):
    """Three of four layers have linear attention (gated delta rule), the fourth a gate for attention's output."""
    interval = c.get("full_attention_interval") or 4
    kinds = c.get("layer_types") or [
        "linear_attention" if (number + 1) % interval else "full_attention" for number in range(c["num_hidden_layers"])
    ]
    layers = tuple(_qwen3_5_layer(c, kind == "linear_attention") for kind in kinds)
    return {"layers": layers, "qk_norm": "head", "unmodeled": "Qwen 3.5's linear attention"}


def _qwen3_5_layer(c, linear):
    hidden_size, intermediate_size = c["hidden_size"], c["intermediate_size"]
    if linear:
        heads, head_dim = c["linear_num_value_heads"], c["linear_value_head_dim"]
        value = heads * head_dim
        mixed = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + value
        parameters = {
            "mixed.weight": (mixed, hidden_size),
            "gate_of_values.weight": (value, hidden_size),
            "decay.weight": (heads, hidden_size),
            "rate.weight": (heads, hidden_size),
            "convolution.weight": (mixed, 1, c["linear_conv_kernel_dim"]),
            "time_step.bias": (heads,),
            "log_decay": (heads,),
            "value_norm.weight": (head_dim,),
            "output.weight": (hidden_size, value),
        }
    else:
        head_dim = c["head_dim"]
        query, key = (head_dim * c[name] for name in ("num_attention_heads", "num_key_value_heads"))
        projections = {"query": 2 * query, "key": key, "value": key}
        parameters = {f"{name}.weight": (outs, hidden_size) for name, outs in projections.items()}
        parameters |= {"output.weight": (hidden_size, query)}
        parameters |= {"query_norm.weight": (head_dim,), "key_norm.weight": (head_dim,)}
        if c["attention_bias"]:
            parameters |= {f"{name}.bias": (outs,) for name, outs in (projections | {"output": hidden_size}).items()}
    parameters |= {f"{name}.weight": (intermediate_size, hidden_size) for name in ("gate", "up")}
    parameters |= {"down.weight": (hidden_size, intermediate_size)}
    parameters |= {f"{name}_norm.weight": (hidden_size,) for name in ("attention", "feed_forward")}
    return Layer(parameters=tuple(parameters.items()), query_size=0 if linear else None)


# Mixtures of experts


def _routed(fields: dict, count: int, routed) -> dict:
    """Return fields with the layers for which ``routed(number)`` holds marked as routed.

    Args:
        fields: of ``GPTShape``; "layers", if there, has the other differences.
        count: layers.
        routed: takes a layer's number.
    """
    windowed = bool(fields.get("sliding_window"))
    layers = fields.get("layers") or [Layer(windowed)] * count
    marked = (Layer(layer.windowed, layer.rotary, bool(routed(n))) for n, layer in enumerate(layers))
    return fields | {"layers": tuple(marked)}


def mixtral(c):
    experts = Experts(c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"], weighs_in_fp32=True)
    return _routed(mistral(c) | {"experts": experts}, c["num_hidden_layers"], lambda _: True)


def qwen3_moe(c):
    count = c["num_experts"] if c.get("num_experts") is not None else c["num_local_experts"]
    experts = Experts(count, c["num_experts_per_tok"], c["moe_intermediate_size"], normalizes=bool(c["norm_topk_prob"]))
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    fields = {"biases": biases(c), "qk_norm": "head", "experts": experts, "sliding_window": window}
    return _sparse(c, fields)


def qwen2_moe(c):
    experts = Experts(
        c["num_experts"],
        c["num_experts_per_tok"],
        c["moe_intermediate_size"],
        shared_size=c["shared_expert_intermediate_size"],
        gates_shared=True,
        normalizes=bool(c["norm_topk_prob"]),
    )
    fields = {"biases": frozenset({"query"} if c["qkv_bias"] else ()), "experts": experts}
    if c.get("use_sliding_window"):
        raise UserError("a Qwen2-MoE with use_sliding_window is not planned: no published model is known to have it")
    return _sparse(c, fields)


def _sparse(c, fields):
    step, dense, experts = c["decoder_sparse_step"], c.get("mlp_only_layers") or (), fields["experts"]
    routed = lambda number: number not in dense and experts.count > 0 and (number + 1) % step == 0  # noqa: E731
    return _routed(fields, c["num_hidden_layers"], routed)


def olmoe(c):
    if c.get("clip_qkv") is not None:
        raise UserError("an OLMoE with clip_qkv is not planned: no published model is known to have it")
    experts = Experts(
        c["num_experts"], c["num_experts_per_tok"], c["intermediate_size"], normalizes=bool(c["norm_topk_prob"])
    )
    fields = {"biases": biases(c), "qk_norm": "projection", "experts": experts}
    return _routed(fields, c["num_hidden_layers"], lambda _: True)


def gpt_oss(c):
    experts = Experts(
        c["num_experts"] if c.get("num_experts") is not None else c["num_local_experts"],
        c["num_experts_per_tok"],
        c["intermediate_size"],
        biased=True,
        router="chosen",
        output_first=False,
    )
    own = {"attention": "sinks", "experts": experts, "biases": biases(c), "in_fp32": frozenset({"norm"})}
    fields = _windowed(c, 2) | own
    return _routed(fields, c["num_hidden_layers"], lambda _: True)


def _with_shared(c):
    """Return the experts of DeepSeek-V3 and of what follows it."""
    size = c["moe_intermediate_size"]
    return Experts(
        c["n_routed_experts"],
        c["num_experts_per_tok"],
        size,
        shared_size=size * c["n_shared_experts"],
        router="sigmoid",
        weighs_in_fp32=True,
        normalizes=bool(c["norm_topk_prob"]),
    )


def deepseek_v3(c):
    latent = LatentAttention(
        c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
    )
    heads = {"num_key_value_heads": c["num_attention_heads"], "explicit_head_dim": c["qk_rope_head_dim"]}
    fields = heads | {"biases": biases(c), "latent": latent, "experts": _with_shared(c)}
    return _routed(fields, c["num_hidden_layers"], lambda number: number >= c["first_k_dense_replace"])


def glm4_moe(c):
    fields = {
        "biases": frozenset({"query"} if c["attention_bias"] else ()),
        "qk_norm": "head" if c["use_qk_norm"] else "",
        "rotary_share": _rotary_share(c, 0.5),
        "experts": _with_shared(c),
    }
    return _routed(fields, c["num_hidden_layers"], lambda number: number >= c["first_k_dense_replace"])


def llama4(c):
    """Its layers without rotary positions attend to all tokens, the others to a chunk."""
    count, interval, step = c["num_hidden_layers"], c["no_rope_layer_interval"], c["interleave_moe_layer_step"]
    rotary = c.get("no_rope_layers") or [(number + 1) % interval != 0 for number in range(count)]
    kinds = c.get("layer_types") or ["chunked_attention" if rotates else "full_attention" for rotates in rotary]
    named = c.get("moe_layers")
    routed = range(step - 1, count, step) if named is None else named
    size, dense_size = c["intermediate_size"], c["intermediate_size_mlp"]
    experts = Experts(c["num_local_experts"], c["num_experts_per_tok"], size, size, router="dense", output_first=False)
    each = zip(range(count), kinds, rotary, strict=False)
    layers = (Layer(kind == "chunked_attention", bool(rotates), n in routed) for n, kind, rotates in each)
    return {
        "intermediate_size": dense_size,
        "biases": biases(c),
        "qk_norm": "unweighted" if c["use_qk_norm"] else "",
        "sliding_window": c["attention_chunk_size"],
        "layers": tuple(layers),
        "experts": experts,
        "scales": frozenset({"query"}) if c["attn_temperature_tuning"] else frozenset(),
    }
