"""Pooled moments: exact mixtures, however the samples come, and however long a stream is."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttnorm.pooling import average, cell_moments, remember, shares


@given(
    samples=st.integers(1, 12),
    cells=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    offset=st.sampled_from([0.0, 10.0, -1e3]),
)
def test_cells_have_the_moments_of_their_samples(samples, cells, seed, offset):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(samples, 3, 5)) + offset
    where, counts = rng.integers(0, cells, samples), rng.integers(0, 2, samples)
    share, new = shares(torch.tensor(where), torch.tensor(counts).double(), cells)
    mean, var = (torch.tensor(t) for t in (values.mean(2), values.var(2)))
    mean, var = cell_moments(share, torch.tensor(where), mean, var)
    for cell in range(cells):
        chosen = values[(where == cell) & (counts == 1)].transpose(1, 0, 2).reshape(3, -1)
        assert new[cell] == ((where == cell) & (counts == 1)).sum()
        if chosen.size:
            np.testing.assert_allclose(mean[cell], chosen.mean(1), rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(var[cell], chosen.var(1), rtol=1e-6, atol=1e-7)


@given(cells=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_the_average_is_an_even_mixture(cells, seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(cells, 2, 50)) * rng.uniform(0.1, 3, (cells, 2, 1))
    mean, var = average(torch.tensor(values.mean(2)), torch.tensor(values.var(2)))
    together = values.transpose(1, 0, 2).reshape(2, -1)
    np.testing.assert_allclose(mean, together.mean(1), atol=1e-12)
    np.testing.assert_allclose(var, together.var(1), rtol=1e-10)


# An update smaller than half a unit in the last place is lost: float32 may stay behind by as much
# as that over the share of a new sample.
BEHIND = 200 * torch.finfo(torch.float32).eps


def test_ten_million_samples_lose_no_digits():
    """A hundred drifting streams, one sample at a time: float32 stays where float64 is."""
    streams, updates, generator = 100, 100_000, torch.Generator().manual_seed(0)
    states = {
        dtype: [
            torch.full((streams,), 4.0, dtype=dtype),
            torch.zeros(streams, 1, dtype=dtype),
            torch.ones(streams, 1, dtype=dtype),
        ]
        for dtype in (torch.float32, torch.float64)
    }
    worst = 0.0
    for update in range(updates):
        new_mean = 5 * np.sin(update / 3000) + torch.randn(streams, 1, generator=generator).double()
        new_var = 1 + torch.rand(streams, 1, generator=generator).double()
        for dtype, state in states.items():
            new = torch.ones(streams, dtype=dtype)
            state[:] = remember(*state, new, new_mean.to(dtype), new_var.to(dtype), window=200.0)
        if update % 100 == 99:
            single, double = states.values()
            errors = zip(single, double, (200.0, 5.0, 2.0), strict=True)  # and how large these are
            worst = max(worst, *((a - b).abs().max().item() / size for a, b, size in errors))
    assert streams * updates == 10_000_000
    assert worst < BEHIND


def test_one_sample_at_a_time_converges_and_stays():
    count, mean, var = torch.full((1,), 4.0), torch.zeros(1, 1), torch.ones(1, 1)
    one, new_mean, new_var = torch.ones(1), torch.full((1, 1), 3.0), torch.full((1, 1), 0.25)
    for _ in range(100_000):
        count, mean, var = remember(count, mean, var, one, new_mean, new_var, window=200.0)
    for value, expected in ((count, 200.0), (mean, 3.0), (var, 0.25)):
        assert abs(value.item() - expected) < BEHIND * expected
