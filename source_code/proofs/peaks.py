"""Plan the memory of a family's training step with plan.py, and measure it.

``census`` compares both. The models are those of ``families``, in fp32: experts have no grouped matmul in float64, and a
loop over experts has shapes that depend on data, which nothing can plan.
"""

import json

import hf_fsdp
import plan
import torch.distributed as dist
from labkit import UserError
from labkit.measuring.trace import StepTrace, peak

from proofs import families

STEPS = 3  # gloo frees some buffers late: the lowest peak of several steps counts


def planned(folder: str, mesh: str) -> dict:
    """Plan a training step on two ranks.

    Args:
        folder: Of the model's files.
        mesh: As hf_fsdp.py's --mesh.

    Returns:
        {"by": "arithmetic", "simulated", or "refused: " and the reason, "planned": the peak in bytes, or None}.
    """
    try:
        options = plan.Config(model=folder, ranks=2, device="cpu", json=True, **_step(mesh))
        found = json.loads(plan.answer(options))
    except UserError as error:
        return {"by": f"refused: {str(error).replace(folder, 'FOLDER')}", "planned": None}
    finally:
        if dist.is_initialized() and dist.get_backend() == "fake":
            dist.destroy_process_group()
    return (
        {"by": "simulated", "planned": found["simulated"]}
        if options.by_library
        else {"by": "arithmetic", "planned": found["peak"]}
    )


def measured(me, folder: str, mesh: str) -> int:
    """Return this rank's peak of a steady training step, in bytes. Collective."""
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
