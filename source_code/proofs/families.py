# SPDX-License-Identifier: BSD-3-Clause
"""Build a tiny model of every family of samples/families.json, train it in one process, and inspect it.

``census`` trains these models on several ranks, and compares. This file uses transformers alone, so that what it finds
does not depend on the lab's own code.
"""

import dataclasses
import json
import logging
import re
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from labkit.measuring.differences import largest, largest_difference
from labkit.running import launch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FILE = launch.SOURCE / "samples" / "families.json"
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
STEPS, LR, WEIGHT_DECAY = 3, 1e-3, 0.01
SEQUENCES, LENGTH = 4, 16  # in a training step, of all ranks together; tokens of each
TOKENS = (3, 240)  # tokens to draw: without the special ones at both ends of the vocabulary
DOCUMENTS = (8, 12)  # lengths of two packed documents, multiples of the chunks of every family
ROUNDING = 1e-5  # absolute difference of logits, which are about 1, in fp32
# transformers computes experts by a grouped matmul, which has no float64; its loop over the experts has.
EXPERTS = {torch.float32: None, torch.float64: "eager"}


def quiet():
    """Turn off progress bars, and warnings about models that are this small or about gloo."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


def names() -> list[str]:
    """Return the names of all families. A name is a ``model_type``, or a variant of one: "gemma4_moe"."""
    return list(json.loads(FILE.read_text())["families"])


def configuration(name: str) -> PreTrainedConfig:
    """Return a family's tiny configuration: the sizes that all share, and its own settings.

    Args:
        name: One of ``names``.
    """
    listed = json.loads(FILE.read_text())
    own = dict(listed["families"][name])
    kind = CONFIG_MAPPING[own.pop("model_type", name)]
    if "text_config" in kind.sub_configs:  # several models in one: the sizes are those of the language model
        return kind(**own | {"text_config": listed["sizes"] | own["text_config"]})
    known = {field.name for field in dataclasses.fields(kind)} | kind.attribute_map.keys()
    return kind(**{size: value for size, value in listed["sizes"].items() if size in known} | own)


def build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a family's model with random weights, no tensor of which has the value that initialization gives it.

    A loader that leaves out a tensor then cannot pass by chance: a norm's weight of one, or a buffer's default, is wrong.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(name), dtype=dtype, **_experts(dtype))
    with torch.no_grad():
        for tensor in stored(model).values():
            if not tensor.is_floating_point():  # a table of indices: other valid ones
                tensor.copy_(tensor.roll(1, 0))
            elif isinstance(tensor, nn.Parameter) or not tensor.any():
                tensor += 0.02 * torch.randn_like(tensor)
            else:  # a buffer's zeros may be a mask
                tensor *= 1 + 0.1 * torch.randn_like(tensor)
    return model


def _experts(dtype: torch.dtype) -> dict:
    return {"experts_implementation": EXPERTS[dtype]} if EXPERTS[dtype] else {}


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a model's files hold, {name: tensor}: parameters and persistent buffers, each once."""
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in named if name in persistent}


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in the logits' format: the library's own loss is in fp32.

    Args:
        logits: (sequences, length, vocabulary).
        targets: The next tokens, (sequences, length).
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def draw(sequences: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return random tokens, (sequences, length)."""
    return torch.randint(*TOKENS, (sequences, length), generator=torch.Generator().manual_seed(seed))


def load(folder: str | Path, precision: str, parallel: DistributedConfig | None = None):
    """Load a model by the library alone.

    Args:
        folder: Of the model's files.
        precision: A key of ``DTYPES``.
        parallel: How the ranks of the process group share it; None: unsharded.
    """
    about = {"dtype": DTYPES[precision], "experts_implementation": EXPERTS[DTYPES[precision]]}
    about["distributed_config"] = parallel
    return AutoModelForCausalLM.from_pretrained(folder, **{key: value for key, value in about.items() if value})


def tensors_of(model) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, {name: tensor}: a buffer that is in no file must have its value, too."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def batches(step: int, parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a step's (inputs, targets) for each part of the global batch, each of shape (sequences, LENGTH)."""
    tokens = draw(SEQUENCES, LENGTH + 1, seed=step)
    return [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(parts)]


def train(model, parts: int, dropout: bool) -> tuple[dict, list[float]]:
    """Train some steps in one process.

    Args:
        model: Unsharded.
        parts: Number of parts of the global batch. They are computed one after another, each with its own dropout.
        dropout: Whether dropout is on.

    Returns:
        ({name: gradient} of the first step, loss of each step).
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    model.train(dropout)
    gradients, losses = {}, []
    for step in range(STEPS):
        losses.append(0.0)
        for part, (inputs, targets) in enumerate(batches(step, parts)):
            torch.manual_seed(1000 * step + part)
            logits = logits_of(model, inputs)
            loss = loss_of(logits, targets) / parts
            loss.backward()
            losses[step] += loss.item()
        named = model.named_parameters() if not gradients else ()
        gradients |= {name: each.grad.clone() for name, each in named if each.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return gradients, losses


# What training has to know


def inspect(name: str) -> dict:
    """Return what training a family has to know about.

    Returns:
        {"family", "model_type", "class", "parameters": how many, then
        "error": the reason why its model does not train in one process in fp32, None if it does,
        "fp64": the reason why it does not train in float64, None if it does,
        "causal": whether a token changes no logits before its own,
        "packed": whether a packed document has the logits of the document alone if its positions begin at 0 again; or
            the reason why the model refuses such positions,
        "random": whether a training step has random numbers, such as dropout,
        "tied": whether several names share one weight,
        "buffers": the persistent buffers' own names, "unused": number of parameters without a gradient,
        "fsdp": whether the library's plan has the blocks as units,
        "tensor": number of modules and parameters that the library's plan splits, "expert": of layers with experts that
            its plan spreads}
    """
    model = build(name)
    row = {"family": name, "model_type": model.config.model_type, "class": type(model).__name__}
    row |= {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    row["error"] = reason(lambda: _train(model))
    row["fp64"] = reason(lambda: _train_in_fp64(name))
    row["unused"] = sum(parameter.grad is None for parameter in model.parameters())
    if row["error"] is None:
        with torch.no_grad():
            row |= {"random": _random(model), "causal": _causal(model), "packed": _packed(model)}
    return row | {"tied": bool(model.all_tied_weights_keys), "buffers": _buffers(model), **_plans(model)}


def reason(function) -> str | None:
    """Call a function; return None, or the first line of the exception that it raises, with the exception's name."""
    try:
        function()
    except Exception as error:  # each family fails in its own way, and the census goes on
        return sentence(error)
    return None


def sentence(error: Exception) -> str:
    """Return an exception as one line."""
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"[:400]


def _train(model):
    tokens = draw(2, sum(DOCUMENTS) + 1)
    loss = loss_of(logits_of(model.train(), tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not (loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients)):
        raise ArithmeticError("a loss or a gradient is not finite")


def _train_in_fp64(name):
    model = build(name, torch.float64)
    if kept := {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float64}:
        raise TypeError(f"it keeps parameters in {', '.join(map(str, kept))}")
    _train(model)


def logits_of(model, tokens: torch.Tensor, **inputs) -> torch.Tensor:
    """Return a model's logits in the format of its weights, without a cache: (sequences, length, vocabulary)."""
    return model(input_ids=tokens, use_cache=False, **inputs).logits.to(model.dtype)  # some return fp32 always


def _random(model) -> bool:
    tokens = draw(2, sum(DOCUMENTS))
    torch.manual_seed(0)
    first, second = (logits_of(model.train(), tokens) for _ in range(2))
    return not torch.equal(first, second)


def _causal(model) -> bool:
    tokens = draw(2, sum(DOCUMENTS))
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] + 1) % TOKENS[1]
    return _equal(*(logits_of(model.eval(), each)[:, :-1] for each in (tokens, changed)))


def _packed(model) -> bool | str:
    first, second = DOCUMENTS
    tokens = draw(2, first + second)
    positions = torch.cat([torch.arange(first), torch.arange(second)]).expand(2, -1)
    try:
        packed = logits_of(model.eval(), tokens, position_ids=positions)
    except Exception as error:
        return sentence(error)
    return _equal(packed[:, :first], logits_of(model, tokens[:, :first])) and _equal(
        packed[:, first:], logits_of(model, tokens[:, first:])
    )


def _equal(some: torch.Tensor, others: torch.Tensor) -> bool:
    return largest_difference(some, others) <= ROUNDING * largest([1, largest(some.abs())])


def _buffers(model) -> list[str]:
    persistent = model.state_dict().keys()
    return sorted({name.rpartition(".")[2] for name, _ in model.named_buffers() if name in persistent})


def _plans(model) -> dict:
    """Return which rules of the library's plans name something in the model."""

    def generic(name):
        return re.sub(r"\.\d+(?=\.|$)", ".*", name)

    named = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    ends = ("lm_head", "embed_tokens")  # a plan of these alone leaves all blocks whole
    tensor = [name for name in named if generic(name) in model.tp_plan and not name.endswith(ends)]
    return {
        "fsdp": any(rule.endswith(".*") for rule in model.fsdp_plan.keys() & {*map(generic, named)}),
        "tensor": len(tensor),
        "expert": sum(model.ep_plan.get(generic(name)) == "ep_dispatch_experts" for name in named),
    }
