# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 13, ZeRO."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planner.models.shapes import GPT_SHAPES
from torch import nn

from labkit.measuring import trace
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered
from labkit.training import deepspeed_zero, models

BUCKET = 500_000_000  # elements: DeepSpeed's default
RANKS = 8


def break_even(of_stage_2: float, of_stage_3: float) -> float:
    """Return the number of parameters from which stage 3 stores less than stage 2.

    Args:
        of_stage_2, of_stage_3: elements per parameter in which the two differ; stage 3 has the bucket, too.
    """
    return BUCKET / (of_stage_2 - of_stage_3)


MIB = 2**20
LIMITS = {"kept": 8.5, "peak": 14.0, "all-gathers": 20}  # MiB, MiB, calls per step
CLUES = {
    "kept": "which elements does every rank store although stage 3 should shard them, and how large is the bucket?",
    "peak": "how much may be gathered ahead of its use?",
    "all-gathers": "tensors are gathered one by one: what coalesces them, and what keeps them from forward to backward?",
}


def _measure(me, zero: dict) -> dict:
    """Train the tiny GPT for three steps under DeepSpeed, and return the numbers of LIMITS for the last one."""
    torch.manual_seed(0)
    model = models.GPT(GPT_SHAPES["tiny"])
    models.init_weights(model, 0)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "gradient_clipping": 0.0}
    settings |= {"zero_force_ds_cpu_optimizer": False, "steps_per_print": None}
    engine, optimizer = deepspeed_zero.initialize(model, torch.optim.AdamW(model.parameters()), settings, me)
    tokens = torch.arange(2 * 16).view(2, 16)
    for _ in range(3):
        step = trace.StepTrace(engine, optimizer, me.device)
        with step:
            loss = F.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten())
            engine.backward(loss)
            optimizer.step()
    timeline = step.timeline()
    gathers = sum(n for (kind, *_), n in step.collectives.items() if kind == "all-gather")
    kept = trace.total(timeline[0]) - timeline[0]["activations"]
    return {"kept": kept / MIB, "peak": trace.peak(timeline)[1] / MIB, "all-gathers": gathers}


def judge_settings(settings) -> str:
    zero = settings()
    if unanswered(zero):
        return "not answered yet"
    if zero.get("stage") != 3:
        return f"not quite: the stage is {zero.get('stage')}; the limits are to be met in stage 3"
    deepspeed_zero.check()
    if unknown := sorted(set(zero) - set(deepspeed_zero.defaults(3))):
        return f"not quite: DeepSpeed has no setting {unknown[0]!r} in zero_optimization"
    found = on_ranks(_measure, zero, ranks=2)[0]
    about = ", ".join(f"{name} {number:.4g}" for name, number in found.items())
    for name, limit in LIMITS.items():
        if not found[name] <= limit:
            return f"not quite: {about} (MiB, MiB, calls): {name} may be at most {limit:g}; {CLUES[name]}"
    return "right"


WORLD = 3


def _small():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def _hooked(me, to_owner):
    """Run backward with ``to_owner`` as a hook.

    Returns:
        (this rank's own gradients, the gradients after ``to_owner``, the number of calls of all_reduce).
    """
    images = torch.randn(5, 3, generator=torch.Generator().manual_seed(me.rank))
    plain, model = _small(), _small()
    F.mse_loss(plain(images), torch.zeros(5, 2)).backward()
    calls, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda *arguments, **options: calls.append(1) or all_reduce(*arguments, **options)
    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda p, n=number: to_owner(p, n % me.world_size, me))
    F.mse_loss(model(images), torch.zeros(5, 2)).backward()
    return [p.grad for p in plain.parameters()], [p.grad for p in model.parameters()], len(calls)


def judge_to_owner(to_owner) -> str:
    results = on_ranks(_hooked, to_owner, ranks=WORLD)
    if all(_same(own, left) for owns, lefts, _ in results for own, left in zip(owns, lefts, strict=True)):
        return "not answered yet"
    for number in range(len(results[0][0])):
        owner, owns = number % WORLD, [own[number] for own, _, _ in results]
        left, mean = results[owner][1][number], sum(owns) / WORLD
        about = f"gradient {number}, which rank {owner} owns"
        if left is None:
            return f"not quite: {about}: the owner has none; only the other ranks free it"
        if not torch.allclose(left, mean):
            what = "the sum, not the mean" if torch.allclose(left, sum(owns)) else "not the mean of all ranks'"
            return f"not quite: {about}: the owner has {what}"
        if holders := [rank for rank in range(WORLD) if rank != owner and results[rank][1][number] is not None]:
            return f"not quite: {about}: rank {holders[0]} still holds one, so it saves no memory"
    if results[0][2]:
        return "not quite: the gradients are right, but all_reduce brings the mean to every rank; one rank needs it"
    return "right"


def _same(own, left) -> bool:
    return left is not None and torch.equal(own, left)


EXERCISES = {
    "13.1": Predict(
        title="from which size on stage 3 pays",
        level=2,
        minutes=6,
        answer=break_even(1, 2 / RANKS) / 1e9,
        unit="billion parameters",
        slips={
            "stage 3 also keeps its share of the gradients": break_even(1, 1 / RANKS) / 1e9,
            "stage 2 frees its gradients before the next step": break_even(2, 2 / RANKS) / 1e9,
            "stage 3 keeps a share of the parameters, not none": break_even(1, 0) / 1e9,
            "the master parameters and moments are sharded in both stages": break_even(4, 5 / RANKS) / 1e9,
        },
        hint="Write what each stage keeps, in elements of the parameters' format. What both keep cancels.",
        solution=f"""
# Elements in the parameters' format. Stage 2 keeps P; stage 3 keeps P / N twice (parameters, gradients), and the bucket.
# Both keep master parameters and moments, sharded: they cancel.  P > 2 P / N + bucket
bucket, ranks = {BUCKET:_}, {RANKS}
answer = bucket / (1 - 2 / ranks) / 1e9
""",
    ),
    "13.2": Do(
        title="a gradient goes to its owner",
        level=3,
        minutes=10,
        judge=judge_to_owner,
        hint="dist.reduce(tensor, dst=…) sums on one rank. Every rank must call it, for the same gradients in the same order;\n"
        "gloo has no mean, so the owner divides.",
        solution="""
import torch.distributed as dist

def to_owner(parameter, owner, me):
    dist.reduce(parameter.grad, dst=owner)
    if me.rank == owner:
        parameter.grad /= me.world_size
    else:
        parameter.grad = None  # freed while backward still runs: this is what stage 2 adds to stage 1
""",
    ),
    "13.3": Do(
        title="settings for a small model",
        level=3,
        minutes=12,
        judge=judge_settings,
        hint="Four keys matter: reduce_bucket_size, stage3_param_persistence_threshold, stage3_prefetch_bucket_size,\n"
        "and, if it is changed, stage3_max_live_parameters. The largest tensor has 49,152 elements, a norm has 128.",
        solution="""
def settings():
    return {
        "stage": 3,
        "reduce_bucket_size": 65_536,  # a little more than the largest tensor: the bucket persists
        "stage3_param_persistence_threshold": 1_000,  # only norms stay whole; by default all tensors here would
        "stage3_prefetch_bucket_size": 200_000,  # about a block ahead; by default the whole model is gathered at once
    }
""",
    ),
}
