# SPDX-License-Identifier: BSD-3-Clause
"""Claims about time. Nothing here ran on a GPU: steps are predicted for H100s (planner/timing), or calculated from peaks."""

from functools import cache

from planner.models.flops import hardware_flops
from planner.timing import cost

from labkit.teaching.claims import Claim
from labkit.teaching.claims.sweeps import attained, grid, parameter_bytes, plan, step

GIGABYTES = (12.5, 25, 50, 100, 200, 400)  # per second that leave a node
HIDDEN = 0.1  # a step with less exposed communication than this share counts as hidden
# Bytes per second of a GPU's share of the host: two sockets of eight channels of DDR5-4800, for eight GPUs
HOST_BANDWIDTH = 2 * 8 * 4.8e9 * 8 / 8
ADAM_BYTES = 7 * 4  # read parameter, gradient, and two moments, and write all but the gradient
BUS_BYTES = 3 * 4  # up for forward and for backward, and the gradient down


def more_for_recomputing(gigabytes, recompute="full", model="llama3-8b", tokens=4096, ranks=128, lora=None):
    """Return how much longer a step takes with recomputation, as a share."""
    with_it, without = (
        step(plan(model, tokens, ranks=ranks, recompute=r, lora=lora), gigabytes) for r in (recompute, "none")
    )
    return with_it["overlapped"] / without["overlapped"] - 1


def recomputing_costs(gigabytes, recompute="full", model="llama3-8b", tokens=4096, ranks=128, lora=None):
    if lora:
        return False
    found = step(plan(model, tokens, ranks=ranks), gigabytes)
    exposed = found["exposed"] / found["overlapped"]
    return recompute == "full" and (True if exposed < 0.07 else False if exposed > 0.2 else None)


def slower_by_offload(tokens, ranks=8, model="llama3-8b"):
    """Return how many times as long a step takes, at the least, with parameters and optimizer in the host's memory."""
    found = plan(model, tokens, ranks=ranks)
    elements, compute = parameter_bytes(found) / 4 / ranks, hardware_flops(found) / attained(found)
    bus = elements * BUS_BYTES / cost.LINKS["pcie"].bandwidth
    return (max(compute, bus) + elements * ADAM_BYTES / HOST_BANDWIDTH) / compute


def offload_costs(tokens, ranks=8, **_):
    together = tokens * ranks
    return True if 11_000 <= together <= 17_000 else False if not 8_000 <= together <= 24_000 else None


def still_exposed(strategy, model="llama3-8b", gigabytes=50):
    """Return the exposed seconds with 16,384 tokens per rank, over those with 1,024."""
    ways = {"DDP": {"strategy": "ddp"}, "FSDP": {}, "HSDP": {"replicas": 2}, "tensor": {"tensor": 8, "ranks": 8}}
    fields = {"ranks": 16} | ways[strategy.removesuffix(" on gloo")]
    backend = "gloo" if strategy.endswith("gloo") else "ring"
    many, few = (step(plan(model, n, **fields), gigabytes, backend=backend)["exposed"] for n in (16384, 1024))
    return many / few


def larger_batches_hide(strategy, gigabytes=50, **_):
    if strategy not in ("DDP", "FSDP", "HSDP"):
        return False
    return True if 50 <= gigabytes <= 100 else None


@cache
def needed(tokens, model="llama3-8b", ranks=64):
    """Return the GB/s per GPU with which all but a tenth of a step hides FSDP's communication, one GPU per node."""
    found, low, high = plan(model, tokens, ranks=ranks), 0.1, 1e5
    for _ in range(25):  # the factor between the bounds shrinks to its square root each time
        middle = (low * high) ** 0.5
        times = step(found, middle, node=1)
        low, high = (low, middle) if times["exposed"] <= HIDDEN * times["overlapped"] else (middle, high)
    return high


def needs_100(tokens, model="llama3-8b", **_):
    if model == "1b":
        return None
    return True if 3500 <= tokens <= 5000 else False if not 2500 <= tokens <= 7500 else None


def both_efficiencies(gigabytes, precision, tokens=8192, model="1b", ranks=128):
    """Return which share of the two statements is true: DDP keeps 90 to 95 % of one node's speed, FSDP 80 to 85 %."""
    found = {}
    for strategy in ("ddp", "fsdp2"):
        node, all_nodes = (
            step(plan(model, tokens, ranks=n, strategy=strategy, precision=precision), gigabytes) for n in (8, ranks)
        )
        found[strategy] = node["overlapped"] / all_nodes["overlapped"]
    return ((0.9 <= found["ddp"] <= 0.95) + (0.8 <= found["fsdp2"] <= 0.85)) / 2


def fsdp_over_ddp(gigabytes, formats, reshard="true", model="1b", tokens=2048, ranks=16):
    """Return how long FSDP's step takes over DDP's, of a model that fits. formats: of computing and of weights."""
    precision, weights = formats.split("/")
    fields = {"precision": precision, "weights": weights, "ranks": ranks}
    fsdp, ddp = plan(model, tokens, reshard=reshard, **fields), plan(model, tokens, strategy="ddp", **fields)
    return step(fsdp, gigabytes)["overlapped"] / step(ddp, gigabytes)["overlapped"]


def ddp_is_faster(gigabytes, formats, reshard="true", model="1b", tokens=2048, ranks=16):
    if reshard == "false" or formats == "bf16/fp32":
        return False
    precision, weights = formats.split("/")
    found = step(plan(model, tokens, precision=precision, weights=weights, ranks=ranks), gigabytes)
    exposed = found["exposed"] / found["overlapped"]
    return True if exposed > 0.15 and gigabytes <= 50 else False if exposed < 0.06 else None


CLAIMS = {
    "30 %": Claim(
        "Recomputation costs 30 % more time.",
        "documentation",
        "08",
        "longer step, as a share",
        (0.25, 0.35),
        "all is trained, blocks are recomputed in full, and communication is hidden; on a slow network, "
        "recomputing hides in the wait",
        more_for_recomputing,
        grid(gigabytes=GIGABYTES, recompute=("full",)) + grid(gigabytes=(400,), recompute=("selective",)),
        recomputing_costs,
    ),
    "offload": Claim(
        "CPU offload costs 2 to 3 times the time.",
        "blog",
        "06",
        "times the step, at least",
        (2, 3),
        "all ranks (H100s) together have some 10,000 to 20,000 tokens in a step, and the host reaches its "
        "published bandwidth; a slower host needs more tokens",
        slower_by_offload,
        grid(tokens=(256, 512, 1024, 1536, 2048, 4096, 16384), ranks=(8,)),
        offload_costs,
        how="calculated",
    ),
    "larger batches": Claim(
        "Larger batches hide communication.",
        "documentation",
        "12",
        "times the exposed seconds, with 16 times the tokens",
        (0, 0.5),
        "the backend overlaps, the traffic does not grow with the batch, and the network is neither far too slow nor hiding "
        "all before (here 50 GB/s per node): so DDP, FSDP, and HSDP, not tensor parallelism, not FSDP on gloo",
        still_exposed,
        grid(strategy=("DDP", "FSDP", "HSDP", "FSDP on gloo", "tensor")),
        larger_batches_hide,
    ),
    "100 GB/s": Claim(
        "FSDP needs 100 GB/s between GPUs.",
        "blog",
        "12",
        "GB/s per GPU that hide all but a tenth of a step",
        (67, 150),
        "an H100 at a third of its peak has some 3,500 to 5,000 tokens of Llama 3 8B or 70B per micro-batch; with fewer tokens, "
        "or for a smaller model, it needs more",
        needed,
        grid(tokens=(1024, 2048, 4096, 8192, 16384, 32768)),
        needs_100,
    ),
    "90 against 80": Claim(
        "DDP scales with 90 to 95 % efficiency, FSDP with 80 to 85 %.",
        "blog",
        "12",
        "share of the two that is true",
        (1, 1),
        "any network makes another pair, and in bf16 FSDP loses less than DDP, whose gradients travel in fp32",
        both_efficiencies,
        grid(gigabytes=(25, 50, 75, 100, 150, 200, 400), precision=("fp32", "bf16")),
    ),
    "DDP when it fits": Claim(
        "Use DDP when the model fits, FSDP when it does not.",
        "documentation",
        "12",
        "times DDP's step: DDP is faster by 2 % or more",
        (1.02, float("inf")),
        "DDP reduces in the format in which FSDP gathers, FSDP frees after forward, and the network is slow: "
        "50 GB/s per node or less, and not hidden",
        fsdp_over_ddp,
        grid(gigabytes=(12.5, 50, 400), formats=("fp32/fp32", "bf16/fp32", "bf16/bf16"), reshard=("true",))
        + grid(gigabytes=(50,), formats=("fp32/fp32",), reshard=("false",)),
        ddp_is_faster,
    ),
}
