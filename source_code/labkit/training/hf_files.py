# SPDX-License-Identifier: BSD-3-Clause
"""Write safetensors; check the files of a model's folder before the library reads them, and say in one sentence what is wrong.

Format: https://huggingface.co/docs/safetensors and, for several files, model.safetensors.index.json with
{"weight_map": {name of a tensor: its file}}.
"""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit import UserError

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
LFS = b"version https://git-lfs"  # the first bytes of a pointer that stands for a file of git-lfs
QUANTIZED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8")  # dtypes of weights that need scales

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def check(path: str):
    """Check that a folder has whole safetensors with weights that are not quantized.

    Raises:
        UserError: it has not.
    """
    folder = Path(path)
    for file in sorted(set(weight_map(folder).values())):
        if not file.is_file():
            raise UserError(f"{file} is missing: fetch it again, or name another --model")
        with opened(file) as tensors:
            for name in tensors.keys():
                if (dtype := tensors.get_slice(name).get_dtype()) in QUANTIZED and name.endswith("weight"):
                    raise UserError(f"{path}: {name} is quantized ({dtype}): take the model in bf16 or fp32")


def dtypes(path: str) -> dict[str, torch.dtype]:
    """Return {name: dtype} of the stored tensors."""
    found = {}
    for file in set(weight_map(Path(path)).values()):
        with opened(file) as tensors:
            found |= {name: DTYPES.get(tensors.get_slice(name).get_dtype()) for name in tensors.keys()}
    return found


def weight_map(folder: Path) -> dict[str, Path]:
    """Return {name of a tensor: its file}. As the library does, prefer one file to an index.

    Raises:
        UserError: there is no file, or it cannot be read.
    """
    one, index = folder / ONE, folder / INDEX
    if one.exists():
        with opened(one) as tensors:
            return dict.fromkeys(tensors.keys(), one)
    if index.exists():
        try:
            return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{index} cannot be read: fetch it again") from None
    raise UserError(f"there is no {ONE} in {folder}: {_instead(folder)}")


def _instead(folder: Path) -> str:
    """Return what to do about a folder without safetensors."""
    if (folder / "adapter_config.json").exists():
        base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
        return f"these are adapters; name their base model ({base}) as --model, and the folder as --adapters"
    if any(folder.glob("pytorch_model*.bin*")):
        return "convert its .bin files: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
    return "name a folder with safetensors, or give --config"


@contextmanager
def opened(file: Path):
    """Open a safetensors file.

    Raises:
        UserError: it is not whole.
    """
    try:
        with open(file, "rb") as raw:
            if raw.read(len(LFS)) == LFS:
                raise UserError(f"{file} is a pointer of git-lfs: fetch the file with `git lfs pull`")
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not whole ({str(error).splitlines()[0]}): fetch it again") from None


def save(tensors: dict, file: Path, **metadata: str):
    """Write {name: tensor} to a file that others may read, as far as the umask says; safetensors' own only its owner may."""
    save_file(tensors, file, {"format": "pt"} | metadata)
    os.umask(umask := os.umask(0))
    file.chmod(0o666 & ~umask)
