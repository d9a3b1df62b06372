"""Graphs for production: torch.compile, torch.export and ONNX agree with eager at any size."""

import copy
import shutil

import onnx
import onnxruntime
import pytest
import torch
from streaming import frames, knowing_its_source
from torch import nn
from torch._dynamo.testing import CompileCounter

import ttnorm
from ttnorm.classes import classes_of
from ttnorm.models.wide_resnet import WideResNet
from ttnorm.routes import EVERY
from ttnorm.shallow import content_of
from ttnorm.tree import CLASSES, CONTENT

BATCH_SIZES = (1, 2, 7, 200)


@pytest.fixture(scope="module")
def network():
    """A residual network whose layers trust the batch to all degrees."""
    torch.manual_seed(0)
    model = WideResNet(depth=10, width=1)
    for _ in range(10):
        model(torch.rand(64, 3, 16, 16))
    ttnorm.convert_(model, alpha=0.5)
    for alpha in ttnorm.alphas(model).values():
        alpha.uniform_()
    return model.eval()


@pytest.fixture(scope="module")
def session(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "network.onnx"
    ttnorm.to_onnx(network, torch.rand(1, 3, 16, 16), path)
    onnx.checker.check_model(str(path))
    assert onnx.load(path).opset_import[0].version >= 17
    return onnxruntime.InferenceSession(path)


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_onnxruntime_agrees_with_eager(network, session, batch_size):
    x = torch.rand(batch_size, 3, 16, 16) ** 2  # another distribution than the training one
    (output,) = session.run(["output"], {"x": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(output), network(x), rtol=0, atol=1e-4)


def test_the_onnx_graph_adapts(session):
    """A sample's output depends on the rest of its batch, as it must."""
    x = torch.rand(8, 3, 16, 16)
    (dark,) = session.run(None, {"x": torch.cat((x[:1], 0.1 * x[1:])).numpy()})
    (bright,) = session.run(None, {"x": x.numpy()})
    assert abs(dark[0] - bright[0]).max() > 1e-2


@pytest.mark.parametrize("memory", ["corrected", "balanced", "pool"])
def test_a_stream_in_onnxruntime_is_the_stream_in_eager(network, tmp_path, memory):
    """500 frames, a few of them together and one broken, with the state handed on from outside."""
    model = copy.deepcopy(network)
    loader = [(torch.rand(60, 3, 16, 16), torch.arange(60) % 5)]
    model.__dict__[CLASSES] = classes_of(model, loader)
    ttnorm.stream_(model, memory=memory)
    ttnorm.to_onnx(model, torch.rand(1, 3, 16, 16), tmp_path / "stream.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "stream.onnx")
    state = {name: t.numpy() for name, t in ttnorm.stream_state(model).items()}
    for number in range(500):
        x = torch.rand(3 if number % 50 == 0 else 1, 3, 16, 16) ** 2
        if number == 77:
            x[0, 0] = torch.nan
        output, *following = session.run(None, {"x": x.numpy(), **state})
        state = dict(zip(state, following, strict=True))
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(
            torch.from_numpy(output), expected, rtol=0, atol=1e-4, equal_nan=True
        )
    for name, expected in ttnorm.stream_state(model).items():
        torch.testing.assert_close(torch.from_numpy(state[name]), expected, rtol=1e-4, atol=1e-4)
    assert ttnorm.health(model)[None].rejected == 1


def alternating(count=500):
    """Batches of two domains that alternate, a few of them larger and two with a broken frame."""
    for number in range(count):
        size = 3 if number % 50 == 0 else 1
        x = frames(size, 0.6, 1.0) if number // 5 % 2 else frames(size)
        if number % 100 == 25:
            x = torch.cat((frames(20), frames(20, 0.6, 1.0)))
        if number == 77:
            x[0, 0] = torch.nan
        if number == 222:
            x = 255 * x
        yield x


def check_a_routed_stream(model, run):
    """That `run(x, state)`, a graph, gives what eager mode does; domains are found in between."""
    state = ttnorm.stream_state(model)
    for x in alternating():
        output, *following = run(x, state)
        state = dict(zip(state, following, strict=True))
        with torch.no_grad():
            torch.testing.assert_close(output, model(x), rtol=0, atol=1e-4, equal_nan=True)
    for name, expected in ttnorm.stream_state(model).items():
        torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-4)
    assert state["there"].sum() == 2
    assert state["looked"] == state["seen"] // EVERY
    assert ttnorm.health(model)[None].rejected == 2


def test_a_routed_stream_in_onnxruntime_is_the_stream_in_eager(small_network, tmp_path):
    model = ttnorm.stream_(knowing_its_source(small_network), memory="routed")
    ttnorm.to_onnx(model, frames(1), tmp_path / "stream.onnx")
    onnx.checker.check_model(tmp_path / "stream.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "stream.onnx")

    def run(x, state):
        given = {name: t.numpy() for name, t in {"x": x, **state}.items()}
        return map(torch.from_numpy, session.run(None, given))

    check_a_routed_stream(model, run)


def test_a_routed_stream_s_program_is_the_stream_in_eager(network):
    """With no more layers than it needs: those of the network, and the first three once more."""
    model = copy.deepcopy(network)
    loader = [(frames(200), torch.arange(200) % 5)]
    model.__dict__[CONTENT] = content_of(model, loader)
    model.__dict__[CLASSES] = classes_of(model, loader)
    ttnorm.stream_(model, memory="routed")
    program, state = ttnorm.to_exported_program(model, frames(1)), ttnorm.stream_state(model)
    convolutions = [n for n in program.graph.nodes if n.target is torch.ops.aten.conv2d.default]
    assert len(convolutions) == 3 + sum(isinstance(m, nn.Conv2d) for m in model.modules())
    graph = program.module()
    assert not any(t.requires_grad for t in graph(frames(1), *state.values())[1:])
    check_a_routed_stream(model, lambda x, state: graph(x, *state.values()))


def test_a_routed_stream_that_knows_no_classes_is_exported_under_its_names(small_network):
    model = knowing_its_source(small_network)
    del model.__dict__[CLASSES]
    ttnorm.stream_(model, memory="routed")
    program = ttnorm.to_exported_program(model, frames(1))
    state = ttnorm.stream_state(model)
    assert program.graph_signature.user_inputs == ("x", *state)
    graph = program.module()
    for x in (*frames(80).split(20), frames(2)):
        output, *following = graph(x, *state.values())
        state = dict(zip(state, following, strict=True))
        with torch.no_grad():
            torch.testing.assert_close(output, model(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("inside", [False, True])
def test_a_stream_is_exported_wherever_it_lies_in_memory(network, inside):
    model = ttnorm.stream_(copy.deepcopy(network), memory="pool", max_streams=2)
    x = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        with ttnorm.streams(model, ["a", "b"]):
            model(x)
            program = ttnorm.to_exported_program(model, x) if inside else None
        model(x)  # in the second row, for "a" was the one unused for longest
        program = program or ttnorm.to_exported_program(model, x)
        output, *_ = program.module()(x, *ttnorm.stream_state(model).values())
        torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-5)


def test_torch_export_agrees_with_eager(network):
    program = ttnorm.to_exported_program(network, torch.rand(1, 3, 16, 16))
    for batch_size in BATCH_SIZES:
        x = torch.rand(batch_size, 3, 16, 16)
        torch.testing.assert_close(program.module()(x), network(x), rtol=1e-4, atol=1e-5)


def test_a_compiled_network_exports_as_what_it_wraps(network):
    program = ttnorm.to_exported_program(torch.compile(network), torch.rand(2, 3, 16, 16))
    x = torch.rand(5, 3, 16, 16)
    torch.testing.assert_close(program.module()(x), network(x), rtol=1e-4, atol=1e-5)


def test_an_exported_program_survives_its_file(network, tmp_path):
    path = tmp_path / "network.pt2"
    torch.export.save(ttnorm.to_exported_program(network, torch.rand(2, 3, 16, 16)), path)
    x = torch.rand(5, 3, 16, 16)
    loaded = torch.export.load(path).module()
    torch.testing.assert_close(loaded(x), network(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.BatchNorm1d, (4,)), (nn.BatchNorm1d, (4, 6)), (nn.BatchNorm3d, (4, 2, 3, 3))],
)
def test_other_dimensions_export(layer, shape, tmp_path):
    model = ttnorm.convert_(nn.Sequential(layer(4)), alpha=0.5)
    path = tmp_path / "layer.onnx"
    ttnorm.to_onnx(model, torch.rand(2, *shape), path)
    session = onnxruntime.InferenceSession(path)
    for batch_size in (1, 5):
        x = torch.randn(batch_size, *shape)
        (output,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(output), model(x), rtol=0, atol=1e-4)


def test_float64_exports(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()
    x = torch.rand(7, 6, dtype=torch.float64)
    ttnorm.to_onnx(ttnorm.convert_(model.eval(), 0.5), x[:2], tmp_path / "model.onnx")
    (output,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), model(x))


def test_an_unconverted_network_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no test-time normalization layers"):
        ttnorm.to_onnx(
            nn.Sequential(nn.BatchNorm2d(3)), torch.rand(2, 3, 4, 4), tmp_path / "x.onnx"
        )


@pytest.mark.parametrize("opset", [16, 99])
def test_an_opset_that_cannot_be_had_is_refused(opset, tmp_path):
    model = ttnorm.convert_(nn.Sequential(nn.BatchNorm2d(3)), alpha=0.5)
    with pytest.raises(ValueError, match=f"opset is {opset}, expected 17 to ..,"):
        ttnorm.to_onnx(model, torch.rand(2, 3, 4, 4), tmp_path / "x.onnx", opset=opset)
    assert not (tmp_path / "x.onnx").exists()


def test_an_isolated_network_is_refused(network, tmp_path):
    with ttnorm.isolated(network, 2), pytest.raises(ValueError, match="is isolated"):
        ttnorm.to_onnx(network, torch.rand(2, 3, 16, 16), tmp_path / "x.onnx")


def test_several_outputs_keep_their_names(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.norm(x)
            return {"out": y, "aux": y.mean((2, 3))}

    path = tmp_path / "two.onnx"
    ttnorm.to_onnx(ttnorm.convert_(Two(), alpha=0.5), torch.rand(2, 3, 4, 4), path)
    names = [output.name for output in onnxruntime.InferenceSession(path).get_outputs()]
    assert len(names) == 2
    assert "output" not in names


def test_export_leaves_the_mode_alone(network):
    network.train()
    ttnorm.to_exported_program(network, torch.rand(2, 3, 16, 16))
    assert all(module.training for module in network.modules())
    network.eval()


class TestCompile:
    def compiles(self, model, shape, sizes):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        with torch.no_grad():
            for size in sizes:
                compiled(torch.rand(size, *shape))
        return counter.frame_count

    def test_no_recompile_per_batch_size(self):
        """Once for the first size, once for all others, whatever the number of sizes."""
        model = ttnorm.convert_(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3)), 0.3)
        assert self.compiles(model, (3, 8, 8), (2, 7, 200, 64, 33, 5, 128)) == 2

    def test_nor_with_groups(self):
        model = ttnorm.convert_(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3)), 0.3)
        with ttnorm.isolated(model, 4):
            assert self.compiles(model, (3, 8, 8), (8, 12, 10, 7, 16, 5, 9)) == 2

    def test_a_network_compiles_as_often_as_with_batchnorm(self, network):
        """torch itself looks at the batch size of a convolution: one graph more on some CPUs."""
        sizes = (2, 7, 200, 64, 33, 5, 128, 1)
        ours = self.compiles(network, (3, 16, 16), sizes)
        plain = self.compiles(WideResNet(depth=10, width=1).eval(), (3, 16, 16), sizes)
        assert ours == plain

    @pytest.mark.skipif(
        not any(map(shutil.which, ("c++", "g++", "clang++"))),
        reason="inductor needs a C++ compiler",
    )
    def test_inductor_agrees_with_eager(self):
        model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))
        ttnorm.convert_(model, alpha=0.3)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        for size in (1, 4, 9):
            x = torch.rand(size, 3, 8, 8)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)

    def test_gradients_of_the_compiled_function_are_the_analytic_ones(self):
        x = torch.randn(6, 3, 4, 4)
        mean, var, weight, bias = (
            torch.randn(3),
            torch.rand(3) + 0.5,
            torch.randn(3),
            torch.randn(3),
        )
        alpha = torch.tensor([0.0, 0.4, 1.0])

        def gradients(fn):
            inputs = [t.clone().requires_grad_() for t in (x, weight, bias, alpha)]
            y = fn(inputs[0], mean, var, *inputs[1:])
            y.square().sum().backward()
            return [t.grad for t in inputs]

        torch._dynamo.reset()
        fn = ttnorm.functional.test_time_norm
        compiled = gradients(torch.compile(fn, fullgraph=True, backend="aot_eager"))
        for got, expected in zip(compiled, gradients(fn), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_a_stream_beside_several_outputs_has_names(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.bn(x)
            return y, 2 * y

    model = ttnorm.stream_(ttnorm.convert_(Two().eval(), 0.5), memory="pool")
    ttnorm.to_onnx(model, torch.rand(2, 3), tmp_path / "two.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "two.onnx")
    state = list(ttnorm.stream_state(model))
    assert [i.name for i in session.get_inputs()] == ["x", *state]
    names = ["output_0", "output_1", *(f"next_{name}" for name in state)]
    assert [o.name for o in session.get_outputs()] == names


def test_what_is_around_a_network_that_remembers_is_refused(small_network):
    """Its graph would leave the stream's state inside, as it is now."""
    model = nn.Sequential(ttnorm.stream_(ttnorm.convert_(small_network, 0.5), memory="pool"))
    with pytest.raises(ValueError, match="around one that remembers"):
        ttnorm.to_exported_program(model, torch.rand(2, 3, 12, 12))
    assert model(torch.rand(2, 3, 12, 12)).shape == (2, 4)
