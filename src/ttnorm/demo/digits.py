"""The whole pipeline in a minute, on scikit-learn's handwritten digits.

Train a small network, post-train it, ship the alpha file, and score BatchNorm with source
statistics, with the batch's, and TTN, on digits as a worse camera would see them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ttnorm

Images = tuple[Tensor, Tensor]
BATCH_SIZES = (200, 16, 1)

# What the network never saw while it was trained or post-trained.
SHIFTS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "clean": lambda x, g: x,
    "faint": lambda x, g: 0.35 * x,
    "fog": lambda x, g: 0.45 * x + 0.5,
    "noise": lambda x, g: (x + 0.25 * torch.randn(x.shape, generator=g)).clamp(0, 1),
    "blur": lambda x, g: F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1),
}


def run(console: Console) -> dict[tuple[str, int], list[float]]:
    """Show the pipeline; returns the error under every shift by norm and batch size."""
    train, test = load_digits()
    console.print(f"1. train a network with BatchNorm on {len(train[0])} digits")
    model = train_network(train)

    console.print("2. post-train: the prior, then alpha; no weight changes")
    loader = DataLoader(TensorDataset(*train), batch_size=200, shuffle=True)
    ttnorm.post_train_(model, loader, ttnorm.PostTrainConfig(epochs=30, lr=5e-3))
    learned = {name: alpha.clone() for name, alpha in ttnorm.alphas(model).items()}
    means = "  ".join(f"{a.mean():.2f}" for a in learned.values())
    console.print(f"   mean alpha, first to last layer: {means}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.ttn.safetensors"
        ttnorm.save(model, path)
        ttnorm.load_(ttnorm.revert_(model), path)
        console.print(f"3. save and load the alpha file: {path.stat().st_size} bytes")

    console.print(f"4. score on {len(test[0])} digits the network has never seen")
    norms: dict[str, float | dict[str, Tensor]] = {
        "source statistics": 0.0,
        "batch statistics": 1.0,
        "TTN": learned,
    }
    errors = {
        (norm, size): [error(ttnorm.convert_(model, alpha), test, s, size) for s in SHIFTS]
        for norm, alpha in norms.items()
        for size in BATCH_SIZES
    }
    console.print(_table(errors))
    return errors


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


def _table(errors: dict[tuple[str, int], list[float]]) -> Table:
    table = Table("error in %", "batch size", *SHIFTS, "mean")
    for column in table.columns[1:]:
        column.justify = "right"
    for (norm, size), row in errors.items():
        cells = [f"{value:.1f}" for value in (*row, sum(row) / len(row))]
        table.add_row(norm, str(size), *cells, end_section=size == BATCH_SIZES[-1])
    return table
