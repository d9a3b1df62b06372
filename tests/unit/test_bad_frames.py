"""Frames that must not be remembered, and how little harm any other can do."""

import pytest
import torch
from streaming import frames, knowing_its_source, outputs
from torch import nn

import ttnorm
from ttnorm import pooling
from ttnorm.data.cifar import load_cifar
from ttnorm.data.corruptions import CORRUPTIONS, corrupt
from ttnorm.demo import ASSETS
from ttnorm.models import zoo
from ttnorm.pooling import FARTHEST
from ttnorm.routes import EVERY
from ttnorm.stream import stream_of
from ttnorm.stream_config import MEMORIES


@pytest.fixture
def network(small_network):
    return knowing_its_source(small_network)


BAD = {
    "NaN": lambda x: x.fill_(torch.nan),
    "one NaN": lambda x: x[0, 0].fill_(torch.nan),
    "Inf": lambda x: x[1].fill_(torch.inf),
    "black": lambda x: x.zero_(),
    "saturated": lambda x: x.fill_(1.0),
    "of one colour": lambda x: x.copy_(torch.arange(3.0)[:, None, None].expand_as(x)),
}


@pytest.mark.parametrize("memory", MEMORIES)
class TestBadFrames:
    @pytest.mark.parametrize("kind", BAD)
    def test_are_rejected_and_leave_no_trace(self, network, memory, kind):
        ttnorm.stream_(network, memory=memory)
        outputs(network, frames(20), 4)
        before = {name: t.clone() for name, t in stream_of(network).state.items()}
        bad = frames(1)
        BAD[kind](bad[0])
        assert network(bad).shape == (1, 4)
        after = stream_of(network).state
        assert all(torch.equal(after[n], before[n]) for n in ("mean", "var", "count", "seen"))
        assert ttnorm.health(network)[None].rejected == 1

    @pytest.mark.parametrize("kind", BAD)
    def test_do_not_reach_the_frames_beside_them(self, network, memory, kind):
        ttnorm.stream_(network, memory=memory)
        outputs(network, frames(20), 4)
        state = stream_of(network).memory_state()
        good, bad = frames(3), frames(1)
        BAD[kind](bad[0])
        expected = network(good)
        stream_of(network).load_memory_state(state)
        torch.testing.assert_close(network(torch.cat((good, bad)))[:3], expected)

    @pytest.mark.parametrize("scale", [255.0, -1e3, 1e9, 1e30, 1e38])
    def test_frames_of_another_scale_change_no_prediction_to_come(self, network, memory, scale):
        """Whether one comes among the first frames, or many where domains are looked for."""
        good = frames(6 * EVERY)
        ttnorm.stream_(network, memory=memory)
        expected = outputs(network, good, 4)
        ttnorm.reset_stream_(network)
        found = []
        for batch in good.split(4):
            assert network(scale * frames(1)).shape == (1, 4)
            found.append(network(batch))
        assert torch.equal(torch.cat(found), expected)
        health = ttnorm.health(network)[None]
        assert (health.frames, health.rejected) == (len(good), len(found))

    @pytest.mark.parametrize("scale", [1e3, 1e9, -1e9, 1e30, 1e38])
    def test_one_frame_moves_the_memory_no_further_than_its_share(
        self, network, memory, scale, monkeypatch
    ):
        """The documented bound: 2 x FARTHEST standard deviations of the source, times its share."""
        monkeypatch.setattr(pooling, "MOST_BEYOND", 1.0)  # as if no frame were refused for that
        ttnorm.stream_(network, memory=memory)
        outputs(network, frames(60), 4)
        stream = stream_of(network)
        before = {name: t.clone() for name, t in stream.state.items()}
        assert network(scale * frames(1)).shape == (1, 4)
        share = 1 / stream.state["count"]
        moved = (stream.state["mean"] - before["mean"]).abs().amax(2)
        assert (moved <= 2 * FARTHEST * share * 1.001).all()
        spread = (stream.state["var"] - before["var"]).abs().amax(2)
        assert (spread <= 5 * FARTHEST**2 * share * 1.001).all()
        assert all(t.isfinite().all() for t in stream.state.values())


@pytest.mark.parametrize("network_name", zoo.NETWORKS)
def test_pictures_are_remembered_in_any_weather_and_not_at_another_scale(network_name):
    pixels = load_cifar(ASSETS / "cifar10", "test").images[:20].permute(0, 2, 3, 1).numpy()
    network = zoo.load(network_name)
    ttnorm.load_(network, zoo.alpha_files(network_name)["ttn"])
    with torch.no_grad():
        for corruption in set(CORRUPTIONS) - {"frost"}:  # which wants pictures of frost
            x = torch.from_numpy(corrupt(pixels, corruption, 5)).permute(0, 3, 1, 2) / 255
            ttnorm.stream_(network)
            network(x)
            network(30 * x)
            health = ttnorm.health(network)[None]
            assert (health.frames, health.rejected) == (20, 20), corruption


def test_features_without_pixels_are_remembered_unless_all_alike():
    network = ttnorm.stream_(ttnorm.convert_(nn.Sequential(nn.BatchNorm1d(3)), 0.5), memory="pool")
    for shape in ((2, 3), (2, 3, 1)):
        ttnorm.reset_stream_(network)
        network(torch.tensor([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]]).view(shape))
        health = ttnorm.health(network)[None]
        assert (health.frames, health.rejected) == (1, 1)
