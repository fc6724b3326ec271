"""The pipeline lab: the transformer of gpt_fsdp.py in stages, one on each rank, by torch.distributed.pipelining.

  python gpt_pipeline.py --ranks 4 --record run.json                 1F1B: a backward as soon as there can be one
  python gpt_pipeline.py --ranks 4 --schedule gpipe                  all forwards, then all backwards
  python gpt_pipeline.py --ranks 4 --mesh pipeline=4 --accumulate 16 --recompute full
  torchrun --nproc-per-node 8 gpt_pipeline.py --preset 1b --precision bf16 --accumulate 32

--accumulate is the number of micro-batches: a step's batch flows through the stages in so many parts.
README.md has every way to start it.
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
    """Some of a GPT's parts, under the names that they have in the whole: first values and checkpoints go by these.

    Input: of the first stage token numbers, (batch, sequence); of the others (batch, sequence, width), which is also
    every output but the last stage's: logits, (batch, sequence, vocabulary).
    bf16: compute in it by autocast; what flows between stages stays in fp32, as in the whole model between blocks.
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
            # Every stage makes these tables for itself: that is less than to send them.
            rotation = models.rotary(x.shape[1], self.shape.head_dim, x)
            for block in self.blocks.values():
                x = block(x, rotation)
            return self.head(self.norm(x)) if self.last else x


def build(config, me) -> PipelineStage:
    """This rank's stage, with memory and values, as torch.distributed.pipelining wants it."""
    with torch.device("meta"):  # the whole model, without storage; a rank gives memory to its own part only
        gpt = models.GPT(config.shape).to(config.dtype)
    preflight.refuse_if_too_big(config, me)
    model = Stage(gpt, me.rank, me.world_size, config.precision == "bf16")
    for block in model.blocks.values():
        gpt_fsdp.change_forward(block, config)
    model.to_empty(device=me.device)
    gpt_fsdp.init_weights(model, config.seed)
    return PipelineStage(model, me.rank, me.world_size, me.device)


def schedule_of(stage: PipelineStage, config):
    """In which order the stage computes its micro-batches' forwards and backwards, and what it waits for between."""

    def part_of_loss(logits, targets):
        return mean_loss(logits, targets, config) / config.accumulate

    # The loss is divided here, so the gradients need not be: otherwise PyTorch divides them when the step ends.
    return SCHEDULES[config.schedule](stage, config.accumulate, part_of_loss, scale_grads=False)


def mean_loss(logits, targets, config):
    """Mean cross-entropy of logits (batch, sequence, vocabulary) and targets (batch, sequence), in nats per token."""
    return F.cross_entropy(logits.flatten(0, 1).to(config.dtype), targets.flatten())


def train_step(model, schedule, optimizer, inputs, targets, config):
    """One step: inputs and targets, each of shape (accumulate, batch_size, seq_len), are the same on every rank.

    Only the first stage looks at the inputs, and only the last at the targets. Returns the micro-batches' parts of the
    loss, whose sum it is, in such a way that their mean over the ranks is right: none but the last knows them.
    """
    losses = []
    schedule.step(
        *([inputs.flatten(0, 1)] if model.first else []),
        target=targets.flatten(0, 1) if model.last else None,
        losses=losses,
        return_outputs=False,  # otherwise the last stage keeps the logits of all micro-batches, and joins them
    )
    if config.clip or config.log:
        keep_norm(optimizer, clip(model, config), config)
    optimizer.step()
    optimizer.zero_grad()
    if model.last:
        return [loss.detach() * model.stages for loss in losses]
    return list(torch.zeros(config.accumulate, dtype=config.dtype, device=inputs.device))


def clip(model, config):
    """Scale the gradient down to the norm allowed, and return the norm it had: of all stages, whose squares add up."""
    square = nn.utils.get_total_norm([p.grad for p in model.parameters()]) ** 2
    dist.all_reduce(square)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), config.clip or math.inf, norm)
    return norm


def compute_loss(model, inputs, targets, config):
    """Mean cross-entropy of one batch, for validation: it passes the stages one after the other, while the others wait.

    A loss as ``train_step`` has it: zero but on the last stage, and there as many times what it is.
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
    """(model, optimizer, step): see ``gpt_fsdp.prepare``. The model is this rank's stage."""
    stage = build(config, me)
    model, schedule = stage.submod, schedule_of(stage, config)
    optimizer = gpt_fsdp.make_optimizer(model, config)
    return model, optimizer, lambda i, t: train_step(model, schedule, optimizer, i, t, config)


def main(config, me):
    """What every rank runs. me: which rank this is (labkit/running/ranks.py)."""
    gpt_fsdp.main(config, me, prepare, compute_loss)


@dataclass(frozen=True)
class Config(PipelineTraining):
    """One run. Its options are declared in labkit/running/lab_options.py."""

    dtype = gpt_fsdp.Config.dtype


if __name__ == "__main__":
    ranks.run(main, options.parse(Config, __doc__))
