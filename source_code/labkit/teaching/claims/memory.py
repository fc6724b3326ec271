# SPDX-License-Identifier: BSD-3-Clause
"""Claims about memory: what a rank keeps, what its peak is, and what the usual savers save."""

from planner import gpus, predict

from labkit.teaching.claims import LAWS, Case, Claim
from labkit.teaching.claims.sweeps import (
    GIB,
    activations,
    grid,
    in_one_unit,
    kept,
    parameter_bytes,
    peak,
    plan,
    state_share,
)

INFINITY = float("inf")
TOKENS = (64, 1024, 4096, 16384, 65536)
HOST = 2048  # GiB of an H100 node's host memory: NVIDIA's DGX H100 data sheet has 2 TB
FEW, MANY = 0.05, 0.15  # shares of a peak: below, the model's state hardly counts; above, it does


def per_rank(part, ranks, model="llama3-8b", tokens=4096, precision="fp32"):
    """Return how many times 1/N of one process's bytes a rank has."""
    measure = kept if part == "kept" else peak
    one, many = (plan(model, tokens, ranks=n, precision=precision) for n in (1, ranks))
    return measure(many) * ranks / measure(one)


def falls_to_one_nth(part, ranks, model="llama3-8b", tokens=4096, precision="fp32"):
    if part == "peak" and plan(model, tokens, ranks=ranks, precision=precision).peak()[0] != "optimizer":
        return None if ranks < 8 else False
    return True if _divides(ranks, model) else None


def _divides(ranks: int, model: str) -> bool:
    """Return whether all ranks have equally many rows of every parameter."""
    shapes = [shape for module in plan(model).blueprint.modules for shape in module.parameters.values()]
    return all(shape[0] % ranks == 0 for shape in shapes)


def per_rank_measured(evidence) -> list[Case]:
    runs, one = evidence["runs"], evidence["runs"]["one process"]
    found = []
    for ranks in (2, 4):
        record = runs[f"FSDP, {ranks} ranks"]
        for part in ("kept", "peak"):
            value = ranks * _bytes(record, part) / _bytes(one, part)
            found.append(Case({"part": part, "ranks": ranks}, value, "measured"))
    return found


def _bytes(record: dict, part: str) -> float:
    """Return what a rank of a run keeps between steps, or its peak, in bytes."""
    if part == "peak":
        return max(record["memory"]["peak_by_rank"])
    return sum(record["memory"]["start"][name] for name in ("parameters", "optimizer state"))


def state(strategy, view=False, ranks=8, model="llama3-8b", precision="fp32"):
    """Return parameters, gradients, moments, and buckets in the optimizer's step, over 4P, or over 4P/N."""
    found = plan(model, 64, strategy=strategy, ranks=ranks, precision=precision)
    terms = predict.by_category(found.timeline()["optimizer"][1])
    names = ("parameters", "gradients", "optimizer state", "all-reduce buckets")
    share = ranks if found.shards_parameters else 1
    return sum(terms.get(name, 0) for name in names) * share / (4 * parameter_bytes(found))


def state_takes_4p(strategy, view=False, ranks=8, model="llama3-8b", **_):
    if strategy == "ddp":
        return view
    return True if _divides(ranks, model) else None


def state_measured(evidence) -> list[Case]:
    return [Case({"strategy": "ddp", "view": view}, value, "measured") for view, value in evidence["state"].items()]


def activations_over_two_ranks(ranks, model="llama3-8b", tokens=4096, precision="bf16", recompute="none"):
    """Return a rank's activations, over those of a rank of two, with the same batch per rank."""
    many, two = (plan(model, tokens, ranks=n, precision=precision, recompute=recompute) for n in (ranks, 2))
    return activations(many) / activations(two)


def activations_measured(evidence) -> list[Case]:
    def most(name):
        timeline, names = evidence["runs"][name]["memory"]["timeline"], evidence["categories"]
        return max(sizes[names.index("activations")] for _, *sizes in timeline)

    one = most("one process")
    return [Case({"ranks": n}, most(f"FSDP, {n} ranks") / one, "measured") for n in (2, 4)]


def saved_by_one_unit(tokens, model="llama3-8b", ranks=8, optimizer="adamw"):
    """Return the share of DDP's peak that FSDP in one unit saves, in fp32."""
    ddp, fsdp = (plan(model, tokens, ranks=ranks, precision="fp32", optimizer=optimizer, strategy=s) for s in _BOTH)
    return 1 - peak(in_one_unit(fsdp)) / peak(ddp)


_BOTH = ("ddp", "fsdp2")


def one_unit_saves_nothing(tokens, model="llama3-8b", ranks=8, optimizer="adamw"):
    little = _little(state_share(plan(model, tokens, ranks=ranks, precision="fp32", optimizer=optimizer)))
    return little or (little if optimizer == "adamw" else None)  # SGD has no moments to shard


def _little(share: float) -> bool | None:
    """Return whether a share of a peak hardly counts; None: in between."""
    return True if share < FEW else False if share > MANY else None


def units_over_one(tokens, model="llama3-8b", ranks=8, strategy="fsdp2", precision="fp32", layers=None):
    """Return the peak with a unit per block, over the peak in one unit. Of the MNIST network, ``tokens`` are images."""
    if model == "mnist":
        whole, parts = (predict.mnist_plan(strategy, wrap, ranks, tokens) for wrap in ("unit", "size"))
        return peak(parts) / peak(whole)
    found = plan(model, tokens, ranks=ranks, strategy=strategy, precision=precision, layers=layers)
    return peak(found) / peak(in_one_unit(found))


def units_help(tokens, model="llama3-8b", ranks=8, strategy="fsdp2", precision="fp32", layers=None):
    if model == "mnist":
        return False if strategy == "fsdp1" and tokens <= 16 else None
    little = _little(state_share(plan(model, tokens, ranks=ranks, precision=precision)))
    return None if little is None else not little


def fsdp1_over_fsdp2(model, batch, ranks=4, **options):
    """Return FSDP1's peak over FSDP2's. batch: tokens per rank, or images of the MNIST network."""
    if model == "mnist":
        one, two = (predict.mnist_plan(s, "size", ranks, batch) for s in ("fsdp1", "fsdp2"))
    else:
        one, two = (plan(model, batch, ranks=ranks, strategy=s, **options) for s in ("fsdp1", "fsdp2"))
    return peak(one) / peak(two)


def fsdps_need_the_same(model, batch, ranks=4, precision="bf16", recompute="none", lora=None):
    if lora:
        return False
    if model == "mnist":
        return True if batch >= 512 else False if batch <= 16 else None
    if batch >= 16384 or (batch >= 4096 and recompute == "none"):
        return True
    return False if (model, ranks, precision) == ("llama3-8b", 64, "fp32") and batch <= 64 else None


def bf16_over_fp32(tokens, weights, model="llama3-8b", ranks=64):
    """Return the peak in bf16 over the peak in fp32. weights: "fp32" for mixed precision, "bf16" for all."""
    half, full = plan(model, tokens, ranks=ranks, weights=weights), plan(model, tokens, ranks=ranks, precision="fp32")
    return peak(half) / peak(full)


def bf16_halves(tokens, weights, model="llama3-8b", ranks=64):
    if weights == "fp32":
        if model == "llama3-70b":
            return True if tokens >= 8192 and ranks >= 256 else None
        return False if model in ("1b", "llama3-8b") and (tokens >= 4096 or ranks <= 64) else None
    few, many = (1024, 4096) if model == "llama3-8b" else (256, INFINITY)
    return True if tokens <= few else False if tokens >= many else None


def saved_by_recomputing(layers, recompute="full", model="llama3-8b", tokens=4096, ranks=64):
    """Return which share of the activations recomputation saves, at the moment when most of them are alive."""
    fields = {"layers": layers, "ranks": ranks}
    return 1 - activations(plan(model, tokens, recompute=recompute, **fields)) / activations(
        plan(model, tokens, **fields)
    )


def recomputing_saves(layers, recompute="full", model="llama3-8b", tokens=4096, ranks=64):
    return recompute == "full" and 9 <= layers <= 40


def whole_gradients(
    tokens, ranks=8, units="blocks", strategy="fsdp2", model="llama3-8b", recompute="none", precision="bf16"
):
    """Return what accumulating without reduction adds to the peak, over 1 − 1/N of the bytes of all gradients."""
    fields = {"ranks": ranks, "recompute": recompute, "precision": precision, "micro_batches": 4, "strategy": strategy}
    every, last = (plan(model, tokens, sync=sync, **fields) for sync in ("every", "last"))
    if units == "one unit":
        every, last = in_one_unit(every), in_one_unit(last)
    return (peak(last) - peak(every)) / parameter_bytes(last) / (1 - 1 / ranks)


def needs_whole_gradients(tokens, ranks=8, units="blocks", strategy="fsdp2", precision="bf16", model="llama3-8b", **_):
    if strategy == "fsdp1":
        return False if precision == "bf16" else None
    if units == "one unit" and tokens < 4096:
        return False if tokens <= 64 and (model, precision) == ("llama3-8b", "bf16") else None
    return True if ranks >= 4 and (tokens >= 4096 or model not in ("tiny", "small", "1b")) else None


def state_dict_over_room(model, what, room):
    """Return the bytes of a full state dict, over those of a memory."""
    size = parameter_bytes(plan(model)) * (3 if what == "weights and moments" else 1)
    return size / ((gpus.GPUS["h100"].memory if room == "GPU" else HOST) * GIB)


def state_dict_fits(model, what, room):
    billions = parameter_bytes(plan(model)) / 4e9
    return billions * (12 if what == "weights and moments" else 4) < (85 if room == "GPU" else 2200)


def over_130_mb(part, weights="fp32", tokens=2048, recompute="full"):
    """Return what a rank of 2,048 keeps of LLaMA 65B, or its peak, over 130 MB."""
    found = plan("llama-65b", tokens, ranks=2048, recompute=recompute, weights=weights)
    return (kept(found) if part == "kept" else peak(found)) / 130e6


def units_measured(evidence) -> list[Case]:
    """Return a case for each network of ``trials.wrapped_share``."""
    return [
        Case({"network": name, "smallest": smallest, "inside_attention": inside}, share, "measured")
        for name, (share, smallest, inside) in evidence["units"].items()
    ]


CLAIMS = {
    "1/N": Claim(
        "With FSDP, memory per GPU falls to 1/N.",
        "blog",
        "04",
        "times 1/N of one process's",
        (0.99, 1.01),
        "you count what a rank keeps between steps (parameters and moments), or the peak is in the optimizer's step (a large "
        "model, few tokens, few ranks), and N divides the rows of each parameter; not a peak in backward on 8 ranks or more",
        per_rank,
        grid(part=("kept", "peak"), ranks=(2, 8, 64)),
        falls_to_one_nth,
        measured=per_rank_measured,
    ),
    "4P": Claim(
        "Parameters, gradients, and Adam's moments take 4P under DDP, 4P/N under FSDP.",
        "course",
        "01",
        "times 4P, or 4P/N",
        (0.98, 1.02),
        "it is FSDP, in the optimizer's step, and N divides the rows of each parameter, or DDP with gradient_as_bucket_view=True; by default, DDP's "
        "buckets add one more P (AdamW's foreach temporaries add a P, or P/N, for a moment)",
        state,
        grid(strategy=("ddp", "fsdp1", "fsdp2"), view=(False,)),
        state_takes_4p,
        measured=state_measured,
    ),
    "activations": Claim(
        "FSDP does not shard activations.",
        "documentation",
        "08",
        "times those with fewer ranks",
        (0.999, 1.001),
        "each rank keeps its own batch's, on any number of ranks; with enough tokens, " + LAWS["08"],
        activations_over_two_ranks,
        grid(ranks=(2, 8, 64, 1024)),
        measured=activations_measured,
    ),
    "one unit": Claim(
        "FSDP in one unit saves nothing.",
        "blog",
        "04",
        "share of DDP's peak saved",
        (-INFINITY, 0.05),
        "activations are nearly all of DDP's peak (its state below 5 % of it); else " + LAWS["04"],
        saved_by_one_unit,
        grid(tokens=TOKENS, model=("tiny",), ranks=(4,)) + grid(tokens=TOKENS, model=("llama3-8b",), ranks=(8,)),
        one_unit_saves_nothing,
    ),
    "more units": Claim(
        "More, smaller units always lower the peak.",
        "blog",
        "05",
        "times the peak in one unit",
        (0, 0.98),
        "the model's state is a good part of the peak (above 15 %), and no unit has most of the parameters; "
        "in time, more units cost more collectives",
        units_over_one,
        grid(tokens=(*TOKENS, 2**18), model=("llama3-8b",), ranks=(8,))
        + grid(tokens=(1, 16), model=("mnist",), ranks=(4,), strategy=("fsdp1",)),
        units_help,
    ),
    "min_num_params": Claim(
        "size_based_auto_wrap_policy with min_num_params=100 wraps every layer.",
        "course",
        "05",
        "share of layers with parameters that are units",
        (1, 1),
        "each layer has 100 parameters or more, and none is inside nn.MultiheadAttention",
        when=lambda smallest, inside_attention, **_: smallest >= 100 and not inside_attention,
        measured=units_measured,
    ),
    "FSDP1 = FSDP2": Claim(
        "FSDP1 and FSDP2 need the same memory.",
        "blog",
        "09",
        "times FSDP2's peak",
        (0.95, 1.05),
        "all parameters are trained, and activations are the peak (from some thousand tokens, or some hundred images, on); else "
        "FSDP1 may need 40 % more (one large layer, one image), or 10 % less",
        fsdp1_over_fsdp2,
        grid(model=("mnist",), batch=(1, 16, 64, 512))
        + grid(model=("llama3-8b",), batch=(64, 1024, 4096, 16384), ranks=(64,), precision=("fp32",))
        + grid(model=("llama3-8b",), batch=(16384,), ranks=(64,), lora=(8,)),
        fsdps_need_the_same,
    ),
    "bf16": Claim(
        "bf16 halves memory.",
        "blog",
        "08",
        "times the peak in fp32",
        (0, 0.53),
        "weights and moments are bf16, too, and tokens are few, or activations are nearly all, as of a 70B model on 256 ranks; "
        "from 4,096 tokens on, the loss's fp32 logits keep Llama 3 8B above half",
        bf16_over_fp32,
        grid(tokens=(64, 1024, 4096, 16384), weights=("fp32", "bf16"))
        + grid(tokens=(16384,), weights=("fp32",), model=("llama3-70b",), ranks=(256,)),
        bf16_halves,
    ),
    "50 to 80 %": Claim(
        "Activation checkpointing saves 50 to 80 % of activations.",
        "documentation",
        "08",
        "share of activations saved",
        (0.5, 0.8),
        "blocks of Llama 3 8B are recomputed in full, and there are 9 to 40 of them; the logits stay, and "
        "selective recomputation saves less",
        saved_by_recomputing,
        grid(layers=(4, 8, 16, 32, 48, 80), recompute=("full", "selective")),
        recomputing_saves,
    ),
    "no_sync": Claim(
        "Under FSDP, accumulating without reduction costs memory for whole gradients.",
        "documentation",
        "09",
        "times (1 − 1/N) of all gradients, on top of the peak",
        (0.75, 1.5),
        "it is FSDP2 on 4 ranks or more, with a unit per block of a large model, or thousands of tokens; in one unit with few tokens, in bf16, "
        "whole gradients are at the peak anyway, and FSDP1 accumulates them in bf16",
        whole_gradients,
        grid(tokens=(64, 4096, 65536), units=("blocks", "one unit"), ranks=(8,))
        + grid(tokens=(64, 4096), strategy=("fsdp1",), ranks=(64,)),
        needs_whole_gradients,
    ),
    "full state dict": Claim(
        "A full state dict fits on rank 0.",
        "course",
        "07",
        "times the memory there is",
        (0, 1),
        "4 bytes per parameter fit, or 12 with moments: 21 billion parameters on an H100 (7 with moments), "
        "and 550 (183) in a host's 2 TiB",
        state_dict_over_room,
        grid(
            model=("1b", "llama3-8b", "llama3-70b", "llama3-405b"),
            what=("weights", "weights and moments"),
            room=("GPU", "host"),
        ),
        state_dict_fits,
        how="calculated",
    ),
    "130 MB": Claim(
        "A 65B model on 2,048 GPUs needs 130 MB per GPU.",
        "blog",
        "11",
        "times 130 MB",
        (0, 1.1),
        "130 MB are the shards of the fp32 parameters alone; with moments it is 390 MB (193 if all is bf16), and a step of "
        "2,048 tokens, recomputed in full, peaks at 11 to 13 GB",
        over_130_mb,
        grid(part=("kept", "peak"), weights=("fp32", "bf16")),
    ),
}
