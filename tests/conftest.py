import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# Without a GPU, Triton's interpreter runs the kernels; it has to know before it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def small_network():
    """Two convolutions with BatchNorm that has seen data and has weights of its own."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    for _ in range(40):
        model(torch.rand(64, 3, 12, 12))
    return model.eval()


@pytest.fixture
def images():
    return torch.rand(10, 3, 12, 12)


@pytest.fixture
def folding_network():
    """Its layer sees twice as many samples as the network."""

    class Folding(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return self.norm(x.repeat(2, 1, 1, 1)).mean((2, 3))[: len(x)]

    return Folding()


@pytest.fixture
def changing_network(small_network):
    """It normalises the images that it is given where they are."""

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = small_network

        def forward(self, x):
            return self.network(x.sub_(0.5).div_(0.25))

    return Changing()


@pytest.fixture
def loader():
    """Labelled images for the small network, in another order every time."""
    x, y = torch.rand(40, 3, 12, 12), torch.randint(4, (40,))
    return DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
