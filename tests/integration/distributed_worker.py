"""Run by torchrun from test_distributed.py: every rank takes its part of each batch."""

import itertools
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import ttnorm
from ttnorm.augment import shift_images
from ttnorm.tree import CLASSES, CONTENT


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).double()
    for _ in range(20):
        model(torch.rand(32, 3, 10, 10, dtype=torch.float64))
    return model.eval()


def part(batch):
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def gathered(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def summed(t):
    t = t.clone()
    dist.all_reduce(t)
    return t


def darker(images, generator):
    """One draw for the batch: the ranks share the seed, so they share the shift."""
    return images * (0.3 + 0.7 * torch.rand(1, generator=generator).double())


def sync_layer(source_count=0.0):
    torch.manual_seed(1)
    x = part(torch.randn(8, 4, 5, 5, dtype=torch.float64)).requires_grad_()
    target = part(torch.randn(8, 4, 5, 5, dtype=torch.float64))
    layer = nn.SyncBatchNorm(4).double()
    layer.running_mean.normal_()
    ttnorm.convert_(layer, alpha=0.4, source_count=source_count)
    layer.alpha = layer.alpha.clone().requires_grad_()
    y = layer(x)
    (y * target).sum().backward()
    return {
        "output": gathered(y.detach()),
        "input gradient": gathered(x.grad),
        "weight gradient": summed(layer.weight.grad),
        "alpha gradient": summed(layer.alpha.grad),
    }


def post_train():
    torch.manual_seed(2)
    x, y = torch.rand(6, 16, 3, 10, 10, dtype=torch.float64), torch.randint(4, (6, 16))
    loader = [(part(a), part(b)) for a, b in zip(x, y, strict=True)]
    config = ttnorm.PostTrainConfig(epochs=3, lr=0.02)
    options = {"augment": darker, "prior_augment": darker}

    model = network()
    result = ttnorm.post_train_(model, loader, config, **options)
    defaults = ttnorm.post_train_(network(), loader, config)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    checkpoint = Path(folder[0]) / "run.safetensors"
    steps = itertools.count(1)

    def shift_or_stop(*args, **kwargs):
        if next(steps) == 9:  # in the second epoch
            raise KeyboardInterrupt
        return shift_images(*args, **kwargs)

    # not an augmentation that stops: to a checkpoint that would be another run
    with (
        mock.patch("ttnorm.posttrain.shift_images", shift_or_stop),
        pytest.raises(KeyboardInterrupt),
    ):
        ttnorm.post_train_(network(), loader, config, checkpoint=checkpoint, **options)
    dist.barrier()
    resumed = ttnorm.post_train_(network(), loader, config, checkpoint=checkpoint, **options)
    known = {"content": model.__dict__[CONTENT].mean, "classes": model.__dict__[CLASSES].codes}
    return {
        **{f"{name} of ranks": gathered(value[None]) for name, value in known.items()},
        **{f"prior {name}": value for name, value in result.prior.items()},
        **{f"alpha {name}": value for name, value in result.alpha.items()},
        **{f"default alpha {name}": value for name, value in defaults.alpha.items()},
        **{f"resumed {name}": value for name, value in resumed.alpha.items()},
    }


def uneven():
    """Whether loaders with other numbers of batches are refused, on every rank."""
    batch = (torch.rand(4, 3, 10, 10, dtype=torch.float64), torch.arange(4))
    loader = [batch] * (3 - dist.get_rank())
    refused = torch.zeros(1)
    try:
        ttnorm.post_train_(network(), loader, ttnorm.PostTrainConfig(epochs=1))
    except ValueError as error:
        refused += "have 3, 2 batches" in str(error)
    return {"uneven": gathered(refused)}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    counted = {f"counted {name}": value for name, value in sync_layer(source_count=3.0).items()}
    tensors = sync_layer() | counted | post_train() | uneven()
    if dist.get_rank() == 0:
        save_file(tensors, sys.argv[1])
    dist.destroy_process_group()
    # at once: a thread of gloo that lets go of its last tensor while Python ends would abort
    os._exit(0)
