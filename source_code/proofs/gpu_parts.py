# SPDX-License-Identifier: BSD-3-Clause
"""The parts of the GPU hour, at most eight minutes each: the steps of each, and which sentence or limit each would change."""

from pathlib import Path

from labkit.running import launch

from proofs.gpu_rows import (
    Check,
    Command,
    Step,
    allocated,
    as_planned,
    as_planned_for_others,
    efficiency,
    ran,
    rate_ratio,
    share,
    step_ratio,
)

LLAMA = {"precision": "bf16", "batch_size": 1, "seq_len": 8192, "max_steps": 9}
FORMATS = ("fp32", "bf16", "fp64")
SMALL = {"config": "samples/llama_small.json", "max_steps": 6, "seq_len": 64}
WAYS = {  # of gpt_fsdp.py, each tried for a few steps
    "one process": {"strategy": "single"},
    "DDP": {"strategy": "ddp"},
    "FSDP1": {"strategy": "fsdp1"},
    "FSDP1, offload": {"strategy": "fsdp1", "cpu_offload": True},
    "FSDP2": {},
    "FSDP2, kept": {"reshard_after_forward": "false"},
    "FSDP2, offload and clip": {"cpu_offload": True, "clip": 1.0},
    "FSDP2, prefetch": {"prefetch": 2},
    "FSDP2, two micro-batches": {"accumulate": 2, "sync": "last"},
    "FSDP2, LoRA": {"lora": 4},
    "FSDP2, fused AdamW": {"optimizer": "adamw-fused"},
    "FSDP2, compiled": {"compile": True},
    "FSDP2, recomputed, compiled, bf16": {"compile": True, "recompute": "selective", "precision": "bf16"},
}

# What the numbers of a step would change: a file, and words that stand there.
RAN = "docs/what_ran_where.md: NCCL, bf16 on GPUs, pinned CPU offload, the CUDA allocator's figures"
KERNELS = "docs/what_ran_where.md: with a GPU it has not been compared yet"
ONE_RANK = "docs/what_ran_where.md: one rank of a larger world, with real tensors"
RESERVE = "source_code/planner/gpus.py: RESERVE ="
CONTEXT = "source_code/planner/gpus.py: CONTEXT, NCCL ="
EFFICIENCY = "source_code/planner/timing/cost.py: EFFICIENCY ="
ZERO = "docs/what_ran_where.md: ZeRO by PyTorch and by DeepSpeed 0.19.8, tensor and pipeline parallelism"
OTHERS = "docs/what_ran_where.md: families of transformers"
JAX = "docs/what_ran_where.md: what XLA makes for GPUs is **unseen**"
SPARSE = "docs/what_ran_where.md: mixtures of experts, expert and context parallelism"
HANGS = "docs/what_ran_where.md: NCCL's dumps, and those of pipelines: read as documented, from files made by hand"
PINNED = "notebooks/06_cpu_offload.ipynb: by default PyTorch rounds each up to a power of two"
FLOAT8 = "source_code/labkit/training/quantized_gather.py: NCCL all-gathers float8; gloo does not"
SPEED = "notebooks/12_speed.ipynb: No GPU has run this chapter yet"
LOADERS = "source_code/proofs/README.md: what a data loader costs, what FSDP costs on one rank"


def smoke(config):
    yield Command("hello", ("python", "hello.py", "--ranks", str(config.ranks), "--device", config.device), RAN)
    for strategy in ("single", "ddp", "fsdp1", "fsdp2"):
        options = {"strategy": strategy, "data": "mnist-5k", "max_steps": 12} | all_of_them(config, strategy)
        yield Step(f"mnist {strategy}", (("mnist_fsdp.py", options),), ran, RAN)
    for name, options in WAYS.items():
        if config.device == "cuda" or name != "FSDP1, offload":
            common = {"max_steps": 12} | all_of_them(config, options.get("strategy"))
            yield Step(f"gpt {name}", (("gpt_fsdp.py", common | options),), ran, RAN)
    if config.ranks % 2 == 0:
        mesh = {"mesh": f"2x{config.ranks // 2}", "ranks": config.ranks, "max_steps": 12}
        yield Step("gpt HSDP", (("gpt_fsdp.py", mesh),), ran, RAN)
    logged = {"max_steps": 12, "log": Path("logs")} | all_of_them(config, "fsdp2")
    yield Step("TensorBoard logs", (("gpt_fsdp.py", logged),), ran, RAN)
    if config.device == "cuda" and config.ranks > 1:  # accelerate starts ranks only on several GPUs
        words = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(config.ranks))
        more = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
        yield Command("started by accelerate", ("python", *words, *more, "gpt_fsdp.py", "--max-steps", "6"), RAN)


def all_of_them(config, strategy) -> dict:
    return {} if strategy == "single" else {"ranks": config.ranks}


def operators(config):
    for precision in FORMATS:
        options = {"strategy": "single", "precision": precision, "data": "mnist-5k", "max_steps": 6}
        yield Step(f"mnist planned {precision}", (("mnist_fsdp.py", options),), as_planned, KERNELS)
    for precision in FORMATS:
        for recompute in ("none", "selective", "full"):
            options = {"strategy": "single", "precision": precision, "recompute": recompute, "max_steps": 6}
            yield Step(f"gpt planned {precision} {recompute}", (("gpt_fsdp.py", options),), as_planned, KERNELS)
    tries = {
        "fp16": {"precision": "fp16"},
        "offloaded activations": {"recompute": "full", "offload_activations": True},
        "experts": {"experts": 8},
        **{optimizer: {"optimizer": optimizer} for optimizer in ("adamw-fused", "adamw-for-loop", "momentum", "muon")},
    }
    for name, options in tries.items():
        run = ("gpt_fsdp.py", {"strategy": "single", "max_steps": 6} | options)
        yield Step(f"gpt planned {name}", (run,), as_planned, KERNELS)


def worlds(config):
    tries = {
        "FSDP2 in 8": {},
        "FSDP2 in 64 bf16": {"ranks": 64, "precision": "bf16", "recompute": "full"},
        "FSDP2 in 8 kept": {"reshard_after_forward": "false"},
        "FSDP2 in 8 fp16": {"precision": "fp16"},
        "FSDP1 in 8 bf16": {"strategy": "fsdp1", "precision": "bf16"},
        "HSDP 2x4": {"mesh": "2x4"},
        "LoRA in 8": {"lora": 4},
        "Muon in 8": {"optimizer": "muon"},
        "tensor parallelism in 8": {"mesh": "shard=4,tensor=2"},
        "ring in 8": {"mesh": "shard=2,context=4", "context_attention": "ring"},
        "gathered context in 8": {"mesh": "shard=2,context=4", "context_attention": "gather"},
        "ulysses in 8": {"mesh": "shard=4,context=2", "context_attention": "ulysses"},
        "experts in 8": {"experts": 8},
    }
    for name, options in tries.items():
        yield Step(f"world {name}", (("one_rank.py", {"max_steps": 6, "ranks": 8} | options),), as_planned, ONE_RANK)


def parallel(config):
    """Real tensor, context, expert, and pipeline parallelism; of several GPUs, or of a rehearsal's two ranks."""
    if config.ranks % 2:
        return
    rest = {"shard": config.ranks // 2} if config.ranks > 2 else {}
    tries = {
        "tensor": {"tensor": 2},
        "ring": {"context": 2},
        "gathered context": {"context": 2},
        "ulysses": {"context": 2},
        "experts": {"expert": 2},
    }
    for name, inner in tries.items():
        mesh = {"shard": config.ranks} if name == "experts" else rest
        options = {"mesh": ",".join(f"{dim}={size}" for dim, size in (mesh | inner).items())}
        options |= {"experts": 4} if name == "experts" else {}
        options |= {"context_attention": {"gathered context": "gather"}.get(name, name)} if "context" in inner else {}
        run = ("gpt_fsdp.py", {"max_steps": 6, "ranks": config.ranks} | options)
        yield Step(f"parallel {name}", (run,), as_planned, SPARSE if name != "tensor" else ZERO)
    for schedule in ("1f1b", "gpipe"):
        run = ("gpt_pipeline.py", {"max_steps": 6, "ranks": 2, "schedule": schedule})
        yield Step(f"parallel pipeline {schedule}", (run,), as_planned, ZERO)
    run = ("hf_fsdp.py", SMALL | {"mesh": "tensor=2", "ranks": 2})
    yield Step("parallel tensor by transformers", (run,), ran, OTHERS)


def zero(config):
    """ZeRO by PyTorch and by DeepSpeed; FSDP in JAX. What is not installed fails, and says so."""
    for engine in ("torch", "deepspeed"):
        for stage in ("0", "1", "2", "3"):
            run = ("gpt_zero.py", {"max_steps": 6, "engine": engine, "stage": stage, "ranks": config.ranks})
            yield Step(f"ZeRO {stage} by {engine}", (run,), as_planned, ZERO)
    words = ("python", "-m", "proofs.gpu_checks", "--check", "deepspeed-defaults", "--ranks", str(config.ranks))
    yield Check("ZeRO by DeepSpeed's defaults", (*words, "--device", config.device), ZERO)
    for strategy in ("fsdp-explicit", "fsdp-activations", "fsdp-shard-map"):
        yield Step(f"JAX {strategy}", (("gpt_jax.py", {"strategy": strategy, "max_steps": 6}),), ran, JAX)


def planner(config):
    tries = {
        "8b on 8 selective": {"preset": "llama3-8b", "ranks": 8, "recompute": "selective"},
        "8b on 8 full": {"preset": "llama3-8b", "ranks": 8, "recompute": "full"},
        "70b on 64 full": {"preset": "llama3-70b", "ranks": 64, "recompute": "full"},
    }
    common = LLAMA if config.device == "cuda" else {"precision": "bf16", "max_steps": 9, "preset": "tiny"}
    for name, options in tries.items():
        yield Step(f"planner {name}", (("one_rank.py", options | common),), allocated, RESERVE)
    run = ("one_rank.py", tries["8b on 8 full"] | common)
    grows = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    yield Step("planner 8b on 8 full, expandable segments", (run,), allocated, RESERVE, grows)


def memory(config):
    """What is on a GPU, or pinned in the CPU's memory, and no tracer sees."""
    for check, changes in {"context": CONTEXT, "groups": CONTEXT, "pinned": PINNED, "float8-gather": FLOAT8}.items():
        words = (
            "python",
            "-m",
            "proofs.gpu_checks",
            "--check",
            check,
            "--ranks",
            str(config.ranks),
            "--device",
            config.device,
        )
        yield Check(f"check {check}", words, changes)


def nccl(config):
    """A time-out of NCCL on two GPUs: what its RAS says meanwhile, and what diagnose_hang.py reads from the dumps."""
    if config.ranks > 1:
        words = ("python", "-m", "proofs.gpu_checks", "--check", "time-out", "--ranks", "2", "--device", config.device)
        yield Check("a real time-out", words, HANGS)


def yours(config):
    """A model of Hugging Face's: in one process and on all GPUs, as planned where the plan knows its operators."""
    for strategy in ("single", "fsdp2"):
        options = SMALL | {"strategy": strategy} | all_of_them(config, strategy)
        for recompute in ("none", "full"):
            run = ("hf_fsdp.py", options | {"recompute": recompute})
            yield Step(f"hf planned {strategy} {recompute}", (run,), as_planned_for_others, OTHERS)
        run = ("hf_fsdp.py", options | {"precision": "bf16", "clip": 1.0})
        yield Step(f"hf bf16 {strategy}", (run,), ran, OTHERS)
    options = SMALL | all_of_them(config, "fsdp2") | {"lora": 8}
    yield Step("hf adapters", (("hf_fsdp.py", options),), ran, OTHERS)


def speed(config):
    mnist = {"data": "mnist-5k", "max_steps": 60}
    one = ("mnist_fsdp.py", mnist | {"strategy": "fsdp2", "ranks": 1})
    plain = ("mnist_fsdp.py", mnist | {"strategy": "single"})
    yield Step("fsdp2 over the plain loop", (one, plain), step_ratio, LOADERS)
    loaders = [("mnist_fsdp.py", mnist | {"strategy": "single", "loader": name}) for name in ("memory", "torchvision")]
    yield Step("loader memory over torchvision", tuple(loaders), rate_ratio, LOADERS)
    on_gpu = config.device == "cuda"
    large = {"preset": "1b", "precision": "bf16", "batch_size": 4, "seq_len": 2048}
    model = {"strategy": "single", "max_steps": 20, "recompute": "selective"} | (large if on_gpu else {})
    compiled = [("gpt_fsdp.py", model | {"compile": compile}) for compile in (False, on_gpu)]
    yield Step("1b eager and compiled", tuple(compiled), share, SPEED)
    yield Step("1b against the plan", (compiled[0],), efficiency, EFFICIENCY)
    rank = {"ranks": 8, "recompute": "selective"} | (LLAMA | {"preset": "llama3-8b", "max_steps": 14} if on_gpu else {})
    yield Step("8b against the plan", (("one_rank.py", rank),), efficiency, EFFICIENCY)
    traced = {"max_steps": 20, "profile": Path("trace")} | all_of_them(config, "fsdp2")
    yield Step("a profiled step", (("gpt_fsdp.py", traced | (large if on_gpu else {})),), ran, SPEED)


def notebooks(config):
    for path in sorted((launch.SOURCE.parent / "notebooks").glob("[0-9]*.ipynb")):
        words = ("python", "-m", "pytest", "--nbval-lax", "-q", "-p", "no:cacheprovider", f"../notebooks/{path.name}")
        yield Command(f"notebook {path.name[:2]}", words, RAN)


def tests(config):
    words = ("python", "-m", "pytest", "-q", "-m", "not long and not slurm and not browser", "../tests")
    yield Command("short tests, beside GPUs", words, RAN)


PARTS = {
    part.__name__: part
    for part in (smoke, operators, worlds, planner, memory, speed, yours, zero, parallel, nccl, notebooks, tests)
}
