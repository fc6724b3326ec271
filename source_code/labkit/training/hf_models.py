"""Models of Hugging Face's transformers: built without memory, cut into units, given first values.

transformers initialises module by module (``_init_weights``, private, the same since 5.0), buffers such as the tables of
rotary positions among them; that is used here to fill what has been sharded before it had any memory.
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
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed, where there is one, is imported too, and prints
        import transformers.modeling_utils
    import transformers.masking_utils
    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
except ImportError:  # said by ``configuration``
    transformers = None
ADAPTER = "default"  # peft's name for the only adapter there is
NOT_MODELS = {"attn_config", "ffn_config"}  # parts of a configuration that are of the same model


def configuration(path: str, option: str):
    """The configuration in a config.json, or in the folder it lies in. option: what named it.

    UserError: there is none, or it is of no dense, text-only, unquantized causal language model that transformers knows
    by itself.
    """
    if transformers is None:
        raise UserError("transformers is not installed here: python -m pip install 'transformers>=5' safetensors")
    transformers.logging.set_verbosity_error()
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        given = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"{option} {path} cannot be read ({error.strerror}): name a model's folder") from None
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise UserError(f"{option} {path} is not JSON with named values: name a model's config.json")
    kind = given.get("model_type")
    if kind not in CONFIG_MAPPING:
        its = "brings code of its own, which is never run here" if given.get("auto_map") else "is not one it knows"
        raise UserError(f"{option} {path}: model_type {kind!r} {its} (transformers {transformers.__version__})")
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{option} {path}: {kind} is no causal language model, which is what this lab trains")
    if parts := sorted(CONFIG_MAPPING[kind].sub_configs.keys() - NOT_MODELS):
        raise UserError(
            f"{option} {path}: {kind} is several models in one ({', '.join(parts)}): take a text-only model"
        )
    if experts := next((name for name in huggingface.EXPERTS if given.get(name)), None):
        raise UserError(f"{option} {path}: {kind} is a mixture of experts ({experts}): take a dense model")
    if quantized := given.get("quantization_config") or given.get("compression_config"):
        method = quantized.get("quant_method", "of an unknown kind") if isinstance(quantized, dict) else quantized
        raise UserError(f"{option} {path}: its weights are quantized ({method}): take the model in bf16 or fp32")
    try:
        return CONFIG_MAPPING[kind].from_pretrained(file)  # it decodes numbers that JSON does not have, such as inf
    except Exception as error:  # each family checks its own
        raise UserError(f"{option} {path}: {str(error).strip().splitlines()[-1]}") from None


def on_meta(config, dtype: torch.dtype, lora: int | None = None):
    """The model of a configuration on the meta device: shapes, and nothing allocated. lora: width of adapters, or None."""
    with torch.device("meta"):
        return without_weights(config, dtype, lora)


def without_weights(config, dtype: torch.dtype, lora: int | None = None):
    """Make the model of a configuration, with new tensors where PyTorch makes them by default."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False  # what generation keeps of each token; training has no use for it
    if lora:
        add_lora(model, lora)
    return model


def flops_per_token(config) -> float | None:
    """Return the floating-point operations that training on a token takes (``planner.flops.per_token``).

    Args:
        config: hf_fsdp.py's options.

    Returns:
        None for a family that the planner does not know, and for peft's adapters, whose layers differ from the course's.
    """
    try:
        return None if config.lora else flops.per_token(huggingface.load(config.model or config.config), config.seq_len)
    except UserError:
        return None


def lora_settings(width: int):
    """peft's settings of the adapters: on every linear layer but the head, with an alpha of twice the width."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise UserError("--lora needs peft: python -m pip install peft") from None
    return LoraConfig(r=width, lora_alpha=2 * width, target_modules="all-linear", task_type="CAUSAL_LM")


def add_lora(model, width: int):
    """Freeze the model and put peft's adapters into it, in place."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(lora_settings(width), model, ADAPTER)


def blocks(model) -> list[nn.Module]:
    """The decoder's blocks."""
    return units_of(model.base_model)


def tied(model) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def initial_weights(pattern, seed: int, but: frozenset = frozenset()):
    """Yield (name, tensor on the CPU) of every parameter and buffer whose name is not in ``but``.

    pattern: a model on the meta device that nobody shards. A block is filled at a time, or what lies outside of blocks
    module by module, from a seed of its own: who holds which part of it has no say in the values.
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
            # The innermost of the library's models around a module knows how to initialize it.
            around = (owner for owner in owners if not owner or f"{name}.".startswith(f"{owner}."))
            _initialise(owners[max(around, key=len)], part)
        yield from wanted.items()


def _with_memory(part, prefix: str, but) -> dict:
    """Give memory to the tensors of a part that are wanted; return {name: tensor}."""
    wanted = {}
    for path, module in part.named_modules():
        for tensors in (module._parameters, module._buffers):
            for own, tensor in tensors.items():
                name = prefix + (f"{path}.{own}" if path else own)
                if tensor is None or name in but:
                    continue
                # What the library leaves as it is, is NaN then, and does not pass for a value.
                fill = math.nan if tensor.is_floating_point() else 0
                tensors[own] = wanted[name] = torch.full_like(tensor, fill, device="cpu")
    return wanted


def _initialise(owner, part):
    for module in reversed(list(part.modules())):  # children before what they are in, as the library does
        owner._init_weights(module)
    for module in part.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters(ADAPTER, init_lora_weights=True)


def stored(model, every_name: bool = False) -> dict[str, torch.Tensor]:
    """Return what a model's files hold, {name: tensor}: parameters and persistent buffers, without adapters.

    Args:
        model: Sharded or not, with memory or without.
        every_name: Whether a tensor that is shared has all its names, instead of the first alone.
    """
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(remove_duplicate=not every_name), *model.named_buffers()]
    return {name: tensor for name, tensor in named if name in persistent and "lora_" not in name}


def read(model, path: str) -> tuple[frozenset, int]:
    """Fill what a model's files hold, on each rank its rows.

    Args:
        model: Has memory on this rank for what it keeps.
        path: The folder of the files.

    Returns:
        The names in the model of what was filled, and how many bytes this rank has read.

    Raises:
        UserError: The files do not have exactly the model's tensors, apart from those that the library leaves out, too.
    """
    tensors = stored(model, every_name=True)
    # Adapters put a ``base_layer`` between a layer and its weight.
    named = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}
    size = hf_weights.Folder(path).read_into(named, model.base_model_prefix, _left_out(model))
    return frozenset(tensors), size


def _left_out(model) -> list[str]:
    """Return regular expressions of old files' tensors that the library leaves out: it does not share its own list."""
    buffers = [name.rpartition(".")[2] for name, _ in model.named_buffers()]
    once_stored = {"inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
    patterns = [pattern for name, pattern in once_stored.items() if name in buffers]
    return [*(model._keys_to_ignore_on_load_unexpected or ()), *patterns]


def tokens_for(config, architecture, device) -> tuple[str, torch.Tensor]:
    """(name of the text, its tokens on the device) that a lab's ``--data`` and ``--tokens`` name. UserError."""
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
        raise UserError(f"--seq-len {config.seq_len} is more than the {longest} positions that the model knows")
    return name, tokens.to(device)


def _encoded(raw: bytes, file: Path) -> torch.Tensor:
    """The text in the tokens of a tokenizer.json: int32, (tokens,)."""
    from tokenizers import Tokenizer

    if not file.is_file():
        raise UserError(f"there is no {file}: give --tokens bytes, or put the model's tokenizer.json there")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no class of its own
        raise UserError(f"{file} is no tokenizer ({error}): fetch it again, or give --tokens bytes") from None
    return torch.tensor(tokenizer.encode(raw.decode(errors="replace")).ids, dtype=torch.int32)


def save(model, architecture, config):
    """Write what was trained to --save, in the library's form: the model, or the adapters in peft's. Collective."""
    named, about = stored(model), architecture
    if config.lora:
        named = {
            f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        about = lora_settings(config.lora)
        about.base_model_name_or_path, about.inference_mode = config.model, True
    else:
        about.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(about)].__name__]
        about.dtype, about.use_cache = config.dtype, True
    stem = "adapter_model" if config.lora else "model"
    hf_weights.save(named, config.save, about, config.model, stem)


@contextlib.contextmanager
def masks_as_in_a_run():
    """Have the library choose attention masks for simulated tensors as it does for real ones.

    It makes whole masks where it believes to be traced, as on fake tensors; and where sequences are packed into one,
    which it reads from the positions' elements: the lab packs none.
    """
    masks = transformers.masking_utils
    with replaced(masks, is_tracing=lambda *_, **__: False, find_packed_sequence_indices=lambda *_, **__: None):
        yield
