# SPDX-License-Identifier: BSD-3-Clause
"""Claims about traffic: what a rank sends in a step, by the law of rings."""

from labkit.measuring.differences import largest_difference
from labkit.teaching.claims import LAWS, Case, Claim
from labkit.teaching.claims.sweeps import grid, leaving, parameter_bytes, plan, sent, sent_by

MANY_RANKS, FEW_RANKS = 32, 8  # (N − 1)/N is within a tenth of 1, or is not
ITEMSIZE = {"fp32": 4, "bf16": 2}  # bytes of a gathered element
ELEMENTWISE = ("AdamW", "SGD")  # optimizers that update an element by its own gradient


def over_ddp(precision, reshard, micro_batches, backend="ring", model="llama3-8b", ranks=64, lora=None):
    """Return what FSDP2 sends over what DDP sends; both reduce gradients after the last micro-batch."""
    fields = {"precision": precision, "micro_batches": micro_batches, "sync": "last", "ranks": ranks}
    fields["lora"] = lora
    fsdp, ddp = plan(model, reshard=reshard, **fields), plan(model, strategy="ddp", **fields)
    return sent(fsdp, backend) / sent(ddp, backend)


def _gathered(precision, reshard, micro_batches) -> int:
    """Return the bytes that a step gathers for each parameter."""
    return (2 if reshard == "true" else 1) * micro_batches * ITEMSIZE[precision]


def _is_ratio(ratio: float):
    """Return the condition under which FSDP sends ``ratio`` times as much as DDP, whose gradients are fp32.

    The reduce-scatter is one pass of 4 bytes in a ring, two under gloo; DDP's all-reduce is two.
    """

    def when(precision, reshard, micro_batches, backend="ring", lora=None, **_):
        if lora:
            return False
        reduced = 8 if backend == "gloo" else 4
        return _gathered(precision, reshard, micro_batches) + reduced == 8 * ratio

    return when


def over_ddp_measured(evidence) -> list[Case]:
    """Collectives of runs in this notebook, with gloo's passes and a ring's."""
    names = {"FSDP, 4 ranks": ("fp32", "true"), "FSDP, kept": ("fp32", "false"), "FSDP, bf16": ("bf16", "true")}
    found = []
    for name, (precision, reshard) in names.items():
        ddp = "DDP, bf16" if precision == "bf16" else "DDP"
        for backend in ("ring", "gloo"):
            ratio = _sent(evidence, name, backend) / _sent(evidence, ddp, backend)
            setting = {"precision": precision, "reshard": reshard, "micro_batches": 1, "backend": backend}
            found.append(Case(setting, ratio, "counted"))
    return found


def _sent(evidence, name: str, backend: str) -> float:
    return sent_by(evidence["runs"][name]["traffic"], evidence["plans"][name], backend)


def off_four_and_two(ranks, backend, model="llama3-8b", precision="fp32"):
    """Return how far FSDP is off 4 times, or DDP off 2 times the model's size in fp32, whichever is more."""
    fsdp, ddp = (plan(model, strategy=s, ranks=ranks, precision=precision) for s in ("fsdp2", "ddp"))
    size = parameter_bytes(fsdp)
    return largest_difference([sent(fsdp, backend) / size / 4, sent(ddp, backend) / size / 2], [1.0, 1.0])


def four_and_two(ranks, backend, precision="fp32", **_):
    if backend != "gloo" or precision != "fp32" or ranks <= FEW_RANKS:
        return False
    return True if ranks >= MANY_RANKS else None


def zero1_over_ddp(library, weights="fp32", model="llama3-8b", ranks=64):
    """Return what ZeRO-1 sends over DDP with the same format of weights and gradients."""
    precision = "bf16" if weights == "bf16" else "fp32"
    ddp = plan(model, strategy="ddp", precision=precision, weights=weights, ranks=ranks)
    if library == "the paper":  # section 7.2.1: reduce-scatter gradients, all-gather parameters
        return 2 * parameter_bytes(ddp) * (ranks - 1) / ranks / sent(ddp)
    strategy, fields = ("zero1", {"weights": weights}) if library == "PyTorch" else ("deepspeed-1", {})
    return sent(plan(model, strategy=strategy, precision=precision, ranks=ranks, **fields)) / sent(ddp)


def shard_grad_op(what, micro_batches=1, model="llama3-8b", ranks=8):
    """Return FSDP's value with parameters kept after forward, over that of the paper's ZeRO-2, in fp32."""
    fields = {"precision": "fp32", "ranks": ranks, "micro_batches": micro_batches}
    kept = plan(model, strategy="fsdp1", reshard="false", **fields)
    if what == "parameters between steps":
        return sum(size for (name, _), size in kept.persistent().items() if name == "parameters") / parameter_bytes(
            kept
        )
    zero2 = parameter_bytes(kept) * (micro_batches + 1) * (ranks - 1) / ranks  # a reduce-scatter each, one all-gather
    return sent(kept) / zero2


def same_as_zero2(what, micro_batches=1, **_):
    return what == "bytes sent" and micro_batches == 1


def in_the_optimizer(evidence) -> list[Case]:
    return [Case({"optimizer": name}, float(size), "measured") for name, size in evidence["optimizers"].items()]


def hybrid_over_full(nodes, precision="bf16", weights="fp32", model="llama3-8b"):
    """Return the bytes that leave a node under HSDP, over the fewer of FSDP's two, freed or kept after forward."""
    fields = {"ranks": 8 * nodes, "precision": precision, "weights": weights}
    full = min(leaving(plan(model, reshard=reshard, **fields)) for reshard in ("true", "false"))
    return leaving(plan(model, replicas=nodes, **fields)) / full


def hybrid_sends_less(nodes, precision="bf16", weights="fp32", **_):
    return precision == "fp32" or weights == "bf16" or nodes < 4


CLAIMS = {
    "1.5x": Claim(
        "FSDP communicates 1.5 times as much as DDP.",
        "paper",
        "02",
        "times DDP's bytes",
        (1.35, 1.65),
        "all parameters are trained, gradients travel in fp32, and a step gathers 8 bytes of each parameter "
        "(twice in fp32, or 4 times in bf16) on rings, or 4 under gloo",
        over_ddp,
        grid(precision=("fp32", "bf16"), reshard=("true", "false"), micro_batches=(1, 2, 4)),
        _is_ratio(1.5),
        measured=over_ddp_measured,
    ),
    "twice": Claim(
        "FSDP communicates twice as much as DDP.",
        "blog",
        "02",
        "times DDP's bytes",
        (1.8, 2.2),
        "all parameters are trained, and a step gathers 12 bytes of each on rings, or 8 under gloo, where a "
        "reduce-scatter costs an all-reduce",
        over_ddp,
        grid(precision=("fp32", "bf16"), reshard=("true",), micro_batches=(1, 2, 3), backend=("ring", "gloo")),
        _is_ratio(2),
        measured=over_ddp_measured,
    ),
    "4x against 2x": Claim(
        "FSDP sends 4 times the model's size (in fp32) per step, DDP 2 times.",
        "course",
        "02",
        "off 4 or 2 by",
        (0, 0.1),
        "the backend is gloo, the format fp32, and there are 32 ranks or more; rings send 3 against 2, times (N − 1)/N",
        off_four_and_two,
        grid(ranks=(2, 4, 8, 64, 256), backend=("ring", "gloo")),
        four_and_two,
    ),
    "ZeRO-1": Claim(
        "ZeRO-1 needs no more traffic than DDP.",
        "paper",
        "13",
        "times DDP's bytes, in the same format",
        (0, 1.05),
        "gradients are reduce-scattered, as in the paper; PyTorch's optimizer, and DeepSpeed as the course "
        "sets it, all-reduce them (1.5 times)",
        zero1_over_ddp,
        grid(library=("the paper", "PyTorch", "DeepSpeed"), weights=("fp32", "bf16")),
        lambda library, **_: library == "the paper",
    ),
    "SHARD_GRAD_OP": Claim(
        "SHARD_GRAD_OP is ZeRO-2.",
        "documentation",
        "13",
        "times ZeRO-2's",
        (0.9, 1.1),
        "you count the bytes sent in a step of one micro-batch, in fp32; between steps, parameters stay sharded, "
        "and ZeRO-2's do not",
        shard_grad_op,
        grid(what=("parameters between steps", "bytes sent"), micro_batches=(1, 4)),
        same_as_zero2,
    ),
    "optimizer step": Claim(
        "There is no communication in the optimizer's step.",
        "documentation",
        "18",
        "bytes in collectives",
        (0, 0),
        "the optimizer updates each element by its own gradient, on the rank that keeps it, without a gradient scaler: AdamW and SGD under FSDP; "
        "ZeRO-1's optimizer broadcasts what it has updated, and " + LAWS["18"],
        when=lambda optimizer: optimizer in ELEMENTWISE,
        measured=in_the_optimizer,
    ),
    "HYBRID_SHARD": Claim(
        "HYBRID_SHARD is best across nodes.",
        "blog",
        "10",
        "times the bytes that leave a node under FSDP, freed or kept",
        (0, 1),
        "you count the bytes that leave a node, and one format travels; with bf16 gathers and fp32 "
        "gradients, only on 2 or 3 nodes",
        hybrid_over_full,
        grid(nodes=(2, 3, 4, 8, 16, 64), precision=("fp32", "bf16")),
        hybrid_sends_less,
    ),
}
