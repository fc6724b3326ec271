# SPDX-License-Identifier: BSD-3-Clause
"""The parameters of a transformer's layers: their names and shapes, in the order of registration. Imports no torch."""

from planner.models.shapes import GPTShape


def linear_parameters(shape: GPTShape, name: str, outs: int, ins: int, bias: str = "") -> dict[str, tuple]:
    """Return {name: shape} of a linear layer's weight (outs, ins), and of its bias (outs,) if the model has one there.

    Args:
        shape: the model.
        name: of the layer.
        outs: output features.
        ins: input features.
        bias: which member of ``GPTShape.biases`` decides; by default the layer's name.
    """
    weight = {f"{name}.weight": (outs, ins)}
    return weight | {f"{name}.bias": (outs,)} if (bias or name) in shape.biases else weight


def norm_parameters(shape: GPTShape, name: str, present: bool = True) -> dict[str, tuple]:
    """Return {name: shape} of a norm's weight (hidden size,), and of its bias if the model's norms have one.

    Args:
        shape: the model.
        name: of the norm.
        present: whether there is one; otherwise {}.
    """
    parameters = {f"{name}.weight": (shape.hidden_size,)} if present else {}
    return parameters | ({f"{name}.bias": (shape.hidden_size,)} if present and shape.norm == "layer" else {})


def block_parameters(shape: GPTShape, lora: int | None, tp_degree: int = 1, number: int = 0) -> dict[str, tuple]:
    """Return {name: shape} of a block's parameters in the order of registration, as one rank of a tensor group has them.

    Args:
        shape: the model.
        lora: the rank of adapters on queries and values; None: there are none.
        tp_degree: ranks that split each weight: "output" and "down" by columns, the others by rows.
        number: of the block.
    """
    layer = shape.layer(number)
    if layer.parameters:
        return dict(layer.parameters)
    if shape.latent:
        attention = _latent_attention_parameters(shape)
    else:
        attention = _attention_parameters(shape, lora, tp_degree)
    if layer.routed:
        feed_forward = _experts_parameters(shape, tp_degree)
    else:
        feed_forward = _feed_forward_parameters(shape, shape.intermediate_size // tp_degree)
    after = shape.norms in ("after", "around")
    return {
        **norm_parameters(shape, "attention_norm", shape.norms != "after"),
        **attention,
        **norm_parameters(shape, "after_attention_norm", after),
        **norm_parameters(shape, "feed_forward_norm", shape.norms not in ("after", "shared")),
        **feed_forward,
        **norm_parameters(shape, "after_feed_forward_norm", after),
    }


def _attention_parameters(shape, lora, tp_degree):
    hidden_size = shape.hidden_size
    query_size, key_value_size = shape.query_size // tp_degree, shape.key_value_size // tp_degree

    def projection(name, outs):
        parameters = linear_parameters(shape, name, outs, hidden_size, "query")
        if lora and name in ("query", "value"):
            parameters |= {f"{name}.down": (lora, hidden_size), f"{name}.up": (outs, lora)}
        if shape.qk_norm in ("head", "projection") and name != "value":
            parameters |= {f"{name}_norm.weight": (outs if shape.qk_norm == "projection" else shape.head_dim,)}
        return parameters

    if "query_key_value" in shape.fused and not lora:
        projections = projection("query_key_value", query_size + 2 * key_value_size)
    else:
        projections = {
            **projection("query", query_size),
            **projection("key", key_value_size),
            **projection("value", key_value_size),
        }
    sinks = {"sinks": (shape.num_attention_heads // tp_degree,)} if shape.attention == "sinks" else {}
    return projections | linear_parameters(shape, "output", hidden_size, query_size) | sinks


def _latent_attention_parameters(shape):
    """Biases are in the projections to short vectors, and in the output's."""
    latent, heads, hidden_size = shape.latent, shape.num_attention_heads, shape.hidden_size
    query_size = heads * (latent.rotary_dim + latent.other_dim)
    expanded, rank = heads * (latent.other_dim + latent.value_dim), latent.key_value_rank
    if latent.query_rank is None:
        query = {"query.weight": (query_size, hidden_size)}
    else:
        query = {
            **linear_parameters(shape, "query_short", latent.query_rank, hidden_size, "query"),
            "query_norm.weight": (latent.query_rank,),
            "query.weight": (query_size, latent.query_rank),
        }
    return {
        **query,
        **linear_parameters(shape, "key_value_short", rank + latent.rotary_dim, hidden_size, "query"),
        "key_value_norm.weight": (rank,),
        "key_value.weight": (expanded, rank),
        **linear_parameters(shape, "output", hidden_size, heads * latent.value_dim),
    }


def _feed_forward_parameters(shape, intermediate_size, prefix=""):
    hidden_size = shape.hidden_size

    def linear(name, outs, ins):
        return linear_parameters(shape, f"{prefix}{name}", outs, ins, "feed_forward")

    down = linear("down", hidden_size, intermediate_size)
    if "gate_up" in shape.fused:
        return linear("gate_up", 2 * intermediate_size, hidden_size) | down
    gate = linear("gate", intermediate_size, hidden_size) if shape.gated else {}
    return gate | linear("up", intermediate_size, hidden_size) | down


def _experts_parameters(shape, tp_degree):
    """The weights of all experts are one tensor, (experts, …); sharding divides it by experts, a tensor group each expert."""
    experts, hidden_size = shape.experts, shape.hidden_size
    count, size = experts.count, experts.intermediate_size // tp_degree
    parameters = {
        "router.weight": (count, hidden_size),
        "experts.gate_up.weight": _oriented(experts, 2 * size, hidden_size),
        "experts.down.weight": _oriented(experts, hidden_size, size),
    }
    if experts.biased:
        parameters |= {
            "router.bias": (count,),
            "experts.gate_up.bias": (count, 2 * size),
            "experts.down.bias": (count, hidden_size),
        }
    if experts.shared_size:
        shared_size = experts.shared_size // (1 if experts.gates_shared else tp_degree)
        parameters |= _feed_forward_parameters(shape, shared_size, "shared.")
    return parameters | ({"shared_gate.weight": (1, hidden_size)} if experts.gates_shared else {})


def _oriented(experts, outs, ins):
    return (experts.count, outs, ins) if experts.output_first else (experts.count, ins, outs)


def active_shares(shape: GPTShape, parameters: dict[str, tuple]) -> dict[str, float]:
    """Return {name: share of its elements that a token multiplies} of the parameters of which a token uses a part."""
    experts = shape.experts
    return {name: experts.active_share for name in parameters if experts and name.startswith("experts.")}
