"""A stream: batch size stops mattering."""

import copy
import itertools

import numpy as np
import pytest
import torch
from streaming import frames, knowing_its_source, outputs
from torch import nn

import ttnorm
from ttnorm import StreamConfig
from ttnorm.files import read_safetensors, write_atomically
from ttnorm.routes import Routes
from ttnorm.stream import stream_of
from ttnorm.stream_config import MEMORIES


@pytest.fixture
def network(small_network):
    return knowing_its_source(small_network)


class WrittenOut:
    """One layer's pool in NumPy's float64: Eq. 2 with the moments of an exponential window."""

    def __init__(self, layer, window, source):
        self.layer, self.window = layer, window
        self.count, self.mean = source, layer.running_mean.double().numpy().copy()
        self.var = layer.running_var.double().numpy().copy()

    def __call__(self, x):
        layer, x = self.layer, x.detach().double().numpy()
        batch_mean, batch_var = x.mean((0, 2, 3)), x.var((0, 2, 3))
        left = self.count * (1 - 1 / self.window) ** len(x)
        self.count = left + len(x)
        share = len(x) / self.count
        mean = (1 - share) * self.mean + share * batch_mean
        second = (1 - share) * (self.var + self.mean**2) + share * (batch_var + batch_mean**2)
        self.mean, self.var = mean, second - mean**2
        alpha = layer.alpha.double().numpy()
        source_mean, source_var = (
            t.double().numpy() for t in (layer.running_mean, layer.running_var)
        )
        mixed = alpha * self.mean + (1 - alpha) * source_mean
        var = alpha * self.var + (1 - alpha) * source_var
        var += alpha * (1 - alpha) * (self.mean - source_mean) ** 2
        scale = layer.weight.detach().double().numpy() / np.sqrt(var + layer.eps)
        y = (x - mixed[:, None, None]) * scale[:, None, None]
        return torch.from_numpy(y + layer.bias.detach().double().numpy()[:, None, None])


@pytest.mark.parametrize("sizes", [(7, 7, 7), (9, 2, 14, 5)])
def test_the_pool_is_an_exponential_window_over_the_frames(network, sizes):
    reference = copy.deepcopy(network)
    layers = [WrittenOut(m, window=20, source=4.0) for m in network if hasattr(m, "alpha")]
    for written, layer in zip(layers, (m for m in reference if hasattr(m, "alpha")), strict=True):
        layer.standardise = lambda x, written=written: written(x).float()
    ttnorm.stream_(network, window=20, memory="pool")
    for size in sizes:  # all of them more than a negligible part of the window
        x = frames(size)
        torch.testing.assert_close(network(x), reference(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("memory", MEMORIES)
def test_batch_size_hardly_matters(network, memory):
    """After a few windows' worth of frames, one at a time gives what batches of 50 give."""
    x = frames(800) * (0.9 + 0.2 * torch.rand(800, 1, 1, 1))  # they differ, as pictures do
    ttnorm.stream_(network, window=100, memory=memory)
    by_size = {}
    for size in (50, 10, 1):
        ttnorm.reset_stream_(network)
        by_size[size] = outputs(network, x, size)[600:]
    ttnorm.end_stream_(network)
    alone = outputs(network, x, 1)[600:]
    for size in (10, 1):
        distance = (by_size[size] - by_size[50]).abs().mean()
        assert distance < 0.1 * (alone - by_size[50]).abs().mean()


@pytest.mark.parametrize("memory", MEMORIES)
def test_alpha_zero_is_plain_batchnorm(network, memory):
    x = frames(12)
    expected = ttnorm.revert_(copy.deepcopy(network))(x)
    model = ttnorm.stream_(ttnorm.convert_(network, 0.0), memory=memory)
    torch.testing.assert_close(outputs(model, x, 5), expected)


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_first_frames_are_nearly_plain_batchnorm(network, memory):
    x = frames(1)
    offline = network(x)
    ttnorm.stream_(network, memory=memory)
    first = network(x)
    ttnorm.revert_(network)
    plain = network(x)
    assert (first - plain).abs().max() < 0.5 * (offline - plain).abs().max()


class TestLeavesNothingBehind:
    def test_end_stream_gives_batches_back_their_own_statistics(self, network):
        x = frames(6)
        expected = network(x)
        ttnorm.stream_(network)
        network(frames(10, 0.0, 0.1))
        ttnorm.end_stream_(network)
        assert torch.equal(network(x), expected)
        with pytest.raises(ValueError, match="remembers no stream"):
            ttnorm.health(network)

    def test_revert_ends_it(self, network):
        ttnorm.stream_(network)
        ttnorm.revert_(network)
        assert not network._forward_hooks
        assert not network._forward_pre_hooks
        assert all("standardise" not in module.__dict__ for module in network)

    def test_an_exception_inside_a_forward_is_forgotten(self, network):
        ttnorm.stream_(network)
        with pytest.raises(RuntimeError):
            network(torch.rand(2, 5, 12, 12))
        network(frames(2))
        assert ttnorm.health(network)[None].frames == 2

    def test_gradients_run_through_one_forward_and_no_further(self, network):
        ttnorm.stream_(network)
        for _ in range(2):  # the second would fail if the memory held the first one's graph
            network(frames(4)).square().sum().backward()
        assert network[1].weight.grad.abs().sum() > 0
        assert not any(t.requires_grad for t in stream_of(network).state.values())

    @pytest.mark.parametrize("what", ["isolated", "fuse", "fold_", "prior"])
    def test_what_knows_no_streams_says_so(self, network, what):
        calls = {
            "isolated": lambda: ttnorm.isolated(network, 2).__enter__(),
            "fuse": lambda: ttnorm.fuse(network),
            "fold_": lambda: ttnorm.fold_(network),
            "prior": lambda: ttnorm.estimate_prior(network, [(frames(2), torch.tensor([0, 1]))]),
        }
        ttnorm.stream_(network)
        with pytest.raises(ValueError, match="does not work on a network that remembers"):
            calls[what]()
        network(frames(1))
        assert ttnorm.health(network)[None].frames == 1


def test_health_tells_the_source_from_a_shift(network):
    ttnorm.stream_(network, memory="pool")
    with ttnorm.streams(network, ["at home"] * 100):
        network(torch.rand(100, 3, 12, 12))  # what its BatchNorm layers saw in training
    with ttnorm.streams(network, ["away"] * 100):
        network(frames(100, 0.7, 0.9))
    health = ttnorm.health(network)
    assert health["at home"].shift < 0.05 < health["away"].shift
    assert health["away"].effective_count == pytest.approx(100, abs=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "none"}, "memory is 'none', expected pool or balanced"),
        ({"window": 0}, "window is 0"),
        ({"window": float("nan")}, "window is nan"),
        ({"max_streams": 0}, "max_streams is 0"),
        ({"slots": 2.5}, r"slots is 2\.5, expected a whole number of at least 1"),
        ({"source": 0.0}, "source is 0.0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        StreamConfig(**options)


def test_a_config_says_what_options_say(network):
    x = frames(12)
    ttnorm.stream_(network, window=30, memory="pool")
    expected = outputs(network, x, 3)
    ttnorm.stream_(network, StreamConfig(window=30, memory="corrected"), memory="pool")
    assert torch.equal(outputs(network, x, 3), expected)
    with pytest.raises(TypeError, match="windw"):
        ttnorm.stream_(network, windw=30)


def test_a_network_without_test_time_normalization_is_refused(small_network):
    with pytest.raises(ValueError, match=r"Call ttnorm\.convert_"):
        ttnorm.stream_(small_network)


def test_a_layer_that_folds_samples_together_is_refused(folding_network):
    model = ttnorm.stream_(ttnorm.convert_(folding_network, 0.5), memory="pool")
    with pytest.raises(ValueError, match="sees 8 samples in a batch of 4"):
        model(frames(4))


def test_a_layer_used_twice_and_one_never_used():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
            self.unused, self.fc = nn.BatchNorm2d(5), nn.Linear(3, 4)

        def forward(self, x):
            return self.fc(self.norm(self.conv(self.norm(x).relu())).relu().mean((2, 3)))

    model = ttnorm.stream_(ttnorm.convert_(Odd(), 0.5))
    outputs(model, frames(30), 4)
    stream = stream_of(model)
    assert (stream.state["mean"][0, :, 3:] == 0).all()
    assert (stream.state["mean"][0, :, :3] != 0).any()


def test_a_compiled_network_remembers_as_it_does_uncompiled(network):
    other = ttnorm.stream_(copy.deepcopy(network))
    compiled = torch.compile(ttnorm.stream_(network))
    with torch.no_grad():
        for part in frames(12).split(3):
            torch.testing.assert_close(compiled(part), other(part), atol=1e-5, rtol=1e-5)
    assert ttnorm.health(compiled)[None].frames == 12


def test_half_precision(network):
    x = frames(40)
    reference = ttnorm.stream_(copy.deepcopy(network))
    half = ttnorm.stream_(network.bfloat16())
    for part in x.split(8):
        expected, actual = reference(part), half(part.bfloat16())
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, atol=0.1, rtol=0.1)


def test_autocast_makes_no_domains(network, monkeypatch):
    """They are told apart in full precision: in half of it noise looks like many."""
    seen = []
    monkeypatch.setattr(Routes, "look", lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    ttnorm.stream_(network, memory="routed")
    with torch.autocast("cpu", torch.bfloat16):
        network(frames(4))
    assert seen == [False]


@pytest.mark.parametrize("memory", MEMORIES)
def test_under_autocast_what_is_remembered_is_not_rounded(network, memory):
    reference = ttnorm.stream_(copy.deepcopy(network), memory=memory)
    ttnorm.stream_(network, memory=memory)
    for part in frames(40).split(8):
        reference(part)
        with torch.autocast("cpu", torch.bfloat16):
            network(part)
    found, expected = stream_of(network).state, stream_of(reference).state
    assert all(t.dtype == expected[name].dtype for name, t in found.items())
    torch.testing.assert_close(found["mean"], expected["mean"], atol=0.05, rtol=0)


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_empty_batch_changes_nothing(network, memory):
    ttnorm.stream_(network, memory=memory)
    network(frames(4))
    before = {name: t.clone() for name, t in stream_of(network).state.items()}
    assert network(frames(4)[:0]).shape == (0, 4)
    for name, tensor in stream_of(network).state.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_one_dimension():
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    ttnorm.stream_(ttnorm.convert_(model, 0.7), window=50)
    for size in itertools.chain([1] * 60, [7]):
        assert model(torch.randn(size, 5) + 3).isfinite().all()
    assert ttnorm.health(model)[None].frames == 67


def test_what_a_network_does_to_a_layer_s_input_afterwards_is_not_remembered():
    class Residual(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.bn, self.in_place = nn.BatchNorm1d(3), in_place

        def forward(self, x):
            h = 2 * x
            return h.add_(self.bn(h)) if self.in_place else h + self.bn(h)

    x = torch.randn(6, 3)
    states = []
    for in_place in (False, True):
        model = ttnorm.stream_(ttnorm.convert_(Residual(in_place).eval(), 0.5), memory="pool")
        with torch.no_grad():
            model(x)
        states.append(ttnorm.stream_state(model)["mean"])
    assert torch.equal(*states)


def test_a_graph_that_would_never_adapt_is_refused(network):
    ttnorm.stream_(network, memory="pool")
    with pytest.raises(RuntimeError, match=r"never adapt.*ttnorm\.to_onnx"):
        torch.jit.trace(network, frames(1))
    with pytest.raises(Exception, match=r"never adapt.*ttnorm\.to_onnx"):
        torch.export.export(network, (frames(2),))


def test_a_call_without_a_tensor_is_named(small_network):
    model = ttnorm.stream_(ttnorm.convert_(small_network, 0.5), memory="pool")
    with pytest.raises(ValueError, match="called with a dict, expected a tensor"):
        model({"x": torch.rand(1, 3, 12, 12)})


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_inference_mode_saw_goes_on_outside_of_it(network, memory):
    ttnorm.stream_(network, memory=memory)
    with torch.inference_mode():
        network(frames(3))
        with ttnorm.streams(network, ["door", "yard", "yard"]):
            network(frames(3))
    with torch.no_grad():
        network(frames(3))
    assert ttnorm.health(network)[None].frames == 6
    ttnorm.reset_stream_(network)


class TestPartOfANetwork:
    """A backbone with a stream, in a network around it."""

    @pytest.fixture
    def whole(self, network):
        whole = nn.Sequential(network, nn.BatchNorm1d(4)).eval()
        ttnorm.convert_(whole, 0.5)
        ttnorm.stream_(network, memory="pool")
        return whole

    def test_what_knows_no_streams_refuses_a_part_of_what_remembers(self, network):
        """It would leave the stream's layers as if there were none."""
        around = ttnorm.stream_(nn.Sequential(network), memory="pool")
        loader, x = [(frames(8), torch.arange(8) % 4)], frames(4)
        for use in (ttnorm.estimate_prior, ttnorm.post_train_):
            with pytest.raises(ValueError, match=r"remembers a stream\. Call ttnorm\.end_stream_"):
                use(network, loader)
        with (
            pytest.raises(ValueError, match="isolated does not work on a network"),
            ttnorm.isolated(network, 2),
        ):
            pass
        expected = ttnorm.stream_(copy.deepcopy(around), memory="pool")(x)
        assert torch.equal(around(x), expected)

    def test_what_knows_no_streams_refuses_it(self, whole):
        with (
            pytest.raises(ValueError, match="isolated does not work on a network"),
            ttnorm.isolated(whole, 2),
        ):
            pass
        with pytest.raises(ValueError, match="Post-training does not work on a network"):
            ttnorm.post_train_(whole, [(frames(4), torch.arange(4))])
        with pytest.raises(ValueError, match="fuse does not work on a network"):
            ttnorm.fuse(whole)

    def test_reverting_the_whole_ends_it(self, whole):
        ttnorm.revert_(whole)
        assert whole(frames(2)).shape == (2, 4)
        assert not whole[0]._forward_pre_hooks

    def test_a_part_of_what_remembers_is_not_reverted(self, network):
        ttnorm.stream_(network, memory="pool")
        part = next(m for m in network.modules() if isinstance(m, ttnorm.TTNorm2d))
        with pytest.raises(ValueError, match="with the network that stream_ was given"):
            ttnorm.revert_(part)
        assert network(frames(2)).shape == (2, 4)


def test_a_file_of_another_network_or_a_damaged_one_is_refused(network, tmp_path):
    ttnorm.stream_(network, memory="pool")
    network(frames(8))
    path = tmp_path / "stream.safetensors"
    ttnorm.save_stream(network, path)
    other = copy.deepcopy(network)
    for layer in other.modules():
        if isinstance(layer, ttnorm.layers.TTNormBase):
            layer.running_mean += 1
    with pytest.raises(ValueError, match=r"other running statistics.*begin anew with stream_"):
        ttnorm.load_stream_(other, path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        ttnorm.load_stream_(network, path)


def test_a_file_of_a_newer_version_is_refused(network, tmp_path):
    ttnorm.stream_(network, memory="pool")
    path = tmp_path / "stream.safetensors"
    ttnorm.save_stream(network, path)
    tensors, metadata = read_safetensors(path)
    write_atomically(path, tensors, {**metadata, "format_version": 2, "ttnorm": "9.9"})
    with pytest.raises(ValueError, match=r"format 2, written by ttnorm 9\.9; .*Upgrade ttnorm"):
        ttnorm.load_stream_(network, path)


def test_options_without_a_name_are_refused(network):
    with pytest.raises(TypeError, match="config is 'pool', expected a StreamConfig"):
        ttnorm.stream_(network, "pool")
