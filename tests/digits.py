"""A small real problem for tests: a network trained in seconds on scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ttnorm

Images = tuple[Tensor, Tensor]

# What the network never saw while it was trained or post-trained.
SHIFTS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "clean": lambda x, g: x,
    "faint": lambda x, g: 0.35 * x,
    "fog": lambda x, g: 0.45 * x + 0.5,
    "noise": lambda x, g: (x + 0.25 * torch.randn(x.shape, generator=g)).clamp(0, 1),
    "blur": lambda x, g: F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1),
}


def load_digits() -> tuple[Images, Images]:
    """Digits of 8 x 8 pixels in [0, 1], in a fixed random order: 1,200 to train, 597 to test."""
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    order = torch.randperm(len(images), generator=Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def network() -> nn.Sequential:
    """Six convolutions with BatchNorm."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in (
        (1, 16, 1),
        (16, 16, 1),
        (16, 32, 2),
        (32, 32, 1),
        (32, 64, 2),
        (64, 64, 1),
    ):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train_network(train: Images, epochs: int = 30, seed: int = 0) -> nn.Sequential:
    """Train on clean digits."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = network()
        loader = DataLoader(TensorDataset(*train), batch_size=100, shuffle=True)
        optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, epochs * len(loader))
        for _ in range(epochs):
            for x, y in loader:
                optimiser.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimiser.step()
                schedule.step()
    return model.eval()


@torch.no_grad()
def error(model: nn.Module, test: Images, shift: str, batch_size: int) -> float:
    """Percent of digits misread when they come `batch_size` at a time."""
    x, y = test
    x = SHIFTS[shift](x, Generator().manual_seed(1))
    with ttnorm.isolated(model, batch_size):
        return 100 * (model(x).argmax(1) != y).double().mean().item()
