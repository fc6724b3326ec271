# SPDX-License-Identifier: BSD-3-Clause
"""Train one network on MNIST with one process, DDP, FSDP1 or FSDP2.

  python mnist_fsdp.py --strategy ddp --ranks 4
  python mnist_fsdp.py --strategy fsdp2 --wrap size --ranks 4 --record run.json
  python mnist_fsdp.py --checkpoint ckpt --epochs 2 && python mnist_fsdp.py --checkpoint ckpt --resume --epochs 4
  torchrun --nproc-per-node 4 mnist_fsdp.py
  srun -p gpu -N 1 --gres=gpu:4 --cpus-per-task=16 python mnist_fsdp.py     # one task, which starts the ranks

README.md lists all ways to start it.
"""

import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from labkit import UserError
from labkit.measuring import records
from labkit.running import options, preflight, ranks
from labkit.running.lab_options import MNISTTraining
from labkit.running.options import SHARDED
from labkit.training import checkpoints, datasets, saving
from labkit.training.loop import Loop
from labkit.training.models import Net
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

# The network is defined in labkit/training/models.py; here it is sharded and trained.
# me is always this rank: its rank, local_rank, world_size, device; me.say prints on rank 0 only.


def unsharded(config):
    """Return the model as one process would train it, with parameters in fp32."""
    return Net(config.dropout)


def parallelize(model, config, me):
    """Apply the strategy to the model. The model and ``train_step`` do not depend on the number of ranks."""
    if config.strategy == "single":
        return model.to(me.device)
    if config.strategy == "ddp":
        return DistributedDataParallel(model.to(me.device))
    return fsdp1(model, config, me) if config.strategy == "fsdp1" else fsdp2(model, config, me)


def fsdp1(model, config, me):
    """Wrap a model with FSDP1, which makes one flat parameter of each unit and shards it evenly."""
    by_size = partial(size_based_auto_wrap_policy, min_num_params=config.min_num_params)
    bf16 = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    keep = config.reshard_after_forward == "false"
    return fsdp.FullyShardedDataParallel(
        model,
        device_mesh=init_device_mesh(me.device.type, (me.world_size,)),
        device_id=me.device,
        auto_wrap_policy=by_size if config.wrap == "size" else None,
        sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP if keep else fsdp.ShardingStrategy.FULL_SHARD,
        cpu_offload=fsdp.CPUOffload(offload_params=config.cpu_offload),
        mixed_precision=bf16 if config.precision == "bf16" else None,
    )


def fsdp2(model, config, me):
    """Apply FSDP2, which makes each parameter a DTensor on the mesh's device, sharded along its first dimension."""
    pinned = me.device.type == "cuda"  # pinned memory makes copies to a GPU fast; it is not available without one
    bf16 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = {
        "mesh": init_device_mesh(me.device.type, (me.world_size,)),
        # None: free after forward, except the root, which backward needs immediately
        "reshard_after_forward": False if config.reshard_after_forward == "false" else None,
        "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=pinned) if config.cpu_offload else fsdp.OffloadPolicy(),
        "mp_policy": bf16 if config.precision == "bf16" else fsdp.MixedPrecisionPolicy(),
    }
    if config.wrap == "size":
        for layer in model.children():
            if sum(p.numel() for p in layer.parameters()) >= config.min_num_params:
                fsdp.fully_shard(layer, **settings)
    return fsdp.fully_shard(model, **settings)  # the root has the other parameters


def units(model):
    """Return the FSDP units of a model (none with "single" and "ddp")."""
    return [m for m in model.modules() if isinstance(m, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule))]


def make_optimizer(model, config):
    return torch.optim.Adadelta(model.parameters(), lr=config.lr)


def compute_loss(model, images, labels, config, reduction="mean"):
    """Return (loss of this rank's batch, log-probabilities of shape (batch, 10))."""
    # FSDP casts by its own policy; for the others, autocast does.
    by_autocast = config.precision == "bf16" and config.strategy not in SHARDED
    with torch.autocast(images.device.type, torch.bfloat16) if by_autocast else nullcontext():
        output = model(images).to(config.dtype)
    return F.nll_loss(output, labels, reduction=reduction), output


def train_step(model, optimizer, images, labels, config):
    """Train one step on this rank's batch and return its loss. In backward, hooks average the gradients over the ranks."""
    loss, _ = compute_loss(model, images, labels, config)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def training_batches(digits, config, me, epoch, batch_size, done=0):
    """Yield this rank's batches of an epoch, without the first ``done``: (images, labels) on its device.

    All ranks draw the same order of the images; each takes its own slice of every global batch.
    """
    generator = torch.Generator().manual_seed(config.seed + 1_000_003 * epoch)
    order = torch.randperm(len(digits.train_images), generator=generator)
    steps = len(order) // (batch_size * me.world_size)  # an incomplete last batch is left out
    mine = order[: steps * batch_size * me.world_size].view(steps, me.world_size, batch_size)[done:, me.rank]
    if config.loader == "memory":  # the whole data set is one tensor on the device: a batch is an index into it
        for rows in mine.to(me.device):
            yield datasets.to_float(digits.train_images[rows], config.dtype), digits.train_labels[rows]
    else:  # a DataLoader: decode and transform each image, in two worker processes
        dataset = datasets.PerSample(digits.train_images.cpu(), digits.train_labels.cpu())
        for images, labels in DataLoader(dataset, batch_sampler=mine.tolist(), num_workers=2):
            yield images.to(me.device, config.dtype), labels.to(me.device)


@torch.no_grad()
def evaluate(model, digits, config, me, watched=iter):
    """Return (correct, total, mean loss) on the test set, with each image seen exactly once.

    A sampler that pads would see 10,002 images on 3 ranks. Here the ranks' numbers of images may differ by one, but every
    rank runs the same number of forward passes: under FSDP each of them is a collective.
    watched: wraps the batches, to end the run if it is preempted (``Loop.interruptible``).
    """
    model.eval()
    total = len(digits.test_images)
    mine = torch.arange(me.rank, total, me.world_size, device=me.device)
    sums = torch.zeros(2, dtype=torch.float64, device=me.device)  # correct, loss
    # 100 at a time: their activations fit into the cache, and a pass still takes long compared with its all-gathers.
    for rows in watched(mine.tensor_split(math.ceil(total / (me.world_size * 100)))):
        images, labels = datasets.to_float(digits.test_images[rows], config.dtype), digits.test_labels[rows]
        loss, output = compute_loss(model, images, labels, config, reduction="sum")
        sums += torch.stack([(output.argmax(1) == labels).sum(), loss])
    dist.all_reduce(sums)
    return int(sums[0]), total, sums[1].item() / total


def train(config, me):
    """Train in the current process group, and return the measurements for a record."""
    name = [datasets.prepare(config.data) if me.local_rank == 0 else None]  # one rank per node downloads
    dist.broadcast_object_list(name, device=me.device)  # rank 0's choice
    digits = datasets.load(name[0]).to(me.device)
    batch_size = config.batch_size_of(me.world_size)
    steps_per_epoch = len(digits.train_images) // (batch_size * me.world_size)
    if steps_per_epoch == 0:
        images = f"{digits.name}'s {len(digits.train_images)} images"
        raise UserError(f"a global batch of {batch_size * me.world_size} is more than {images}")

    torch.manual_seed(config.seed)  # the same weights on every rank
    model = parallelize(unsharded(config).to(config.dtype), config, me)
    optimizer = make_optimizer(model, config)  # after sharding, which replaces the parameters
    me.say(model)
    global_batch = batch_size * me.world_size
    saver = saving.Saver(config, model, optimizer, checkpoints.identity(config, global_batch, digits.name))
    last_step = min(config.epochs * steps_per_epoch, config.max_steps or math.inf)

    def learning_rate(step):
        return config.lr * config.gamma ** (step // steps_per_epoch)

    loop = Loop(config, me, saver, last_step, global_batch, learning_rate=learning_rate)
    while loop.step < last_step:
        epoch, done = divmod(loop.step, steps_per_epoch)
        model.train()
        batches = training_batches(digits, config, me, epoch, batch_size, done)
        local_losses = []
        for images, labels in loop.watch(islice(batches, last_step - loop.step)):
            # Dropout depends on step and rank only, so that a run resumed on as many ranks continues exactly.
            torch.manual_seed(config.seed + 1000 * loop.step + me.rank)
            local_losses.append(train_step(model, optimizer, images, labels, config))

        finite = loop.log(local_losses)
        if finite:  # otherwise the previous checkpoint remains the newest
            saver.save(loop.step)
        correct, total, test_loss = evaluate(model, digits, config, me, loop.interruptible)
        loop.log_scalars(test_loss=test_loss, accuracy=correct / total)
        me.say(
            f"epoch {epoch + 1}: loss {statistics.mean(loop.losses[-len(local_losses) :]):.4f}, "
            f"test loss {test_loss:.4f}, accuracy {correct}/{total} ({correct / total:.2%})"
        )
        if not finite:  # records.report raises Diverged
            break
    return {
        "data": {"name": digits.name, "train": len(digits.train_images), "test": len(digits.test_images)},
        "batch_size": batch_size,
        "units": len(units(model)),
        "accuracy": {"correct": correct, "total": total},
        "test_loss": test_loss,
        **loop.finish(),
    }


def main(config, me):
    """Run the lab on one rank. me: this rank (labkit/running/ranks.py)."""
    begin = time.perf_counter()
    preflight.check(config, me)
    dist.init_process_group(me.backend, device_id=me.device if me.device.type == "cuda" else None)
    result = train(config, me)
    records.report(__file__, config, me, result, elapsed=time.perf_counter() - begin)


@dataclass(frozen=True)
class Config(MNISTTraining):
    """One run. Its options are declared in labkit/running/lab_options.py."""

    @property
    def dtype(self):
        """Data type of the weights, the input, and the loss; bf16 applies only to the computation between them."""
        return torch.float64 if self.precision == "fp64" else torch.float32


if __name__ == "__main__":
    ranks.run(main, options.parse(Config, __doc__))
