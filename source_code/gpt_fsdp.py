# SPDX-License-Identifier: BSD-3-Clause
"""Train a GPT in the style of Llama 3 on text, with one process, DDP, FSDP1 or FSDP2.

  python gpt_fsdp.py --ranks 4 --recompute full --record run.json
  python gpt_fsdp.py --ranks 4 --mesh 2x2                   # two replicas, each sharded over two ranks
  python gpt_fsdp.py --ranks 4 --mesh shard=2,tensor=2      # tensor parallelism: two ranks share each matmul
  python gpt_fsdp.py --ranks 4 --mesh context=4 --context-attention ring    # four ranks share each sequence
  python gpt_fsdp.py --ranks 4 --experts 8 --mesh shard=4,expert=2   # each rank has 4 experts, which two ranks shard
  python gpt_fsdp.py --lora 4 --accumulate 4 --clip 1.0     # a frozen base model, four micro-batches per step
  python gpt_fsdp.py --lr-schedule cosine --warmup-steps 4 --no-decay-1d --log logs     # tensorboard --logdir logs
  python gpt_fsdp.py --checkpoint ckpt && python gpt_fsdp.py --checkpoint ckpt --resume --max-steps 40
  srun -p gpu -N 1 --gres=gpu:4 --cpus-per-task=16 python gpt_fsdp.py          # one task, which starts the ranks
  torchrun --nproc-per-node 8 gpt_fsdp.py --preset llama3-8b --precision bf16 --recompute selective --compile \\
           --batch-size 1 --seq-len 8192

README.md lists all ways to start it.
"""

import math
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from labkit.measuring import meters, records
from labkit.measuring.trace import local
from labkit.running import options, preflight, ranks
from labkit.running.lab_options import TransformerTraining
from labkit.running.options import Conflict, several
from labkit.training import checkpoints, experts, loss_scaling, models, muon, post_forward_mesh, recompute, saving, text
from labkit.training.bf16_adamw import BF16AdamW
from labkit.training.context_parallel import Context, context_group, context_parallel, positions
from labkit.training.expert_parallel import clip_grad_norm, expert_mesh, spread
from labkit.training.loop import Loop, keep_norm
from labkit.training.shards import count_units, part_of
from labkit.training.tensor_parallel import tensor_parallel
from labkit.training.weight_decay import by_mesh, parameter_groups
from planner.models import flops
from planner.ops import context
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# The model is defined in labkit/training/models.py; here it is built, sharded and trained.
# me is always this rank: its rank, local_rank, world_size, device; me.say prints on rank 0 only.
VALIDATION_SEQUENCES = 32
EQUAL_BLOCKS = True  # so plan.py --simulate needs only few of them
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # --precision in which mixed precision computes


def build(config, me):
    """Return (model ready to train, model FLOPs per token)."""
    with torch.device("meta"):  # shapes without storage: nothing is allocated
        model = unsharded(config).to(config.dtype)
    experts.prepare(model, config.accumulate)
    preflight.refuse_if_too_big(config, me)
    return parallelize(model, config, me), flops.per_token(config.shape, config.seq_len, config.lora)


def unsharded(config):
    """Return the model as one process would train it, on the current default device."""
    model = models.GPT(config.shape)
    if config.lora:
        models.add_lora(model, config.lora)
    for number, block in enumerate(model.blocks):
        change_forward(block, config, number)
    return model


def change_forward(block, config, number=0):
    """Apply activation checkpointing and compile ``forward``, inside FSDP's hooks, where parameters are gathered."""
    if config.recompute != "none" and number % config.recompute_every == 0:
        # There is no dropout to repeat, so the state of the random generator need not be saved.
        settings = {"use_reentrant": False, "preserve_rng_state": False}
        if config.recompute == "selective":  # save the results of the expensive operators
            saved = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, *models.ATTENTION_OPERATORS]
            settings["context_fn"] = partial(create_selective_checkpoint_contexts, saved)
        elif config.recompute == "alternate":
            settings["context_fn"] = recompute.save_every_second_matmul
        block.forward = partial(checkpoint, block.forward, **settings)
        if config.offload_activations:
            block.forward = recompute.with_offloaded_inputs(block.forward)
    if config.compile:
        block.forward = torch.compile(block.forward)


def parallelize(model, config, me):
    """Apply the strategy to a model on the meta device, allocate it, and initialize its weights.

    FSDP2 shards first, so that a rank allocates and draws only its shards. The other strategies get an unsharded model,
    FSDP1 in CPU memory.
    """
    if config.strategy == "fsdp2":
        fsdp2(model, config, me)
    # FSDP1 moves a model from CPU memory to the device unit by unit.
    model.to_empty(device="cpu" if config.strategy == "fsdp1" or config.cpu_offload else me.device)
    model.tie()  # to_empty has given each name its own tensor
    init_weights(model, config.seed)
    if config.strategy == "ddp":
        return DistributedDataParallel(model)
    return fsdp1(model, config, me) if config.strategy == "fsdp1" else model


def device_mesh(config, me):
    """Return the device mesh: --mesh, or one dimension of all ranks. Dimensions of size 1 are omitted, except FSDP's.

    FSDP shards among the ranks that share a sequence, too, and averages their gradients: "shard" includes "context".
    """
    mesh = config.arranged(me.world_size)
    sizes = mesh.sizes | {"shard": mesh.shards}
    names = tuple(name for name in ("replicate", "shard", "tensor") if name == "shard" or sizes[name] > 1)
    return init_device_mesh(me.device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)


def fsdp1(model, config, me):
    """Wrap a model with FSDP1, which makes one flat parameter of each unit and shards it evenly."""
    mesh = device_mesh(config, me)
    one_dimension = fsdp.ShardingStrategy.FULL_SHARD if config.reshard else fsdp.ShardingStrategy.SHARD_GRAD_OP
    half = fsdp.MixedPrecision(param_dtype=HALF.get(config.precision), reduce_dtype=torch.float32)
    units = {models.Block} | ({nn.Embedding, models.Head} if config.wraps_embeddings else set())
    # With --lora a block's gradient is as large as all its parameters: FSDP1 warns for each block on each rank.
    warnings.filterwarnings("ignore", ".*has both parameters with requires_grad")
    return fsdp.FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        device_id=me.device,
        auto_wrap_policy=ModuleWrapPolicy(units),
        sharding_strategy=fsdp.ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else one_dimension,
        cpu_offload=fsdp.CPUOffload(offload_params=config.cpu_offload),
        mixed_precision=half if config.mixed else None,
        # Otherwise a flat parameter is trained or frozen as a whole, and torch.compile cannot trace its views.
        use_orig_params=bool(config.lora) or config.compile,
    )


def fsdp2(model, config, me):
    """Apply FSDP2, which makes each parameter a DTensor, sharded along its first dimension."""
    pinned = me.device.type == "cuda"  # pinned memory makes copies to a GPU fast; it is not available without one
    half = fsdp.MixedPrecisionPolicy(param_dtype=HALF.get(config.precision), reduce_dtype=torch.float32)
    mesh = device_mesh(config, me)
    if "tensor" in mesh.mesh_dim_names:
        tensor_parallel(model, mesh["tensor"])
    if config.cp_degree > 1:
        context_parallel(model, context_of(config, me), config.context_attention)
    settings = {
        "mesh": mesh[tuple(name for name in mesh.mesh_dim_names if name != "tensor")],
        "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=pinned) if config.cpu_offload else fsdp.OffloadPolicy(),
        "mp_policy": half if config.mixed else fsdp.MixedPrecisionPolicy(),
    }
    units = list(model.blocks)
    if config.wraps_embeddings:
        units.insert(0, model.embedding)
    if config.ep_degree > 1:
        own_mesh = expert_mesh(me.world_size, config.ep_degree, me.device.type)
        spread(model, own_mesh, settings | {"reshard_after_forward": config.reshard})
    with post_forward_mesh.shared():  # one for all units, if --reshard-after-forward is N
        for unit in units:
            fsdp.fully_shard(unit, reshard_after_forward=config.reshard, **settings)
    if config.wraps_embeddings:  # one unit for both; it stays gathered, since backward begins with it
        fsdp.fully_shard([model.norm, model.head], reshard_after_forward=False, **settings)
        units.append(model.head)
    # The root has the other parameters: embedding, final norm and head, unless they are units. It stays gathered, too.
    fsdp.fully_shard(model, **settings)
    if config.prefetch:
        prefetch(model, units, config.prefetch)
    return model


def context_of(config, me):
    """Return this rank's place in its context group. Collective: it makes the groups."""
    mesh = config.arranged(me.world_size)
    group = context_group(me.rank, mesh.context, mesh.tensor, me.world_size)
    return Context(group, mesh.context_part(me.rank), mesh.context, context.order_of(config.context_attention))


def my_tokens(sequences, config, me):
    """Return this rank's tokens of sequences (…, seq_len): all of them, unless a context group shares each sequence."""
    mesh = config.arranged(me.world_size)
    if mesh.context == 1:
        return sequences
    order = context.order_of(config.context_attention)
    mine = positions(mesh.context_part(me.rank), mesh.context, config.seq_len, order)
    return [each[..., mine.to(each.device)] for each in sequences]


def prefetch(model, units, ahead):
    """Set explicitly which units are all-gathered while another one computes, instead of FSDP2's default."""
    model.set_modules_to_forward_prefetch(units[:ahead])
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(0, i - ahead) : i][::-1])


@torch.no_grad()
def init_weights(model, seed):
    """Initialize the parameters, which ``to_empty`` leaves uninitialized, and check that none was forgotten."""
    for parameter in model.parameters():
        local(parameter).fill_(math.nan)
    models.init_weights(model, seed, part_of)
    forgotten = [name for name, parameter in model.named_parameters() if local(parameter).isnan().any()]
    if forgotten:
        raise RuntimeError(f"not initialized: {', '.join(forgotten)}")


def make_optimizer(model, config):
    """Return the optimizer. foreach or fused is explicit, since PyTorch's default, and so the memory, depends on the device."""
    if config.optimizer in ("momentum", "sgd"):
        trained = by_mesh({"params": [p for p in model.parameters() if p.requires_grad]})
        momentum = 0.9 if config.optimizer == "momentum" else 0.0
        return torch.optim.SGD(trained, lr=config.lr, momentum=momentum, foreach=True)
    if config.optimizer.startswith("muon"):
        return muon.make(model, config)
    if config.optimizer == "adamw-bf16":
        return BF16AdamW(parameter_groups(model, config), config.lr, seed=config.seed)
    how = {"adamw": {"foreach": True}, "adamw-fused": {"fused": True}, "adamw-for-loop": {"foreach": False}}
    groups = [part for group in parameter_groups(model, config) for part in by_mesh(group)]
    return torch.optim.AdamW(groups, lr=config.lr, **how[config.optimizer])


def compute_loss(model, inputs, targets, config):
    """Return the mean cross-entropy of a micro-batch on this rank, in nats per token."""
    # FSDP casts by its own policy, as DeepSpeed does; for the others, autocast does.
    by_autocast = config.mixed and config.strategy in ("single", "ddp")
    with torch.autocast(inputs.device.type, HALF[config.precision]) if by_autocast else nullcontext():
        if config.loss_chunks > 1:  # inside the model: see models.Head
            return model(inputs, targets, config.loss_chunks)
        logits = model(inputs)
    loss_dtype = torch.promote_types(config.dtype, torch.float32)
    return local(F.cross_entropy(logits.flatten(0, 1).to(loss_dtype), targets.flatten()))


def gradients_wait(model, config, last):
    """Return the context of a micro-batch: with --sync last, gradients are averaged only after a step's last micro-batch."""
    wait = config.sync == "last" and not last
    if config.strategy == "fsdp2":
        model.set_requires_gradient_sync(not wait)
    elif wait and config.strategy != "single":
        return model.no_sync()
    return nullcontext()


def clip(model, config):
    """Clip the gradient to the norm of --clip, and return its norm before that, over all shards. Collective."""
    max_norm = config.clip or math.inf  # without --clip, --log only measures the norm
    if config.strategy == "fsdp1":
        return model.clip_grad_norm_(max_norm)
    if config.ep_degree > 1:
        return clip_grad_norm(model, max_norm)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def train_step(model, optimizer, inputs, targets, config):
    """Train one step on this rank's (inputs, targets), each of shape (accumulate, batch_size, seq_len).

    Returns one term per micro-batch; their sum is the step's loss.
    """
    losses, routing = [], []
    scaler = loss_scaling.scaler_of(optimizer)  # which does nothing, except with --precision fp16
    for micro in range(config.accumulate):
        with gradients_wait(model, config, last=micro == config.accumulate - 1), loss_parallel():
            loss = compute_loss(model, inputs[micro], targets[micro], config) / config.accumulate
            routing += experts.tokens_of(model)
            scaler.scale(loss).backward()
        losses.append(loss.detach())
    scaler.unscale_(optimizer)  # before the norm is computed
    if config.clip or config.log:
        keep_norm(optimizer, clip(model, config), config)
    scaler.step(optimizer)  # unless a gradient of any rank is not finite
    scaler.update()
    experts.after_step(model, routing)
    optimizer.zero_grad()
    return losses


def training_batches(tokens, config, me, steps):
    """Yield this rank's micro-batches of each step: (inputs, targets), each of shape (accumulate, batch_size, tokens).

    The ranks of a tensor group see the same tokens, and those of a context group parts of the same sequences.
    """
    mesh = config.arranged(me.world_size)
    count = config.accumulate * mesh.data * config.batch_size
    for step in steps:
        starts = text.starts(tokens, config.seq_len, count, config.seed, step)
        mine = starts.view(config.accumulate, mesh.data, config.batch_size)[:, mesh.data_part(me.rank)]
        yield my_tokens(text.sequences(tokens, mine, config.seq_len), config, me)


@torch.no_grad()
def evaluate(model, tokens, config, me, compute_loss=compute_loss):
    """Return the mean loss on the validation text; for up to VALIDATION_SEQUENCES ranks the sequences are the same."""
    mesh = config.arranged(me.world_size)
    total = max(VALIDATION_SEQUENCES, mesh.data)
    starts = torch.linspace(0, len(tokens) - config.seq_len - 1, total).long()
    passes = math.ceil(math.ceil(total / mesh.data) / config.batch_size)
    loss = torch.zeros((), dtype=torch.float64, device=me.device)
    for part in starts[mesh.data_part(me.rank) :: mesh.data].tensor_split(passes):
        # Under FSDP each forward pass is a collective: a rank without sequences makes one whose loss does not count.
        sequences = text.sequences(tokens, part if len(part) else starts[:1], config.seq_len)
        inputs, targets = my_tokens(sequences, config, me)
        with loss_parallel():
            loss += len(part) * compute_loss(model, inputs, targets, config)
    dist.all_reduce(loss)
    # Tensor-parallel ranks have the same sequences; those of a context group, the means of as many tokens each.
    return loss.item() / total * mesh.data / me.world_size


def prepare(config, me):
    """Return (model, optimizer, step), ready to train: step(inputs, targets) returns losses as ``train_step`` does."""
    model, _ = build(config, me)
    optimizer = make_optimizer(model, config)
    loss_scaling.attach(optimizer, config, me.device)
    return model, optimizer, lambda inputs, targets: train_step(model, optimizer, inputs, targets, config)


def train(config, me, prepare=prepare, compute_loss=compute_loss):
    """Train in the current process group, and return the measurements for a record.

    Args:
        config: the options.
        me: this rank.
        prepare, compute_loss: functions of other labs that replace those of this file.
    """
    data = text.load(me.device, config.seq_len)
    model, optimizer, train_one = prepare(config, me)
    global_batch = config.batch_size * config.accumulate * config.arranged(me.world_size).data
    saver = saving.Saver(config, model, optimizer, checkpoints.identity(config, global_batch, text.NAME))
    work = flops.per_token(config.shape, config.seq_len, config.lora)
    loop = Loop(config, me, saver, config.max_steps, global_batch, flops_per_token=work)
    while loop.step < loop.last_step:
        local_losses = []
        for inputs, targets in loop.watch(training_batches(data.train, config, me, loop.next_steps())):
            local_losses += train_one(inputs, targets)

        finite = loop.log(local_losses)
        me.say(f"step {loop.step}: loss {loop.losses[-1]:.4f}")
        if not finite:  # records.report raises Diverged, and nothing more is saved
            break
        loop.save_if_due()
    measured = loop.finish()
    validation_loss = evaluate(model, data.validation, config, me, compute_loss)
    loop.log_scalars(validation_loss=validation_loss)
    first, last = measured["first_step"], loop.step
    if scaling := measured.get("loss_scaling"):
        me.say(loss_scaling.sentence(scaling, last - first))
    me.say(f"loss {loop.losses[0]:.4f} in step {first + 1}, validation loss {validation_loss:.4f} after step {last}")
    return {
        "data": {"name": text.NAME, "train": len(data.train), "test": len(data.validation)},
        "batch_size": config.batch_size,
        "units": count_units(model),
        "validation_loss": validation_loss,
        **measured,
        "flops_per_token": work,
    }


def main(config, me, prepare=prepare, compute_loss=compute_loss):
    """Run the lab on one rank. Arguments: see ``train``."""
    begin = time.perf_counter()
    config.arranged(me.world_size)  # raises before anything is allocated if the model cannot be sharded like this
    preflight.check(config, me)
    # With offload, --clip reduces the norms of shards in CPU memory, which NCCL does not support.
    backend = "cpu:gloo,cuda:nccl" if config.cpu_offload and me.backend == "nccl" else me.backend
    dist.init_process_group(backend, device_id=me.device if me.device.type == "cuda" else None)
    result = train(config, me, prepare, compute_loss)
    result |= meters.utilization(result["tokens_per_second"], result["flops_per_token"], config.precision, me)
    records.report(config.script, config, me, result, elapsed=time.perf_counter() - begin)


@dataclass(frozen=True)
class Config(TransformerTraining):
    """One run. Its options are declared in labkit/running/lab_options.py, for plan.py too."""

    conflicts = (
        Conflict(
            {"strategy": "fsdp2"},
            {"stages": several},
            "--mesh {c.mesh} has a pipeline, which is gpt_pipeline.py's: name other dimensions",
        ),
    )

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights; that of the loss is at least fp32."""
        if self.weights == "bf16":
            return torch.bfloat16
        return torch.float64 if self.precision == "fp64" else torch.float32


if __name__ == "__main__":
    ranks.run(main, options.parse(Config, __doc__))
