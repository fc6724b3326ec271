# SPDX-License-Identifier: BSD-3-Clause
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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from labkit import UserError
from labkit.measuring import records
from labkit.measuring.trace import local
from labkit.running import options, preflight, ranks
from labkit.running.lab_options import HuggingFaceTraining
from labkit.training import (
    checkpoints,
    hf_export,
    hf_initial,
    hf_loading,
    hf_lora,
    hf_models,
    hf_parallel,
    models,
    saving,
    sequences,
)
from labkit.training.loop import Loop, keep_norm
from labkit.training.shards import count_units, whole
from labkit.training.weight_decay import by_mesh, parameter_groups
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

in_simulation = hf_models.untraced_masks  # the context of a simulated step
# me is always this rank: its rank, local_rank, world_size, device; me.say prints on rank 0 only.


def build(config, me):
    """Build the model: transformers shards it on the meta device, and then each rank reads or draws its shards."""
    preflight.refuse_if_too_big(config, me)
    with torch.device("meta"):
        pattern = unsharded(config)  # the unsharded model, which initial weights need
    parallelized = partial(parallelize, config=config, me=me)
    device = torch.device("cpu") if config.cpu_offload else me.device
    if config.model:
        model, missing = hf_loading.load(config, config.architecture, device, parallelized)
    else:
        with torch.device("meta"):
            model = parallelized(
                hf_models.without_weights(config.architecture, config.dtype, config.experts_implementation)
            )
        model.to_empty(device=device)
        model.tie_weights()  # to_empty has given each name its own tensor
        missing = set(hf_initial.tensors(model))
    source = f"--model {config.model}" if config.model else f"--config {config.config}"
    hf_initial.initialize(model, pattern, missing, config.seed, source)
    for buffer in model.buffers():
        buffer.data = buffer.to(me.device)  # which FSDP's offload does not move
    model.train()
    return DistributedDataParallel(model) if config.strategy == "ddp" else model


def unsharded(config):
    """Return the model as one process would train it, without weights, on the current default device."""
    return change(hf_models.without_weights(config.architecture, config.dtype, config.experts_implementation), config)


def parallelize(model, config, me):
    """Prepare a model on the meta device for training, and shard it."""
    model = change(model, config)
    if me.world_size == 1 and config.cpu_offload:
        raise UserError(
            "--cpu-offload is FSDP's, and on one rank there is nothing to shard: take more ranks, or leave it out"
        )
    return fsdp2(model, config, me) if config.strategy == "fsdp2" and me.world_size > 1 else model


def change(model, config):
    """Freeze what is not trained, add adapters, and change each block's forward, inside FSDP's hooks."""
    hf_models.freeze_towers(model)
    if config.adapts:
        hf_lora.add(model, config)
    for block in hf_models.blocks(model):
        if config.recompute != "none":
            settings = {"use_reentrant": False}
            if config.recompute == "selective":  # save the results of the expensive operators
                saved = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, *models.ATTENTION_OPERATORS]
                settings["context_fn"] = partial(create_selective_checkpoint_contexts, saved)
            block.forward = partial(checkpoint, block.forward, **settings)
        if config.compile:
            block.forward = torch.compile(block.forward)
    return model


def fsdp2(model, config, me):
    """Apply tensor and expert parallelism, then FSDP2, by the library's plans of this family.

    Its units are the blocks, the embedding, and the last norm with the head.
    """
    mesh = config.arranged(me.world_size)
    distribution = hf_parallel.DistributedConfig(
        fsdp_size=mesh.shard,
        dp_replicate_size=mesh.replicate,
        tp_size=mesh.tensor,
        ep_size=mesh.expert,
        fsdp_mixed_precision=config.mixed,
        fsdp_cpu_offload=config.cpu_offload,
    )
    model = hf_parallel.distribute(model, distribution, me.device.type, pin_memory=me.device.type == "cuda")
    if config.reshard_after_forward == "false" and isinstance(model, fsdp.FSDPModule):
        model.set_reshard_after_forward(False)
    if config.prefetch:
        prefetch(model, hf_models.blocks(model), config.prefetch)
    return model


def prefetch(model, units, ahead):
    """Set explicitly which units are all-gathered while another one computes, instead of FSDP2's default."""
    model.set_modules_to_forward_prefetch(units[:ahead])
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(0, i - ahead) : i][::-1])


def make_optimizer(model, config):
    """Return AdamW, with a parameter group for each device mesh: foreach cannot mix the DTensors of several."""
    groups = [part for group in parameter_groups(model, config) for part in by_mesh(group)]
    return torch.optim.AdamW(groups, lr=config.lr, foreach=True)


def compute_loss(model, inputs, targets, config, positions=None):
    """Return the sum of the cross-entropies of a micro-batch's targets on this rank, in nats; -100 is no target."""
    # FSDP casts by its own policy; for the others, autocast does.
    by_autocast = config.mixed and not isinstance(model, fsdp.FSDPModule)
    batch = {"input_ids": inputs, "use_cache": False} | hf_models.text_inputs(model, inputs)
    if positions is not None:  # they begin anew with each document, which tells the library to separate them
        batch["position_ids"] = positions
    with torch.autocast(inputs.device.type, torch.bfloat16) if by_autocast else nullcontext():
        if config.loss_chunks > 1:
            return hf_models.chunked_loss(model, batch, targets, config.loss_chunks)
        logits = model(**batch).logits
    loss_dtype = torch.promote_types(config.dtype, torch.float32)
    return F.cross_entropy(local(logits).flatten(0, 1).to(loss_dtype), targets.flatten(), reduction="sum")


def gradients_wait(model, config, last):
    """Return the context of a micro-batch: with --sync last, gradients are averaged only after a step's last micro-batch."""
    wait = config.sync == "last" and not last
    if isinstance(model, fsdp.FSDPModule):
        model.set_requires_gradient_sync(not wait)
    return model.no_sync() if wait and isinstance(model, DistributedDataParallel) else nullcontext()


def train_step(model, optimizer, inputs, targets, config, positions=None, weight=None):
    """Train one step on this rank's sequences, and return one term per micro-batch; their sum is the step's loss.

    Args:
        model, optimizer: as ``build`` and ``make_optimizer`` return them.
        inputs, targets: int64, (accumulate, batch_size, seq_len); -100 is no target.
        config: the options.
        positions: of the inputs in their documents, of the same shape; None: each sequence is one document.
        weight: factor on each target's loss. FSDP and DDP average gradients over the ranks, so it is the number of ranks
            with different sequences, over the number of targets on all of them; None: all have as many, without -100.
    """
    losses = []
    weight = 1 / targets.numel() if weight is None else weight
    for micro in range(config.accumulate):
        with gradients_wait(model, config, last=micro == config.accumulate - 1):
            of_documents = None if positions is None else positions[micro]
            loss = weight * compute_loss(model, inputs[micro], targets[micro], config, of_documents)
            loss.backward()
        losses.append(loss.detach())
    if config.clip or config.log:  # without --clip, --log only measures the norm
        keep_norm(optimizer, clip(model, config.clip or math.inf), config)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def clip(model, max_norm):
    """Clip the gradient, and return its norm before that, over all shards. Collective."""
    gradients = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradients.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(gradients) == 1:
        return clip_grad_norm_(model.parameters(), max_norm)
    norms = [get_total_norm([p.grad for p in parameters]) for parameters in gradients.values()]
    norm = get_total_norm([whole(norm) for norm in norms])
    for parameters in gradients.values():
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@torch.no_grad()
def evaluate(model, data, config, me):
    """Return the mean loss per target of all validation sequences, without dropout. Collective."""
    mesh = config.arranged(me.world_size)
    loss = torch.zeros((), dtype=torch.float64, device=me.device)
    model.eval()
    for batch in data.validation_batches(config.batch_size, mesh.data_part(me.rank), mesh.data, me.device):
        positions = None if batch.positions is None else batch.positions[0]
        loss += compute_loss(model, batch.inputs[0], batch.targets[0], config, positions) / batch.tokens
    hf_models.reshard(model)
    model.train()
    dist.all_reduce(loss)
    return loss.item() * mesh.data / me.world_size  # tensor-parallel ranks have the same sequences


def train(config, me):
    """Train in the current process group, and return the measurements for a record."""
    vocabulary, positions = hf_models.vocabulary_and_positions(config.architecture)
    if positions and positions < config.seq_len:
        more = f"more than the {positions} positions that the model supports"
        raise UserError(f"--seq-len {config.seq_len} is {more}: give --seq-len {positions}")
    data, validation = sequences.load(config, vocabulary, me)
    mesh = config.arranged(me.world_size)
    part, global_batch = mesh.data_part(me.rank), config.batch_size * config.accumulate * mesh.data
    config = config.with_steps(data.steps(config.epochs, global_batch))
    model = build(config, me)
    hf_models.check_masks(model, me.device, packed=data.packing == "documents")
    optimizer = make_optimizer(model, config)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    me.say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {trained:,} trained")
    identity = checkpoints.identity(config, global_batch, data.corpus.identity) | hf_lora.identity(config)
    saver = saving.Saver(config, model, optimizer, identity)
    loop = Loop(config, me, saver, config.max_steps, global_batch, flops_per_token=hf_models.flops_per_token(config))
    plain = getattr(model, "module", model)  # inside of DDP
    validated = {}  # {step: loss}
    while loop.step < loop.last_step:
        local_losses = []
        batches = data.training_batches(
            loop.next_steps(), config.accumulate, config.batch_size, part, mesh.data, me.device
        )
        for batch in loop.watch(batches):
            # Dropout depends on step and data only, so that a run resumed on as many ranks continues exactly.
            torch.manual_seed(config.seed + 1000 * loop.step + part)
            weight = mesh.data / batch.tokens
            local_losses += train_step(model, optimizer, *batch[:2], config, batch.positions, weight)

        finite = loop.log(local_losses)
        me.say(f"step {loop.step}: loss {loop.losses[-1]:.4f}")
        if not finite:  # records.report raises Diverged, and nothing more is saved
            break
        if validation and (loop.step == loop.last_step or loop.step % (config.validate_every or loop.last_step) == 0):
            validated[loop.step] = evaluate(model, validation, config, me)
            me.say(f"step {loop.step}: validation loss {validated[loop.step]:.4f}")
            loop.log_scalars(validation_loss=validated[loop.step])
        loop.save_if_due()
        if config.save_every and loop.step % config.save_every == 0 and loop.step < loop.last_step:
            hf_export.save(plain, config.architecture, config, hf_export.folder_of(config, loop.step))
    measured = loop.finish()
    if config.save and all(map(math.isfinite, loop.losses)):
        hf_export.save(plain, config.architecture, config, config.save)
        me.say(f"saved to {config.save}")
    tokens = [int(each.targets.sum()) if each else 0 for each in (data, validation)]
    about = {"name": data.corpus.name, "train": tokens[0], "test": tokens[1]}
    results = {"batch_size": config.batch_size, "units": count_units(model), "validation_losses": validated}
    return {"data": about, **results, **measured}


def main(config, me):
    """Run the lab on one rank. me: this rank (labkit/running/ranks.py)."""
    begin = time.perf_counter()
    preflight.check(config, me)
    if config.save and me.rank == 0:
        hf_export.check_new(config)
    # With offload, --clip reduces the norms of shards in CPU memory, which NCCL does not support.
    backend = "cpu:gloo,cuda:nccl" if config.cpu_offload and me.backend == "nccl" else me.backend
    dist.init_process_group(backend, device_id=me.device if me.device.type == "cuda" else None)
    result = train(config, me)
    records.report(config.script, config, me, result, elapsed=time.perf_counter() - begin)


@dataclass(frozen=True)
class Config(HuggingFaceTraining):
    """One run. Its options are declared in labkit/running/lab_options.py."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights; that of a frozen base model is bf16 if it computes in bf16."""
        if self.weights == "bf16" or (self.adapts and self.precision == "bf16"):
            return torch.bfloat16
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def adapter_dtype(self) -> torch.dtype:
        """Data type of the adapters."""
        return torch.bfloat16 if self.weights == "bf16" else torch.promote_types(self.dtype, torch.float32)

    @property
    def experts_implementation(self) -> str | None:
        """The library's implementation of experts; its default has no kernel in fp64."""
        return "eager" if self.precision == "fp64" else None

    @property
    def architecture(self):
        """The model's configuration, as transformers reads it."""
        return hf_models.configuration(self.model or self.config, "--model" if self.model else "--config")


if __name__ == "__main__":
    ranks.run(main, options.parse(Config, __doc__))
