# SPDX-License-Identifier: BSD-3-Clause
"""List the configurations that proofs/memory.py trains: one for each option known to matter, and any number of draws.

A configuration is {"script", "ranks", "config"}, and of mnist_fsdp.py "batch_size" too; "config" has the options that
are given, the others are as the lab script has them. "knobs" has what no lab has an option for: arguments and methods of
FSDP2, by the names of ``Plan``'s fields.
"""

import dataclasses
from importlib import import_module
from random import Random

from labkit.running.options import choices_of
from planner.ops import context
from planner.parallel import muon


def listed() -> list[dict]:
    """3 sequences of 33 tokens, and 2, 3 and 4 ranks, so that little divides evenly.

    Where matrix products are split among ranks they are 34 or 36 tokens: these must.
    """
    configs = [mnist(1, strategy="single"), mnist(1, strategy="single", precision="fp64")]
    configs += [mnist(n, strategy="ddp") for n in (2, 3, 4)]
    for strategy in ("fsdp1", "fsdp2"):
        configs += [mnist(n, strategy=strategy) for n in (2, 3)]
        configs += [mnist(n, strategy=strategy, wrap="size") for n in (2, 3, 4)]
        configs += [mnist(3, strategy=strategy, wrap="size", min_num_params=300, reshard_after_forward="false")]
    for optimizer in ("adamw", "adamw-fused", "adamw-for-loop", "momentum", "sgd"):
        configs += [gpt(1, strategy="single", optimizer=optimizer)]
        configs += [gpt(2, strategy="fsdp2", optimizer=optimizer)]
    configs += [gpt(1, strategy="single", optimizer="muon"), gpt(2, strategy="ddp", optimizer="muon")]
    for way in muon.WAYS:
        configs += [gpt(ranks, strategy="fsdp2", optimizer=way) for ranks in (1, 2, 3)]
        configs += [gpt(4, strategy="fsdp2", optimizer=way, precision="bf16", recompute="full")]
    configs += [gpt(4, strategy="fsdp2", optimizer=way, mesh="2x2") for way in ("muon", "muon-gather")]
    for recompute in ("none", "full", "selective"):
        configs += [gpt(1, strategy="single", recompute=recompute, tied=True)]
        configs += [gpt(2, strategy="ddp", recompute=recompute)]
        configs += [gpt(3, strategy=strategy, recompute=recompute) for strategy in ("fsdp1", "fsdp2")]
        configs += [gpt(4, strategy="fsdp2", recompute=recompute, precision="bf16")]
        configs += [gpt(4, strategy="fsdp2", recompute=recompute, mesh="2x2")]
    knobs = {"shard_dim": 1, "reduce_buffers": 3}
    configs += [gpt(2, strategy="fsdp2") | {"knobs": knobs}]
    configs += [gpt(4, strategy="fsdp2", precision="bf16", accumulate=3, sync="last") | {"knobs": knobs}]
    for keep in ("false", "2"):
        configs += [gpt(4, strategy="fsdp2", reshard_after_forward=keep)]
    configs += [gpt(3, strategy="fsdp1", reshard_after_forward="false"), gpt(4, strategy="fsdp1", mesh="2x2")]
    configs += [gpt(2, strategy="fsdp2", lora=4), gpt(3, strategy="fsdp2", lora=3, recompute="full")]
    flat = {"strategy": "fsdp1", "lora": 3}
    configs += [gpt(3, **flat), gpt(2, **flat, wrap="blocks+embeddings", recompute="full", precision="bf16")]
    configs += [gpt(2, strategy=strategy, accumulate=3, sync="last") for strategy in ("ddp", "fsdp1", "fsdp2")]
    configs += [gpt(2, strategy="fsdp2", accumulate=2), gpt(4, strategy="fsdp2", prefetch=2)]
    configs += [gpt(3, strategy="fsdp2", tied=True), gpt(2, strategy="fsdp1", precision="bf16")]
    configs += tensor_parallel() + context_parallel() + mixtures_of_experts()
    for recompute in ("none", "full", "selective"):  # by autocast; AdamW's own peak would be higher than what it does
        configs += [gpt(1, strategy="single", recompute=recompute, precision="bf16", optimizer="sgd", tied=True)]
        configs += [gpt(2, strategy="ddp", recompute=recompute, precision="bf16", optimizer="sgd")]
    configs += [gpt(2, strategy="ddp", precision="bf16", lora=4, batch_size=9)]
    for strategy in ("ddp", "fsdp1", "fsdp2"):
        configs += [gpt(2, strategy=strategy, precision="bf16", accumulate=3, sync="last")]
        configs += [mnist(3, strategy=strategy, precision="bf16")]
    configs += [
        mnist(2, strategy="fsdp2", precision="bf16", wrap="size"),
        mnist(1, strategy="single", precision="bf16"),
    ]
    for schedule in ("gpipe", "1f1b"):
        configs += [pipeline(2, schedule=schedule, accumulate=4)]
        configs += [pipeline(4, schedule=schedule, accumulate=6, recompute="full")]
        configs += [pipeline(3, schedule=schedule, accumulate=4, precision="bf16", optimizer="sgd")]
    return configs + accumulating() + choices() + zero()


def zero() -> list[dict]:
    """Each stage of DeepSpeed's ZeRO, and of PyTorch's."""
    configs = [zero_run(2, stage="1", precision="bf16", accumulate=2)]
    configs += [zero_run(3, stage="1", recompute="full", tied=True)]
    configs += [zero_run(3, engine="deepspeed", stage="0"), zero_run(3, engine="deepspeed", stage="1", batch_size=9)]
    configs += [zero_run(3, engine="deepspeed", stage=stage, recompute="full", tied=True) for stage in ("2", "3")]
    for stage in ("0", "1", "2", "3"):
        configs += [zero_run(4, engine="deepspeed", stage=stage, precision="bf16", accumulate=3)]
    for stage in ("1", "2", "3"):
        configs += [zero_run(n, stage=stage) for n in (2, 4)]
        configs += [zero_run(n, engine="deepspeed", stage=stage) for n in (2, 4)]
    configs += [zero_run(3, engine="deepspeed", stage="3", recompute=how) for how in ("selective", "alternate")]
    return [*configs, zero_run(2, engine="deepspeed", stage="0", clip=1.0, accumulate=2)]


def accumulating() -> list[dict]:
    """Several micro-batches a step, their gradients reduced after each, or after the last; under HSDP, and kept parameters."""
    configs = [gpt(2, strategy=strategy, accumulate=2) for strategy in ("ddp", "fsdp1")]
    for sync in ("every", "last"):
        configs += [gpt(3, strategy="fsdp2", accumulate=3, sync=sync, precision="bf16", clip=1.0)]
        configs += [gpt(3, strategy="fsdp1", accumulate=3, sync=sync, reshard_after_forward="false")]
        configs += [gpt(4, strategy=strategy, accumulate=3, sync=sync, mesh="2x2") for strategy in ("fsdp1", "fsdp2")]
    return configs


def choices() -> list[dict]:
    """List further choices: which blocks and results to recompute, bf16 weights, a chunked loss, the wrapping policy."""
    fsdp1, fsdp2, bf16 = {"strategy": "fsdp1"}, {"strategy": "fsdp2"}, {"precision": "bf16"}
    alternate, wrapped, parts = {"recompute": "alternate"}, {"wrap": "blocks+embeddings"}, {"loss_chunks": 4}
    sgd = {"optimizer": "sgd"}  # where AdamW's own peak would be higher than the peak to validate
    pure = bf16 | {"weights": "bf16"}
    configs = [gpt(1, strategy="single", **alternate, **sgd), gpt(2, strategy="ddp", **alternate, **bf16, **sgd)]
    configs += [
        gpt(3, **fsdp1, **alternate),
        gpt(4, **fsdp2, **alternate, **bf16),
        gpt(2, **fsdp2, **alternate, lora=4),
    ]
    configs += [gpt(2, **fsdp2, **alternate, **sgd, mesh="tensor=2", seq_len=34)]
    configs += [gpt(3, **fsdp2, recompute=how, recompute_every=2) for how in ("full", "selective", "alternate")]
    configs += [gpt(2, **fsdp1, recompute="full", recompute_every=3, preset="small", **sgd)]
    configs += [gpt(1, strategy="single", **pure, **sgd), gpt(2, strategy="ddp", **pure, optimizer="adamw-fused")]
    configs += [gpt(3, **fsdp1, **pure), gpt(3, **fsdp2, **pure), gpt(4, **fsdp2, **pure, mesh="2x2")]
    configs += [gpt(2, **fsdp2, **pure, accumulate=3, sync="last"), gpt(2, **fsdp1, **pure, accumulate=3, sync="last")]
    configs += [
        gpt(1, strategy="single", **parts, **sgd),
        gpt(1, strategy="single", **parts, **bf16, tied=True, optimizer="momentum"),
    ]
    configs += [gpt(2, strategy="ddp", **parts, accumulate=2), gpt(2, strategy="ddp", **parts, **bf16, batch_size=5)]
    configs += [gpt(3, **fsdp1, **parts, **bf16), gpt(3, **fsdp2, **parts), gpt(3, **fsdp2, **parts, **bf16, tied=True)]
    configs += [gpt(2, **fsdp2, **parts, lora=4), gpt(4, **fsdp2, **parts, **pure, recompute="full")]
    configs += [gpt(3, **strategy, **wrapped) for strategy in (fsdp1, fsdp2)]
    configs += [
        gpt(2, **fsdp2, **wrapped, **bf16, reshard_after_forward="false"),
        gpt(4, **fsdp2, **wrapped, prefetch=2),
    ]
    configs += [gpt(1, **fsdp2, **bf16, mesh="1x1", lora=4, batch_size=1)]  # a shard that is all there is
    # On the CPU what is offloaded stays in the same memory: the same bytes, on two sides (chapter 06).
    configs += [gpt(3, **fsdp2, cpu_offload=True), gpt(2, **fsdp2, **bf16, cpu_offload=True, accumulate=2)]
    configs += [gpt(4, **fsdp1, **pure, clip=1.0), gpt(2, **fsdp1, **wrapped, **bf16, **parts)]
    half = {"optimizer": "adamw-bf16"}
    configs += [gpt(2, **fsdp2, **half), gpt(2, **fsdp1, **half, **pure), gpt(4, **fsdp2, **half, **pure, mesh="2x2")]
    fp16 = {"precision": "fp16"}  # as bf16, and what the gradient scaler adds
    configs += [gpt(2, **fsdp1, **fp16, clip=1.0), gpt(4, **fsdp2, **fp16, mesh="2x2", accumulate=2)]
    configs += [gpt(2, **fsdp2, **fp16, optimizer="adamw-fused", lora=4), gpt(2, strategy="ddp", **fp16)]
    configs += [gpt(4, **fsdp2, **wrapped, **pure, **parts, recompute="full")]
    return configs


def tensor_parallel() -> list[dict]:
    """Tensor parallelism over two ranks, with one shard, two, or two replicas; and over four ranks."""
    configs = [gpt(2, mesh="tensor=2", seq_len=34), gpt(2, mesh="tensor=2", seq_len=34, precision="bf16", batch_size=1)]
    configs += [gpt(4, mesh="shard=2,tensor=2", seq_len=34, recompute="selective", accumulate=3, sync="last")]
    configs += [gpt(4, mesh="shard=2,tensor=2", seq_len=34, recompute="full", precision="bf16")]
    configs += [gpt(4, mesh="replicate=2,tensor=2", seq_len=34, tied=True)]
    configs += [gpt(4, mesh="tensor=4", preset="small", seq_len=36)]
    return [one | {"config": {"strategy": "fsdp2"} | one["config"]} for one in configs]


def context_parallel() -> list[dict]:
    """Each form of attention over sequences that ranks share, alone and with every other dimension of a mesh."""
    sgd = {"strategy": "fsdp2", "seq_len": 32, "optimizer": "sgd"}
    ring, gathered, ulysses = ({"context_attention": form} for form in context.FORMS)
    configs = [gpt(2, **sgd, **form, mesh="context=2", precision="bf16") for form in (ring, gathered, ulysses)]
    configs += [gpt(2, **sgd, mesh="context=2", recompute="full", loss_chunks=3, clip=1.0)]
    configs += [gpt(2, **sgd, **ulysses, mesh="context=2", recompute="selective", lora=4)]
    configs += [gpt(3, **sgd | {"seq_len": 30}, mesh="context=3", accumulate=3, sync="last")]
    configs += [gpt(4, **sgd, mesh="context=4"), gpt(4, **sgd, **gathered, mesh="context=2,tensor=2")]
    configs += [gpt(4, **sgd, **gathered, mesh="shard=2,context=2", recompute="full", precision="bf16")]
    return [*configs, gpt(4, **sgd, **ulysses, mesh="replicate=2,context=2")]


def mixtures_of_experts() -> list[dict]:
    """Experts whole on each rank, sharded, spread over ranks, and with sequences that ranks share."""
    sgd = {"strategy": "fsdp2", "seq_len": 32, "optimizer": "sgd", "experts": 8}
    configs = [gpt(1, strategy="single", experts=4, top_k=1, balance="loss", recompute="full")]
    configs += [gpt(2, **sgd | {"strategy": "ddp"}, shared_expert=True, capacity_factor=0.75)]
    configs += [gpt(2, **sgd, precision="bf16", balance="bias"), gpt(2, **sgd, mesh="context=2", top_k=1)]
    configs += [gpt(2, **sgd, mesh="shard=2,expert=2", accumulate=3, sync="last", clip=1.0)]
    configs += [gpt(4, **sgd, mesh="shard=4,expert=2", precision="bf16", recompute="full")]
    configs += [gpt(4, **sgd, mesh="shard=4,expert=4", shared_expert=True, top_k=3, capacity_factor=1.5)]
    return [*configs, gpt(4, **sgd, mesh="shard=2,context=2,expert=4", balance="bias")]


def mnist(ranks: int, **config) -> dict:
    return {"script": "mnist_fsdp.py", "ranks": ranks, "batch_size": 9, "config": config}


def gpt(ranks: int, **config) -> dict:
    return {"script": "gpt_fsdp.py", "ranks": ranks, "config": {"batch_size": 3, "seq_len": 33} | config}


def pipeline(ranks: int, **config) -> dict:
    return gpt(ranks, **config) | {"script": "gpt_pipeline.py"}


def zero_run(ranks: int, **config) -> dict:
    return gpt(ranks, **config) | {"script": "gpt_zero.py"}


def lab_of(one: dict):
    """The lab script of a configuration, as a module."""
    return import_module(one["script"].removesuffix(".py"))


# Drawn at random: what an option may become, in every lab that has it. What is here twice comes up twice as often; of what
# a lab does not accept nothing is drawn there, and of an option without any value here each word that it accepts.
CHOICES = {
    "strategy": ("single", "ddp", "fsdp1", "fsdp1", "fsdp2", "fsdp2", "fsdp2"),
    "stage": ("0", "1", "2", "3"),
    "engine": ("torch", "deepspeed"),
    "schedule": ("gpipe", "1f1b"),
    "wrap": (),
    "min_num_params": (300, 20_000),
    "dropout": (True, False),
    "batch_size": (1, 2, 3, 4, 5),
    "seq_len": (8, 13, 20, 24, 27, 32, 34, 40),
    "precision": ("fp32", "bf16", "fp16", "fp64"),
    "recompute": ("none", "full", "selective", "alternate"),
    "recompute_every": (1, 1, 2, 3),
    "offload_activations": (False, False, False, True),
    "weights": ("fp32", "fp32", "bf16"),
    "loss_chunks": (1, 1, 3),
    "optimizer": ("adamw", "adamw-fused", "adamw-for-loop", "adamw-bf16", "momentum", "sgd", *muon.WAYS),
    "accumulate": (1, 1, 2, 3, 4),
    "sync": ("every", "last"),
    "clip": (None, 1.0),
    "experts": (None, None, 4, 8),
    "top_k": (1, 2, 3),
    "shared_expert": (False, True),
    "capacity_factor": (None, 0.75, 1.5),
    "balance": (),
    "tied": (None, True),
    "lora": (None, None, None, 1, 4),
    "reshard_after_forward": ("true", "true", "false", "2", "4"),
    "prefetch": (0, 0, 1, 2, 5),
    "context_attention": ("ring", *context.FORMS),
}
CONTEXTS = ("context=4", "shard=2,context=2", "replicate=2,context=2", "context=2,tensor=2")
EXPERTS = ("shard=4,expert=2", "shard=4,expert=4", "shard=2,context=2,expert=2", "context=4,expert=4")
MESHES = {  # by the number of ranks, where --mesh goes with a strategy
    1: (None, None, "1x1"),
    2: (None, None, "2x1", "tensor=2", "context=2", "context=2", "shard=2,expert=2"),
    3: (None, None, "3x1", "1x3", "context=3"),
    4: (None, "2x2", "4x1", "shard=2,tensor=2", "replicate=2,tensor=2", *CONTEXTS, *EXPERTS),
}
NEEDED = {  # {option: options that are drawn only with it}
    "experts": ("top_k", "shared_expert", "capacity_factor", "balance"),
    "context": ("context_attention",),
}
# What goes together with a mixture of experts, with sequences that ranks share, and with experts spread over ranks: few
# draws of all choices would.
MIXED = {
    "precision": ("fp32", "bf16", "fp64"),
    "weights": ("fp32", "fp32", "fp32", "bf16"),
    "recompute": ("none", "full"),
    "recompute_every": (1,),
    "offload_activations": (False,),
    "optimizer": ("adamw", "adamw-fused", "adamw-for-loop", "adamw-bf16", "momentum", "sgd"),
    "lora": (None,),
}
SHARED = {"strategy": ("fsdp2",), "seq_len": (8, 16, 24, 32, 40), "precision": ("fp32", "bf16", "fp64")}
SHARED |= {"weights": ("fp32",), "offload_activations": (False,), "recompute": ("none", "none", "full")}
SHARED |= {"recompute_every": (1,), "capacity_factor": (None,), "balance": ("none", "bias")}
SPREAD = MIXED | {
    "strategy": ("fsdp2",),
    "experts": (4, 8),
    "weights": ("fp32",),
    "optimizer": ("adamw", "adamw-fused", "adamw-for-loop", "momentum", "sgd"),
    "reshard_after_forward": ("true", "false"),
    "prefetch": (0,),
    "wrap": ("blocks",),
}
KNOBS = {"shard_dim": (0, 0, 0, 1), "reduce_buffers": (1, 1, 1, 2, 3)}  # of FSDP2 in gpt_fsdp.py
SCRIPTS = ("gpt_fsdp.py",) * 6 + ("mnist_fsdp.py", "gpt_pipeline.py", "gpt_zero.py", "gpt_zero.py")


def drawn(seed: int, count: int) -> list[dict]:
    """Draw ``count`` configurations, each option at random, whether or not the choices go together; each has its "seed".

    The first draws of a seed are always the same. "config" leaves out what has its default.
    """
    random = Random(seed)
    return [_draw(random) | {"seed": seed} for _ in range(count)]


def choices_for(field) -> tuple:
    """Return the values that an option of a lab may be drawn with; () if it is not drawn."""
    words = choices_of(field)
    listed = CHOICES.get(field.name)
    return () if listed is None else tuple(value for value in listed if not words or value in words) or words


def _draw(random: Random) -> dict:
    """An option that is declared for some strategies only is drawn with these alone."""
    script, ranks, config = random.choice(SCRIPTS), random.choice((1, 2, 2, 3, 4, 4)), {}
    fields = dataclasses.fields(lab_of({"script": script}).Config)
    for field in sorted(fields, key=lambda field: field.name != "strategy"):
        choices = MESHES[ranks] if field.name == "mesh" and "strategy" in config else choices_for(field)
        if choices and config.get("strategy") in (field.metadata["only"] or (config.get("strategy"),)):
            config[field.name] = random.choice(choices)
    config = _together(random, config)
    one = {"script": script, "ranks": 1 if config.get("strategy") == "single" else ranks}
    if script == "mnist_fsdp.py":
        one["batch_size"] = config.pop("batch_size")
    if script == "gpt_fsdp.py" and config["strategy"] == "fsdp2":
        one["knobs"] = {name: random.choice(choices) for name, choices in KNOBS.items()}
    defaults = {field.name: field.default for field in fields}
    return one | {"config": {name: value for name, value in config.items() if value != defaults[name]}}


def _together(random: Random, config: dict) -> dict:
    """Draw anew what goes together with experts and with shared sequences, and leave out what is for these alone."""
    mesh = config.get("mesh") or ""
    has = {"experts": bool(config.get("experts")) or "expert" in mesh, "context": "context" in mesh}
    chosen = (
        (MIXED if has["experts"] else {}) | (SHARED if has["context"] else {}) | (SPREAD if "expert" in mesh else {})
    )
    if has["context"] and not has["experts"]:  # more goes together with these
        chosen = {name: chosen[name] for name in ("strategy", "seq_len")}
    config |= {name: random.choice(choices) for name, choices in chosen.items()}
    excluded = {name for what, names in NEEDED.items() if not has[what] for name in names}
    return {name: value for name, value in config.items() if name not in excluded}
