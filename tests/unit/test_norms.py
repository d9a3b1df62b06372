"""Normalisations by name, and MixNorm against a loop over samples."""

from functools import partial

import numpy as np
import pytest
import small_network
import torch
from torch import nn

import ttnorm
from ttnorm import norms, surgery, tree
from ttnorm.mixnorm import MixNorm, running_average


def alpha_of(name, batch_size=16, alpha_file=None):
    model = norms.apply_norm_(
        small_network.network(), name, batch_size=batch_size, alpha_file=alpha_file
    )
    return torch.cat(list(surgery.alphas(model).values()))


@pytest.mark.parametrize(("name", "alpha"), [("source", 0), ("tbn", 1), ("alpha-bn", 0.1)])
def test_constants(name, alpha):
    assert torch.equal(alpha_of(name), torch.full((24,), float(alpha)))
    assert torch.equal(alpha_of(f"constant-{alpha}"), torch.full((24,), float(alpha)))


def test_source_and_tbn_are_batchnorm_in_its_two_modes():
    x = torch.rand(8, 3, 32, 32)
    plain = small_network.network()
    for name, model in (("source", plain.eval()), ("tbn", small_network.network().train())):
        ours = norms.apply_norm_(small_network.network(), name, batch_size=8)
        assert torch.allclose(ours(x), model(x), atol=1e-5)


@pytest.mark.parametrize(
    ("size", "alpha"), [(200, 0.44), (64, 0.33), (16, 0.2), (4, 0.11), (2, 0.06), (1, 0.06)]
)
def test_adaptive_bn_has_the_alphas_that_the_paper_lists(size, alpha):
    found = alpha_of("adaptive-bn", batch_size=size)
    assert found.unique().numel() == 1
    assert round(found[0].item(), 2) == alpha


def test_adaptive_bn_at_a_size_nobody_listed_takes_the_nearest_one():
    assert alpha_of("adaptive-bn", batch_size=60)[0].item() == pytest.approx(60 / (60 + 128))


def test_baselines_leave_the_cross_term_out_and_ttn_does_not(tmp_path):
    files = small_network.with_alphas(tmp_path).alpha_files
    for name, cross_term in (("alpha-bn", False), ("adaptive-bn", False), ("ttn", True)):
        model = norms.apply_norm_(
            small_network.network(), name, batch_size=4, alpha_file=files["ttn"]
        )
        assert {layer.cross_term for layer in tree.ttn_layers(model).values()} == {cross_term}


def test_scaled_is_a_fraction_of_alpha(tmp_path):
    file = small_network.with_alphas(tmp_path).alpha_files["ttn"]
    whole, scaled = (alpha_of(name, alpha_file=file) for name in ("ttn", "ttn-scaled"))
    assert torch.allclose(scaled, 0.4 * whole)


def test_counted_is_alpha_by_batch_size(tmp_path):
    file = small_network.with_alphas(tmp_path).alpha_files["ttn"]
    model = norms.apply_norm_(small_network.network(), "ttn-counted", batch_size=1, alpha_file=file)
    assert {layer.source_count for layer in tree.ttn_layers(model).values()} == {2.0}


@pytest.mark.parametrize("name", ["ttm", "constant-", "constant-x", "constant-1.5"])
def test_an_unknown_name_lists_the_choices(name):
    with pytest.raises(ValueError, match=r"expected|there are source, tbn"):
        norms.norm_named(name)


def test_a_fitted_norm_without_a_file_says_what_to_do():
    with pytest.raises(ValueError, match="needs an alpha file"):
        norms.apply_norm_(small_network.network(), "ttn", batch_size=4)


class TestMixNorm:
    def layer(self):
        layer = nn.BatchNorm2d(3)
        g = torch.Generator().manual_seed(0)
        layer.running_mean.copy_(torch.randn(3, generator=g))
        layer.running_var.copy_(torch.rand(3, generator=g) + 0.5)
        return nn.Sequential(layer)

    def loop(self, x, layer, scale, rate):
        """One sample at a time, in NumPy."""
        mean, var = (t.numpy().astype(np.float64) for t in (layer.running_mean, layer.running_var))
        second = var + mean**2
        out = []
        for sample in x.numpy().astype(np.float64):
            pair = np.stack([sample, sample[..., ::-1]])
            local_mean, local_var = pair.mean((0, 2, 3)), pair.var((0, 2, 3))
            mean = (1 - rate) * mean + rate * local_mean
            second = (1 - rate) * second + rate * (local_var + local_mean**2)
            m = scale * local_mean + (1 - scale) * mean
            v = scale * local_var + (1 - scale) * (second - mean**2)
            out.append((sample - m[:, None, None]) / np.sqrt(v[:, None, None] + 1e-5))
        return np.stack(out)

    def test_equals_a_loop_over_samples(self):
        x = torch.randn(12, 3, 6, 6) * 2 + 1
        expected = self.loop(x, self.layer()[0], scale=0.3, rate=0.1)
        found = MixNorm(self.layer(), scale=0.3, rate=0.1)(x)
        assert np.allclose(found.detach().numpy(), expected, atol=1e-5)

    def test_it_goes_where_its_network_goes(self):
        network = MixNorm(self.layer()).to("meta")
        assert network(torch.randn(4, 3, 6, 6, device="meta")).is_meta
        assert all(t.is_meta for pair in network.memory_state() for t in pair)

    def test_batches_do_not_matter_and_reset_forgets(self):
        x = torch.rand(12, 3, 32, 32)
        with torch.no_grad():
            model = MixNorm(small_network.network(), scale=0.3, rate=0.1)
            together = model(x)
            model.reset()
            apart = torch.cat([model(part) for part in x.split(5)])
            assert torch.allclose(together, apart, atol=1e-5)
            assert not torch.allclose(model(x), together, atol=1e-3)  # it remembers

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("at_once", [1, 4, 12])
    def test_a_frame_that_is_not_finite_is_not_remembered(self, value, at_once):
        good = torch.rand(12, 3, 32, 32)
        broken = torch.rand(1, 3, 32, 32)
        broken[0, 1, 5, 5] = value
        mixed = torch.cat([good[:5], broken, good[5:], broken])
        models = [MixNorm(small_network.network(), scale=0.3, rate=0.1) for _ in range(2)]
        with torch.no_grad():
            expected = models[0](good)
            found = torch.cat([models[1](part) for part in mixed.split(at_once)])
        is_broken = torch.zeros(14, dtype=torch.bool)
        is_broken[[5, 13]] = True
        assert found[is_broken].isnan().all()
        assert torch.allclose(found[~is_broken], expected, atol=1e-5)
        states = zip(*(model.memory_state() for model in models), strict=True)
        for ours, theirs in states:
            assert all(torch.allclose(*pair) for pair in zip(ours, theirs, strict=True))

    def test_a_frame_too_large_to_square_is_not_remembered(self):
        model = MixNorm(small_network.network())
        with torch.no_grad():
            expected = model(torch.rand(4, 3, 32, 32))
            model(torch.full((1, 3, 32, 32), 1e30))
            assert model(torch.rand(4, 3, 32, 32)).isfinite().all()
        assert expected.isfinite().all()

    def test_running_average(self):
        values, start = torch.rand(7, 2, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
        state, expected = start, []
        for value in values:
            state = 0.9 * state + 0.1 * value
            expected.append(state)
        assert torch.allclose(running_average(values, start, 0.1), torch.stack(expected))

    def test_running_average_passes_over_what_is_not_kept(self):
        values, start = torch.rand(7, 2, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
        kept = torch.tensor([False, True, True, False, False, True, False])
        state, expected = start, []
        for value, keep in zip(values, kept, strict=True):
            state = 0.9 * state + 0.1 * value if keep else state
            expected.append(state)
        values[~kept] = torch.nan
        assert torch.allclose(running_average(values, start, 0.1, kept), torch.stack(expected))


@pytest.mark.parametrize("batch_size", [1, 4, 20])
def test_ema_follows_the_stream_with_its_momentum(batch_size):
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3).eval()
    model = norms.apply_norm_(nn.Sequential(nn.BatchNorm2d(3)), "ema", batch_size=batch_size)
    mean, var = torch.zeros(3), torch.ones(3)
    for x in (2 + 3 * torch.randn(60, 3, 8, 8)).split(batch_size):
        batch_var, batch_mean = torch.var_mean(x, (0, 2, 3), correction=0)
        mean, var = 0.95 * mean + 0.05 * batch_mean, 0.95 * var + 0.05 * batch_var
        layer.running_mean, layer.running_var = mean, var
        torch.testing.assert_close(model(x), layer(x), atol=1e-5, rtol=1e-5)


def test_ema_goes_on_from_a_file_as_it_was(tmp_path):
    make = partial(norms.apply_norm_, name="ema", batch_size=4)
    model, other = (make(nn.Sequential(nn.BatchNorm2d(3))) for _ in range(2))
    torch.manual_seed(0)
    batches = (2 + 3 * torch.randn(40, 3, 8, 8)).split(4)
    for x in batches[:5]:
        model(x)
    ttnorm.save_stream(model, tmp_path / "ema.safetensors")
    ttnorm.load_stream_(other, tmp_path / "ema.safetensors")
    for x in batches[5:]:
        assert torch.equal(model(x), other(x))


def test_mixnorm_of_a_covered_camera_stays_finite():
    model = MixNorm(nn.Sequential(nn.BatchNorm2d(1)).eval(), rate=0.05)
    for _ in range(20):
        output = model(torch.full((200, 1, 2, 2), 4.4))
    assert output.isfinite().all()
