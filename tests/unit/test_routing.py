"""Frames of one domain lie together, and groups of them are found without being told how many."""

import pytest
import torch

from ttnorm import routing


def clouds(*middles, count=200, size=30, seed=0):
    """Frames around middles, (1, N, D), in random order, and where each is from."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(len(middles), count, size, generator=g)
    for index, middle in enumerate(middles):
        x[index, :, index % size] += middle
    where = torch.arange(len(middles)).repeat_interleave(count)
    order = torch.randperm(len(where), generator=g)
    return x.flatten(0, 1)[order][None], where[order]


@pytest.mark.parametrize("middles", [(0.0,), (0.0, 9.0), (0.0, 8.0, 8.0, 8.0)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_as_many_groups_as_there_are(middles, seed):
    x, where = clouds(*middles, seed=seed)
    groups = routing.find_groups(x, torch.ones(x.shape[:2]), 8)
    assert groups.there.sum() == len(middles)
    found = routing.nearest(x, groups)[0]
    agree = sum(torch.bincount(where[found == k]).max().item() for k in found.unique())
    assert agree > 0.98 * len(where)


def test_streams_are_looked_at_each_on_its_own():
    one, two = clouds(0.0, count=400)[0], clouds(0.0, 9.0)[0]
    together = routing.find_groups(torch.cat((one, two)), torch.ones(2, 400), 8)
    for index, x in enumerate((one, two)):
        alone = routing.find_groups(x, torch.ones(1, 400), 8)
        assert torch.equal(together.there[index], alone.there[0])
        torch.testing.assert_close(together.middles[index], alone.middles[0])


def test_frames_that_do_not_count_are_not_looked_at():
    x, _ = clouds(0.0, count=400)
    x[0, 300:] = 1e3
    counts = torch.ones(1, 400)
    counts[0, 300:] = 0
    groups = routing.find_groups(x, counts, 8)
    assert groups.there.sum() == 1
    assert groups.middles[0, groups.there[0]].abs().max() < 1


def test_a_frame_that_is_far_from_all_is_of_none():
    x, _ = clouds(0.0, 9.0)
    groups = routing.find_groups(x, torch.ones(x.shape[:2]), 8)
    assert routing.nearest(torch.full((1, 1, 30), 20.0), groups).item() == 8


def test_content_is_white_once_it_is_whitened():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5000, 6, generator=g) @ torch.randn(6, 6, generator=g) + 3
    content = routing.measure_content(x)
    white = (x - content.mean) @ content.whitening.T
    eigenvalues = torch.linalg.eigvalsh(torch.cov(white.T))
    assert eigenvalues.max() < 1.15  # the ridge leaves less where there is hardly anything
    assert white.mean(0).abs().max() < 1e-4


def test_a_slot_inherits_from_the_one_that_its_frames_were_in():
    slot = torch.tensor([[0, 0, 0, 1, 1, 2]])
    before = torch.tensor([[1, 1, 1, 1, 1, 3]])  # the last is of no group
    parent, share = routing.heirs(slot, before, torch.ones(1, 6), 4)
    assert parent[0, :2].tolist() == [1, 1]
    assert share[0].tolist() == pytest.approx([0.6, 0.4, 0.0, 0.0])


def test_a_channel_in_which_source_images_do_not_vary_stays_finite_in_a_file():
    x = torch.cat((torch.randn(200, 3), torch.zeros(200, 1)), 1)  # a filter that never fires
    whitening = routing.measure_content(x).whitening
    assert whitening.half().isfinite().all()


@pytest.mark.parametrize("shape", [(1, 512, 28), (2, 256, 300), (40, 1, 28)])
def test_distances_in_a_graph_are_those_of_cdist(shape):
    x, y = 3 * torch.randn(shape), 3 * torch.randn(shape[0], 8, shape[2])
    torch.testing.assert_close(routing._between(x, y), torch.cdist(x, y), rtol=1e-5, atol=0)
