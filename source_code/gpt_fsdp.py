"""The transformer lab: a GPT in the form of Llama 3, trained on text by one process, DDP, FSDP1 or FSDP2.

Every launch below runs this file unchanged:

  python gpt_fsdp.py                                     starts one rank per GPU, or two on the CPU
  torchrun --nproc-per-node 4 gpt_fsdp.py
  srun -p gpu -N 1 --gres=gpu:4 python gpt_fsdp.py       one task, which starts its own ranks
  srun -p gpu -N 2 --ntasks-per-node=4 --gpus-per-task=1 python gpt_fsdp.py
  srun -N 2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 4 \\
       --rdzv-backend c10d --rdzv-endpoint $HOST:29500 gpt_fsdp.py

Things to try:

  python gpt_fsdp.py --ranks 4 --recompute full --record run.json
  python gpt_fsdp.py --ranks 4 --mesh 2x2                   two replicas, each sharded over two ranks
  python gpt_fsdp.py --lora 4 --accumulate 4 --clip 1.0     a frozen base, four micro-batches a step
  python gpt_fsdp.py --checkpoint ckpt && python gpt_fsdp.py --checkpoint ckpt --resume --max-steps 40
  torchrun --nproc-per-node 8 gpt_fsdp.py --preset llama3-8b --precision bf16 --recompute selective --compile \\
           --batch-size 1 --seq-len 8192
"""

import dataclasses
import math
import os
import re
import shutil
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from labkit import UserError, blueprints, checkpoints, meters, models, predict, ranks, records, text
from labkit.meters import Meter
from labkit.models import GPT, Block
from labkit.options import option, parse
from labkit.progress import Progress
from labkit.shapes import GPT_SHAPES, GPTShape
from labkit.trace import local
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


@dataclass(frozen=True)
class Config:
    """One run. The command line is made from these fields."""

    preset: Literal[tuple(GPT_SHAPES)] = option("tiny", "size of the model")
    tied: bool | None = option(None, "one weight for embedding and head (default: as the preset says)")
    strategy: Literal["single", "ddp", "fsdp1", "fsdp2"] = option("fsdp2", "one process, or how the ranks share")
    max_steps: int = option(20, "steps to train, those of the run being resumed included")
    batch_size: int = option(8, "sequences in a micro-batch on each rank")
    seq_len: int = option(128, "tokens in a sequence")
    reshard_after_forward: str | None = option(
        None, "FSDP: true frees a block's gathered parameters after forward, false keeps them, N keeps 1/N of them"
    )
    precision: Literal["fp32", "bf16", "fp64"] = option("fp32", "number format of the computation")
    recompute: Literal["none", "full", "selective"] = option(
        "none", "what backward computes again: nothing, each block, or all but matrix products and attention"
    )
    cpu_offload: bool = option(False, "FSDP: keep shards, gradients and optimizer state in the CPU's memory")
    mesh: str | None = option(None, "FSDP: REPLICASxSHARDS, such as 2x4: shard among 4 ranks, replicate twice")
    prefetch: int = option(0, "FSDP2: gather this many blocks ahead; 0 leaves it to FSDP2")
    accumulate: int = option(1, "micro-batches in a step")
    sync: Literal["every", "last"] = option("every", "after which micro-batch of a step the ranks sum gradients")
    clip: float | None = option(None, "largest global norm of the gradient")
    compile: bool = option(False, "compile each block's forward")
    optimizer: Literal["adamw", "adamw-fused", "adamw-for-loop", "momentum", "sgd"] = option("adamw", "optimizer")
    lora: int | None = option(None, "freeze the model, and train adapters of this rank on queries and values")
    lr: float = option(1e-3, "learning rate")
    seed: int = option(1, "seed of the weights and the order of the text")
    ranks: int | None = option(
        None, "ranks to start, where neither torchrun nor srun does (default: one per GPU, or 2)"
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute")
    backend: Literal["auto", "nccl", "gloo"] = option("auto", "how to communicate; gloo alone means on the CPU")
    checkpoint: str | None = option(None, "folder for a checkpoint at the end of training")
    checkpoint_every: int | None = option(None, "and after every so many steps")
    resume: bool = option(False, "go on from the newest checkpoint in --checkpoint, if there is one")
    record: str | None = option(None, "write what was measured to this JSON file")
    profile: str | None = option(None, "folder for a trace of a few steps, for Perfetto or TensorBoard")

    def __post_init__(self):
        for name in ("reshard_after_forward", "mesh", "cpu_offload"):
            if getattr(self, name) and not self.strategy.startswith("fsdp"):
                raise UserError(f"{flag(name)} is FSDP's; with --strategy {self.strategy} leave it out")
        if self.prefetch and self.strategy != "fsdp2":
            raise UserError(f"--prefetch is FSDP2's; with --strategy {self.strategy} leave it out")
        if not re.fullmatch(r"true|false|[2-9]|[1-9]\d+", self.reshard_after_forward or "true"):
            raise UserError(
                f"--reshard-after-forward is true, false or a number from 2 on, not {self.reshard_after_forward!r}"
            )
        if self.strategy == "fsdp1" and not isinstance(self.reshard, bool):
            raise UserError("--reshard-after-forward N is FSDP2's; FSDP1 knows true and false")
        if self.strategy == "fsdp1" and self.mesh and not self.reshard:
            raise UserError("FSDP1 on a --mesh frees parameters after forward: leave --reshard-after-forward out")
        if self.strategy == "fsdp1" and self.clip and self.precision == "fp64":
            raise UserError("FSDP1 computes the norm that --clip needs in fp32: leave --precision fp64 out")
        if self.mesh and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", self.mesh):
            raise UserError(f"--mesh is REPLICASxSHARDS, such as 2x4, not {self.mesh!r}")
        if self.strategy == "single" and self.ranks not in (None, 1):
            raise UserError("--strategy single is one rank: leave --ranks out, or choose another strategy")
        for name in ("resume", "checkpoint_every"):
            if getattr(self, name) and not self.checkpoint:
                raise UserError(f"{flag(name)} needs --checkpoint DIR, the folder of the checkpoints")
        for name in ("ranks", "max_steps", "batch_size", "seq_len", "accumulate", "lora", "checkpoint_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{flag(name)} must be at least 1, but is {value}")
        if self.prefetch < 0:
            raise UserError(f"--prefetch must be at least 0, but is {self.prefetch}")
        for name in ("clip", "lr"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise UserError(f"{flag(name)} must be a number above 0, but is {value}")

    @property
    def shape(self) -> GPTShape:
        shape = GPT_SHAPES[self.preset]
        return shape if self.tied is None else dataclasses.replace(shape, tied=self.tied)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the loss; bf16 is a format of the computation between them."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def reshard(self) -> bool | int:
        """What becomes of a block's gathered parameters after forward, in ``fully_shard``'s words."""
        value = self.reshard_after_forward or "true"
        return int(value) if value.isdecimal() else value == "true"

    def grid(self, world_size: int) -> tuple[int, int]:
        """(replicas of the model, ranks that share each). UserError: the options do not fit this number of ranks."""
        if self.strategy == "single" and world_size > 1:
            raise UserError(f"--strategy single is one rank, but {world_size} were started: choose another strategy")
        if not self.strategy.startswith("fsdp"):
            return world_size, 1
        replicas, shards = map(int, self.mesh.split("x")) if self.mesh else (1, world_size)
        if replicas * shards != world_size:
            raise UserError(f"--mesh {self.mesh} is for {replicas * shards} ranks, but {world_size} were started")
        if not isinstance(self.reshard, bool) and shards % self.reshard:
            raise UserError(f"--reshard-after-forward {self.reshard} does not divide the {shards} ranks of a model")
        return replicas, shards


def flag(name: str) -> str:
    """An option as it is typed."""
    return "--" + name.replace("_", "-")


def build(config, me):
    """(model ready to train, floating-point operations a token)."""
    with torch.device("meta"):  # shapes and no storage: nothing is allocated, however large the model
        model = GPT(config.shape).to(config.dtype)
        if config.lora:
            models.add_adapters(model, config.lora)
    refuse_if_too_big(config, me)
    flops = blueprints.flops_per_token(config.shape, config.seq_len, config.lora)
    for block in model.blocks:
        change_forward(block, config)
    return parallelize(model, config, me), flops


def change_forward(block, config):
    """Recompute and compile, in place. Inside FSDP's hooks, so that the recomputation finds the parameters gathered."""
    if config.recompute != "none":
        # There is no dropout to repeat, hence no state of a random generator to keep.
        options = {"use_reentrant": False, "preserve_rng_state": False}
        if config.recompute == "selective":  # the operators whose results are kept: the dear ones
            kept = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, *models.ATTENTION_OPERATORS]
            options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
        block.forward = partial(checkpoint, block.forward, **options)
    if config.compile:
        block.forward = torch.compile(block.forward)


def parallelize(model, config, me):
    """Apply the strategy to a model on the meta device, and give it memory and values. The model knows nothing of it.

    FSDP2 shards first: then no rank ever holds more than its part. The others are made for a model that is there.
    """
    if config.strategy == "fsdp2":
        fsdp2(model, config, me)
    # FSDP1 moves a model that lies in the CPU's memory to the device unit by unit.
    model.to_empty(device="cpu" if config.strategy == "fsdp1" or config.cpu_offload else me.device)
    model.tie()
    initialise(model, config.seed)
    if config.strategy == "ddp":
        return DistributedDataParallel(model)
    return fsdp1(model, config, me) if config.strategy == "fsdp1" else model


def device_mesh(config, me):
    """The ranks in a row, which share one model; or, with --mesh, in a grid, whose rows share a model each."""
    shape, names = config.grid(me.world_size), ("replicate", "shard")
    start = 0 if config.mesh else 1
    return init_device_mesh(me.device.type, shape[start:], mesh_dim_names=names[start:])


def fsdp1(model, config, me):
    """The wrapper class: each unit's parameters become one flat tensor, cut into equal parts."""
    whole = ShardingStrategy.FULL_SHARD if config.reshard else ShardingStrategy.SHARD_GRAD_OP
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # A block of frozen and trained parameters has a gradient as large as both: FSDP1 warns, once a block and rank.
    warnings.filterwarnings("ignore", ".*has both parameters with requires_grad")
    return FullyShardedDataParallel(
        model,
        device_mesh=device_mesh(config, me),
        device_id=me.device,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if config.mesh else whole,
        cpu_offload=CPUOffload(offload_params=config.cpu_offload),
        mixed_precision=bf16 if config.precision == "bf16" else None,
        # Otherwise a flat tensor is trained or frozen as a whole, and torch.compile does not see what is in it.
        use_orig_params=bool(config.lora) or config.compile,
    )


def fsdp2(model, config, me):
    """The function: each parameter becomes a DTensor, cut along its first dimension."""
    pinned = me.device.type == "cuda"  # page-locked memory makes copies to a GPU fast; without one it cannot be had
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "mesh": device_mesh(config, me),
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if config.cpu_offload else OffloadPolicy(),
        "mp_policy": bf16 if config.precision == "bf16" else MixedPrecisionPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=config.reshard, **options)
    # The root takes the embedding, the last norm and the head. It stays gathered, as backward begins with it.
    fully_shard(model, **options)
    if config.prefetch:
        prefetch(model, list(model.blocks), config.prefetch)
    expected = (Replicate(), Shard(0)) if config.mesh else (Shard(0),)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.placements != expected:
            raise RuntimeError(f"{name} is not placed as {expected}, but {getattr(parameter, 'placements', 'whole')}")


def prefetch(model, blocks, ahead):
    """Say which blocks to gather while another computes, instead of only the next one."""
    model.set_modules_to_forward_prefetch(blocks[:ahead])
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1])


@torch.no_grad()
def initialise(model, seed):
    """Fill what ``to_empty`` left without values, and prove that nothing was forgotten."""
    for parameter in model.parameters():
        local(parameter).fill_(math.nan)
    for parameter, value in models.first_values(model, seed):
        if isinstance(parameter, DTensor):  # every rank draws the whole value and keeps its part: nothing is sent
            mesh, placements = parameter.device_mesh, parameter.placements
            value = local(distribute_tensor(value, mesh, placements, src_data_rank=None))
        local(parameter).copy_(value)
    forgotten = [name for name, parameter in model.named_parameters() if local(parameter).isnan().any()]
    if forgotten:
        raise RuntimeError(f"no first value was given to {', '.join(forgotten)}")


def refuse_if_too_big(config, me):
    """UserError, on every rank, if the planner's peak is more than the memory there is."""
    run = {"script": "gpt_fsdp.py", "ranks": me.world_size, "device": me.device.type}
    try:
        plan = predict.plan_of(run | {"config": dataclasses.asdict(config)})
    except UserError:  # not predicted: nothing to go by
        return
    # With offload, what persists lies in the CPU's memory.
    needed = predict.total(plan.persistent() if config.cpu_offload else plan.peak()[1])
    free = meters.free_memory_of_a_rank(me, torch.device("cpu") if config.cpu_offload else me.device)
    if needed > free:
        raise UserError(
            f"--preset {config.preset} with --strategy {config.strategy} needs {needed / 2**30:.1f} GiB on each of "
            f"{me.world_size} ranks, and {free / 2**30:.1f} GiB are free: take a smaller preset or more ranks "
            "(plan.py says what takes them)"
        )


def make_optimizer(model, config):
    """The implementation is named, so that it needs the same memory on every device."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer in ("momentum", "sgd"):
        momentum = 0.9 if config.optimizer == "momentum" else 0.0
        return torch.optim.SGD(trained, lr=config.lr, momentum=momentum, foreach=True)
    how = {"adamw": {"foreach": True}, "adamw-fused": {"fused": True}, "adamw-for-loop": {"foreach": False}}
    return torch.optim.AdamW(trained, lr=config.lr, **how[config.optimizer])


def training_batches(tokens, config, me, steps):
    """A step's micro-batches on this rank: (inputs, targets), each of shape (accumulate, batch_size, seq_len)."""
    count = config.accumulate * me.world_size * config.batch_size
    for step in steps:
        starts = text.starts(tokens, config.seq_len, count, config.seed, step)
        mine = starts.view(config.accumulate, me.world_size, config.batch_size)[:, me.rank]
        yield text.sequences(tokens, mine, config.seq_len)


def compute_loss(model, inputs, targets, config):
    """Mean cross-entropy of a micro-batch on this rank, in nats a token."""
    # FSDP casts by its own policy; for the others, autocast does.
    by_autocast = config.precision == "bf16" and not config.strategy.startswith("fsdp")
    with torch.autocast(inputs.device.type, torch.bfloat16) if by_autocast else nullcontext():
        logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).to(config.dtype), targets.flatten())


def gradients_wait(model, config, last):
    """The context of a micro-batch: with --sync last the ranks sum gradients after a step's last one only."""
    wait = config.sync == "last" and not last
    if config.strategy == "fsdp2":
        model.set_requires_gradient_sync(not wait)
    elif wait and config.strategy != "single":
        return model.no_sync()
    return nullcontext()


def clip(model, config):
    """Scale the gradient down to the norm allowed. The norm is of all shards together: a collective."""
    if config.strategy == "fsdp1":
        model.clip_grad_norm_(config.clip)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)


@torch.no_grad()
def evaluate(model, tokens, config, me):
    """Mean loss on the validation text: the same sequences for any number of ranks up to 32."""
    total = max(32, me.world_size)
    starts = torch.linspace(0, len(tokens) - config.seq_len - 1, total).long()[me.rank :: me.world_size]
    loss = torch.zeros((), dtype=torch.float64, device=me.device)
    # Under FSDP each forward pass is a collective: every rank makes as many.
    for part in starts.tensor_split(max(1, total // me.world_size // config.batch_size)):
        loss += len(part) * compute_loss(model, *text.sequences(tokens, part, config.seq_len), config)
    dist.all_reduce(loss)
    return loss.item() / total


def train(config, me):
    """Train as ``config`` says in the process group there is; returns this run's part of a record."""
    data = text.load(me.device)
    if config.seq_len >= len(data.validation):
        raise UserError(
            f"--seq-len {config.seq_len} is longer than the validation text of {len(data.validation)} tokens"
        )
    model, flops = build(config, me)
    optimizer = make_optimizer(model, config)
    step = 0
    if config.resume and (newest := checkpoints.latest(config.checkpoint)):
        step = checkpoints.load(newest, model, optimizer)
    if step >= config.max_steps:
        raise UserError(f"nothing left to train: the checkpoint is at step {step}; raise --max-steps above it")
    me.say(f"{'resumed at' if step else 'starting at'} step {step} of {config.max_steps}")

    progress = Progress(me, config.max_steps, step)
    meter = Meter(model, optimizer, me.device, progress=progress, profile=config.profile, compiled=config.compile)
    first_step, local_losses = step, []
    while step < config.max_steps:
        every = config.checkpoint_every or config.max_steps
        stop = min(config.max_steps, step - step % every + every)
        for inputs, targets in meter.watch(training_batches(data.train, config, me, range(step, stop))):
            for micro in range(config.accumulate):
                with gradients_wait(model, config, last=micro == config.accumulate - 1):
                    loss = compute_loss(model, inputs[micro], targets[micro], config) / config.accumulate
                    loss.backward()
                local_losses.append(loss.detach())
            if config.clip:
                clip(model, config)
            optimizer.step()
            optimizer.zero_grad()
        step = stop
        if config.checkpoint:
            checkpoints.save(config.checkpoint, step, model, optimizer)
    meter.finish()
    losses = torch.stack(local_losses).view(-1, config.accumulate).sum(1)
    dist.all_reduce(losses)  # once, at the end: a collective a step, only to print, would slow the training
    losses = (losses / me.world_size).tolist()
    validation_loss = evaluate(model, data.validation, config, me)
    me.say(
        f"loss {losses[0]:.4f} in step {first_step + 1}, {losses[-1]:.4f} in step {step}; "
        f"validation loss {validation_loss:.4f}"
    )
    measured = meter.summary(config.batch_size * config.accumulate * me.world_size)
    rate = measured["time"]["samples_per_second"]
    return {
        "data": {"name": text.NAME, "train": len(data.train), "test": len(data.validation)},
        "batch_size": config.batch_size,
        "units": sum(isinstance(m, (FullyShardedDataParallel, FSDPModule)) for m in model.modules()),
        "first_step": first_step,
        "losses": losses,
        "validation_loss": validation_loss,
        **measured,
        "tokens_per_second": rate and rate * config.seq_len,
        "model_flops_utilisation": {"flops_per_token": flops},
    }


def main(config, me):
    """What every rank runs. me: which rank this is (labkit/ranks.py)."""
    begin = time.perf_counter()
    check(config, me)
    # With shards in the CPU's memory there are collectives on either device.
    both = config.cpu_offload and me.backend == "nccl"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if both else me.backend, device_id=me.device if me.device.type == "cuda" else None
    )
    if config.checkpoint:
        checkpoints.prepare(config.checkpoint)
    me.say(f"{me.world_size} ranks on {me.device.type} ({me.backend}), {records.hardware(me.device)}; data {text.NAME}")
    result = train(config, me)
    speed = result["model_flops_utilisation"]
    compute_dtype = torch.bfloat16 if config.precision == "bf16" else config.dtype
    speed |= meters.utilisation(result["tokens_per_second"], speed["flops_per_token"], compute_dtype, me)
    report(config, me, result, elapsed=time.perf_counter() - begin)


def check(config, me):
    """UserError, before anything is allocated, for what these ranks or this device cannot do."""
    config.grid(me.world_size)
    if config.precision == "bf16" and me.device.type == "cuda" and torch.cuda.get_device_capability(me.device) < (8, 0):
        raise UserError(f"{torch.cuda.get_device_name(me.device)} does not compute in bf16: use --precision fp32")
    if config.strategy == "fsdp1" and config.cpu_offload and me.device.type == "cpu":
        raise UserError(
            "FSDP1's --cpu-offload needs a GPU (it page-locks memory); --strategy fsdp2 shows it on the CPU"
        )
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if config.compile and me.device.type == "cpu" and not shutil.which(compiler):
        raise UserError(f"--compile needs a C++ compiler on the CPU, and there is no {compiler} here: leave it out")
    if config.record:
        records.check_writable(config.record)


def report(config, me, result, elapsed):
    """Print what was measured and write the record."""
    nodes = [None] * me.world_size
    dist.all_gather_object(nodes, me.node)
    result["time"]["elapsed"] = elapsed
    speed, memory = result["model_flops_utilisation"], result["memory"]
    if speed["value"]:
        me.say(f"{result['tokens_per_second']:,.0f} tokens/s, {speed['value']:.1%} of the {speed['peak_of']}")
    if memory and memory["peak"]:
        me.say(f"peak memory of rank 0: {sum(memory['peak'].values()) / 2**20:.2f} MiB of tensors")
    me.say(f"elapsed {elapsed:.1f} s")
    if config.record and me.rank == 0:
        about = records.new(__file__, dataclasses.asdict(config), me, sorted(set(nodes)))
        records.write(config.record, about | result)


if __name__ == "__main__":
    ranks.run(main, parse(Config, __doc__))
