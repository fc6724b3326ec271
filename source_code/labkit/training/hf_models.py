# SPDX-License-Identifier: BSD-3-Clause
"""Read and build models of Hugging Face's transformers, and ask them what training must know (``hf_loading`` loads them)."""

import contextlib
import io
import json
from pathlib import Path

import torch
from planner.models import flops, huggingface
from torch import nn
from torch.distributed.fsdp import FSDPModule

from labkit import UserError
from labkit.measuring.differences import largest, largest_difference
from labkit.measuring.replaced import replaced
from labkit.training.chunked_loss import chunked_loss as by_chunks
from labkit.training.units import units_of

try:
    with contextlib.redirect_stdout(io.StringIO()):  # it imports DeepSpeed if it is installed, which prints
        import transformers.modeling_utils
    import transformers.distributed.mixin  # which earlier versions do not have
    import transformers.masking_utils
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
except ImportError:  # reported by ``configuration``
    transformers = None
REDRAWN = ("youtu",)  # families whose embedding transformers 5.23 draws anew when it reads a model: proofs/census.py
# Inputs that models with an image tower need to train on text: zero marks a token as text
TEXT_MARKS = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}


def configuration(path: str, option: str):
    """Read a model's configuration.

    Args:
        path: of a config.json, or of its folder.
        option: the option that set ``path``, for messages.

    Raises:
        UserError: it cannot be read, or does not describe an unquantized causal language model that transformers
            supports without remote code.
    """
    if transformers is None:
        raise UserError(
            "there is no transformers 5.23 or newer here: python -m pip install 'transformers>=5.23' safetensors"
        )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        settings = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"{option} {path} cannot be read ({error.strerror}): {_instead(path)}") from None
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise UserError(f"{option} {path} is not JSON with named values: name a model's config.json")
    kind = settings.get("model_type")
    if kind is None:
        raise UserError(f"{option} {path} has no model_type, so it is no model's: name a model's config.json")
    if kind not in CONFIG_MAPPING:
        why = "brings code of its own, which is never run here" if settings.get("auto_map") else "is not one it knows"
        raise UserError(f"{option} {path}: model_type {kind!r} {why} (transformers {transformers.__version__})")
    if kind in REDRAWN:
        raise UserError(f"{option} {path}: transformers draws a part of {kind} at random each time it reads it")
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{option} {path}: {kind} is no causal language model, which is what this lab trains")
    if quantized := settings.get("quantization_config") or settings.get("compression_config"):
        method = quantized.get("quant_method", "of an unknown kind") if isinstance(quantized, dict) else quantized
        raise UserError(f"{option} {path}: its weights are quantized ({method}): take the model in bf16 or fp32")
    try:
        return CONFIG_MAPPING[kind].from_pretrained(file)  # it decodes values that JSON lacks, such as inf
    except Exception as error:  # each family has its own checks
        raise UserError(f"{option} {path}: {str(error).strip().splitlines()[-1]}") from None


def _instead(path: str) -> str:
    """Return what to do about a path that does not exist."""
    folder = Path(path)
    if (folder / "adapter_config.json").exists():
        base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
        return f"these are adapters; name their base model ({base}) as --model, and the folder as --adapters"
    if (folder / "snapshots").is_dir():
        return "name the folder in its snapshots/"
    if path.count("/") == 1 and not folder.exists():
        return f"it is no folder; fetch it with `hf download {path} --local-dir FOLDER`, and name that"
    return "name a model's folder"


def vocabulary_and_positions(architecture) -> tuple[int, int | None]:
    """Return (size of the vocabulary, largest number of positions or None) of a configuration, also of a nested one."""
    text = architecture.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    return text.vocab_size, positions if positions and positions > 0 else None  # XLNet's -1 is no limit


def on_meta(architecture, dtype: torch.dtype, experts: str | None = None):
    """Build a model on the meta device, which allocates nothing. Arguments: see ``without_weights``."""
    with torch.device("meta"):
        return without_weights(architecture, dtype, experts)


def without_weights(architecture, dtype: torch.dtype, experts: str | None = None):
    """Build a model on the current default device, without loading weights.

    Args:
        architecture: as ``configuration`` returns it.
        dtype: of its parameters.
        experts: the library's implementation of experts; None: its default.

    Raises:
        UserError: the model needs a package that is not installed, such as timm.
    """
    how = {"experts_implementation": experts} if experts else {}
    try:
        return without_cache(AutoModelForCausalLM.from_config(architecture, dtype=dtype, **how))
    except ImportError as error:
        raise UserError(f"{architecture.model_type}: {first_line(error)}") from None


def without_cache(model):
    """Switch off the KV cache of generation, which training does not need, and return the model."""
    model.config.use_cache = model.config.get_text_config().use_cache = False
    return model


def decoder(model) -> nn.Module:
    """Return the part of a model that processes text: of one with an image tower, the language model."""
    found = model.get_decoder()
    return model.base_model if found is None else found


def blocks(model) -> list[nn.Module]:
    """Return the decoder's blocks."""
    return units_of(decoder(model))


def tied(model) -> bool:
    """Return whether embedding and head share one weight."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def freeze_towers(model):
    """Freeze what text does not pass: image and audio towers and their projections, which are saved as they were."""
    text = [decoder(model), model.get_input_embeddings(), model.get_output_embeddings()]
    trained = {id(p) for module in text if module is not None for p in module.parameters()}
    if model.config.get_text_config() is not model.config:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)


def text_inputs(model, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the further inputs that a model needs to train on text, {name: tensor of the shape of ``inputs``}."""
    mark = TEXT_MARKS.get(getattr(model, "module", model).config.model_type)
    return {mark: torch.zeros_like(inputs)} if mark else {}


def chunked_loss(model, batch: dict, targets: torch.Tensor, chunks: int) -> torch.Tensor:
    """Return the sum of the targets' cross-entropies, with logits and loss computed in chunks of the tokens.

    The head computes the loss in place of the logits, where FSDP has gathered its weight.

    Args:
        model: any causal language model, sharded or not.
        batch: the model's inputs.
        targets: int64, (batch, sequence); -100 is no target.
        chunks: number of chunks.

    Raises:
        UserError: the model changes the logits after its head, or the head has a bias.
    """
    inner = getattr(model, "module", model)
    head, made = inner.get_output_embeddings(), []

    def loss_of(x):
        made.append(by_chunks(x, head.weight, targets, chunks, summed=True))
        return made[-1]

    with replaced(head, forward=loss_of):
        try:
            loss = model(**batch).logits
        except (RuntimeError, IndexError, TypeError):  # the model takes a scalar apart
            loss = None
    if loss is not made[0] or getattr(head, "bias", None) is not None:
        raise UserError(
            f"--loss-chunks {chunks}: {inner.config.model_type} changes its logits after the head: leave it out"
        )
    return loss


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def flops_per_token(config) -> float | None:
    """Return the model FLOPs of training on one token (``planner.flops.per_token``).

    Args:
        config: hf_fsdp.py's options.

    Returns:
        FLOPs; None for a family that the planner does not know, and for peft's adapters, which are not planned.
    """
    try:
        return (
            None if config.adapts else flops.per_token(huggingface.load(config.model or config.config), config.seq_len)
        )
    except UserError:
        return None


@torch.no_grad()
def check_masks(model, device: torch.device, packed: bool):
    """Check that no token sees a later one, and none of another document if several are packed. Collective.

    The model says so itself: changed tokens must leave the logits of others as they were.

    Args:
        model: ready to train.
        device: of its inputs.
        packed: whether sequences will have several documents.

    Raises:
        UserError: the model is not causal, or mixes packed documents.
    """
    family = getattr(model, "module", model).config
    model.eval()

    def logits(tokens, positions):
        batch = {"input_ids": tokens, "position_ids": positions} if packed else {"input_ids": tokens}
        try:
            return model(**batch, **text_inputs(model, tokens), use_cache=False).logits[0].float()
        except TypeError:
            raise UserError(f"{family.model_type} takes no positions: give --packing padding or stream") from None
        except AssertionError as error:  # FSDP2's, of parameters that the library keeps in fp32
            raise UserError(f"{family.model_type} cannot be sharded in this precision: {first_line(error)}") from None

    tokens = torch.arange(16, device=device)[None] % family.get_text_config().vocab_size
    positions = torch.arange(16, device=device)[None] % 8
    before = logits(tokens, positions)
    # Experts are multiplied in groups, whose sizes a changed token changes: the last bits may differ.
    limit = (1e-5 if next(model.parameters()).dtype != torch.bfloat16 else 2e-2) * largest(before.abs())
    for what, changed, others in (("sees later tokens", slice(12, 16), slice(12)), ("mixes", slice(8), slice(8, 16))):
        if what == "mixes" and not packed:
            continue
        other = tokens.clone()
        other[:, changed] = other[:, changed].flip(-1)
        if not largest_difference(logits(other, positions)[others], before[others]) <= limit:
            why = {"sees later tokens": "sees the tokens that it shall predict: its config.json lacks is_decoder"}
            raise UserError(
                f"{family.model_type} {why.get(what, 'mixes the documents of a sequence: give --packing padding')}"
            )
    reshard(model)
    model.train()


def reshard(model):
    """Free the gathered parameters of all units: after a forward without backward, FSDP2 keeps those of the root."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def untraced_masks():
    """Make the library choose attention masks for fake tensors as it does for real ones.

    It materializes masks when it detects tracing, as with fake tensors, and for packed sequences, which it detects by
    reading the elements of the positions. The simulated step packs no sequences.
    """
    masks = transformers.masking_utils
    with replaced(masks, is_tracing=lambda *_, **__: False, find_packed_sequence_indices=lambda *_, **__: None):
        yield
