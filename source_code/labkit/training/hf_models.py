"""Build, initialize, load, and save models of Hugging Face's transformers, sharded before they have any memory.

transformers initializes weights module by module (``_init_weights``, private, unchanged since 5.0), including buffers such
as tables of rotary embeddings. That makes it possible to fill a model that was sharded on the meta device.
"""

import contextlib
import copy
import io
import json
import math
import zlib
from pathlib import Path

import torch
from planner.models import flops, huggingface
from torch import nn

from labkit import UserError
from labkit.measuring.replaced import replaced
from labkit.training import hf_weights, text
from labkit.training.units import units_of

try:
    with contextlib.redirect_stdout(io.StringIO()):  # it imports DeepSpeed if it is installed, which prints
        import transformers.modeling_utils
    import transformers.masking_utils
    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
except ImportError:  # reported by ``configuration``
    transformers = None
ADAPTER = "default"  # peft's name of the only adapter
NOT_MODELS = {"attn_config", "ffn_config"}  # sub-configurations that do not describe another model


def configuration(path: str, option: str):
    """Read a model's configuration.

    Args:
        path: of a config.json, or of its folder.
        option: the option that set ``path``, for messages.

    Raises:
        UserError: it cannot be read, or does not describe a dense, text-only, unquantized causal language model that
            transformers supports without remote code.
    """
    if transformers is None:
        raise UserError("transformers is not installed here: python -m pip install 'transformers>=5' safetensors")
    transformers.logging.set_verbosity_error()
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        settings = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"{option} {path} cannot be read ({error.strerror}): name a model's folder") from None
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise UserError(f"{option} {path} is not JSON with named values: name a model's config.json")
    kind = settings.get("model_type")
    if kind not in CONFIG_MAPPING:
        why = "brings code of its own, which is never run here" if settings.get("auto_map") else "is not one it knows"
        raise UserError(f"{option} {path}: model_type {kind!r} {why} (transformers {transformers.__version__})")
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{option} {path}: {kind} is no causal language model, which is what this lab trains")
    if parts := sorted(CONFIG_MAPPING[kind].sub_configs.keys() - NOT_MODELS):
        raise UserError(
            f"{option} {path}: {kind} is several models in one ({', '.join(parts)}): take a text-only model"
        )
    if experts := next((name for name in huggingface.EXPERTS if settings.get(name)), None):
        raise UserError(f"{option} {path}: {kind} is a mixture of experts ({experts}): take a dense model")
    if quantized := settings.get("quantization_config") or settings.get("compression_config"):
        method = quantized.get("quant_method", "of an unknown kind") if isinstance(quantized, dict) else quantized
        raise UserError(f"{option} {path}: its weights are quantized ({method}): take the model in bf16 or fp32")
    try:
        return CONFIG_MAPPING[kind].from_pretrained(file)  # it decodes values that JSON lacks, such as inf
    except Exception as error:  # each family has its own checks
        raise UserError(f"{option} {path}: {str(error).strip().splitlines()[-1]}") from None


def on_meta(config, dtype: torch.dtype, lora: int | None = None):
    """Build a model on the meta device, which allocates nothing.

    Args:
        config: as ``configuration`` returns it.
        dtype: of its parameters.
        lora: rank of LoRA adapters to add; None: no adapters.
    """
    with torch.device("meta"):
        return without_weights(config, dtype, lora)


def without_weights(config, dtype: torch.dtype, lora: int | None = None):
    """Build a model on the current default device, without loading weights. Arguments: see ``on_meta``."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False  # the KV cache of generation, which training does not need
    if lora:
        add_lora(model, lora)
    return model


def flops_per_token(config) -> float | None:
    """Return the model FLOPs of training on one token (``planner.flops.per_token``).

    Args:
        config: hf_fsdp.py's options.

    Returns:
        FLOPs; None for a family that the planner does not know, and for peft's adapters, which are not planned.
    """
    try:
        return None if config.lora else flops.per_token(huggingface.load(config.model or config.config), config.seq_len)
    except UserError:
        return None


def lora_settings(width: int):
    """Return peft's configuration of the adapters: on every linear layer except the head, with alpha = 2 · rank.

    width: rank of the adapters.
    """
    try:
        from peft import LoraConfig
    except ImportError:
        raise UserError("--lora needs peft: python -m pip install peft") from None
    return LoraConfig(r=width, lora_alpha=2 * width, target_modules="all-linear", task_type="CAUSAL_LM")


def add_lora(model, width: int):
    """Freeze a model and add peft's adapters of rank ``width`` to it, in place."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(lora_settings(width), model, ADAPTER)


def blocks(model) -> list[nn.Module]:
    """Return the decoder's blocks."""
    return units_of(model.base_model)


def tied(model) -> bool:
    """Return whether embedding and head share one weight."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def initial_weights(pattern, seed: int, but: frozenset = frozenset()):
    """Yield (name, tensor on the CPU) with the initial weights of every parameter and buffer.

    One block at a time is initialized, or one module outside of blocks, each from its own seed, so that the values do not
    depend on the sharding.

    Args:
        pattern: the model on the meta device, not sharded.
        seed: any integer.
        but: names to leave out.
    """
    owners = {name: module for name, module in pattern.named_modules() if isinstance(module, PreTrainedModel)}
    inside = {module for block in blocks(pattern) for module in block.modules()}
    whole = {id(block) for block in blocks(pattern)}
    for name, module in pattern.named_modules():
        if id(module) in whole:
            part = copy.deepcopy(module)
        elif module in inside or not (module._parameters or module._buffers):
            continue
        else:
            part = copy.copy(module)
            part._parameters, part._buffers, part._modules = dict(module._parameters), dict(module._buffers), {}
        prefix = f"{name}." if name else ""
        wanted = _with_memory(part, prefix, but)
        if not wanted:
            continue
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            # The innermost PreTrainedModel that contains a module initializes it.
            enclosing = (owner for owner in owners if not owner or f"{name}.".startswith(f"{owner}."))
            _initialize(owners[max(enclosing, key=len)], part)
        yield from wanted.items()


def _with_memory(part, prefix: str, but) -> dict:
    """Allocate the tensors of a part, except those in ``but``, and return {name: tensor}."""
    wanted = {}
    for path, module in part.named_modules():
        for tensors in (module._parameters, module._buffers):
            for own, tensor in tensors.items():
                name = prefix + (f"{path}.{own}" if path else own)
                if tensor is None or name in but:
                    continue
                # NaN, so that a tensor that the library does not initialize is noticed.
                fill = math.nan if tensor.is_floating_point() else 0
                tensors[own] = wanted[name] = torch.full_like(tensor, fill, device="cpu")
    return wanted


def _initialize(owner, part):
    for module in reversed(list(part.modules())):  # children before their parents, as the library does
        owner._init_weights(module)
    for module in part.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters(ADAPTER, init_lora_weights=True)


def stored(model, every_name: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors that a model's files contain, {name: tensor}: parameters and persistent buffers, no adapters.

    Args:
        model: Sharded or not, with memory or on the meta device.
        every_name: Whether to list a shared tensor under all its names, instead of the first only.
    """
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(remove_duplicate=not every_name), *model.named_buffers()]
    return {name: tensor for name, tensor in named if name in persistent and "lora_" not in name}


def read(model, path: str) -> tuple[frozenset, int]:
    """Load a model's files; each rank reads its own rows.

    Args:
        model: Allocated; may be sharded.
        path: The folder of the files.

    Returns:
        (names of the loaded tensors, number of bytes that this rank has read).

    Raises:
        UserError: The files do not have exactly the model's tensors, except those that the library ignores, too.
    """
    tensors = stored(model, every_name=True)
    # Adapters put a ``base_layer`` between a layer and its weight.
    named = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}
    size = hf_weights.Folder(path).read_into(named, model.base_model_prefix, _left_out(model))
    return frozenset(tensors), size


def _left_out(model) -> list[str]:
    """Return regular expressions of tensors in old files that the library ignores; its own list is not accessible."""
    buffers = [name.rpartition(".")[2] for name, _ in model.named_buffers()]
    once_stored = {"inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
    patterns = [pattern for name, pattern in once_stored.items() if name in buffers]
    return [*(model._keys_to_ignore_on_load_unexpected or ()), *patterns]


def load_tokens(config, architecture, device) -> tuple[str, torch.Tensor]:
    """Read and tokenize the text of ``--data``, as ``--tokens`` specifies.

    Args:
        config: hf_fsdp.py's options.
        architecture: as ``configuration`` returns it.
        device: where the tokens go.

    Returns:
        (name of the text, its tokens: int32, (tokens,)).

    Raises:
        UserError: the text or the tokenizer cannot be read, or does not fit the model or --seq-len.
    """
    name, raw = text.read(config.data)
    if (config.tokens or ("model" if config.model else "bytes")) == "bytes":
        tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(torch.int32)
    else:
        tokens = _encoded(raw, Path(config.model) / "tokenizer.json")
    if len(tokens) <= config.seq_len:
        raise UserError(f"{name} has {len(tokens)} tokens, and --seq-len is {config.seq_len}: it must have more")
    if (most := int(tokens.max())) >= architecture.vocab_size:
        raise UserError(
            f"{name} has a token {most}, and the model's vocabulary ends at {architecture.vocab_size - 1}: "
            "take the tokenizer that belongs to it"
        )
    longest = getattr(architecture, "max_position_embeddings", None)
    if longest and 0 < longest < config.seq_len:  # XLNet's -1 is no limit
        raise UserError(f"--seq-len {config.seq_len} is more than the {longest} positions that the model supports")
    return name, tokens.to(device)


def _encoded(raw: bytes, file: Path) -> torch.Tensor:
    """Tokenize a text with a tokenizer.json: int32, (tokens,)."""
    from tokenizers import Tokenizer

    if not file.is_file():
        raise UserError(f"there is no {file}: give --tokens bytes, or put the model's tokenizer.json there")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no exception class of its own
        raise UserError(f"{file} is not a tokenizer ({error}): fetch it again, or give --tokens bytes") from None
    return torch.tensor(tokenizer.encode(raw.decode(errors="replace")).ids, dtype=torch.int32)


def save(model, architecture, config):
    """Save the model to --save in the library's format, or the adapters in peft's. Collective.

    Args:
        model: the trained model.
        architecture: as ``configuration`` returns it.
        config: hf_fsdp.py's options.
    """
    named, metadata = stored(model), architecture
    if config.lora:
        named = {
            f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        metadata = lora_settings(config.lora)
        metadata.base_model_name_or_path, metadata.inference_mode = config.model, True
    else:
        metadata.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(metadata)].__name__]
        metadata.dtype, metadata.use_cache = config.dtype, True
    stem = "adapter_model" if config.lora else "model"
    hf_weights.save(named, config.save, metadata, config.model, stem)


@contextlib.contextmanager
def untraced_masks():
    """Make the library choose attention masks for fake tensors as it does for real ones.

    It materializes masks when it detects tracing, as with fake tensors, and for packed sequences, which it detects by
    reading the elements of the positions. The lab packs no sequences.
    """
    masks = transformers.masking_utils
    with replaced(masks, is_tracing=lambda *_, **__: False, find_packed_sequence_indices=lambda *_, **__: None):
        yield
