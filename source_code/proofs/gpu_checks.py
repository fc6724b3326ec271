# SPDX-License-Identifier: BSD-3-Clause
"""Checks of the GPU hour that no lab makes. Each prints rows of gpu_rows.py, as JSON in its last line.

  python -m proofs.gpu_checks --check context                       memory of a process on a GPU that is not PyTorch's
  python -m proofs.gpu_checks --check groups --ranks 4              what each further process group takes
  python -m proofs.gpu_checks --check pinned                        pinned memory of the host, over what was asked for
  python -m proofs.gpu_checks --check float8-gather --ranks 4       bytes of all-gathers in one byte per element
  python -m proofs.gpu_checks --check deepspeed-defaults --ranks 4  the kept bytes of ZeRO under DeepSpeed's own settings
  python -m proofs.gpu_checks --check time-out --ranks 2            a collective that times out: NCCL's RAS, and the dumps

With --device cpu they are rehearsed: what only a GPU has is then left out, and said.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from labkit import UserError
from labkit.measuring.trace import StepTrace, total
from labkit.running import launch, notebook_ranks
from labkit.running.options import Options, exit_with_error, option, parse
from labkit.training import deepspeed_zero, models, quantized_gather
from planner.models.shapes import GPT_SHAPES
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

MIB, GIB = 2**20, 2**30
GROUPS = 4  # process groups that are made one after the other
TIMEOUT = 30  # seconds that a collective may take
RAS = ("localhost", 28028)  # where a rank of each node answers, from NCCL 2.24 on
REHEARSED = {"measured": None, "note": "a rehearsal: there is no GPU"}


@dataclass(frozen=True)
class Config(Options):
    check: Literal["context", "groups", "pinned", "float8-gather", "deepspeed-defaults", "time-out"] = option(
        "context", "which one"
    )
    ranks: int = option(1, "ranks, one per GPU", least=1)
    device: Literal["cuda", "cpu"] = option("cuda", "cpu: a rehearsal")


def used(device) -> int:
    """Return the bytes in use on a GPU, by all processes, that are not reserved by this one's allocator."""
    free, all_of_it = torch.cuda.mem_get_info(device)
    return all_of_it - free - torch.cuda.memory_reserved(device)


def context(config) -> list[dict]:
    if config.device == "cpu":
        return [{"what": "GiB of a context", **REHEARSED}]
    (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
    note = "of all processes on GPU 0: run it alone"
    return [{"what": "GiB of a context", "measured": used(0) / GIB, "note": note}]


def groups(config) -> list[dict]:
    steps = notebook_ranks.on_ranks(_group_sizes, ranks=config.ranks, device=config.device)[0]
    if config.device == "cpu":
        return [{"what": "MiB of a further process group", **REHEARSED}]
    return [{"what": f"MiB of process group {number}", "measured": size / MIB} for number, size in enumerate(steps)]


def _group_sizes(me) -> list[int]:
    """Return the bytes that a rank's process groups take on its GPU, in the order in which they first communicate."""
    on_gpu = me.device.type == "cuda"
    number, sizes = torch.ones(1024, device=me.device), []
    before = used(me.device) if on_gpu else 0
    for group in [None, *(dist.new_group(list(range(me.world_size))) for _ in range(GROUPS))]:
        dist.all_reduce(number, group=group)
        if on_gpu:
            torch.cuda.synchronize(me.device)
        now = used(me.device) if on_gpu else 0
        sizes.append(now - before)
        before = now
    return sizes


def pinned(config) -> list[dict]:
    asked = {
        "a power of two": 64 * MIB,
        "one byte more": 64 * MIB + 1,
        "a block of Llama 3's 8B, 8 shards": 109_058_048,
    }
    if config.device == "cpu":
        return [{"what": f"pinned memory over what was asked for: {name}", **REHEARSED} for name in asked]
    rows = []
    for name, size in asked.items():
        before = _locked()
        tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        taken = _locked() - before
        rows.append({"what": f"pinned memory over what was asked for: {name}", "measured": taken / tensor.nbytes})
    return rows


def _locked() -> int:
    """Return the bytes that the allocator of pinned memory holds.

    Raises:
        UserError: this PyTorch does not count them.
    """
    if not hasattr(torch.cuda, "host_memory_stats"):
        raise UserError("this PyTorch has no torch.cuda.host_memory_stats")
    stats = torch.cuda.host_memory_stats()
    return stats.get("allocated_bytes.current", stats.get("allocated_bytes.allocated", 0))


def float8_gather(config) -> list[dict]:
    """Compare the all-gathers of the tiny GPT's blocks with and without quantization. gloo gathers int8 instead of float8."""
    plain, quantized = (
        notebook_ranks.on_ranks(_gathered, quantize, ranks=config.ranks, device=config.device)[0]
        for quantize in (False, True)
    )
    return [
        {"what": "all-gathered bytes, one byte per element over fp32", "measured": quantized["bytes"] / plain["bytes"]},
        {"what": "relative change of the third loss", "measured": abs(quantized["loss"] / plain["loss"] - 1)},
    ]


def _gathered(me, quantize: bool) -> dict:
    """Train three steps under FSDP2: {"bytes" of the last step's all-gathers, its "loss"}."""
    torch.manual_seed(0)
    model = models.GPT(GPT_SHAPES["tiny"])
    models.init_weights(model, 0)
    model.to(me.device)
    if quantize:
        gathered = quantized_gather.Float8Gathered if me.device.type == "cuda" else quantized_gather.Int8Gathered
        quantized_gather.quantize_gathers(model.blocks, gathered)
    for module in [*model.blocks, model]:
        fully_shard(module)
    step, loss = _three_steps(model, torch.optim.AdamW(model.parameters()), me)
    found = sum(size * count for (kind, size, _), count in step.collectives.items() if kind == "all-gather")
    return {"bytes": found, "loss": loss}


def _three_steps(model, optimizer, me, backward=None) -> tuple[StepTrace, float]:
    tokens = torch.arange(2 * 16, device=me.device).view(2, 16)
    for _ in range(3):
        step = StepTrace(model, optimizer, me.device)
        with step:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            (backward or torch.Tensor.backward)(loss)
            optimizer.step()
            optimizer.zero_grad()
    return step, loss.item()


def deepspeed_defaults(config) -> list[dict]:
    deepspeed_zero.check()
    rows = []
    for stage in range(4):
        kept = notebook_ranks.on_ranks(_kept_by_deepspeed, stage, ranks=config.ranks, device=config.device)[0]
        rows.append({"what": f"stage {stage}: MiB kept between steps", "measured": kept / MIB})
    return rows


def _kept_by_deepspeed(me, stage: int) -> int:
    torch.manual_seed(0)
    model = models.GPT(GPT_SHAPES["tiny"])
    models.init_weights(model, 0)
    model.to(me.device)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    settings |= {"zero_force_ds_cpu_optimizer": False, "steps_per_print": None}
    engine, optimizer = deepspeed_zero.initialize(model, torch.optim.AdamW(model.parameters()), settings, me)
    step, _ = _three_steps(engine, optimizer, me, engine.backward)
    start = step.timeline()[0]
    return total(start) - start["activations"]


def time_out(config) -> list[dict]:
    """Let rank 1 stay away from a collective; meanwhile ask NCCL's RAS, and afterwards read the dumps."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = TIMEOUT if config.device == "cuda" else 3
        words = ["faults.py", "--fault", "1", "--ranks", str(config.ranks), "--device", config.device]
        words += ["--timeout", str(seconds), "--flight", folder]
        with subprocess.Popen(
            [sys.executable, *words], cwd=launch.SOURCE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run:
            answer = _ask_ras(time.monotonic() + seconds) if config.device == "cuda" else None
            printed, _ = run.communicate(timeout=10 * seconds + 60)
        read = [sys.executable, "diagnose_hang.py", "--folder", folder]
        report = subprocess.run(read, cwd=launch.SOURCE, capture_output=True, text=True, timeout=60).stdout
        dumps = sorted(os.listdir(folder))
    print(printed, answer or "", report, sep="\n\n")
    ras = {"note": " ".join((answer or "").split())[:500]} if config.device == "cuda" else REHEARSED
    return [
        {"what": "RAS answers while a rank is missing", "holds": bool(answer) if config.device == "cuda" else None}
        | ras,
        {"what": "the run fails", "holds": run.returncode != 0},
        {
            "what": "diagnose_hang.py names a rank",
            "holds": bool(re.search(r"\branks? \d", report)),
            "note": report[:500],
        },
        {"what": "files of the dumps", "measured": len(dumps), "note": ", ".join(dumps)},
    ]


def _ask_ras(deadline: float) -> str | None:
    """Return what NCCL's RAS says of the job in detail, or None if nobody answers."""
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(RAS, timeout=5) as connection:
            connection.sendall(b"verbose status\n")
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode(errors="replace")
        time.sleep(1)  # until the ranks are there
    return None


CHECKS = {
    check.__name__.replace("_", "-"): check
    for check in (context, groups, pinned, float8_gather, deepspeed_defaults, time_out)
}


def main(config) -> None:
    if config.device == "cuda" and torch.cuda.device_count() < config.ranks:
        raise UserError(f"--ranks {config.ranks} needs as many GPUs, and PyTorch sees {torch.cuda.device_count()} here")
    print(json.dumps(CHECKS[config.check](config)))


if __name__ == "__main__":
    asked = parse(Config, __doc__)
    try:
        main(asked)
    except UserError as error:
        exit_with_error(str(error))
