"""The prior: one batched backward equals the per-sample loop, and says what the paper says."""

import copy
import functools
import itertools
import logging
from functools import partial
from pathlib import Path

import digits
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ttnorm
from ttnorm.data.cifar import load_cifar
from ttnorm.models import zoo


def brighter(x, generator):
    return (x + 0.3 * torch.rand(1, generator=generator).to(x)).clamp(0, 1)


def inverted(x, generator):
    return 1 - x


def naive_prior(model, x, y, augment, loss=F.cross_entropy):
    """Eq. 3-5, one backward per sample and view; every channel has to get gradients."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    parameters = [p for m in layers.values() for p in (m.weight, m.bias)]
    agreement, informed = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for i in range(len(x)):
        views = (x[i : i + 1], augment(x, None)[i : i + 1])
        grads = [torch.autograd.grad(loss(model(v), y[i : i + 1]), parameters) for v in views]
        for total, count, g, shifted in zip(agreement, informed, *grads, strict=True):
            total += g.sign() * shifted.sign()
            count += (g != 0) & (shifted != 0)
    scores = [total / count for total, count in zip(agreement, informed, strict=True)]
    low, high = min(s.min() for s in scores), max(s.max() for s in scores)
    scores = [(s - low) / (high - low) for s in scores]
    pairs = zip(scores[::2], scores[1::2], strict=True)
    return {
        name: (1 - (gamma + beta) / 2) ** 2
        for name, (gamma, beta) in zip(layers, pairs, strict=True)
    }


@pytest.mark.parametrize("channels_last", [False, True])
def test_equals_the_per_sample_loop(small_network, channels_last):
    model, x = small_network.double(), torch.rand(23, 3, 12, 12, dtype=torch.float64)
    if channels_last:
        model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
    y = torch.randint(4, (23,))
    expected = naive_prior(model, x, y, inverted)
    prior = ttnorm.estimate_prior(model, [(x[:10], y[:10]), (x[10:], y[10:])], augment=inverted)
    assert prior.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(prior[name], value)


def test_per_pixel_labels_with_an_ignore_index():
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU(), nn.Conv2d(6, 4, 1)
    )
    model, x = model.double().eval(), torch.rand(9, 3, 6, 6, dtype=torch.float64)
    y = torch.randint(4, (9, 6, 6))
    y[:, :3] = 255
    loss = functools.partial(F.cross_entropy, ignore_index=255)
    expected = naive_prior(model, x, y, inverted, loss)
    prior = ttnorm.estimate_prior(model, [(x, y)], augment=inverted, loss=loss)
    torch.testing.assert_close(prior["1"], expected["1"])


def test_a_layer_used_twice_has_the_gradient_of_both_uses():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Linear(3, 4)

        def forward(self, x):
            return self.fc(self.norm(self.conv(self.norm(x).tanh())).square().mean((2, 3)))

    model, x = Twice().double().eval(), torch.rand(12, 3, 5, 5, dtype=torch.float64)
    y = torch.randint(4, (12,))
    expected = naive_prior(model, x, y, inverted)
    prior = ttnorm.estimate_prior(model, [(x, y)], augment=inverted)
    torch.testing.assert_close(prior["norm"], expected["norm"])


def test_images_out_of_range_are_refused_before_the_network_sees_any(small_network):
    seen = []
    small_network.register_forward_pre_hook(lambda *_: seen.append(1))
    loader = [(torch.rand(8, 3, 12, 12) * 255, torch.randint(4, (8,)))]
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        ttnorm.estimate_prior(small_network, loader)
    assert not seen


def test_is_in_the_unit_interval_and_reaches_from_trusted_to_distrusted(small_network):
    loader = [(torch.rand(64, 3, 12, 12), torch.randint(4, (64,)))]
    prior = torch.cat(list(ttnorm.estimate_prior(small_network, loader).values()))
    assert ((prior >= 0) & (prior <= 1)).all()
    assert prior.max() > prior.min()


def test_no_shift_leaves_no_distance():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(96, 4))
    loader = [(torch.rand(16, 3, 6, 6), torch.randint(4, (16,)))]
    prior = ttnorm.estimate_prior(model, loader, augment=lambda x, g: x)
    assert (prior["1"] == 0).all()


def test_falls_with_depth_on_a_trained_network():
    """A shift of style is felt by the first layers and wears off towards the last (Fig. 4)."""
    train, _ = digits.load_digits()
    model = digits.train_network(train)
    # digits have no colours to shift, so they are inverted more often than photographs
    augment = partial(ttnorm.prior_shift, invert=0.5)
    generator = torch.Generator().manual_seed(0)
    prior = ttnorm.estimate_prior(model, [train], augment=augment, generator=generator)
    means = [a.mean().item() for a in prior.values()]
    assert means[0] > 1.8 * means[-1]
    assert all(shallow > deep for shallow, deep in itertools.pairwise(means[1:]))


def test_falls_with_depth_on_a_wide_resnet():
    """The paper's Fig. 4 on the shipped network and real images."""
    images, labels = load_cifar(Path(ttnorm.__file__).parent / "demo/assets/cifar10", "train")
    batches = list(
        zip((images[:256].float() / 255).split(128), labels[:256].split(128), strict=True)
    )
    generator = torch.Generator().manual_seed(0)
    prior = ttnorm.estimate_prior(zoo.load("wrn40_2-cifar10"), batches, generator=generator)
    means = torch.stack([a.mean() for a in prior.values()])
    assert len(means) == 37
    assert means[:5].mean() > 4 * means[-5:].mean()
    ranks = torch.stack((means.argsort().argsort(), torch.arange(37))).double()
    assert torch.corrcoef(ranks)[0, 1] < -0.85


def test_a_compiled_network_has_the_same_prior(small_network):
    loader = [(torch.rand(16, 3, 12, 12), torch.randint(4, (16,)))]
    plain = ttnorm.estimate_prior(small_network, loader, augment=inverted)
    compiled = ttnorm.estimate_prior(torch.compile(small_network), loader, augment=inverted)
    assert all(torch.equal(plain[name], compiled[name]) for name in plain)


def test_a_generator_makes_it_reproducible(small_network):
    loader = [(torch.rand(16, 3, 12, 12), torch.randint(4, (16,)))]
    runs = [
        ttnorm.estimate_prior(
            small_network, loader, augment=brighter, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (3, 3, 4)
    ]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert any(not torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


def test_takes_as_many_samples_as_asked_for(small_network):
    seen = []

    def count(x, generator):
        seen.append(len(x))
        return 1 - x

    loader = [(torch.rand(8, 3, 12, 12), torch.randint(4, (8,)))] * 5
    ttnorm.estimate_prior(small_network, loader, samples=20, augment=count)
    assert seen == [8, 8, 4]


def test_a_channel_without_gradient_is_reported_and_keeps_the_source(small_network, caplog):
    small_network[4].bias.data[2] = -1e3  # behind a ReLU: dead
    loader = [(torch.rand(16, 3, 12, 12), torch.randint(4, (16,)))]
    with caplog.at_level(logging.WARNING, logger="ttnorm"):
        prior = ttnorm.estimate_prior(small_network, loader, augment=inverted)
    assert "1 of 14 channels hardly ever got a gradient" in caplog.text
    assert "1 in 4" in caplog.text
    assert prior["4"][2] == 0
    assert torch.cat(list(prior.values())).isfinite().all()


def test_dead_channels_do_not_change_the_others(small_network):
    """They are left out of the min-max normalisation, not taken for total disagreement."""
    x, y = torch.rand(16, 3, 12, 12), torch.randint(4, (16,))
    small_network[4].bias.data[2] = -1e3
    small_network[8].weight.data[:, 2] = 0
    with_dead = ttnorm.estimate_prior(small_network, [(x, y)], augment=inverted)["1"]
    narrow = nn.Sequential(*small_network)
    narrow[3], narrow[4], narrow[8] = (
        nn.Conv2d(6, 7, 3, stride=2),
        nn.BatchNorm2d(7),
        nn.Linear(7, 4),
    )
    keep = [0, 1, 3, 4, 5, 6, 7]
    for name in ("weight", "bias", "running_mean", "running_var"):
        getattr(narrow[4], name).data = getattr(small_network[4], name).data[keep]
    narrow[3].weight.data, narrow[3].bias.data = (
        t.data[keep] for t in (small_network[3].weight, small_network[3].bias)
    )
    narrow[8].weight.data, narrow[8].bias.data = (
        small_network[8].weight.data[:, keep],
        small_network[8].bias.data,
    )
    without = ttnorm.estimate_prior(narrow.eval(), [(x, y)], augment=inverted)["1"]
    torch.testing.assert_close(with_dead, without)


def test_a_channel_that_hardly_ever_fires_does_not_change_the_others(small_network):
    """Samples that give it no gradient are no disagreement, and one sample is no measure."""
    x, y = torch.rand(64, 3, 12, 12), torch.randint(4, (64,))
    deep = ttnorm.convert_(copy.deepcopy(small_network), alpha=0.0)[:5](x)[:, 2].amax((1, 2))
    highest, second = deep.topk(2).values
    small_network[4].bias.data[2] -= (highest + second) / 2  # one image still gets through the ReLU
    rare = ttnorm.estimate_prior(small_network, [(x, y)], augment=lambda x, g: x.roll(1, 2))
    assert rare["4"][2] == 0
    small_network[4].bias.data[2] = -1e3
    small_network[8].weight.data[:, 2] = 0
    dead = ttnorm.estimate_prior(small_network, [(x, y)], augment=lambda x, g: x.roll(1, 2))
    torch.testing.assert_close(rare["4"], dead["4"], atol=0.05, rtol=0)


def test_leaves_no_trace(small_network):
    small_network.train()
    before = {k: v.clone() for k, v in small_network.state_dict().items()}
    ttnorm.estimate_prior(
        small_network, [(torch.rand(4, 3, 12, 12), torch.zeros(4, dtype=torch.long))]
    )
    assert type(small_network[1]) is nn.BatchNorm2d
    assert all(module.training for module in small_network.modules())
    assert all(p.grad is None and p.requires_grad for p in small_network.parameters())
    assert all(torch.equal(v, before[k]) for k, v in small_network.state_dict().items())


def test_works_where_the_caller_has_gradients_switched_off(small_network):
    loader = [(torch.rand(4, 3, 12, 12), torch.randint(4, (4,)))]
    with torch.no_grad():
        assert ttnorm.estimate_prior(small_network, loader).keys() == {"1", "4"}


def test_a_converted_network_has_the_same_prior(small_network):
    loader = [(torch.rand(16, 3, 12, 12), torch.randint(4, (16,)))]
    plain = ttnorm.estimate_prior(small_network, loader, augment=inverted)
    ttnorm.convert_(small_network, alpha=0.4)
    converted = ttnorm.estimate_prior(small_network, loader, augment=inverted)
    assert all(torch.equal(plain[name], converted[name]) for name in plain)
    assert (small_network[1].alpha == 0.4).all()


def test_a_loss_that_is_not_finite_is_an_error(small_network):
    loader = [(torch.rand(4, 3, 12, 12), torch.full((4,), -100))]
    with pytest.raises(ValueError, match="loss is not finite"):
        ttnorm.estimate_prior(small_network, loader)


def test_a_network_that_does_not_use_its_batchnorm_is_an_error():
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    model.unused = nn.BatchNorm2d(3)
    model.forward = lambda x: model[1](model[0](x))
    with pytest.raises(ValueError, match="depends on no BatchNorm layer"):
        ttnorm.estimate_prior(model, [(torch.rand(4, 3, 4, 4), torch.zeros(4).long())])


@pytest.mark.parametrize("samples", [0, -1, 8.5])
def test_a_number_of_samples_that_is_none(small_network, samples):
    with pytest.raises(ValueError, match=f"samples is {samples}, expected a whole number"):
        ttnorm.estimate_prior(small_network, [], samples=samples)


def test_empty_loader(small_network):
    with pytest.raises(ValueError, match="yielded no samples"):
        ttnorm.estimate_prior(small_network, [])


def test_a_layer_that_folds_samples_together_is_refused(folding_network):
    with pytest.raises(ValueError, match="'norm' saw 8 samples in a batch of 4"):
        ttnorm.estimate_prior(folding_network, [(torch.rand(4, 3, 6, 6), torch.zeros(4).long())])
