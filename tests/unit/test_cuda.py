"""On a GPU the same numbers as in float64 on the CPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from small_network import domains, with_alphas

import ttnorm
from ttnorm import capture, functional, kernels
from ttnorm.bench.evaluate import evaluate
from ttnorm.bench.job import Job
from ttnorm.bench.records import RecordFile, read_records
from ttnorm.classes import classes_of
from ttnorm.data.loader import DeviceLoader
from ttnorm.methods.swr import swr
from ttnorm.methods.tent import tent
from ttnorm.methods.ttn_online import ttn_online
from ttnorm.shallow import content_of
from ttnorm.stream import find_domains
from ttnorm.stream_config import MEMORIES
from ttnorm.tree import CLASSES, CONTENT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("group_size", [None, 1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_forward_and_backward(dtype, channels_last, group_size):
    torch.manual_seed(0)
    x = (1 + 2 * torch.randn(8, 16, 9, 7)).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    mean, weight, bias, seed = *torch.randn(3, 16), torch.randn(x.shape).to(dtype)
    var, alpha = torch.rand(16) + 0.5, torch.rand(16)

    def run(device, to, exact):
        inputs = [x.to(device, to)] + [t.to(device, exact) for t in (weight, bias, alpha)]
        inputs = [t.detach().requires_grad_() for t in inputs]
        y = functional.test_time_norm(
            inputs[0],
            mean.to(device, exact),
            var.to(device, exact),
            *inputs[1:],
            group_size=group_size,
        )
        y.backward(seed.to(device, to))
        return [y.detach(), *(t.grad for t in inputs)]

    precise = torch.float64 if dtype == torch.float64 else torch.float32
    eps = torch.finfo(dtype).eps
    reference = run("cpu", torch.float64, torch.float64)
    for got, expected in zip(run("cuda", dtype, precise), reference, strict=True):
        assert (got.cpu().double() - expected).norm() <= (4 * eps + 1e-6) * expected.norm()
    assert run("cuda", dtype, precise)[0].stride() == x.stride()


def test_alpha_zero_and_one_are_batchnorm():
    x, mean, var = torch.randn(8, 4, 5, 5).cuda(), torch.randn(4).cuda(), torch.rand(4).cuda() + 0.5
    zero = functional.test_time_norm(x, mean, var, None, None, torch.zeros(4).cuda())
    torch.testing.assert_close(zero, F.batch_norm(x, mean, var))
    one = functional.test_time_norm(x, mean, var, None, None, torch.ones(4).cuda())
    torch.testing.assert_close(one, F.batch_norm(x, None, None, training=True))


def test_prior_and_post_training(small_network):
    loader = [(torch.rand(16, 3, 12, 12), torch.randint(4, (16,))) for _ in range(4)]
    config = ttnorm.PostTrainConfig(epochs=3, lr=0.02)
    results = [
        ttnorm.post_train_(copy.deepcopy(small_network).to(device), loader, config)
        for device in ("cpu", "cuda")
    ]
    for name in ("1", "4"):
        torch.testing.assert_close(
            results[1].alpha[name].cpu(), results[0].alpha[name], rtol=0, atol=0.02
        )


def test_amp(small_network):
    loader = [(torch.rand(16, 3, 12, 12), torch.randint(4, (16,))) for _ in range(4)]
    for amp in ("bfloat16", "float16"):
        config = ttnorm.PostTrainConfig(epochs=1, amp=amp)
        result = ttnorm.post_train_(copy.deepcopy(small_network).cuda(), loader, config)
        assert all(a.isfinite().all() for a in result.alpha.values())


SHAPES = [
    (64, 24, 14, 14),
    (9, 300, 7, 7),
    (70, 33),
    (6, 20, 50),
    (3, 8, 4, 9, 9),
    (33, 16, 32, 32),
    (40, 600, 14, 14),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group_size", [None, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_float64_to_rounding(shape, group_size, dtype):
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for layout in {torch.contiguous_format, layouts.get(len(shape), torch.contiguous_format)}:
        x = (3 + 2 * torch.randn(shape, device="cuda")).to(dtype).contiguous(memory_format=layout)
        weight, bias, mean = torch.randn(3, shape[1], device="cuda")
        var, alpha = torch.rand(2, shape[1], device="cuda")
        var, alpha[0], alpha[-1] = var + 0.5, 0, 1
        seed = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout)
        exact = [t.double().requires_grad_() for t in (x, weight, bias, alpha)]
        expected = functional.test_time_norm(
            exact[0], mean.double(), var.double(), *exact[1:], group_size=group_size
        )
        expected.backward(seed.double())
        y, *moments = kernels.forward(x, weight, bias, alpha, mean, var, 1e-5, group_size, True)
        grads = kernels.backward(
            seed, x, weight, alpha, mean, var, *moments, 1e-5, group_size, True
        )
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert y.stride() == x.stride()
        for found, wanted in zip((y, *grads), (expected, *(t.grad for t in exact)), strict=True):
            scale = wanted.abs().max().clamp(min=1)
            assert ((found - wanted).abs().max() / scale).item() < tolerance


def test_where_triton_fails_pytorch_does_it(monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("no C compiler")

    x = torch.randn(4, 3, 5, 5, device="cuda")
    arguments = (torch.zeros(3).cuda(), torch.ones(3).cuda(), None, None, torch.ones(3).cuda())
    expected = functional.test_time_norm(x, *arguments)
    kernels._work_on.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_forward_code", fail)
        torch.testing.assert_close(functional.test_time_norm(x, *arguments), expected)
    assert "no C compiler" in caplog.text
    kernels._work_on.cache_clear()


def test_moments_of_many_values_far_from_zero():
    x = 1e3 + torch.randn(64, 8, 112, 112, device="cuda")
    expected_var, expected_mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    for layout in (torch.contiguous_format, torch.channels_last):
        mean, var = kernels.moments(x.contiguous(memory_format=layout))
        assert torch.allclose(mean.double(), expected_mean, rtol=1e-6)
        assert torch.allclose(var.double(), expected_var, rtol=1e-4)


def _network():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(16, 32, 3, stride=2), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 4),
    )  # fmt: skip
    for _ in range(20):
        model(torch.rand(64, 3, 16, 16))
    return model.eval().cuda()


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # switched off above
def test_compiled_on_a_gpu_it_gives_the_same_outputs_and_gradients():
    model = ttnorm.convert_(_network(), 0.4)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    x = torch.rand(24, 3, 16, 16, device="cuda")
    for network in (model, compiled):
        network(x).square().sum().backward()
    assert torch.allclose(model(x), compiled(x), atol=1e-4)
    pairs = zip(model.parameters(), compiled.parameters(), strict=True)
    for ours, theirs in pairs:
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    with ttnorm.isolated(model, 5), torch.no_grad():
        grouped = model(x)
    apart = torch.cat([model(part) for part in x.split(5)])
    assert torch.allclose(grouped, apart, atol=1e-4)


def test_under_autocast_the_layer_takes_what_comes():
    model = ttnorm.convert_(_network(), 0.4)
    x = torch.rand(24, 3, 16, 16, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        half = model(x)
    assert torch.allclose(half.float(), model(x), atol=3e-2)


def test_a_repeated_step_is_recorded_and_does_the_same():
    x = torch.rand(6, 10, device="cuda")
    state = torch.zeros(10, device="cuda")

    def step(batch):
        state.add_(batch.mean(0))
        return state.square().sum()

    repeated, expected = capture.Repeated(step), torch.zeros(10, device="cuda")
    for i in range(10):
        found = repeated(x * i)
        expected += (x * i).mean(0)
        assert torch.allclose(found, expected.square().sum())
    assert len(repeated.recorded) == 1
    repeated(x[:3])  # another shape is called, not replayed
    assert torch.allclose(state, expected + x[:3].mean(0))


def test_graphs_that_take_turns_share_their_memory():
    x, mebibyte = torch.ones(1, device="cuda"), 2**20

    def grown(**options):
        repeated = capture.Repeated(lambda x: (x.expand(64 * mebibyte) * 2).sum(), **options)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(3):
            assert repeated(x).item() == 128 * mebibyte
        assert repeated.recorded
        torch.cuda.empty_cache()
        return repeated, torch.cuda.memory_reserved() - before

    first, alone = grown(warm_up=1)
    second, beside = grown(warm_up=1, beside=first)
    assert alone >= 256 * mebibyte
    assert beside <= 32 * mebibyte
    assert first(x).item() == second(x).item() == 128 * mebibyte


def test_what_cannot_be_recorded_is_called():
    repeated = capture.Repeated(lambda x: x * x.sum().item())
    x = torch.rand(3, device="cuda")
    for _ in range(6):
        assert torch.allclose(repeated(x), x * x.sum())
    assert not repeated.recorded


@pytest.mark.parametrize(("groups", "graphs"), [(None, 1), ((4, 24), 2)])
def test_recorded_post_training_gives_the_alpha_of_plain_steps(groups, graphs, monkeypatch):
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (240, 3, 16, 16), generator=g, dtype=torch.uint8).cuda()
    labels = torch.randint(4, (240,), generator=g).cuda()
    results, made = [], []

    class Watched(capture.Repeated):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr("ttnorm.fitting.Repeated", Watched)
    for record in (True, False):
        if not record:
            monkeypatch.setattr("ttnorm.fitting.Repeated", lambda function, **_: function)
        loader = DeviceLoader(images, labels, 24)
        config = ttnorm.PostTrainConfig(epochs=3, lr=0.02, group_sizes=groups)
        results.append(ttnorm.post_train_(_network(), loader, config).alpha)
    assert sum(len(repeated.recorded) for repeated in made) == graphs  # the shift is part of them
    for name, alpha in results[0].items():
        assert torch.allclose(alpha, results[1][name], atol=2e-3)


@pytest.mark.parametrize("make", [tent, swr, ttn_online])
def test_a_recorded_window_does_what_the_plain_one_does(make, monkeypatch):
    g = torch.Generator().manual_seed(0)
    x = torch.rand(8, 16, 3, 16, 16, generator=g).cuda()
    x[6, 3] = float("nan")  # after the recording

    def run():
        model = ttnorm.convert_(_network(), 0.4)
        options = {"weights": dict.fromkeys(dict(model.named_parameters()), 0.5)}
        method = make(model, 4, window=16, **(options if make is swr else {}))
        outputs = torch.stack([method(part).clone() for part in x])
        state = method.state_dict()
        method.reset()
        again = torch.stack([method(part).clone() for part in x])
        return method, outputs, again, state

    method, *recorded = run()
    assert len(method._whole.recorded) == 1
    assert method.report() == 2  # a broken sample in both rounds
    monkeypatch.setattr("ttnorm.methods.step.Repeated", lambda function: function)
    _, *plain = run()
    for ours, theirs in zip(recorded[:2], plain[:2], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4, equal_nan=True)
    for name in ("parameters", "exp_avg", "gradient"):
        assert torch.allclose(recorded[2][name], plain[2][name], atol=1e-4)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_recorded_stream_does_what_the_plain_one_does(memory):
    g = torch.Generator().manual_seed(0)
    x = torch.rand(12, 6, 3, 16, 16, generator=g).cuda()
    x[8, 2] = float("nan")  # after the recording

    def run(record):
        model = ttnorm.convert_(_network().eval(), 0.4)
        loader = [(x[0], torch.arange(6) % 2)]
        model.__dict__[CONTENT] = content_of(model, loader)
        model.__dict__[CLASSES] = classes_of(model, loader)
        ttnorm.stream_(model, memory=memory, window=20)
        outputs = []
        with torch.no_grad(), ttnorm.streams(model, ["a", "a", "b", "c", "c", "c"]):
            forward = capture.Repeated(model) if record else model
            for batch in x:
                outputs.append(forward(batch).clone())
                find_domains(model)
        outputs = torch.stack(outputs)
        if record:
            assert len(forward.recorded) == 1
        return outputs, ttnorm.stream_state(model, "a"), ttnorm.health(model)

    outputs, state, health = run(True)
    plain_outputs, plain_state, plain_health = run(False)
    assert torch.allclose(outputs, plain_outputs, atol=1e-5, equal_nan=True)
    for name, values in state.items():
        assert torch.allclose(values, plain_state[name], atol=1e-5)
    assert {one: (h.frames, h.rejected) for one, h in health.items()} == {
        "a": (24, 0), "b": (11, 1), "c": (36, 0)
    }  # fmt: skip
    assert health.keys() == plain_health.keys()


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_stream_goes_on_where_its_network_goes(memory, tmp_path):
    """To a GPU by `.to`, and back by a file."""
    x = torch.rand(20, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = ttnorm.convert_(_network().eval().cpu(), 0.4)
    loader = [(x[0], torch.arange(4) % 2)]
    model.__dict__[CONTENT] = content_of(model, loader)
    model.__dict__[CLASSES] = classes_of(model, loader)
    stayed = copy.deepcopy(model)
    for one in (model, stayed):
        ttnorm.stream_(one, memory=memory)
    with torch.no_grad():
        for batch in x[:10]:
            assert torch.equal(model(batch), stayed(batch))
        model.cuda()
        for batch in x[10:15]:
            assert torch.allclose(model(batch.cuda()).cpu(), stayed(batch), atol=1e-4)
        ttnorm.save_stream(model, tmp_path / "stream.safetensors")
        ttnorm.load_stream_(model.cpu(), tmp_path / "stream.safetensors")
        for batch in x[15:]:
            assert torch.allclose(model(batch), stayed(batch), atol=1e-4)
    assert ttnorm.health(model)[None].frames == 80


@pytest.mark.parametrize("norm", ["tbn", "ttn-stream"])
def test_images_may_stay_where_they_are_and_go_to_the_gpu_batch_by_batch(norm, tmp_path):
    network = with_alphas(tmp_path)
    network.model.cuda()
    data, found = domains(50), {}
    for name, on in {"here": data, "there": data.to("cuda")}.items():
        records = RecordFile(tmp_path / f"{name}.jsonl")
        jobs = [Job(norm=norm, batch_size=8, scenario=s) for s in ("single", "mixed")]
        evaluate(network, on, jobs, records)
        found[name] = read_records([records.path])
    assert len(found["here"]) == 4
    assert [r["wrong"] for r in found["here"]] == [r["wrong"] for r in found["there"]]
