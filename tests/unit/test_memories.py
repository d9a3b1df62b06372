"""What each memory of a stream remembers: by class, without class, and by domain."""

import copy

import pytest
import torch
from streaming import frames, knowing_its_source, outputs
from torch import nn

import ttnorm
from ttnorm.classes import classes_of
from ttnorm.routes import EVERY, FIRST, RECENT
from ttnorm.shallow import content_of, describe_frames
from ttnorm.stream import stream_of
from ttnorm.tree import CLASSES, CONTENT


@pytest.fixture
def network(small_network):
    return knowing_its_source(small_network)


class TestBalanced:
    def test_a_class_that_was_not_seen_counts_as_the_source(self, network):
        network[8].weight.data.zero_()
        network[8].bias.data = torch.tensor([0.0, 1.0, 0.0, 0.0])  # all is class 1
        ttnorm.stream_(network, memory="balanced")
        outputs(network, frames(100, 0.8, 1.0), 1)
        stream = stream_of(network)
        unseen = [0, 2, 3]
        assert (stream.state["mean"][0, unseen] == 0).all()
        assert (stream.state["var"][0, unseen] == 1).all()
        assert (stream.state["mean"][0, 1].abs() > 0.1).any()
        assert stream.state["count"][0, unseen].tolist() == [stream.config.source / 4] * 3

    def test_a_run_of_one_class_moves_the_statistics_less_than_a_pool_s(self, network):
        """With four classes in turn both see the same; in a run, one fourth is the run's."""
        network[8].weight.data.zero_()
        network[8].bias.data = torch.tensor([0.0, 1.0, 0.0, 0.0])
        run = frames(300, 0.9, 1.0)
        shifts = {}
        for memory in ("pool", "balanced"):
            ttnorm.stream_(network, memory=memory, buckets=4)
            outputs(network, run, 1)
            shifts[memory] = ttnorm.health(network)[None].shift
        assert shifts["balanced"] < 0.5 * shifts["pool"]

    def test_more_classes_than_buckets_share_them(self, network):
        ttnorm.stream_(network, memory="balanced", buckets=2)
        outputs(network, frames(20), 4)
        assert stream_of(network).state["mean"].shape[1] == 2
        assert ttnorm.health(network)[None].frames == 20

    def test_a_state_from_before_the_first_frame_loads_after_it(self, network):
        """How many classes there are is only known by then."""
        ttnorm.stream_(network, memory="balanced")
        stream, x = stream_of(network), frames(20)
        nothing = stream.memory_state()
        first = outputs(network, x, 4)
        seen = stream.memory_state()
        assert (nothing["mean"].shape[1], seen["mean"].shape[1]) == (10, 4)
        for state, expected in ((nothing, first), (seen, outputs(network, x, 4)), (nothing, first)):
            stream.load_memory_state(state)
            assert torch.equal(outputs(network, x, 4), expected)

    def test_needs_predictions(self):
        model = ttnorm.convert_(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), 0.5)
        ttnorm.stream_(model, memory="balanced")
        with pytest.raises(ValueError, match="memory='pool'"):
            model(frames(2))


class TestCorrected:
    @pytest.fixture
    def bright(self, network):
        """Class 1 is brighter than the others, and all that is predicted."""
        network[8].weight.data.zero_()
        network[8].bias.data = torch.tensor([0.0, 50.0, 0.0, 0.0])
        labels = torch.arange(400) % 4
        every = torch.where((labels == 1)[:, None, None, None], frames(400, 0.5), frames(400))
        network.__dict__[CLASSES] = classes_of(network, [(every, labels)])
        return network, every

    def remembered(self, network, memory, x, usual=None):
        ttnorm.stream_(network, memory=memory, window=50)
        if usual is not None:
            stream_of(network).state["usual"][:] = usual
        outputs(network, x, 1)
        return stream_of(network)._recall(None)[0]

    @pytest.mark.parametrize(("length", "share"), [(150, 0.3), (400, 0.45), (1000, 0.65)])
    def test_a_run_of_one_class_is_remembered_as_all_classes_would_be(self, bright, length, share):
        """The longer it is the less, for what is always there is what is usual."""
        network, every = bright
        run = frames(length, 0.5)
        expected = self.remembered(network, "pool", every)
        poisoned = self.remembered(network, "pool", run) - expected
        assert (self.remembered(network, "corrected", run) - expected).norm() < (
            share * poisoned.norm()
        )

    def test_what_a_stream_is_used_to_is_not_taken_off(self, bright):
        """A class that is always predicted, as it may be under a shift."""
        network, _ = bright
        x, only = frames(40), torch.tensor([0.0, 1.0, 0.0, 0.0])
        expected = self.remembered(network, "pool", x)
        alike = self.remembered(network, "corrected", x) - expected
        found = self.remembered(network, "corrected", x, only) - expected
        # what classes differ by is added to the variance: deeper means are not quite the same
        assert found.norm() < 0.2 * alike.norm()

    def test_needs_to_know_its_classes(self, network):
        ttnorm.stream_(network, memory="corrected")
        network[8] = nn.Linear(8, 5)
        with pytest.raises(ValueError, match=r"shape \(2, 5\), expected predictions \(N, 4\)"):
            network(frames(2))
        del network.__dict__[CLASSES]
        with pytest.raises(ValueError, match="not known what classes do"):
            ttnorm.stream_(network, memory="corrected")


class TestRouted:
    def test_is_the_default_where_it_can_be(self, network):
        assert stream_of(ttnorm.stream_(network)).config.memory == "routed"
        bare = ttnorm.convert_(nn.Sequential(nn.BatchNorm2d(3)), 0.1)
        assert stream_of(ttnorm.stream_(bare)).config.memory == "balanced"

    def test_domains_that_alternate_are_told_apart(self, network):
        """As if each had a stream of its own, once there were a few frames of both."""
        ttnorm.stream_(network, memory="routed", window=40)
        dark, light = frames(80, 0.0, 0.2), frames(80, 0.5, 1.0)
        x = torch.stack((dark, light), 1).flatten(0, 1)
        routed = outputs(network, x, 1)
        assert ttnorm.health(network)[None].domains == 2
        ttnorm.stream_(network, memory="corrected", window=40)
        one = outputs(network, x, 1)
        ttnorm.reset_stream_(network)
        oracle = outputs(network, x, 1, ["dark", "light"] * 80)
        late = slice(4 * FIRST, None)
        assert (routed - oracle)[late].norm() < 0.3 * (one - oracle)[late].norm()

    def test_a_stream_of_one_domain_has_one(self, network):
        ttnorm.stream_(network, memory="routed")
        x = frames(160)
        routed = outputs(network, x, 4)
        assert ttnorm.health(network)[None].domains == 1
        ttnorm.stream_(network, memory="corrected")
        torch.testing.assert_close(routed, outputs(network, x, 4), atol=2e-2, rtol=0)

    def test_a_frame_of_no_domain_is_in_no_memory(self, network):
        ttnorm.stream_(network, memory="routed")
        outputs(network, frames(5 * EVERY), 4)
        before = stream_of(network).state["mean"].clone()
        network(frames(1, -3.0, 3.0))
        assert torch.equal(stream_of(network).state["mean"], before)
        assert ttnorm.health(network)[None].frames == 5 * EVERY + 1

    def test_a_domain_that_does_not_come_any_more_is_forgotten(self, network):
        ttnorm.stream_(network, memory="routed")
        outputs(network, torch.cat((frames(64, 0.0, 0.2), frames(64, 0.5, 1.0))), 8)
        assert ttnorm.health(network)[None].domains == 2
        outputs(network, frames(RECENT, 0.5, 1.0), 32)
        assert ttnorm.health(network)[None].domains == 1

    def test_needs_to_know_how_source_images_vary(self, small_network, tmp_path):
        model = ttnorm.convert_(small_network, 0.3)
        with pytest.raises(ValueError, match="not known how source images vary"):
            ttnorm.stream_(model, memory="routed")
        loader = [(frames(16), torch.randint(4, (16,)))]
        ttnorm.post_train_(model, loader, ttnorm.PostTrainConfig(epochs=0))
        ttnorm.save(model, tmp_path / "alpha")
        other = ttnorm.load_(ttnorm.revert_(copy.deepcopy(model)), tmp_path / "alpha")
        ttnorm.stream_(other, memory="routed")
        assert other(frames(3)).shape == (3, 4)

    @pytest.mark.parametrize(("depth", "numbers"), [(1, 12), (2, 28)])
    def test_looks_as_deep_as_content_was_measured(self, network, depth, numbers):
        x = frames(200)
        network.__dict__[CONTENT] = content_of(network, [(x, torch.zeros(200))], depth=depth)
        ttnorm.stream_(network, memory="routed")
        passed = []
        deeper = network[3].register_forward_hook(lambda *_: passed.append(1))
        network(x[:4])
        deeper.remove()
        # the forward itself comes to the second convolution, and a shallow pass of two norms
        assert len(passed) == depth
        described = stream_of(network).state["frames"][0, :4]
        mean, whitening = network.__dict__[CONTENT]
        assert described.shape == (4, numbers)
        layers = stream_of(network).layers
        raw = describe_frames(layers, lambda: network.forward(x[:4]), size=numbers)
        torch.testing.assert_close(described, (raw - mean) @ whitening.T)


def test_wide_norms_are_not_what_frames_are_told_apart_by():
    """What is measured of them has the square of their channels."""
    norms = [nn.BatchNorm1d(width) for width in (300, 300)]
    model = nn.Sequential(nn.Linear(5, 300), norms[0], nn.Linear(300, 300), norms[1]).eval()
    loader = [(torch.rand(64, 5), torch.arange(64) % 4)]
    assert len(content_of(model, loader).mean) == 600
    wide = nn.Sequential(nn.Linear(5, 600), nn.BatchNorm1d(600)).eval()
    assert content_of(wide, loader) is None
