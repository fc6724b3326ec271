"""Fine-tune your own model, a causal language model of Hugging Face's transformers, with FSDP2.

  python hf_fsdp.py --config samples/llama_small.json --ranks 4        # train from random weights
  python hf_fsdp.py --model Qwen3-8B --save tuned                      # a folder with config.json and safetensors
  python hf_fsdp.py --model Qwen3-8B --lora 16 --save adapters         # a frozen base, peft's adapters
  srun -p gpu -N 1 --gres=gpu:4 --cpus-per-task=16 python hf_fsdp.py --model Qwen3-8B --precision bf16 --recompute full
  torchrun --nproc-per-node 8 hf_fsdp.py --model Qwen3-8B --data mine.txt --checkpoint ckpt --resume

No rank ever has the whole model in memory: each reads only its shards from the files. ``from_pretrained`` reads the
result of --save without this course. README.md lists all ways to start it.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from labkit import UserError
from labkit.measuring import records
from labkit.measuring.trace import local
from labkit.running import options, preflight, ranks
from labkit.running.lab_options import HuggingFaceTraining
from labkit.training import checkpoints, hf_models, hf_weights, saving, text
from labkit.training.loop import Loop, keep_norm
from labkit.training.shards import count_units
from labkit.training.weight_decay import parameter_groups
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

in_simulation = hf_models.untraced_masks  # the context of a simulated step
# me is always this rank: its rank, local_rank, world_size, device; me.say prints on rank 0 only.


def build(config, me):
    """Build the model: shard it on the meta device, which allocates nothing, then initialize it."""
    preflight.refuse_if_too_big(config, me)
    with torch.device("meta"):
        model, pattern = unsharded(config), unsharded(config)
    if config.strategy == "fsdp2":
        fsdp2(model, config, me)
    model.to_empty(device=me.device)
    model.tie_weights()  # to_empty has given each name its own tensor
    fill(model, pattern, config, me)  # the pattern is the unsharded model, which initial weights need
    return DistributedDataParallel(model) if config.strategy == "ddp" else model


def unsharded(config):
    """Return the model as one process would train it, on the current default device."""
    model = hf_models.without_weights(config.architecture, config.dtype, config.lora)
    if config.recompute == "full":  # before sharding: FSDP's hooks must enclose the recomputation
        for block in hf_models.blocks(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def fsdp2(model, config, me):
    """Apply FSDP2: each block, the embedding, and the head are units. The root has the rest, including a tied weight."""
    bf16 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = {
        "mesh": init_device_mesh(me.device.type, (me.world_size,)),
        "mp_policy": bf16 if config.precision == "bf16" else fsdp.MixedPrecisionPolicy(),
    }
    for block in hf_models.blocks(model):
        fsdp.fully_shard(block, **settings)
    if not hf_models.tied(model):
        fsdp.fully_shard(model.get_input_embeddings(), **settings)
        # Backward begins with the head: if it were freed after forward, it would be gathered again immediately.
        fsdp.fully_shard(model.get_output_embeddings(), reshard_after_forward=False, **settings)
    return fsdp.fully_shard(model, **settings)


@torch.no_grad()
def fill(model, pattern, config, me):
    """Load parameters and buffers from the model's files, initialize the others, and check that none was forgotten."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for tensor in tensors.values():
        if tensor.is_floating_point():
            local(tensor).fill_(math.nan)
    read = frozenset()
    if config.model:
        read, size = hf_models.read(model, config.model)
        me.say(f"read {size / 2**20:,.1f} MiB of {Path(config.model).name} per rank")
    filled = set(read)
    for name, value in hf_models.initial_weights(pattern, config.seed, read):
        filled.add(name)
        tensor = tensors.get(name)
        if isinstance(tensor, DTensor):  # every rank draws the unsharded value and takes its shard: nothing is sent
            value = local(distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None))
        if tensor is not None:  # None for the second name of a shared tensor
            local(tensor).copy_(value)
    forgotten = [name for name, tensor in tensors.items() if name not in filled or local(tensor).isnan().any()]
    if forgotten:
        why = "is a file damaged?" if forgotten[0] in read else "its module does not initialize it, take another model"
        raise UserError(f"{config.model or config.config}: no value for {', '.join(forgotten[:3])}: {why}")


def make_optimizer(model, config):
    return torch.optim.AdamW(parameter_groups(model, config), lr=config.lr, foreach=True)


def compute_loss(model, inputs, targets, config):
    """Return the mean cross-entropy of a micro-batch on this rank, in nats per token."""
    by_autocast = config.precision == "bf16" and config.strategy != "fsdp2"  # FSDP casts by its own policy
    with torch.autocast(inputs.device.type, torch.bfloat16) if by_autocast else nullcontext():
        logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).to(config.dtype), targets.flatten())


def train_step(model, optimizer, inputs, targets, config):
    """Train one step on this rank's (inputs, targets), each of shape (accumulate, batch_size, seq_len).

    Returns one term per micro-batch; their sum is the step's loss.
    """
    losses = []
    for micro in range(config.accumulate):
        loss = compute_loss(model, inputs[micro], targets[micro], config) / config.accumulate
        loss.backward()
        losses.append(loss.detach())
    if config.clip or config.log:  # without --clip, --log only measures the norm
        keep_norm(optimizer, clip_grad_norm_(model.parameters(), config.clip or math.inf), config)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def training_batches(tokens, config, me, steps):
    """Yield this rank's micro-batches of each step: (inputs, targets), each of shape (accumulate, batch_size, seq_len)."""
    shape = config.accumulate, me.world_size, config.batch_size
    for step in steps:
        starts = text.starts(tokens, config.seq_len, math.prod(shape), config.seed, step)
        yield text.sequences(tokens, starts.view(shape)[:, me.rank], config.seq_len)


def train(config, me):
    """Train in the current process group, and return the measurements for a record."""
    name, tokens = hf_models.load_tokens(config, config.architecture, me.device)
    model = build(config, me)
    optimizer = make_optimizer(model, config)
    global_batch = config.batch_size * config.accumulate * me.world_size
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    me.say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {trained:,} trained; {len(tokens):,} tokens")
    saver = saving.Saver(config, model, optimizer, checkpoints.identity(config, global_batch, name))
    loop = Loop(config, me, saver, config.max_steps, global_batch, flops_per_token=hf_models.flops_per_token(config))
    while loop.step < loop.last_step:
        local_losses = []
        for inputs, targets in loop.watch(training_batches(tokens, config, me, loop.next_steps())):
            # Dropout depends on step and rank only, so that a run resumed on as many ranks continues exactly.
            torch.manual_seed(config.seed + 1000 * loop.step + me.rank)
            local_losses += train_step(model, optimizer, inputs, targets, config)

        finite = loop.log(local_losses)
        me.say(f"step {loop.step}: loss {loop.losses[-1]:.4f}")
        if not finite:  # records.report raises Diverged, and nothing more is saved
            break
        loop.save_if_due()
    measured = loop.finish()
    if config.save and all(map(math.isfinite, loop.losses)):
        hf_models.save(getattr(model, "module", model), config.architecture, config)
        me.say(f"saved to {config.save}")
    data = {"name": name, "train": len(tokens), "test": 0}
    return {"data": data, "batch_size": config.batch_size, "units": count_units(model), **measured}


def main(config, me):
    """Run the lab on one rank. me: this rank (labkit/running/ranks.py)."""
    begin = time.perf_counter()
    preflight.check(config, me)
    if config.save and me.rank == 0:
        hf_weights.check_new(config.save)
    dist.init_process_group(me.backend, device_id=me.device if me.device.type == "cuda" else None)
    result = train(config, me)
    records.report(config.script, config, me, result, elapsed=time.perf_counter() - begin)


@dataclass(frozen=True)
class Config(HuggingFaceTraining):
    """One run. Its options are declared in labkit/running/lab_options.py."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights and of the loss."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def architecture(self):
        """The model's configuration, as transformers reads it."""
        return hf_models.configuration(self.model or self.config, "--model" if self.model else "--config")


if __name__ == "__main__":
    ranks.run(main, options.parse(Config, __doc__))
