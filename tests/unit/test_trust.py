"""How far a batch is trusted beside its memory: as far as batches come from elsewhere."""

import pytest
import torch

from ttnorm.pooling import shares
from ttnorm.trust import NOISE, Unlike, compare, trust


@pytest.mark.parametrize(("moves", "size"), [(0.0, 5), (0.5, 5), (1.0, 20)])
def test_what_is_measured_is_how_domains_differ(moves, size):
    """Of many batches around a memory of 50 frames, which are around it as well."""
    generator = torch.Generator().manual_seed(0)
    batches, channels = 400, 30
    domain = moves * torch.randn(batches, channels, generator=generator)
    frames = 0.7 * torch.randn(batches, size, channels, generator=generator) + domain[:, None]
    memory = 0.7 * torch.randn(batches, channels, generator=generator) / 50**0.5
    cells = torch.arange(batches).repeat_interleave(size)
    share, new = shares(cells, torch.ones(len(cells)), batches)
    weight, count = torch.full((channels,), 1 / channels), torch.full((batches,), 50.0)
    flat = frames.flatten(0, 1)
    excess, runs, within = compare(flat, 0 * flat, cells, share, new, memory, count, weight)
    assert not runs.any()
    assert within.mean().item() == pytest.approx(0.49, rel=0.05)
    assert excess.mean().item() == pytest.approx(moves**2, abs=0.02, rel=0.05)


def test_a_batch_is_trusted_by_its_size():
    sizes = torch.tensor([1.0, 10.0, 1000.0])
    unlike = Unlike(torch.full((3,), 0.1 + NOISE), torch.zeros(3), torch.ones(3))
    torch.testing.assert_close(trust(unlike, sizes, torch.zeros(3)), sizes / (sizes + 10))


def test_runs_of_classes_are_not_domains():
    """What a class did and was not taken off may come to as much as what was."""
    generator = torch.Generator().manual_seed(0)
    run = torch.randn(400, 1, 30, generator=generator).expand(-1, 5, -1).flatten(0, 1)
    frames = 0.7 * torch.randn(2000, 30, generator=generator)
    cells = torch.arange(400).repeat_interleave(5)
    share, new = shares(cells, torch.ones(2000), 400)
    rest = (cells, share, new, torch.zeros(400, 30), torch.full((400,), 50.0))
    unlike = compare(frames + 0.5 * run, run, *rest, torch.full((30,), 1 / 30))
    unlike = Unlike(*(t.mean() for t in unlike))
    assert unlike.excess > 0.2
    assert trust(unlike, torch.tensor(5.0), torch.tensor(0.0)) == 0
