# SPDX-License-Identifier: BSD-3-Clause
"""GPUs: how much memory each has for a process, how fast it computes at most, and how much of both is unavailable.

memory     GiB that PyTorch finds on it ("total capacity" in its out-of-memory messages, such as V100 16 GB:
           iomgaa/Shift-GCN#34): less than in its name, as the driver reserves some; of an A10 22.1 to 22.2,
           of a T4 14.56 to 14.76, by driver (Zheng-Chong/CatVTON#133, xinge008/Cylinder3D#109)
flops      operations per second, by number format, without sparsity, from NVIDIA's data sheets: bf16 and fp16 with tensor
           cores and fp32 sums; RTX: from the whitepapers of Ampere GA102 and Ada; fp32 without them, as PyTorch multiplies
           unless TF32 is enabled; fp64 with them, where there are any. V100 and T4 have no bf16 in their tensor cores

Imports no torch.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30

# What a process holds on a GPU in addition to what PyTorch reserves, in GiB, read from out-of-memory messages ("memory in use",
# less "allocated" and "reserved but unallocated"). The context, with its kernels: 0.42 to 0.49 in
# DINGYANB/MTVCrafter#21, pytorch/torchchat#1341 and QwenLM/Qwen3-VL#2097. With NCCL's buffers, 16 ranks on V100s: 1.62
# (rwth-i6/returnn#1469).
CONTEXT, NCCL = 0.5, 1.1

# GiB that every further communicator is assumed to take (planner/parallel/groups.py counts them), and the range of the
# reports: 388 MiB on an RTX 3060 (sgl-project/sglang#35538); 544 MB for two A100s with NVLink and 688 for more
# (NVIDIA/nccl#964); "1GB" (FSDP2's maintainers: pytorch/pytorch#153302); about 2, as three took 6 GB (NVIDIA/nccl#864). Its
# buffers are allocated by channel, of which NCCL takes more the faster the links are (NVIDIA/nccl#986).
COMMUNICATOR, REPORTED = 1.0, (0.4, 2.0)

# Reserved over planned, the lowest and the highest of torchtitan's published eager runs (notebook 11 has them all, and the
# compiled ones): the allocator holds free blocks that another stream cannot use, and rounds up. torchtitan's launch script
# sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True since a5e57e4a9 (22 October 2024), before these runs: its segments
# grow instead of leaving gaps between them. Without it, more may be reserved. (Newer name: PYTORCH_ALLOC_CONF.)
RESERVE = (1.16, 1.22)


@dataclass(frozen=True)
class GPU:
    """One model of GPU.

    Attributes:
        named: words that are in its name as PyTorch reports it, among others.
        memory: GiB.
        flops: {number format: operations per second}.
        link: a key of ``cost.LINKS``.
        flash: whether PyTorch's flash attention runs on it: from compute capability 8.0 on
            (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """

    named: str
    memory: float
    flops: dict[str, float]
    link: str = "nvlink"
    flash: bool = True


def _tensor_cores(rate: float) -> dict[str, float]:
    """Return the rate of a GPU whose tensor cores multiply bf16 as fast as fp16."""
    return {"bf16": rate, "fp16": rate}


GPUS = {
    "v100-16": GPU("v100 16gb", 15.8, {"fp16": 125e12, "fp32": 15.7e12, "fp64": 7.8e12}, flash=False),
    "v100": GPU("v100 32gb", 31.7, {"fp16": 125e12, "fp32": 15.7e12, "fp64": 7.8e12}, flash=False),
    "t4": GPU("t4", 14.5, {"fp16": 65e12, "fp32": 8.1e12}, "pcie", flash=False),
    "a100-40": GPU("a100 40gb", 39.4, _tensor_cores(312e12) | {"fp32": 19.5e12, "fp64": 19.5e12}),
    "a100": GPU("a100 80gb", 79.2, _tensor_cores(312e12) | {"fp32": 19.5e12, "fp64": 19.5e12}),
    "h100": GPU("h100 80gb hbm3", 79.1, _tensor_cores(989e12) | {"fp32": 67e12, "fp64": 67e12}),
    "h200": GPU("h200", 139.7, _tensor_cores(989e12) | {"fp32": 67e12, "fp64": 67e12}),
    "b200": GPU("b200", 178.3, _tensor_cores(2250e12) | {"fp32": 75e12, "fp64": 37e12}),
    "l40s": GPU("l40s", 44.4, _tensor_cores(362e12) | {"fp32": 91.6e12}, "pcie"),
    "l4": GPU("l4", 21.9, _tensor_cores(121e12) | {"fp32": 30.3e12}, "pcie"),
    "a10": GPU("a10", 22.1, _tensor_cores(125e12) | {"fp32": 31.2e12}, "pcie"),
    "rtx3090": GPU("rtx 3090", 23.7, _tensor_cores(71e12) | {"fp32": 35.6e12}, "pcie"),
    "rtx4090": GPU("rtx 4090", 23.5, _tensor_cores(165e12) | {"fp32": 82.6e12}, "pcie"),
}
# In the names of others: a slice of a GPU, an H100 or H200 with other clocks, a laptop's, China's RTX 4090 D, an RTX 3090 Ti
OTHERS = {"mig", "nvl", "laptop", "d", "ti"}
RECORDS = Path(__file__).resolve().parents[1] / "results" / "reference"  # of proofs/gpu.py, a folder for each GPU


def outside(ranks: int, communicators: int = 1) -> float:
    """Return the GiB on a GPU that are not PyTorch's: the context, and with several ranks the buffers of communicators.

    Args:
        ranks: how many train.
        communicators: of a rank; all but the first are assumed to take ``COMMUNICATOR``.
    """
    return CONTEXT + (NCCL + (communicators - 1) * COMMUNICATOR if ranks > 1 else 0.0)


def known(name: str) -> str | None:
    """Return the key in ``GPUS`` of the GPU with a name such as "NVIDIA H100 80GB HBM3"; None if it is not one of them.

    Args:
        name: of the GPU as PyTorch reports it, or of the folder that proofs/gpu.py makes of that.
    """
    words = set(re.findall("[a-z0-9]+", name.lower()))
    return next((key for key, gpu in GPUS.items() if set(gpu.named.split()) <= words and not words & OTHERS), None)


def reserve(gpu: str, records: Path = RECORDS) -> tuple[float, str]:
    """Return (reserved memory / planned memory, its source): measured by proofs/gpu.py, else published.

    Args:
        gpu: a key of ``GPUS``.
        records: the folder with a folder for each measured GPU.
    """
    for path in sorted(records.glob("*/rows/planner.json")):
        if known(path.parts[-3]) == gpu:
            measured = [
                row["measured"] for row in json.loads(path.read_text()) if row["what"] == "reserved over the plan"
            ]
            if measured:
                return max(measured), f"measured: {path.parts[-3]}"
    return RESERVE[1], "published: torchtitan's eager runs on H100, with expandable_segments, 1.16 to 1.22"


def verdict(peak: int, memory: float, gpu: str, ranks: int, communicators: int = 1) -> dict:
    """Return whether a plan fits, and the GiB it needs.

    Args:
        peak: of the plan, in bytes.
        memory: of the GPU, in GiB.
        gpu: a key of ``GPUS``.
        ranks: how many train.
        communicators: of a rank.

    Returns:
        {"answer": "fits", "tight", or "does not fit", "needs": GiB with the reserve, "least": GiB without, "outside":
        GiB, "communicators", "reserve": factor, "source": of the factor}. Tight: it fits if the allocator reserves
        nothing beyond the plan.
    """
    factor, source = reserve(gpu)
    beyond = outside(ranks, communicators)
    least = peak / GIB + beyond
    needs = peak / GIB * factor + beyond
    answer = "fits" if needs <= memory else "tight" if least <= memory else "does not fit"
    return {"answer": answer, "needs": needs, "least": least} | {
        "outside": beyond,
        "communicators": communicators if ranks > 1 else 0,
        "reserve": factor,
        "source": source,
    }
