"""Streams of networks and samples of all kinds."""

import copy
import itertools

import pytest
import torch
from streaming import frames, knowing_its_source, outputs
from torch import nn

import ttnorm
from ttnorm.classes import classes_of
from ttnorm.shallow import content_of
from ttnorm.stream import stream_of
from ttnorm.tree import CLASSES, CONTENT, known_of, ttn_layers


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
    for layer in ttn_layers(model).values():
        layer.cross_term = False
    assert torch.equal(model(x), expected(x))


def test_what_changes_alpha_is_refused_while_a_network_remembers(network, tmp_path):
    """Or its numbers would be a stream's, under another name."""
    ttnorm.save(network, tmp_path / "a.ttn.safetensors")
    ttnorm.stream_(network)
    network(frames(8))
    with pytest.raises(ValueError, match="load_ does not work on a network that remembers"):
        ttnorm.load_(network, tmp_path / "a.ttn.safetensors")
    with pytest.raises(ValueError, match="convert_ does not work on a network that remembers"):
        ttnorm.convert_(network, 1.0)
    assert ttnorm.health(network)[None].frames == 8
    x = frames(8, 0.0, 0.3)
    expected = ttnorm.convert_(copy.deepcopy(ttnorm.end_stream_(network)), 1.0)(x)
    assert torch.equal(ttnorm.convert_(network, 1.0)(x), expected)


class TestGraphs:
    """torch.fx's copies of them have no attribute but their modules."""

    def test_a_copy_knows_what_its_original_knows(self, network, tmp_path):
        graph = ttnorm.fuse(network)
        for one in (graph, copy.deepcopy(graph), copy.deepcopy(copy.deepcopy(graph))):
            assert known_of(one, CONTENT) is not None
            assert known_of(one, CLASSES) is not None
            assert ttnorm.stream_(one)._modules  # a routed one
            assert ttnorm.stream_state(one).keys() >= {"slot_seen"}
        ttnorm.revert_(graph)
        assert known_of(copy.deepcopy(graph), CONTENT) is None

    def test_one_that_remembers_is_exported(self, network):
        graph = ttnorm.stream_(ttnorm.fuse(network), memory="pool")
        x = frames(12, 0.0, 0.4)
        graph(x[:4])
        program = ttnorm.to_exported_program(graph, x[:4]).module()
        state = ttnorm.stream_state(graph)
        output, *after = program(x[4:], *state.values())
        torch.testing.assert_close(output, graph(x[4:]))
        for actual, expected in zip(after, ttnorm.stream_state(graph).values(), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(("before", "after"), itertools.permutations((torch.float32, torch.double)))
def test_a_network_may_be_cast_afterwards(network, before, after, gradients):
    x = frames(8)
    expected = ttnorm.stream_(copy.deepcopy(network))(x)
    ttnorm.stream_(network.to(before)).to(after)
    with torch.set_grad_enabled(gradients):
        actual = network(x.to(after))
    assert actual.dtype == after
    torch.testing.assert_close(actual.float(), expected, atol=1e-4, rtol=1e-4)


def test_of_several_inputs_the_frames_are_judged():
    class WithFacts(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, facts, image):
            return self.norm(self.conv(image)).mean((2, 3)) + facts

    model = ttnorm.stream_(ttnorm.convert_(WithFacts().eval(), 0.5), memory="pool")
    model(torch.zeros(4, 1), frames(4))
    model(torch.rand(1, 1), torch.zeros(1, 3, 12, 12))
    health = ttnorm.health(model)[None]
    assert (health.frames, health.rejected) == (4, 1)


def test_a_list_of_images_is_refused_with_advice(network):
    ttnorm.stream_(network)
    with pytest.raises(ValueError, match=r"called with a list of 2 .*stream_\(model\.backbone\)"):
        network([frames(1)[0], frames(1)[0]])


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


def test_what_is_around_a_network_saves_folds_and_forgets_what_it_knows(network, tmp_path):
    around = nn.Sequential(nn.Identity(), network)
    ttnorm.save(around, tmp_path / "around.ttn.safetensors")
    bare = ttnorm.revert_(copy.deepcopy(around))
    ttnorm.load_(bare, tmp_path / "around.ttn.safetensors")
    assert stream_of(ttnorm.stream_(bare)).config.memory == "routed"
    folded = copy.deepcopy(around)
    ttnorm.alphas(folded)["1.4"].zero_()
    assert ttnorm.fold_(folded) == ["1.4"]
    x = frames(4)
    ttnorm.alphas(around)["1.4"].zero_()
    expected = ttnorm.stream_(around, memory="corrected")(x)
    actual = ttnorm.stream_(folded, memory="corrected")(x)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    ttnorm.convert_(ttnorm.revert_(around), 0.3)
    assert stream_of(ttnorm.stream_(around)).config.memory == "balanced"
    assert not {CONTENT, CLASSES} & network.__dict__.keys()


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


@pytest.mark.parametrize("memory", ["pool", "balanced", "corrected"])
def test_a_layer_that_is_used_twice_remembers_both_uses(memory):
    """Two cameras through one norm, each with statistics of its own."""

    class Stereo(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.BatchNorm1d(3), nn.Linear(6, 4)

        def forward(self, x):
            left, right = x.chunk(2, 1)
            return self.fc(torch.cat((self.norm(left), self.norm(right)), 1))

    def pairs(count):
        return torch.randn(count, 6) + torch.tensor([2.0, 2, 2, -2, -2, -2])

    model = Stereo()
    for _ in range(200):
        model.norm(torch.cat(pairs(200).chunk(2, 1)))
    ttnorm.convert_(model.eval(), 1.0)
    model.__dict__[CLASSES] = classes_of(model, [(pairs(400), torch.arange(400) % 4)])
    expected = ttnorm.convert_(copy.deepcopy(model), 0.0)
    outputs(ttnorm.stream_(model, memory=memory), pairs(600), 4)
    x = pairs(50)
    assert ttnorm.health(model)[None].shift < 0.02
    torch.testing.assert_close(model(x), expected(x), atol=0.4, rtol=0)  # of about 2


def test_without_a_cross_term_what_differs_between_frames_is_remembered_all_the_same():
    model = ttnorm.convert_(nn.Sequential(nn.BatchNorm1d(2)).eval(), 1.0, cross_term=False)
    ttnorm.stream_(model, memory="pool")
    outputs(model, torch.randn(1000, 2), 1)
    assert stream_of(model).state["var"].mean() == pytest.approx(1.0, abs=0.2)


def test_complex_frames():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(x.abs()).mean(2)

    model = ttnorm.stream_(ttnorm.convert_(Spectrum(), 0.5), memory="pool")
    x = torch.randn(4, 3, 8, dtype=torch.complex64)
    x[1] = float("nan")
    model(x)
    assert (ttnorm.health(model)[None].frames, ttnorm.health(model)[None].rejected) == (3, 1)


def test_a_part_that_was_folded_is_noticed(network):
    around = nn.Sequential(network)
    for known in (CONTENT, CLASSES):
        around.__dict__[known] = network.__dict__.pop(known)
    ttnorm.alphas(network)["4"].zero_()
    ttnorm.fold_(network)
    with pytest.raises(ValueError, match="known of 14 channels, and the network has 6"):
        ttnorm.stream_(around)
