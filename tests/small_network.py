"""A network of a few layers whose BatchNorm statistics matter, and images for it."""

import torch
from torch import nn

from ttnorm import artefact, surgery, tree
from ttnorm.bench.job import Domains, Network
from ttnorm.classes import classes_of
from ttnorm.shallow import content_of


def network(classes: int = 10) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, classes),
        )
        for _ in range(20):
            model(torch.rand(64, 3, 32, 32))
    return model.eval()


def domains(count: int = 50, names: tuple[str, ...] = ("dark", "light", "red")) -> Domains:
    g = torch.Generator().manual_seed(1)
    clean = torch.randint(0, 256, (count, 3, 32, 32), generator=g).float()
    labels = torch.randint(0, 10, (count,), generator=g)
    shades = torch.rand(len(names), 3, 1, 1, generator=g)
    images = {
        n: (clean * s + 60 * (1 - s)).to(torch.uint8) for n, s in zip(names, shades, strict=True)
    }
    return Domains("cifar10-c", 5, images, labels)


def with_alphas(folder) -> Network:
    """The network with an alpha file of every kind, of random alphas."""
    g = torch.Generator().manual_seed(2)
    files = {}
    for kind in ("ttn", "dynamic", "strong"):
        model = surgery.convert_(network(), 0.5)
        for alpha in surgery.alphas(model).values():
            alpha.copy_(torch.rand(alpha.shape, generator=g))
        clean = torch.rand(64, 3, 32, 32, generator=g)
        loader = [(clean, torch.arange(64) % 10)]
        model.__dict__[tree.CONTENT] = content_of(model, loader)
        model.__dict__[tree.CLASSES] = classes_of(model, loader)
        files[kind] = folder / f"{kind}.ttn.safetensors"
        artefact.save(model, files[kind])
    return Network("small", network(), files)
