# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 11, planning, and what its cells need in addition to them."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from textwrap import wrap

from planner import predict
from planner.cli.commands import describe, plan_from_options
from planner.models import networks
from planner.models.shapes import GPT_SHAPES
from planner.ops.autograd import AbstractParameter
from planner.ops.chunked_loss import chunked_loss
from planner.ops.operators import Tape

from labkit import UserError
from labkit.running import launch, options, plan_options
from labkit.teaching.exercises import Do, unanswered

GIB = 2**30
PROOFS = ("-m", "proofs.estimators")
LONG = {"batch_size": 1, "seq_len": 8192, "precision": "bf16", "recompute": "full"}  # of large models


def ask(**given) -> str:
    """Print the command of plan.py with these options, and return its output or its error; with json=True, raise the latter.

    It runs in a process of its own, as a process simulates one world only.
    """
    words = ["plan.py", *options.arguments(given)]
    command = re.sub(" (?!--)", "\xa0", " ".join(["$ python", *words]))  # an option stays with its value
    print(" \\\n    ".join(wrap(command, 96, break_on_hyphens=False)).replace("\xa0", " ") + "\n", end="")
    here = launch.Cluster(launcher="local")  # a login node is enough
    try:
        text = launch.follow(launch.build_command(words, 1, 1, "cpu", here), device="cpu")
    except launch.RunFailed as error:
        if "json" in given:
            raise
        return str(error)
    return text[text.find("{") :] if "json" in given else text + "\n"  # a warning may come before the answer


def llama(size="llama3-8b", ranks=8, batch=1, recompute="full", loss_chunks=1, **fields) -> predict.Plan:
    """Return the plan of a Llama 3 with 8192 tokens per sequence, in bf16, under FSDP2, with a GPU's kernels."""
    network = networks.gpt(GPT_SHAPES[size], batch, 8192, recompute, loss_chunks=loss_chunks)
    return predict.Plan(network, "fsdp2", ranks, **{"precision": "bf16", "on_gpu": True} | fields)


def tiny(ranks: int, size: str = "tiny", recompute: str = "full") -> predict.Plan:
    """Return the plan of a small GPT with one sequence of 128 tokens per rank, in fp32, under FSDP2, on the CPU."""
    return predict.Plan(networks.gpt(GPT_SHAPES[size], 1, 128, recompute), "fsdp2", ranks)


def peak_bytes(plan: predict.Plan) -> int:
    """Return the peak of a plan, in bytes."""
    return predict.total(plan.peak()[1])


def estimators(*words: str) -> dict:
    """Return {estimator: bytes, or why there is none}: what ``python -m proofs.estimators`` prints; show the command."""
    print(" ".join(["$ python", *PROOFS, *words]) + "\n", end="")
    run = subprocess.run([sys.executable, *PROOFS, *words], cwd=launch.SOURCE, capture_output=True, text=True)
    return json.loads(run.stdout) if run.returncode == 0 else {"all": run.stderr}


# Published by torchtitan (https://github.com/pytorch/torchtitan): memory that the allocator reserved, and tokens per second.
# "8 GPUs, batch 1": pull request 822, steady state; the others: benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 4,
# without context parallelism: H100s with 96 GB and a power limit of 500 W, 8 per node, 400 Gbit/s per GPU between nodes.
_BATCH_2 = {"recompute": "alternate", "batch_size": 2}
_128_GPUS = _BATCH_2 | {"ranks": 128}
_LARGE = {"preset": "llama3-70b", "ranks": 256, "mesh": "shard=32,tensor=8", "batch_size": 16}


@dataclass(frozen=True)
class Published:
    """A published run. options: of plan.py; tokens_per_second: of a GPU, None if it was not published; how: it ran."""

    name: str
    options: dict
    reserved: float  # GiB
    tokens_per_second: float | None = None
    how: str = "eager"


TORCHTITAN = (
    Published("8 GPUs, batch 1", {"recompute": "alternate"}, 49.41),
    Published("8 GPUs, batch 1, not resharded", {"recompute": "alternate", "reshard_after_forward": "false"}, 62.18),
    Published("8 GPUs, batch 2", _BATCH_2, 82.4, 5762),
    Published("8 GPUs, batch 2", _BATCH_2, 77.0, 6667, "compiled"),
    Published("8 GPUs, batch 2", _BATCH_2, 76.8, 8532, "compiled, fp8"),
    Published("128 GPUs, batch 2", _128_GPUS, 67.0, 5605),
    Published("128 GPUs, batch 2", _128_GPUS, 62.0, 6514, "compiled"),
    Published("128 GPUs, batch 2", _128_GPUS, 61.8, 8380, "compiled, fp8"),
    Published("8 GPUs, 32k tokens", {"seq_len": 32768}, 83.9, 3890, "compiled, fp8"),
    Published("70B, 256 GPUs", _LARGE, 71.9, 829, "compiled, fp8"),
    Published("70B, async TP", _LARGE, 67.6, 876, "compiled, fp8"),
)
FIRST_STEP = {"true": 41.89, "false": 54.66}  # GiB reserved at step 1 in pull request 822, by --reshard-after-forward


def planned(run: Published) -> dict:
    """Return what plan.py computes for a published run, and its options: {"asked", …}."""
    given = LONG | {"preset": "llama3-8b", "ranks": 8, "optimizer": "adamw-fused", "gpu": "h100"} | run.options
    config = plan_options.Config(**given)
    return describe(config, plan_from_options(config)) | {"asked": config}


# 11.0: the loss in chunks

LOSSES = [  # tokens, vocabulary, width, chunks, whether the head's weight is frozen
    (8192, 128_256, 4096, 8, False),
    (8192, 128_256, 4096, 8, True),
    (8192, 32_000, 4096, 1, False),
    (1000, 32_000, 512, 3, False),
]


def reference_loss(tokens, vocabulary, width, chunks, frozen) -> int:
    """Return what 11.0 asks for, by the planner's operators, less a few bytes per token that the exercise leaves out."""
    tape = Tape()
    weight = AbstractParameter("head.weight", (vocabulary, width), 2, trained=not frozen)
    x = tape.linear(tape.constant("tokens", tokens, 2), AbstractParameter("before", (width, 1), 2))
    chunked_loss(tape, x, weight, chunks)
    ours = ("gradient of head", "logits", "log-softmax", "gradient of logits")
    sums = [
        sum(size for (_, name), size in terms.items() if any(text in name for text in ours))
        for _, terms in tape.snapshots.values()
    ]
    return max(sums)


def _slips_of_loss(tokens, vocabulary, width, chunks, frozen) -> dict[str, float]:
    """Return {description of a mistake: the bytes that it leads to}."""
    chunk, gradient = -(-tokens // chunks) * vocabulary, 0 if frozen else 2 * vocabulary * width
    inputs = 2 * tokens * width
    return {
        "the gradient of the head's weight is as large as the weight, however many chunks there are": 8 * chunk
        + inputs,
        "a frozen weight has no gradient": 8 * chunk + 2 * vocabulary * width + inputs,
        "the gradient of the head's input is left out; it has a row for each of the tokens": 8 * chunk + gradient,
        "the input of log-softmax, in fp32, is alive while the result is made": 4 * chunk + gradient + inputs,
        "the logits in bf16 are gone when log-softmax begins": 10 * chunk + gradient + inputs,
        "the moment after that one is smaller: the logits' gradient is in bf16": 6 * chunk + gradient + inputs,
        "that is the loss in one piece, without chunks: three tensors in fp32": 12 * tokens * vocabulary,
        "the last chunk may be shorter, but the others are rounded up": 8 * (tokens // chunks) * vocabulary
        + gradient
        + inputs,
    }


def judge_loss(loss_bytes) -> str:
    answers = [loss_bytes(*case) for case in LOSSES]
    if all(unanswered(answer) for answer in answers):
        return "not answered yet"
    for case, answer in zip(LOSSES, answers, strict=True):
        right = reference_loss(*case)
        if unanswered(answer) or abs(answer - right) > 1e-3 * right:
            tokens, vocabulary, width, chunks, frozen = case
            about = f"{tokens:,} tokens, vocabulary {vocabulary:,}, width {width:,}, {chunks} chunks"
            return f"not quite: {about}{', frozen head' * frozen}: {_difference_of_loss(case, answer, right)}"
    return "right"


def _difference_of_loss(case, answer, right) -> str:
    if unanswered(answer):
        return "your function returns nothing"
    for slip, number in _slips_of_loss(*case).items():
        if abs(answer - number) <= 1e-3 * right < abs(number - right):
            return slip
    return f"{answer / GIB:.3f} GiB instead of {right / GIB:.3f}"


# 11.1: a search where a larger world may need more


@cache
def _needs(size: str, recompute: str, ranks: int) -> int:
    if size.startswith("llama"):
        return peak_bytes(llama(size, ranks, recompute=recompute))
    return peak_bytes(tiny(ranks, size, recompute))


def ripple(needs, most: int) -> int:
    """Return how many bytes a world of up to ``most`` ranks needs more than a smaller one, at most."""
    least, widest = needs(1), 0
    for ranks in range(2, most + 1):
        widest = max(widest, needs(ranks) - least)
        least = min(least, needs(ranks))
    return widest


MOST = 160
WORLDS = [  # (model, recompute, the world whose need is the room; None: less than all need)
    ("tiny", "full", 22),
    ("small", "full", 86),
    ("small", "full", 53),
    ("llama3-8b", "full", 150),
    ("llama3-8b", "full", None),
    ("tiny", "full", 1),
]
SPARE = 1.5  # plans that a function may ask for, over those of the solution


def reference_world(needs, room: int, ripple: int, most: int) -> int | None:
    """Return what 11.1 asks for, as its solution does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle) > room + ripple else (low, middle)
    return next((ranks for ranks in range(low + 1, most + 1) if needs(ranks) <= room), None)


def worlds() -> list[tuple]:
    """Return the cases of 11.1: (model, needs, room, ripple)."""
    cases = []
    for size, recompute, world in WORLDS:
        needs = lambda ranks, size=size, recompute=recompute: _needs(size, recompute, ranks)  # noqa: E731
        room = needs(world) if world else needs(MOST) // 2
        cases.append((f"{size}, recompute {recompute}", needs, room, ripple(needs, MOST)))
    return cases


def _counted(needs, asked: set):
    """Wrap needs to record for which worlds it is called."""

    def one(ranks):
        if not 1 <= ranks <= MOST:
            raise ValueError(f"needs was called with {ranks} ranks, but most is {MOST}")
        asked.add(ranks)
        return needs(ranks)

    return one


def judge_world(smallest_world) -> str:
    answers, calls = [], 0
    for _, needs, room, widest in worlds():
        asked = set()
        answers.append(smallest_world(_counted(needs, asked), room, widest, MOST))
        calls += len(asked)
    if all(unanswered(answer) for answer in answers):
        return "not answered yet" if not calls else f"not quite: {calls} worlds tried, and none returned"
    ours = 0
    for (name, needs, room, widest), answer in zip(worlds(), answers, strict=True):
        asked = set()
        right = reference_world(_counted(needs, asked), room, widest, MOST)
        ours += len(asked)
        if answer != right:
            return f"not quite: {name}, {room:,} bytes: {_difference_of_world(needs, room, answer, right)}"
    if calls > SPARE * ours:
        return f"not quite: every number is right, but you ask for {calls} worlds where {ours} are enough: exclude many at once"
    return "right"


def _difference_of_world(needs, room, answer, right) -> str:
    if unanswered(answer):
        return f"{right} ranks are enough, but your function finds none"
    if right is None:
        return f"no world of up to {MOST} ranks fits; yours returns {answer}"
    if not isinstance(answer, int) or not 1 <= answer <= MOST:
        return f"{answer!r} is not a number of ranks from 1 to {MOST}"
    if needs(answer) > room:
        return f"yours returns {answer} ranks, but they need {needs(answer):,} bytes"
    return (
        f"yours returns {answer} ranks, which fit, but so do {right}: "
        "a world that does not fit excludes smaller ones only if it needs more than room + ripple"
    )


# 11.2: the largest term of 405B

ASKED = {"preset": "llama3-405b", "ranks": 512, "gpu": "h100", **LONG}
GIVEN = {"preset", "config", "model", "module", "strategy", "ranks", "seq_len"}
GIVEN |= {"gpu", "gpu_memory", "flops", "efficiency", "link", "network"}
NUMERICS = {"precision", "weights", "optimizer", "lora", "frozen"}
SLOWER = 0.9  # of the throughput without changes


@cache
def _as_asked() -> dict:
    return describe(*_planned({}))


def _planned(changes: dict) -> tuple:
    config = plan_options.Config(**ASKED | changes)
    return config, plan_from_options(config)


def judge_attack(attack) -> str:
    changes = attack()
    if unanswered(changes) or changes == {}:
        return "not answered yet"
    if not isinstance(changes, dict):
        return 'not quite: return a dictionary of options, as {"loss_chunks": 8}'
    if fixed := sorted(GIVEN & set(changes)):
        return f"not quite: {', '.join(fixed)} must stay as given"
    if numerics := sorted(NUMERICS & set(changes)):
        return f"not quite: {', '.join(numerics)} changes the numbers that training computes, not only where they are"
    if changes.get("cpu_offload"):
        return "not quite: with cpu_offload the optimizer steps on the CPU, and the planned time leaves that out"
    try:
        config, plan = _planned(changes)
        return _verdict_on(describe(config, plan), plan)
    except (UserError, TypeError) as error:
        return f"not quite: plan.py refuses this: {error}"


def _verdict_on(found: dict, plan) -> str:
    before, memory = _as_asked(), found["memory"]
    if found["tokens_of_a_step"] != before["tokens_of_a_step"]:
        return f"not quite: a step has {found['tokens_of_a_step']:,} tokens instead of {before['tokens_of_a_step']:,}"
    if memory["answer"] != "fits":
        (_, name), size, _ = plan.explain()[0]
        return (
            f"not quite: {memory['answer']}, as it needs {memory['needs']:.1f} GiB; the largest term is still {size / GIB:.1f} GiB: "
            f"{name}"
        )
    share = before["seconds"]["overlapped"] / found["seconds"]["overlapped"]
    if share < SLOWER:
        return f"not quite: it fits, but trains at {share:.0%} of the speed without changes, as planned"
    return "right"


EXERCISES = {
    "11.0": Do(
        title="the loss in chunks",
        level=2,
        minutes=13,
        judge=judge_loss,
        hint="Go through one chunk line by line, and write down what is alive after each: how many bytes per element of the chunk's "
        "tokens × vocabulary? Take the largest line. Then add what outlives the chunk. Chunks have ceil(tokens / chunks) tokens.",
        solution="""
# Per element of a chunk: 2 bytes (bf16), then 2 + 4 (copied to fp32), then 4 + 4 (log-softmax next to its input), then
# 4 + 2 (the logits' gradient). The third line is the largest. Both gradients of bf16 outlive the chunk; they do not
# shrink with the number of chunks, so from some number on more chunks save next to nothing.
def loss_bytes(tokens, vocabulary, width, chunks, frozen):
    chunk = -(-tokens // chunks) * vocabulary
    weight_gradient = 0 if frozen else 2 * vocabulary * width
    return 8 * chunk + weight_gradient + 2 * tokens * width
""",
    ),
    "11.1": Do(
        title="the smallest world, where needs may rise",
        level=3,
        minutes=18,
        judge=judge_world,
        hint="A world that needs more than room does not exclude all smaller worlds: one of them may need up to ripple less. A world "
        "that needs more than room + ripple does. So search by halves for the end of what is excluded, and go on one by one.",
        solution="""
# If a world needs more than room + ripple, each smaller one needs more than room: it and they are excluded. Halving finds a
# world up to which all are excluded; above it, a few are left to be tried one by one.
def smallest_world(needs, room, ripple, most):
    low, high = 0, most + 1  # all worlds up to low are excluded
    while high - low > 1:
        middle = (low + high) // 2
        if needs(middle) > room + ripple:
            low = middle
        else:
            high = middle
    for ranks in range(low + 1, most + 1):
        if needs(ranks) <= room:
            return ranks
    return None
""",
    ),
    "11.2": Do(
        title="which term of 405B would you attack?",
        level=2,
        minutes=12,
        judge=judge_attack,
        hint='print(ask(preset="llama3-405b", ranks=512, **LONG, gpu="h100", explain=True)): which term is the largest, does it '
        "belong to the model or to the batch, and which options of python plan.py --help shrink that one?",
        solution="""
# The largest term, 31 GiB, is the saved output of each block, one per block and token: activations. More ranks, chunks of
# the loss, or 8-bit Adam change other terms. Two options change this one: the outputs wait in CPU memory (31 GiB out and
# in, about 1 s of 84 at 64 GB/s each way, calculated: the plan leaves it out; 8 ranks of a node pin 248 GiB there), or tensor-parallel ranks work on one sequence together: {"mesh": "shard=64,tensor=8", "batch_size": 8}, 8 % slower as planned.
def attack():
    return {"offload_activations": True}
""",
    ),
}
