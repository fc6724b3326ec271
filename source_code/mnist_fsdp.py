"""The MNIST lab: one network, trained by one process, by DDP, by FSDP1 or by FSDP2.

Every launch below runs this file unchanged:

  python mnist_fsdp.py                                   starts one rank per GPU, or two on the CPU
  torchrun --nproc-per-node 4 mnist_fsdp.py
  srun -p gpu -N 1 --gres=gpu:4 python mnist_fsdp.py     one task, which starts its own ranks
  srun -p gpu -N 2 --ntasks-per-node=4 --gpus-per-task=1 python mnist_fsdp.py
  srun -N 2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 4 \\
       --rdzv-backend c10d --rdzv-endpoint $HOST:29500 mnist_fsdp.py

Things to try:

  python mnist_fsdp.py --strategy ddp --ranks 4
  python mnist_fsdp.py --strategy fsdp2 --wrap size --ranks 4 --record run.json
  python mnist_fsdp.py --checkpoint ckpt --epochs 2 && python mnist_fsdp.py --checkpoint ckpt --resume --epochs 4
"""

import dataclasses
import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from labkit import UserError, checkpoints, datasets, ranks, records
from labkit.meters import Meter
from labkit.models import Net
from labkit.options import option, parse
from labkit.progress import Progress
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
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Config:
    """One run. The command line is made from these fields."""

    strategy: Literal["single", "ddp", "fsdp1", "fsdp2"] = option("fsdp2", "one process, or how the ranks share")
    wrap: Literal["unit", "size"] = option("unit", "FSDP: the whole model as one unit, or big layers apart")
    min_num_params: int = option(20000, "--wrap size: a layer with this many parameters is a unit of its own")
    sharding: Literal["full", "grad-op"] = option("full", "FSDP: free gathered parameters after forward, or keep them")
    cpu_offload: bool = option(False, "FSDP: keep shards, gradients and optimizer state in the CPU's memory")
    precision: Literal["fp32", "bf16", "fp64"] = option("fp32", "number format of the computation")
    epochs: int = option(4, "passes over the training set, those of the run being resumed included")
    max_steps: int | None = option(None, "stop after this many steps in all")
    batch_size: int | None = option(None, "images a step on each rank (default: 64)")
    global_batch_size: int | None = option(None, "images a step on all ranks together, instead of --batch-size")
    lr: float = option(1.0, "Adadelta's learning rate in the first epoch")
    gamma: float = option(0.7, "factor on the learning rate after each epoch")
    dropout: bool = option(True, "dropout layers; without them, any number of ranks computes the same losses")
    seed: int = option(1, "seed of the weights, the order of the images and the dropout")
    data: Literal["auto", "mnist", "mnist-5k"] = option("auto", "data set; auto: MNIST if it can be had")
    loader: Literal["memory", "torchvision"] = option("memory", "data set on the device, or image by image")
    ranks: int | None = option(
        None, "ranks to start, where neither torchrun nor srun does (default: one per GPU, or 2)"
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute")
    backend: Literal["auto", "nccl", "gloo"] = option("auto", "how to communicate; gloo alone means on the CPU")
    checkpoint: str | None = option(None, "folder for a checkpoint after each epoch and at the end")
    resume: bool = option(False, "go on from the newest checkpoint in --checkpoint, if there is one")
    record: str | None = option(None, "write what was measured to this JSON file")
    profile: str | None = option(None, "folder for a trace of a few steps, for Perfetto or TensorBoard")

    def __post_init__(self):
        fsdp = self.strategy.startswith("fsdp")
        if self.cpu_offload and not fsdp:
            raise UserError(f"--cpu-offload is FSDP's; with --strategy {self.strategy} leave it out")
        if self.wrap == "size" and not fsdp:
            raise UserError(f"--wrap size is FSDP's; with --strategy {self.strategy} leave it out")
        if self.sharding == "grad-op" and not fsdp:
            raise UserError(f"--sharding grad-op is FSDP's; with --strategy {self.strategy} leave it out")
        if self.strategy == "single" and self.ranks not in (None, 1):
            raise UserError("--strategy single is one rank: leave --ranks out, or choose another strategy")
        if self.batch_size and self.global_batch_size:
            raise UserError("--batch-size and --global-batch-size say the same thing twice: give one of them")
        if self.resume and not self.checkpoint:
            raise UserError("--resume needs --checkpoint DIR, the folder to go on from")
        for name in ("ranks", "epochs", "max_steps", "batch_size", "global_batch_size", "min_num_params"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, but is {value}")

    @property
    def dtype(self):
        """Of the weights, the input and the loss; bf16 is a format of the computation between them."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    def batch_size_of(self, world_size: int) -> int:
        """Images a step on each rank."""
        if self.global_batch_size is None:
            return self.batch_size or 64
        if self.global_batch_size % world_size:
            raise UserError(
                f"--global-batch-size {self.global_batch_size} cannot be shared evenly by {world_size} ranks"
            )
        return self.global_batch_size // world_size


def parallelize(model, config, me):
    """Apply the strategy to the model. It is the only place that knows there is more than one rank."""
    if config.strategy == "single":
        if me.world_size > 1:
            raise UserError(f"--strategy single is one rank, but {me.world_size} were started: choose another strategy")
        return model.to(me.device)
    if config.strategy == "ddp":
        return DistributedDataParallel(model.to(me.device))
    mesh = init_device_mesh(me.device.type, (me.world_size,))
    return (fsdp1 if config.strategy == "fsdp1" else fsdp2)(model, config, me, mesh)


def fsdp1(model, config, me, mesh):
    """The wrapper class: each unit's parameters become one flat tensor, cut into equal parts."""
    by_size = partial(size_based_auto_wrap_policy, min_num_params=config.min_num_params)
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    keep = config.sharding == "grad-op"
    if config.cpu_offload and me.device.type == "cpu":
        raise UserError(
            "FSDP1's --cpu-offload needs a GPU (it page-locks memory); --strategy fsdp2 shows it on the CPU"
        )
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        device_id=me.device,
        auto_wrap_policy=by_size if config.wrap == "size" else None,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD,
        cpu_offload=CPUOffload(offload_params=config.cpu_offload),
        mixed_precision=bf16 if config.precision == "bf16" else None,
    )


def fsdp2(model, config, me, mesh):
    """The function: each parameter becomes a DTensor, cut along its first dimension."""
    pinned = me.device.type == "cuda"  # page-locked memory makes copies to a GPU fast; without one it cannot be had
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "mesh": mesh,
        # None: free after forward, except the root, which backward needs again at once
        "reshard_after_forward": False if config.sharding == "grad-op" else None,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if config.cpu_offload else OffloadPolicy(),
        "mp_policy": bf16 if config.precision == "bf16" else MixedPrecisionPolicy(),
    }
    if config.wrap == "size":
        for layer in model.children():
            if sum(p.numel() for p in layer.parameters()) >= config.min_num_params:
                fully_shard(layer, **options)
    return fully_shard(model, **options)  # the root takes what is left


def units(model):
    """The modules whose parameters FSDP gathers together (none under "single" and "ddp")."""
    return [m for m in model.modules() if isinstance(m, (FullyShardedDataParallel, FSDPModule))]


def training_batches(digits, config, me, epoch, batch_size):
    """This rank's batches of an epoch: (images, labels) on its device.

    All ranks draw the same order of the images; of each global batch, each takes a slice of its own.
    """
    order = torch.randperm(len(digits.train_images), generator=torch.Generator().manual_seed(config.seed + epoch))
    steps = len(order) // (batch_size * me.world_size)  # the few images left over wait for the next epoch's order
    mine = order[: steps * batch_size * me.world_size].view(steps, me.world_size, batch_size)[:, me.rank]
    if config.loader == "memory":  # the whole data set is one tensor on the device: a batch is an index into it
        for rows in mine.to(me.device):
            yield datasets.to_float(digits.train_images[rows], config.dtype), digits.train_labels[rows]
    else:  # the usual way: decode and transform image by image, in two worker processes
        dataset = datasets.PerSample(digits.train_images.cpu(), digits.train_labels.cpu())
        for images, labels in DataLoader(dataset, batch_sampler=mine.tolist(), num_workers=2):
            yield images.to(me.device, config.dtype), labels.to(me.device)


def compute_loss(model, images, labels, config, reduction="mean"):
    """(loss of a batch on this rank, log-probabilities)."""
    # FSDP casts by its own policy; for the others, autocast does.
    by_autocast = config.precision == "bf16" and not config.strategy.startswith("fsdp")
    with torch.autocast(images.device.type, torch.bfloat16) if by_autocast else nullcontext():
        output = model(images).to(config.dtype)
    return F.nll_loss(output, labels, reduction=reduction), output


@torch.no_grad()
def evaluate(model, digits, config, me):
    """(correct, total, mean loss) on the test set, each image seen exactly once.

    A sampler that pads would see 10,002 images on 3 ranks. Here the parts differ in size, by one image or so,
    but every rank takes part in the same number of forward passes: under FSDP each of them is a collective.
    """
    model.eval()
    total = len(digits.test_images)
    mine = torch.arange(me.rank, total, me.world_size, device=me.device)
    sums = torch.zeros(2, dtype=torch.float64, device=me.device)  # correct, loss
    for rows in mine.tensor_split(math.ceil(total / (me.world_size * 1000))):
        images, labels = datasets.to_float(digits.test_images[rows], config.dtype), digits.test_labels[rows]
        loss, output = compute_loss(model, images, labels, config, reduction="sum")
        sums += torch.stack([(output.argmax(1) == labels).sum(), loss])
    dist.all_reduce(sums)
    return int(sums[0]), total, sums[1].item() / total


def train(config, me):
    """Train as ``config`` says in the process group there is; returns this run's part of a record."""
    name = [datasets.prepare(config.data) if me.rank == 0 else None]  # one rank fetches, all learn what there is
    dist.broadcast_object_list(name, device=me.device)
    digits = datasets.load(name[0]).to(me.device)
    batch_size = config.batch_size_of(me.world_size)
    steps_per_epoch = len(digits.train_images) // (batch_size * me.world_size)
    if steps_per_epoch == 0:
        raise UserError(
            f"a global batch of {batch_size * me.world_size} is more than {digits.name}'s {len(digits.train_images)} images"
        )

    torch.manual_seed(config.seed)  # the same weights on every rank
    model = parallelize(Net(config.dropout).to(config.dtype), config, me)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=config.lr)
    step, last_step = 0, min(config.epochs * steps_per_epoch, config.max_steps or math.inf)
    if config.resume and (newest := checkpoints.latest(config.checkpoint)):
        step = checkpoints.load(newest, model, optimizer)
    me.say(
        f"{me.world_size} ranks on {me.device.type} ({me.backend}), {records.hardware(me.device)}; data {digits.name}"
    )
    me.say(f"{model}\n{'resumed at' if step else 'starting at'} step {step} of {last_step}")

    meter = Meter(model, optimizer, me.device, progress=Progress(me, last_step, step), profile=config.profile)
    first_step, losses = step, []
    if step >= last_step:
        raise UserError(f"nothing left to train: the checkpoint is at step {step} of {last_step}; raise --epochs")
    while step < last_step:
        epoch, done = divmod(step, steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * config.gamma**epoch
        model.train()
        batches = training_batches(digits, config, me, epoch, batch_size)
        local_losses = []
        for images, labels in meter.watch(islice(batches, done, done + last_step - step)):
            # Dropout as a function of step and rank: a resumed run draws what the first would have drawn.
            torch.manual_seed(config.seed + 1000 * step + me.rank)
            loss, _ = compute_loss(model, images, labels, config)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            local_losses.append(loss.detach())
            step += 1
        mean = torch.stack(local_losses)
        dist.all_reduce(mean)  # once an epoch: a collective a step, only to print, would slow the training
        losses += (mean / me.world_size).tolist()

        correct, total, test_loss = evaluate(model, digits, config, me)
        me.say(
            f"epoch {epoch + 1}: loss {statistics.mean(losses[-len(local_losses) :]):.4f}, "
            f"test loss {test_loss:.4f}, accuracy {correct}/{total} ({correct / total:.2%})"
        )
        if config.checkpoint:
            checkpoints.save(config.checkpoint, step, model, optimizer)
    meter.finish()
    return {
        "data": {"name": digits.name, "train": len(digits.train_images), "test": len(digits.test_images)},
        "batch_size": batch_size,
        "units": len(units(model)),
        "first_step": first_step,
        "losses": losses,
        "accuracy": {"correct": correct, "total": total},
        "test_loss": test_loss,
        **meter.summary(batch_size * me.world_size),
    }


def main(config, me):
    """What every rank runs. me: which rank this is (labkit/ranks.py)."""
    begin = time.perf_counter()
    if config.record:
        records.check_writable(config.record)
    dist.init_process_group(me.backend, device_id=me.device if me.device.type == "cuda" else None)
    if config.checkpoint:
        checkpoints.prepare(config.checkpoint)
    report(config, me, train(config, me), elapsed=time.perf_counter() - begin)


def report(config, me, result, elapsed):
    """Print what was measured and write the record."""
    nodes = [None] * me.world_size
    dist.all_gather_object(nodes, me.node)
    result["time"]["elapsed"] = elapsed
    me.say(f"elapsed {elapsed:.1f} s")
    if result["memory"]:
        me.say(f"peak memory of rank 0: {sum(result['memory']['peak'].values()) / 2**20:.2f} MiB of tensors")
    if config.record and me.rank == 0:
        about = records.new(__file__, dataclasses.asdict(config), me, sorted(set(nodes)))
        records.write(config.record, about | result)


if __name__ == "__main__":
    ranks.run(main, parse(Config, __doc__))
