"""A window of batches at once is the sequence of its batches, gradients accumulated."""

import copy

import pytest
import small_network
import torch

import ttnorm
from ttnorm.methods.step import AdaptationStep, mean_entropy


def converted(alpha):
    model = ttnorm.convert_(small_network.network(), alpha).double()
    norms = [layer for layer in model if isinstance(layer, ttnorm.TTNorm2d)]
    return model, [p for layer in norms for p in (layer.weight, layer.bias)]


@pytest.mark.parametrize("batch_size", [12, 4, 1])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_equals_the_sequential_loop(batch_size, alpha):
    x = torch.rand(36, 3, 32, 32, dtype=torch.float64)
    model, parameters = converted(alpha)
    optimiser = torch.optim.Adam(parameters, lr=0.01)
    step = AdaptationStep(model, optimiser, mean_entropy, batch_size)
    outputs = torch.cat([step(window) for window in x.split(12)])

    other, parameters = converted(alpha)
    optimiser = torch.optim.Adam(parameters, lr=0.01)
    expected = []
    for window in x.split(12):
        optimiser.zero_grad()
        for batch in window.split(batch_size):
            output = other(batch)
            (mean_entropy(output) * len(batch) / len(window)).backward()
            expected.append(output.detach())
        optimiser.step()
    assert torch.allclose(outputs, torch.cat(expected), atol=1e-10)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)


def test_only_what_the_optimiser_has_is_changed():
    model, parameters = converted(0.3)
    before = copy.deepcopy(model.state_dict())
    step = AdaptationStep(model, torch.optim.SGD(parameters, lr=0.1), mean_entropy, 4)
    step(torch.rand(12, 3, 32, 32, dtype=torch.float64))
    changed = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == {"1.weight", "1.bias", "4.weight", "4.bias"}
