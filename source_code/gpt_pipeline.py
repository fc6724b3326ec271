# SPDX-License-Identifier: BSD-3-Clause
"""Train the transformer of gpt_fsdp.py with pipeline parallelism (torch.distributed.pipelining), one stage per rank.

  python gpt_pipeline.py --ranks 4 --record run.json                 1F1B: each backward as early as possible
  python gpt_pipeline.py --ranks 4 --schedule gpipe                  all forwards, then all backwards
  python gpt_pipeline.py --ranks 4 --mesh pipeline=4 --accumulate 16 --recompute full
  torchrun --nproc-per-node 8 gpt_pipeline.py --preset 1b --precision bf16 --accumulate 32

--accumulate is the number of micro-batches into which a step's batch is split.
README.md lists all ways to start it.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import gpt_fsdp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from labkit.running import options, preflight, ranks
from labkit.running.lab_options import PipelineTraining
from labkit.training import models
from labkit.training.loop import keep_norm
from planner.parallel import pipeline
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = dict(zip(pipeline.SCHEDULES, (ScheduleGPipe, Schedule1F1B), strict=True))


class Stage(nn.Module):
    """One stage of a GPT. Its parameters have the names of the whole model, on which initial weights and checkpoints depend.

    Input: token ids (batch, sequence) for the first stage, hidden states (batch, sequence, hidden_size) for the others.
    Output: logits (batch, sequence, vocabulary) of the last stage, hidden states of the others.

    Args:
        gpt: the whole model, on the meta device.
        index: of this stage.
        stages: their number.
        bf16: compute in bf16 by autocast. Hidden states between stages stay in fp32, as between blocks of the whole model.
    """

    def __init__(self, gpt: models.GPT, index: int, stages: int, bf16: bool):
        super().__init__()
        self.shape, self.index, self.stages, self.bf16 = gpt.shape, index, stages, bf16
        mine = pipeline.split_blocks(len(gpt.blocks), stages)[index]
        self.blocks = nn.ModuleDict({str(i): gpt.blocks[i] for i in mine})
        self.embedding = gpt.embedding if self.first else None
        self.norm, self.head = (gpt.norm, gpt.head) if self.last else (None, None)

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.stages - 1

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16) if self.bf16 else nullcontext():
            if self.first:
                x = self.embedding(x)
            # Every stage computes these tables, which is cheaper than sending them.
            rotation = models.rotary(x.shape[1], self.shape.head_dim, x)
            for block in self.blocks.values():
                x = block(x, rotation)
            return self.head(self.norm(x)) if self.last else x


def build(config, me) -> PipelineStage:
    """Return this rank's stage, allocated and initialized."""
    with torch.device("meta"):  # the whole model, without storage; a rank allocates only its stage
        gpt = models.GPT(config.shape).to(config.dtype)
    preflight.refuse_if_too_big(config, me)
    model = Stage(gpt, me.rank, me.world_size, config.precision == "bf16")
    for block in model.blocks.values():
        gpt_fsdp.change_forward(block, config)
    model.to_empty(device=me.device)
    gpt_fsdp.init_weights(model, config.seed)
    return PipelineStage(model, me.rank, me.world_size, me.device)


def schedule_of(stage: PipelineStage, config):
    """Return the schedule of a stage: the order of its micro-batches' forwards and backwards."""

    def part_of_loss(logits, targets):
        return mean_loss(logits, targets, config) / config.accumulate

    # The loss is divided above, so PyTorch must not divide the gradients at the end of the step, as it does by default.
    return SCHEDULES[config.schedule](stage, config.accumulate, part_of_loss, scale_grads=False)


def mean_loss(logits, targets, config):
    """Return the mean cross-entropy of logits (batch, sequence, vocabulary) and targets (batch, sequence), in nats per token."""
    return F.cross_entropy(logits.flatten(0, 1).to(config.dtype), targets.flatten())


def train_step(model, schedule, optimizer, inputs, targets, config):
    """Train one step. inputs and targets, each (accumulate, batch_size, seq_len), are the same on every rank.

    Only the first stage uses the inputs, and only the last one the targets.

    Returns:
        One term of the loss per micro-batch, scaled so that the mean over the ranks is correct, although all stages but
        the last return zeros.
    """
    losses = []
    schedule.step(
        *([inputs.flatten(0, 1)] if model.first else []),
        target=targets.flatten(0, 1) if model.last else None,
        losses=losses,
        return_outputs=False,  # or the last stage would retain and concatenate the logits of all micro-batches
    )
    if config.clip or config.log:
        keep_norm(optimizer, clip(model, config), config)
    optimizer.step()
    optimizer.zero_grad()
    if model.last:
        return [loss.detach() * model.stages for loss in losses]
    return list(torch.zeros(config.accumulate, dtype=config.dtype, device=inputs.device))


def clip(model, config):
    """Clip the gradient to the norm of --clip, and return its norm before that, over all stages. Collective."""
    square = nn.utils.get_total_norm([p.grad for p in model.parameters()]) ** 2
    dist.all_reduce(square)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), config.clip or math.inf, norm)
    return norm


def compute_loss(model, inputs, targets, config):
    """Return the validation loss of one batch, scaled as in ``train_step``: zero except on the last stage.

    The batch passes through the stages one after another, without pipelining.
    """
    x = inputs
    if not model.first:
        x = torch.empty(*inputs.shape, config.shape.hidden_size, dtype=config.dtype, device=inputs.device)
        dist.recv(x, model.index - 1)
    x = model(x)
    if model.last:
        return mean_loss(x, targets, config) * model.stages
    dist.send(x, model.index + 1)
    return x.new_zeros(())


def prepare(config, me):
    """Return (model, optimizer, step) as ``gpt_fsdp.prepare`` does; the model is this rank's stage."""
    stage = build(config, me)
    model, schedule = stage.submod, schedule_of(stage, config)
    optimizer = gpt_fsdp.make_optimizer(model, config)
    return model, optimizer, lambda i, t: train_step(model, schedule, optimizer, i, t, config)


def main(config, me):
    """Run the lab on one rank. me: this rank (labkit/running/ranks.py)."""
    gpt_fsdp.main(config, me, prepare, compute_loss)


@dataclass(frozen=True)
class Config(PipelineTraining):
    """One run. Its options are declared in labkit/running/lab_options.py."""

    dtype = gpt_fsdp.Config.dtype


if __name__ == "__main__":
    ranks.run(main, options.parse(Config, __doc__))
