# SPDX-License-Identifier: BSD-3-Clause
"""Plan the memory of a family's training step with plan.py, and measure it on two ranks, for ``census``.

The models are in fp32: experts have no grouped matmul in float64, and a loop over experts has shapes that depend on data,
which nothing can plan. With expert parallelism, what a rank receives depends on data, too.
"""

import json
import os
import sys

import hf_fsdp
import plan as planner
import torch.distributed as dist
from labkit import UserError
from labkit.measuring import simulate
from labkit.measuring.trace import StepTrace, peak
from labkit.running import notebook_ranks

from proofs import families

MESHES = ("shard=2", "tensor=2")
STEPS = 3  # gloo frees some buffers late: the lowest peak of several steps counts
LIBRARIES = os.path.join(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages", "")


def plan(runs: list[tuple[str, str]], cluster) -> list[tuple[str, int | None]]:
    """Plan training steps on two ranks, in two processes.

    Args:
        runs: (folder of a model's files, --mesh).
        cluster: Where to run.

    Returns:
        For each run (how, planned peak in bytes): "arithmetic"; "simulated"; "arithmetic without dropout", with the
        simulated peak, which plan.py prints next to it with --simulate; or "refused: " and the reason, with None.
    """
    found = notebook_ranks.on_ranks(_plan_part, runs, ranks=2, cluster=cluster, timeout=1800)
    return [found[number % 2][number // 2] for number in range(len(runs))]


def _plan_part(me, runs):
    families.quiet()
    dist.barrier()  # a plan leaves the process group, which the other rank may still be about to join
    found = [_plan(*run) for run in runs[me.rank :: me.world_size]]
    simulate.join(me.world_size)  # the other rank may have left the real world, too
    return found


def _plan(folder: str, mesh: str) -> tuple[str, int | None]:
    options = planner.Config(model=folder, ranks=2, device="cpu", json=True, **_step(mesh))
    try:
        without_dropout = not options.by_library and options.shape.unplanned_dropout(options.on_gpu)
        if without_dropout:
            options = planner.Config(model=folder, ranks=2, device="cpu", json=True, simulate=True, **_step(mesh))
        found = json.loads(planner.answer(options))
    except UserError as error:
        return f"refused: {str(error).replace(folder, 'FOLDER').replace(LIBRARIES, '')}", None
    if options.by_library:
        return "simulated", found["simulated"]
    return ("arithmetic without dropout", found["simulated"]) if without_dropout else ("arithmetic", found["peak"])


def measured(me, folder: str, mesh: str) -> int:
    """Return this rank's peak in a steady training step, in bytes. Collective.

    Args:
        me: This rank.
        folder: Of the model's files.
        mesh: As hf_fsdp.py's --mesh.
    """
    config = hf_fsdp.Config(model=folder, device="cpu", tokens="bytes", **_step(mesh))
    model = hf_fsdp.build(config, me)
    optimizer = hf_fsdp.make_optimizer(model, config)
    tokens = families.draw(config.batch_size, config.seq_len + 1)[None]
    batch = tokens[..., :-1].clone(), tokens[..., 1:].clone()
    trace = StepTrace(model, optimizer, me.device)
    kept, peaks = [hf_fsdp.train_step(model, optimizer, *batch, config)], []  # a training loop keeps its losses
    for _ in range(STEPS):
        trace.batch = batch
        with trace:
            kept = [kept[-1], hf_fsdp.train_step(model, optimizer, *batch, config)]
        peaks.append(peak(trace.timeline())[1])
    return min(peaks)


def _step(mesh: str) -> dict:
    return {"mesh": mesh, "precision": "fp32", "batch_size": 2, "seq_len": families.LENGTH}
