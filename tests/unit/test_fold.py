"""Folding changes what a network costs, and not what it says where alpha is 0."""

import pytest
import torch
from torch import nn

import ttnorm
from ttnorm.models import zoo


def test_layers_that_ignore_the_batch_fold_without_a_trace(small_network, images):
    model = ttnorm.convert_(small_network, 0.0)
    expected = model(images)
    assert ttnorm.fold_(model) == ["1", "4"]
    assert torch.allclose(model(images), expected, atol=1e-5)
    assert not [m for m in model.modules() if isinstance(m, (ttnorm.TTNorm2d, nn.BatchNorm2d))]


def test_others_stay(small_network, images):
    model = ttnorm.convert_(small_network, 0.0)
    ttnorm.alphas(model)["1"][2] = 0.3
    expected = model(images)
    assert ttnorm.fold_(model) == ["4"]
    assert torch.allclose(model(images), expected, atol=1e-5)
    assert isinstance(model[1], ttnorm.TTNorm2d)


def test_what_is_within_the_tolerance_is_as_if_it_were_zero(small_network, images):
    model = ttnorm.convert_(small_network, 0.0)
    exact = model(images)
    ttnorm.convert_(model, 0.05)
    assert ttnorm.fold_(model, tolerance=0.01) == []
    assert ttnorm.fold_(model, tolerance=0.05) == ["1", "4"]
    assert torch.allclose(model(images), exact, atol=1e-5)


def test_a_wide_residual_network_folds_only_where_a_convolution_comes_right_before():
    model = ttnorm.convert_(zoo.load("wrn40_2-cifar10"), 0.0)
    x = torch.rand(4, 3, 32, 32)
    expected = model(x)
    folded = ttnorm.fold_(model)
    assert len(folded) == 18 + 1  # the second norm of every block, and the very first
    assert all(name.endswith("bn2") or name == "block1.layer.0.bn1" for name in folded)
    assert torch.allclose(model(x), expected, atol=1e-4)


def test_a_network_in_training_is_folded_as_it_will_be_used(images):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            before = self.conv(x)
            after = self.norm(before)
            return after if self.training else (after, before)

    model = ttnorm.convert_(TwoHeads().train(), 0.0)
    assert ttnorm.fold_(model) == []  # what comes before the norm is an output as well
    assert model.training


class Branches(nn.Module):
    """A convolution that feeds two, one that is used twice, and a norm after a sum."""

    def __init__(self):
        super().__init__()
        self.forked, self.twice, self.plain = (nn.Conv2d(3, 3, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(4))

    def forward(self, x):
        forked = self.forked(x)
        x = self.norms[0](forked) + forked
        x = self.norms[1](self.twice(x))
        x = self.norms[2](self.twice(x) + x)
        return self.norms[3](self.plain(x))


def test_only_what_serves_nothing_else_is_folded():
    model = ttnorm.convert_(Branches().eval(), 0.0)
    x = torch.rand(2, 3, 5, 5)
    expected = model(x)
    assert ttnorm.fold_(model) == ["norms.3"]
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_an_activation_stays():
    import timm

    norm = timm.layers.BatchNormAct2d(4)
    model = ttnorm.convert_(nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), norm).eval(), 0.0)
    x = torch.rand(2, 3, 5, 5)
    expected = model(x)
    assert ttnorm.fold_(model) == ["1"]
    assert torch.allclose(model(x), expected, atol=1e-6)


def test_norms_without_weights():
    model = nn.Sequential(nn.Conv1d(5, 4, 1), nn.BatchNorm1d(4, affine=False)).eval()
    model[1].running_mean.uniform_()
    ttnorm.convert_(model, 0.0)
    x = torch.rand(3, 5, 6)
    expected = model(x)
    assert ttnorm.fold_(model) == ["1"]
    assert torch.allclose(model(x), expected, atol=1e-6)


class TwoNames(nn.Module):
    """As torchvision's segmentation encoders do: a layer of its own and inside a Sequential."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.stem = nn.Sequential(self.conv, self.norm, nn.ReLU())

    def forward(self, x):
        return self.stem(x)


def test_a_layer_of_two_names_is_replaced_under_both():
    model = ttnorm.convert_(TwoNames().eval(), 0.0)
    model.norm.running_mean.uniform_()
    x = torch.rand(2, 3, 5, 5)
    expected = model(x)
    assert ttnorm.fold_(model) == ["norm"]
    assert isinstance(model.stem[1], nn.Identity)
    assert torch.allclose(model(x), expected, atol=1e-6)


class WeightElsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(nn.functional.conv2d(x, self.conv.weight)))


def hooked():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    return model


def parametrized():
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1))
    return nn.Sequential(conv, nn.BatchNorm2d(3))


@pytest.mark.parametrize("build", [WeightElsewhere, hooked, parametrized])
def test_what_is_more_than_a_convolution_is_left_alone(build):
    model = ttnorm.convert_(build().eval(), 0.0)
    x = torch.rand(2, 3, 5, 5)
    expected = model(x)
    assert ttnorm.fold_(model) == []
    assert torch.equal(model(x), expected)


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(x) if x.sum() > 0 else x


def test_errors():
    with pytest.raises(ValueError, match=r"torch\.fx cannot trace Untraceable"):
        ttnorm.fold_(ttnorm.convert_(Untraceable(), 0.0))
    with pytest.raises(ValueError, match="no test-time normalization layers"):
        ttnorm.fold_(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="tolerance is 2, expected"):
        ttnorm.fold_(ttnorm.convert_(nn.Sequential(nn.BatchNorm2d(3)), 0.0), tolerance=2)


def test_a_norm_whose_parameters_are_read_elsewhere_stays():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.norm(self.conv(x)) * self.norm.weight.sum()

    model, x = ttnorm.convert_(Reading().eval(), 0.0), torch.rand(2, 3, 5, 5)
    expected = model(x)
    assert ttnorm.fold_(model) == []
    assert torch.equal(model(x), expected)


@torch.no_grad()
def test_a_fused_copy_can_be_folded_and_fused_again(small_network, images):
    fused = ttnorm.fuse(ttnorm.convert_(small_network.eval(), 0.0))
    expected = fused(images)
    again = ttnorm.fuse(fused)
    torch.testing.assert_close(again(images), expected)
    assert len(ttnorm.fold_(fused)) == 2
    torch.testing.assert_close(fused(images), expected, atol=1e-5, rtol=1e-5)
