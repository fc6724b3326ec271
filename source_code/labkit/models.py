"""The networks of the course. They are pure: nothing here knows that there is more than one rank."""

import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """The MNIST network: two convolutions, two linear layers, 1,199,882 parameters.

    ``fc1`` holds 1,179,776 of them (98.3 %), which is what makes this small network a good subject
    for sharding: there is one thing worth splitting, and everybody can see which.

    Input: float images of shape (batch, 1, 28, 28). Output: log-probabilities of shape (batch, 10).
    """

    def __init__(self, dropout: bool = True):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)  # 28×28 → 26×26
        self.conv2 = nn.Conv2d(32, 64, 3)  # 26×26 → 24×24
        self.dropout1 = nn.Dropout(0.25 if dropout else 0.0)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.dropout2 = nn.Dropout(0.5 if dropout else 0.0)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images):
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)  # 24×24 → 12×12
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)
