# SPDX-License-Identifier: BSD-3-Clause
"""Hide GPUs that must not be used, and diagnose those that cannot be: PyTorch does not see them, or two ranks share one."""

import os
import re
from datetime import timedelta
from pathlib import Path

import torch

from labkit import UserError
from labkit.running import slurm

ROOT = Path("/")
OLDEST_DRIVER = {12: 525, 13: 580}  # {CUDA version of a wheel: driver}, by NVIDIA's minor version compatibility
KEYS = "labkit/gpus"  # prefix in the store: the rank on each GPU, the number of ranks that have checked, any error
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def hide():
    """Hide the GPUs from this process and those it starts, so that no code selects them as its default device.

    ``fully_shard`` without a mesh does so, for instance. Call this before PyTorch first looks for GPUs.
    """
    os.environ.update(HIDDEN)


def diagnose_missing_gpu(environ: dict) -> str | None:
    """Return why PyTorch sees no GPU on a machine that has some, and what to do: a run would silently use the CPU.

    None if there is no GPU, or if they are hidden on purpose. A practice cluster's GPUs are slots without hardware.
    """
    named = environ.get("SLURM_JOB_GPUS") or environ.get("SLURM_STEP_GPUS")  # "0": the first one
    granted = bool(named or slurm.gpus_granted(environ)) and environ.get("SLURM_CLUSTER_NAME") != "practice"
    installed = (ROOT / ("dev/kfd" if torch.version.hip else "dev/nvidiactl")).exists()
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not (granted or installed):
        return None
    on_cpu = "or compute on the CPU: --device cpu, or CUDA_VISIBLE_DEVICES= before a command without that option"
    if "SLURM_JOB_ID" in environ and not granted:
        return f"this node has GPUs, but Slurm gave the job none: ask for them, as in --gres=gpu:4, {on_cpu}"
    has = "Slurm granted GPUs" if granted else "this machine has GPUs"
    return f"{has}, but PyTorch sees none: {_driver_and_wheel()}, {on_cpu}"


def _driver_and_wheel() -> str:
    """Return why PyTorch's wheel and the driver do not fit together, and what to do."""
    cuda, installed = torch.version.cuda, driver()
    wheel = f"its wheel, {torch.__version__}, is for"
    wheel += f" CUDA {cuda}" if cuda else f" ROCm {torch.version.hip}" if torch.version.hip else " the CPU only"
    if installed is None:
        return f"{wheel}, and there is no NVIDIA driver: use a node that has one"
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0])) if cuda else None
    if oldest and int(installed.split(".")[0]) >= oldest:
        return f"{wheel}, and the driver, {installed}, should run it: see the output of nvidia-smi"
    needs = ", ".join(f"CUDA {major} needs {number} or newer" for major, number in OLDEST_DRIVER.items())
    return f"{wheel}, and the driver is {installed}: install a wheel that this driver runs ({needs})"


def driver() -> str | None:
    """Return the version of NVIDIA's kernel driver, such as "535.104.05"; None if there is none."""
    try:
        text = (ROOT / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    version = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text)
    return version and version[1]


def check_one_each(me, store, seconds: float):
    """Check that no two ranks compute on one GPU: NCCL's own error would name neither. Collective.

    GPUs are compared by UUID, since each task may see its GPU as number 0.

    Args:
        me: a ``ranks.Rank``.
        store: the store of the rendezvous.
        seconds: how long the ranks wait for one another.

    Raises:
        UserError: two ranks share a GPU, or a rank is missing; on every rank.
    """
    gpu = f"{KEYS}/{me.node}/{torch.cuda.get_device_properties(me.device).uuid}"
    first = int(store.compare_set(gpu, "", str(me.rank)))  # the rank that claimed this GPU first
    if first != me.rank:
        one, other = sorted((first, me.rank))
        store.set(
            f"{KEYS}/wrong",
            f"ranks {one} and {other} are both on GPU {me.device.index} of {me.node}: start at most one rank for "
            "each GPU of a node, or ask for more GPUs",
        )
    if store.add(f"{KEYS}/checked", 1) == me.world_size:
        store.set(f"{KEYS}/all checked", "")
    try:
        store.wait([f"{KEYS}/all checked"], timedelta(seconds=seconds))
    except torch.distributed.DistStoreError:
        raise UserError(
            f"{store.add(f'{KEYS}/checked', 0)} of {me.world_size} ranks have started within {seconds:g} s: is a node still "
            "importing torch, or has a rank failed?"
        ) from None
    if store.check([f"{KEYS}/wrong"]):
        raise UserError(store.get(f"{KEYS}/wrong").decode())
