"""`test_time_norm` against an independent NumPy implementation, over whatever users may pass."""

import numpy as np
import numpy_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttnorm import functional

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@st.composite
def problems(draw):
    """A batch and everything that goes with it, from well-behaved to extreme."""
    spatial = draw(st.lists(st.integers(1, 5), max_size=3))
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 5)), *spatial)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(DTYPES))
    offset = draw(st.sampled_from([0.0, 1.0, -30.0]))
    spread = draw(st.sampled_from([1.0, 1e-2, 10.0, 0.0]))
    x = torch.tensor(offset + spread * rng.standard_normal(shape)).to(dtype)
    layout = draw(st.sampled_from(["contiguous", "channels_last", "strided"]))
    if layout == "channels_last" and len(shape) in CHANNELS_LAST:
        x = x.contiguous(memory_format=CHANNELS_LAST[len(shape)])
    elif layout == "strided":
        x = torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
    channels = shape[1]
    edge = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 1e-8, 1 - 1e-7]))
    alpha = draw(st.lists(edge, min_size=channels, max_size=channels))
    affine = draw(st.sampled_from(["both", "weight", "neither"]))

    def parameter(values):  # what a network's float32 can hold
        return np.float32(values).astype(np.float64)

    return {
        "x": x,
        "source_mean": parameter(offset + rng.standard_normal(channels)),
        "source_var": parameter(rng.uniform(0.05, 4, channels)),
        "weight": parameter(rng.standard_normal(channels)) if affine != "neither" else None,
        "bias": parameter(rng.standard_normal(channels)) if affine == "both" else None,
        "alpha": parameter(alpha),
        "group_size": draw(st.one_of(st.none(), st.integers(1, 10))),
        "cross_term": draw(st.booleans()),
        "requires_grad": draw(st.booleans()),
    }


def run(p, fn):
    dtype = torch.float64 if p["x"].dtype == torch.float64 else torch.float32
    params = [
        None if p[name] is None else torch.tensor(p[name], dtype=dtype)
        for name in ("source_mean", "source_var", "weight", "bias", "alpha")
    ]
    x = p["x"].detach().requires_grad_(p["requires_grad"])
    return fn(x, *params, group_size=p["group_size"], cross_term=p["cross_term"])


def composed(x, mean, var, weight, bias, alpha, group_size, cross_term):
    """The three public steps one after the other: what compilers and exporters trace."""
    moments = functional.batch_moments(x, group_size)
    mixed = functional.mix_moments(alpha, mean, var, *moments, cross_term=cross_term)
    return functional.normalise(x, *mixed, weight, bias, group_size=group_size)


@pytest.mark.parametrize("fn", [functional.test_time_norm, composed])
@settings(max_examples=400, deadline=None)
@given(p=problems())
def test_agrees_with_numpy_to_rounding(fn, p):
    y = run(p, fn)
    reference = [p[k] for k in ("source_mean", "source_var", "weight", "bias", "alpha")]
    options = {"group_size": p["group_size"], "cross_term": p["cross_term"]}
    expected = numpy_reference.test_time_norm(p["x"].double().numpy(), *reference, **options)

    assert y.dtype == p["x"].dtype
    # Rounding x by eps moves y by eps * |x| / std; the output is rounded to x's dtype once more.
    eps = 1e-15 if y.dtype == torch.float64 else 1.2e-7
    size = np.abs(p["x"].double().numpy()).max() + np.abs(p["source_mean"]).max()
    least_var = (1 - p["alpha"]) * p["source_var"] + 1e-5
    gamma = 1.0 if p["weight"] is None else np.abs(p["weight"])
    conditioning = (size * gamma / np.sqrt(least_var)).max()
    tolerance = 16 * eps * (1 + conditioning) + torch.finfo(y.dtype).eps * np.abs(expected)
    assert (np.abs(y.detach().double().numpy() - expected) <= tolerance).all()


@settings(max_examples=100, deadline=None)
@given(p=problems())
def test_memory_layout_is_kept(p):
    x = p["x"]
    y = run(p, functional.test_time_norm)
    for layout in (torch.contiguous_format, CHANNELS_LAST.get(x.dim())):
        if layout is not None and x.is_contiguous(memory_format=layout):
            assert y.is_contiguous(memory_format=layout)


@settings(max_examples=100, deadline=None)
@given(p=problems())
def test_groups_equal_separate_calls(p):
    """To rounding: the same sums are added up in another order."""
    size = p["group_size"] or 1
    together = run({**p, "group_size": size}, functional.test_time_norm)
    apart = torch.cat(
        [
            run({**p, "x": part, "group_size": None}, functional.test_time_norm)
            for part in p["x"].split(size)
        ]
    )
    eps = torch.finfo(together.dtype).eps
    least_std = np.sqrt(((1 - p["alpha"]) * p["source_var"] + 1e-5).min())
    inner = 1e-15 if together.dtype == torch.float64 else 1.2e-7
    atol = 64 * inner * (1 + p["x"].double().abs().max().item() / least_std)
    torch.testing.assert_close(together, apart, rtol=2 * eps, atol=max(atol, 2 * eps))
