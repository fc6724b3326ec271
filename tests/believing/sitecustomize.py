# SPDX-License-Identifier: BSD-3-Clause
"""On the path of a Python, this makes torch believe in four GPUs, or in those that CUDA_VISIBLE_DEVICES leaves.

Whatever then uses one fails, as there is none: what is meant for the CPU must keep everything on the CPU.
"""

import os

import torch


def visible() -> int:
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    return len([name for name in names.split(",") if name])


def accelerator(check_available=False):
    return torch.device("cuda") if visible() else None


torch.cuda.is_available = lambda: visible() > 0
torch.cuda.device_count = visible
torch.cuda.get_device_name = lambda device=None: "a GPU that is not there"
torch.cuda.current_device = lambda: 0
torch.accelerator.current_accelerator = accelerator
torch._C._get_accelerator = lambda check=None: accelerator() or torch.device("cpu")
