"""A fused network says what the network says, with fewer steps."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import ttnorm
from ttnorm.fuse import NormRelu
from ttnorm.models.wide_resnet import WideResNet


def fused_norms(model):
    return [m for m in model.modules() if isinstance(m, NormRelu)]


def settle(model):
    """Statistics and weights that are not those of a fresh layer."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
    return ttnorm.convert_(model.eval(), 0.3)


@pytest.mark.parametrize(
    ("build", "norms", "residuals"),
    [
        (lambda: WideResNet(10, 1, 10), 7, 0),  # every norm has a ReLU after it
        (torchvision.models.resnet18, 17, 8),  # nine norms and eight sums
        (torchvision.models.mobilenet_v2, 0, 0),  # ReLU6 is another matter
    ],
)
@torch.no_grad()
def test_networks_give_the_same_outputs(build, norms, residuals):
    model = settle(build())
    fused = ttnorm.fuse(model)
    x = torch.rand(6, 3, 32, 32)
    assert torch.allclose(fused(x), model(x), atol=1e-4)
    with ttnorm.isolated(model, 2), ttnorm.isolated(fused, 2):
        assert torch.allclose(fused(x), model(x), atol=1e-4)
    nodes = [n for n in fused.graph.nodes if n.op == "call_module" and n.name.endswith("_relu")]
    assert len(fused_norms(fused)) == len(nodes) == norms
    assert sum(len(node.args) == 2 for node in nodes) == residuals


def test_parameters_are_shared_and_the_network_is_untouched():
    model = settle(WideResNet(10, 1, 10))
    names = list(model.state_dict())
    fused = ttnorm.fuse(model)
    assert list(model.state_dict()) == names
    assert {id(p) for p in fused.parameters()} == {id(p) for p in model.parameters()}


def test_gradients_are_those_of_the_network():
    model = settle(WideResNet(10, 1, 10))
    x = torch.rand(4, 3, 32, 32)
    grads = []
    for network in (model, ttnorm.fuse(model)):
        model.zero_grad()
        network(x).square().sum().backward()
        grads.append(model.conv1.weight.grad.clone())
    assert torch.allclose(*grads, rtol=1e-4, atol=1e-5)


class Used(nn.Module):
    """A norm whose output is wanted as it is, besides."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        y = self.norm(x)
        return torch.relu(y) + y


def test_a_norm_that_goes_elsewhere_too_is_left_alone():
    model = settle(Used())
    fused = ttnorm.fuse(model)
    x = torch.rand(2, 3, 4, 4)
    assert torch.equal(fused(x), model(x))
    assert not fused_norms(fused)


@torch.no_grad()
def test_a_submodule_that_has_the_name_already_stays():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn1, self.bn1_relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()

        def forward(self, x):
            return self.bn1_relu(self.bn1(self.conv(x))) + self.bn1_relu(self.conv(x))

    model = settle(Twice())
    x = torch.randn(4, 3, 8, 8)
    assert torch.allclose(ttnorm.fuse(model)(x), model(x), atol=1e-6)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return nn.functional.dropout(torch.relu(self.bn(self.conv(x))), 0.5, self.training)


@torch.no_grad()
def test_a_network_in_training_mode_is_fused_for_inference():
    model, x = settle(Dropping()), torch.rand(2, 3, 8, 8)
    fused = ttnorm.fuse(model.train()).eval()
    assert model.training
    torch.testing.assert_close(fused(x), model.eval()(x))


@torch.no_grad()
def test_a_relu_with_a_hook_keeps_it():
    model, calls = settle(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())), []
    model[2].register_forward_hook(lambda *args: calls.append(1))
    fused = ttnorm.fuse(model)
    fused(torch.rand(2, 3, 8, 8))
    assert calls == [1]
    assert not fused_norms(fused)


@torch.no_grad()
def test_a_fused_network_can_remember_a_stream():
    model = settle(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    plain, fused = (
        ttnorm.stream_(m, memory="pool") for m in (copy.deepcopy(model), ttnorm.fuse(model))
    )
    for x in torch.rand(5, 2, 3, 8, 8):
        torch.testing.assert_close(fused(x), plain(x))
    with pytest.raises(RuntimeError, match="such as fuse gives, are to be made before stream_"):
        copy.deepcopy(fused)(x)


@pytest.mark.parametrize("source_count", [0.0, 2.0])
@torch.no_grad()
def test_a_fused_network_can_be_exported(source_count):
    model = settle(WideResNet(10, 1, 10))
    fused = ttnorm.fuse(ttnorm.convert_(model, ttnorm.alphas(model), source_count=source_count))
    program = ttnorm.to_exported_program(fused, torch.rand(2, 3, 32, 32)).module()
    x = torch.rand(5, 3, 32, 32)
    torch.testing.assert_close(program(x), model(x), atol=1e-4, rtol=1e-4)


def test_names_that_run_into_each_other_are_kept_apart():
    class Alike(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.ModuleDict({"norm": nn.BatchNorm2d(3)})
            self.stem_norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return self.stem_norm(self.stem["norm"](x).relu()).relu()

    model, x = settle(Alike()), torch.rand(4, 3, 5, 5)
    fused = ttnorm.fuse(model)
    assert len(fused_norms(fused)) == 2
    torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize("changed", ["input", "residual"])
def test_what_is_changed_before_the_relu_is_read_before_it(changed):
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            x, residual = x * 1, x * 2
            y = self.norm(x) + residual
            (x if changed == "input" else residual).mul_(0.1)
            return y.relu() + x + residual

    model, x = settle(Changing()), torch.rand(4, 3, 5, 5)
    fused = ttnorm.fuse(model)
    assert not fused_norms(fused)
    torch.testing.assert_close(fused(x), model(x))


@torch.no_grad()
def test_what_is_added_to_in_place_and_used_later_is_not_fused():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            skip = x = x.clone()
            x += self.norm(self.conv(x))
            return x.relu() + skip

    model, x = settle(Kept()), torch.randn(4, 3, 5, 5)
    assert torch.allclose(ttnorm.fuse(model)(x), model(x), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda view: view.mul_(2),
        nn.ReLU(inplace=True),
        partial(F.relu, inplace=True),
        lambda view: torch.mul(view, 2, out=view),
    ],
    ids=["a method", "a module", "a function", "out"],
)
def test_what_is_changed_through_a_view_is_not_fused(change):
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
            self.change = change

        def forward(self, x):
            x = self.conv(x)
            view = x.view(x.shape)
            y = self.norm(x)
            self.change(view)
            return (y + x).relu()

    model, x = settle(Viewed()), torch.randn(4, 3, 5, 5)
    assert torch.allclose(ttnorm.fuse(model)(x), model(x), atol=1e-6)


def test_hooks_of_the_network_itself_are_refused():
    model = settle(WideResNet(10, 1, 10))
    handle = model.register_forward_pre_hook(lambda _, args: (args[0] / 255,))
    with pytest.raises(ValueError, match="hooks of its own"):
        ttnorm.fuse(model)
    handle.remove()
    ttnorm.fuse(model)


@torch.no_grad()
def test_a_copy_of_what_is_reverted_is_plain_batchnorm():
    model, x = settle(WideResNet(10, 1, 10)), torch.rand(4, 3, 32, 32)
    fused = ttnorm.fuse(model)
    ttnorm.revert_(model)
    assert torch.allclose(fused(x), model(x), atol=1e-4)
