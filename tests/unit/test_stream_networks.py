"""Streams of networks and samples of all kinds."""

import copy

import pytest
import torch
from streaming import frames, knowing_its_source, outputs
from torch import nn

import ttnorm
from ttnorm.shallow import content_of
from ttnorm.stream import stream_of
from ttnorm.surgery import CLASSES, CONTENT


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


def test_what_is_around_a_network_knows_what_the_network_knows(network):
    """A wrapper of one's own that scales images, say, after post-training."""
    x = frames(30)
    expected = outputs(ttnorm.stream_(copy.deepcopy(network)), x, 3)
    around = ttnorm.stream_(nn.Sequential(nn.Identity(), network))
    assert stream_of(around).config.memory == "routed"
    assert torch.equal(outputs(around, x, 3), expected)


def test_what_has_more_layers_than_a_network_knows_nothing_of_them(network):
    more = ttnorm.convert_(nn.Sequential(network, nn.BatchNorm1d(4)), 0.5)
    network.__dict__[CONTENT], network.__dict__[CLASSES] = ("of", "a part")
    assert stream_of(ttnorm.stream_(more)).config.memory == "balanced"


def test_a_fused_copy_knows_what_the_network_knows(network):
    x = frames(30)
    expected = outputs(ttnorm.stream_(copy.deepcopy(network)), x, 3)
    fused = ttnorm.stream_(ttnorm.fuse(network))
    assert stream_of(fused).config.memory == "routed"
    torch.testing.assert_close(outputs(fused, x, 3), expected)


@pytest.mark.parametrize(("layer", "memory"), [("1", "balanced"), ("4", "routed")])
def test_what_is_folded_is_known_no_longer(network, layer, memory):
    """Norms that frames are told apart by take that knowledge along; others only their share."""
    network.__dict__[CONTENT] = content_of(network, [(frames(200), torch.zeros(200))], depth=1)
    ttnorm.alphas(network)[layer].zero_()
    x = frames(30)
    expected = outputs(ttnorm.stream_(copy.deepcopy(network), memory="corrected"), x, 3)
    assert ttnorm.fold_(network) == [layer]
    assert stream_of(ttnorm.stream_(network)).config.memory == memory
    ttnorm.stream_(network, memory="corrected")
    torch.testing.assert_close(outputs(network, x, 3), expected, atol=1e-4, rtol=1e-4)


def test_two_networks_that_share_layers_cannot_both_remember(network):
    other = nn.Sequential(*network)
    ttnorm.stream_(network, memory="pool")
    with pytest.raises(ValueError, match="belong to another one as well"):
        ttnorm.stream_(other, memory="pool")
    x = frames(4)
    network(x)
    assert ttnorm.health(network)[None].frames == 4
    ttnorm.end_stream_(network)
    ttnorm.stream_(other, memory="pool")(x)


def test_a_network_that_predicts_no_classes_is_told_what_to_do(network):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x):
            return {"logits": self.network(x)}

    model = ttnorm.stream_(Named(), memory="corrected")
    with pytest.raises(ValueError, match=r"returned a dict, expected predictions.*memory='pool'"):
        model(frames(2))
