"""Whole networks as users have them: converted, isolated, loaded and given back."""

import copy

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from torch import nn

import ttnorm
from ttnorm.models.wide_resnet import WideResNet

NETWORKS = {
    "resnet18": (lambda: torchvision.models.resnet18(), (3, 64, 64), 20),
    "resnet50": (lambda: torchvision.models.resnet50(), (3, 64, 64), 53),
    "resnet18 frozen": (
        lambda: torchvision.models.resnet18(norm_layer=torchvision.ops.FrozenBatchNorm2d),
        (3, 64, 64),
        20,
    ),
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(), (3, 64, 64), 52),
    "timm efficientnet": (lambda: timm.create_model("efficientnet_lite0"), (3, 64, 64), 49),
    "r3d_18": (lambda: torchvision.models.video.r3d_18(), (3, 4, 32, 32), 20),
    "deeplabv3+": (
        lambda: smp.DeepLabV3Plus("mobilenet_v2", encoder_weights=None, classes=5),
        (3, 64, 64),
        61,
    ),
    "wrn-40-2": (lambda: WideResNet(), (3, 32, 32), 37),
}


@pytest.fixture(params=NETWORKS, scope="module")
def built(request):
    make, shape, layers = NETWORKS[request.param]
    torch.manual_seed(0)
    model = make()
    for _ in range(3):
        model(torch.rand(4, *shape))
    return model.eval(), torch.rand(5, *shape) ** 2, layers


@pytest.fixture
def case(built):
    """A network that has seen some data, a batch, and its number of BatchNorm layers."""
    return copy.deepcopy(built)


@torch.no_grad()
def test_converts_and_comes_back_bit_for_bit(case):
    model, x, layers = case
    state, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    expected = model(x)

    ttnorm.convert_(model, alpha=0.0)
    assert len(ttnorm.alphas(model)) == layers
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ttnorm.convert_(model, alpha=0.5)(x), expected)

    ttnorm.revert_(model)
    assert [type(m) for m in model.modules()] == kinds
    assert torch.equal(model(x), expected)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


@torch.no_grad()
def test_the_original_s_state_dict_loads_before_and_after_conversion(case):
    model, x, _ = case
    state = copy.deepcopy(model.state_dict())
    expected = ttnorm.convert_(model, alpha=0.3)(x)
    for module in model.modules():
        if hasattr(module, "running_mean"):
            module.running_mean += 1
    assert not torch.allclose(model(x), expected)
    model.load_state_dict(state)
    assert torch.equal(model(x), expected)
    ttnorm.revert_(model).load_state_dict(state)
    assert torch.equal(ttnorm.convert_(model, alpha=0.3)(x), expected)
    ttnorm.revert_(model)


@torch.no_grad()
def test_isolated_equals_separate_forwards(case):
    """In float64, where a network of fifty layers does not amplify rounding into view."""
    model, x, _ = case
    model, x = ttnorm.convert_(model.double(), alpha=0.4), x.double()
    with ttnorm.isolated(model, 2):
        together = model(x)
    apart = torch.cat([model(part) for part in x.split(2)])
    torch.testing.assert_close(together, apart, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_train_mode_batchnorm_is_alpha_one(case):
    model, x, _ = case
    if any(isinstance(m, torchvision.ops.FrozenBatchNorm2d) for m in model.modules()):
        pytest.skip("a frozen layer has no train mode to compare with")
    model, x = model.double(), x.double()
    for module in model.modules():  # everything but dropout
        module.train(isinstance(module, nn.modules.batchnorm._BatchNorm))
    ours = ttnorm.convert_(copy.deepcopy(model), alpha=1.0)(x)
    torch.testing.assert_close(ours, model(x), rtol=1e-7, atol=1e-7)


def test_gradients_flow_to_weights_and_through_groups(case):
    model, x, _ = case
    ttnorm.convert_(model, alpha=0.4)
    with ttnorm.isolated(model, 2):
        model(x).float().square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads
    assert all(g.isfinite().all() for g in grads)


def test_channels_last_networks_stay_channels_last():
    model = torchvision.models.resnet18().eval().to(memory_format=torch.channels_last)
    ttnorm.convert_(model, alpha=0.4)
    contiguous = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    x = torch.rand(3, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    layouts = []
    for layer in model.modules():
        if isinstance(layer, ttnorm.TTNorm2d):
            layer.register_forward_hook(
                lambda m, args, y: layouts.append(
                    y.is_contiguous(memory_format=torch.channels_last)
                )
            )
    with torch.no_grad():
        torch.testing.assert_close(model(x), contiguous(x.contiguous()), rtol=1e-3, atol=1e-4)
    assert layouts
    assert all(layouts)


def test_autocast():
    model = ttnorm.convert_(torchvision.models.resnet18().eval(), alpha=0.4)
    x = torch.rand(4, 3, 64, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        low = model(x)
    with torch.no_grad():
        high = model(x)
    assert low.dtype == torch.bfloat16
    assert (low - high).norm() < 0.05 * high.norm()


def test_wide_resnet_has_the_keys_of_the_augmix_checkpoint():
    keys = WideResNet().state_dict().keys()
    units = [f"block{b}.layer.{i}." for b in (1, 2, 3) for i in range(6)]
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {"conv1.weight", "fc.weight", "fc.bias", *(f"bn1.{n}" for n in norm)}
    for unit in units:
        expected |= {f"{unit}{layer}.{n}" for layer in ("bn1", "bn2") for n in norm}
        expected |= {f"{unit}conv1.weight", f"{unit}conv2.weight"}
        if unit.endswith(".0."):
            expected.add(f"{unit}convShortcut.weight")
    assert keys == expected
    assert sum(p.numel() for p in WideResNet().parameters()) == 2_243_546
