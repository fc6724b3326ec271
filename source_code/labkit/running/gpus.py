"""GPUs that must not be used, hidden; and a sentence for those that cannot: PyTorch does not see them, or two ranks have one."""

import os
import re
from datetime import timedelta
from pathlib import Path

import torch

from labkit import UserError

ROOT = Path("/")
OLDEST_DRIVER = {12: 525, 13: 580}  # that runs a wheel for CUDA 12, or 13: NVIDIA's minor version compatibility
KEYS = "labkit/gpus"  # at the store: who has which, how many ranks have said so, and what is wrong
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def hide():
    """Make this process and those it starts one without GPUs: else what chooses a device by itself would take them.

    ``fully_shard`` without a mesh is such a thing. Must come before PyTorch looks for GPUs, which it does once.
    """
    os.environ.update(HIDDEN)


def why_unseen(environ: dict) -> str | None:
    """Why PyTorch sees no GPU where there should be one, and what to do: a run would be on the CPU, unnoticed.

    None where there is none, and where somebody hides them. A practice cluster's GPUs are slots without hardware.
    """
    grants = (environ.get(f"SLURM_{name}") for name in ("JOB_GPUS", "STEP_GPUS", "GPUS_ON_NODE"))
    granted = any(grants) and environ.get("SLURM_CLUSTER_NAME") != "practice"
    there = (ROOT / ("dev/kfd" if torch.version.hip else "dev/nvidiactl")).exists()
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not (granted or there):
        return None
    on_cpu = "or compute on the CPU: --device cpu, or CUDA_VISIBLE_DEVICES= before a command without that option"
    if "SLURM_JOB_ID" in environ and not granted:
        return f"this node has GPUs, but Slurm gave the job none: ask for them, as in --gres=gpu:4, {on_cpu}"
    has = "Slurm granted GPUs" if granted else "this machine has GPUs"
    return f"{has}, but PyTorch sees none: {_driver_and_wheel()}, {on_cpu}"


def _driver_and_wheel() -> str:
    """What is wrong between the two, and the remedy."""
    cuda, found = torch.version.cuda, driver()
    wheel = f"its wheel, {torch.__version__}, is for"
    wheel += f" CUDA {cuda}" if cuda else f" ROCm {torch.version.hip}" if torch.version.hip else " the CPU only"
    if found is None:
        return f"{wheel}, and there is no NVIDIA driver: go to a node that has one"
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0])) if cuda else None
    if oldest and int(found.split(".")[0]) >= oldest:
        return f"{wheel}, and the driver, {found}, should run it: see what nvidia-smi says"
    needs = ", ".join(f"CUDA {major} needs {number} or newer" for major, number in OLDEST_DRIVER.items())
    return f"{wheel}, and the driver is {found}: install a wheel that this driver runs ({needs})"


def driver() -> str | None:
    """The version of NVIDIA's driver, such as "535.104.05", as the kernel tells it; None where there is none."""
    try:
        told = (ROOT / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    version = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", told)
    return version and version[1]


def check_one_each(me, store, seconds: float):
    """UserError, on every rank, if two ranks compute on one GPU: NCCL's own words would name neither. Collective.

    me: a ``ranks.Rank``. store: where the ranks have met. seconds: how long they wait for one another. By the GPU's
    UUID: where each task is given one GPU, all call their own 0.
    """
    gpu = f"{KEYS}/{me.node}/{torch.cuda.get_device_properties(me.device).uuid}"
    first = int(store.compare_set(gpu, "", str(me.rank)))  # whose it is: this rank's, or that of one before
    if first != me.rank:
        one, other = sorted((first, me.rank))
        store.set(
            f"{KEYS}/wrong",
            f"ranks {one} and {other} are both on GPU {me.device.index} of {me.node}: start at most one rank for "
            "each GPU of a node, or ask for more GPUs",
        )
    if store.add(f"{KEYS}/told", 1) == me.world_size:
        store.set(f"{KEYS}/all told", "")
    try:
        store.wait([f"{KEYS}/all told"], timedelta(seconds=seconds))
    except torch.distributed.DistStoreError:
        raise UserError(
            f"{store.add(f'{KEYS}/told', 0)} of {me.world_size} ranks have started within {seconds:g} s: does a node still "
            "import torch, or has a rank failed?"
        ) from None
    if store.check([f"{KEYS}/wrong"]):
        raise UserError(store.get(f"{KEYS}/wrong").decode())
