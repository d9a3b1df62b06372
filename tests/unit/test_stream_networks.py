"""Streams of networks and samples of all kinds."""

import copy

import pytest
import torch
from streaming import frames, knowing_its_source
from torch import nn

import ttnorm


@pytest.fixture
def network(small_network):
    return knowing_its_source(small_network)


def test_a_network_that_changes_its_input_is_given_it_once(changing_network):
    x, entered = frames(6), []
    model = ttnorm.stream_(knowing_its_source(changing_network), memory="routed")
    model.network.register_forward_pre_hook(lambda _, args: entered.append(args[0].clone()))
    model(x.clone())
    assert len(entered) == 2  # to tell its domain, and to predict
    for seen in entered:
        torch.testing.assert_close(seen, (x - 0.5) / 0.25)


def test_a_sample_of_one_number_is_remembered():
    model = ttnorm.stream_(ttnorm.convert_(nn.Sequential(nn.BatchNorm1d(1)), 0.5))
    for value in (0.3, 0.7, float("nan")):
        model(torch.tensor([[value]]))
    assert (ttnorm.health(model)[None].frames, ttnorm.health(model)[None].rejected) == (2, 1)


def test_samples_without_any_dimension_of_their_own():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.norm = nn.Embedding(10, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.words(x))

    model = ttnorm.stream_(ttnorm.convert_(Words().eval(), 0.5), memory="pool")
    assert model(torch.arange(6)).shape == (6, 4)
    assert ttnorm.health(model)[None].frames == 6


def test_a_cross_term_that_is_set_later_counts(small_network):
    x = frames(8, 0.0, 0.3)
    expected = ttnorm.convert_(copy.deepcopy(small_network), 0.7, cross_term=False)
    ttnorm.stream_(expected, memory="pool")
    model = ttnorm.stream_(ttnorm.convert_(small_network, 0.7), memory="pool")
    ttnorm.convert_(model, 0.7, cross_term=False)
    assert torch.equal(model(x), expected(x))


def test_a_network_may_be_cast_to_double_afterwards(network):
    x = frames(8)
    expected = ttnorm.stream_(copy.deepcopy(network))(x)
    actual = ttnorm.stream_(network).double()(x.double())
    torch.testing.assert_close(actual.float(), expected, atol=1e-4, rtol=1e-4)


def test_made_in_inference_mode_it_works_outside(network):
    with torch.inference_mode():
        ttnorm.stream_(ttnorm.convert_(network, 0.5), memory="pool")
    ttnorm.alphas(network)["1"].fill_(0.2)
    network.load_state_dict(network.state_dict())
    x = frames(4).requires_grad_()
    network(x).sum().backward()
    assert x.grad.abs().sum() > 0
