# SPDX-License-Identifier: BSD-3-Clause
"""Recognize whose configuration a file is that --config or --model names. Imports no torch."""

import json
import re
from pathlib import Path

from planner import UserError
from planner.models import huggingface

# Keys that tell configurations of training libraries from a model's
DEEPSPEED = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
ACCELERATE = {"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config"}


def settings(path: str) -> dict:
    """Return the values of a model's config.json; {} if it cannot be read, which ``huggingface.load`` reports.

    Args:
        path: the file, or the folder that it is in.
    """
    try:
        found = json.loads(_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(path: str) -> str:
    file = Path(path)
    return (file / "config.json" if file.is_dir() else file).read_text()


def check(path: str, option: str):
    """Check that a file is not the configuration of a library that trains.

    Args:
        path: the file, or a model's folder.
        option: that the path is from, for messages.

    Raises:
        UserError: it is DeepSpeed's or accelerate's; it says which options state the same here.
    """
    try:
        text = _text(path)
    except (OSError, ValueError):  # reported by ``huggingface.load``
        return
    values = settings(path)
    keys = values.keys() or set(re.findall(r"^(\w+):", text, re.MULTILINE))  # of JSON, or of YAML
    if "model_type" in keys:
        return
    instead = "name a model's config.json here"
    if keys & ACCELERATE:
        kind = re.search(r"distributed_type\W+(\w+)", text)
        stated = {"FSDP": "--strategy fsdp2", "DEEPSPEED": "--strategy deepspeed-3", "MULTI_GPU": "--strategy ddp"}
        strategy = stated.get(kind[1].upper(), "--strategy") if kind else "--strategy"
        raise UserError(f"{option} {path} is accelerate's configuration, which {strategy} stands for: {instead}")
    if keys & DEEPSPEED:
        zero = values.get("zero_optimization")
        stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
        raise UserError(
            f"{option} {path} is DeepSpeed's configuration, which --strategy deepspeed-{stage} stands for: {instead}"
        )


def is_planned(path: str) -> bool:
    """Return whether arithmetic covers a model's family; True for a file that cannot be read, which is reported later."""
    family = settings(path).get("model_type")
    return not isinstance(family, str) or family in huggingface.FAMILIES or family in huggingface.NESTED
