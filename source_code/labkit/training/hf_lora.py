"""Adapters of a frozen model (LoRA, https://arxiv.org/abs/2106.09685), as the peft library defines and stores them."""

import re

from labkit import UserError

ADAPTER = "default"  # peft's name of the only adapter


def settings(config):
    """Return peft's configuration of the adapters that hf_fsdp.py's options describe.

    Raises:
        UserError: peft is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError:
        raise UserError("--lora needs peft: python -m pip install peft") from None
    targets = "all-linear" if config.lora_targets == "all-linear" else config.lora_targets.split(",")
    return LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha or 2 * config.lora,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def add(model, config):
    """Freeze a model and add adapters to it, in place.

    Raises:
        UserError: no module has the name of --lora-targets, or peft does not support the family.
    """
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(settings(config), model, ADAPTER)
    except ValueError as error:
        raise UserError(f"--lora {config.lora}: {str(error).strip().splitlines()[0]}") from None
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # trained in fp32 even if the base model is in bf16: small steps would be rounded away
            parameter.data = parameter.data.to(config.adapter_dtype)


def renamed_weights(model, config) -> dict[str, str]:
    """Return the renaming that reads a model's files into one with adapters, {regular expression: replacement}.

    An adapter replaces a layer by one that has the original as ``base_layer``.

    Args:
        model: without adapters, on the meta device; gets some.
        config: hf_fsdp.py's options.
    """
    add(model, config)
    adapted = {name.rpartition(".base_layer.")[0] for name, _ in model.named_parameters() if ".base_layer." in name}
    last = "|".join(sorted({re.escape(name.rpartition(".")[2]) for name in adapted}))
    return {rf"(\b(?:{last}))(?=\.(?:weight|bias)$)": r"\1.base_layer"}


def original_name(name: str) -> str:
    """Return the name that a base model's tensor has in the model without adapters."""
    return name.replace(".base_layer.", ".")
