"""The methods against loops that one would write down first, batch after batch."""

import copy

import pytest
import small_network
import torch
import torch.nn.functional as F
from torch import nn

import ttnorm
from ttnorm.augment import prior_shift
from ttnorm.bench.scenarios import SCENARIOS
from ttnorm.data.loader import DeviceLoader
from ttnorm.methods import METHODS
from ttnorm.methods.cotta import cotta
from ttnorm.methods.setting import Setting
from ttnorm.methods.step import FlatParameters, batch_means
from ttnorm.methods.swr import gradient_agreement, swr
from ttnorm.methods.tent import tent
from ttnorm.methods.ttn_online import RATES, settings, ttn_online
from ttnorm.surgery import alphas
from ttnorm.tree import ttn_layers

WINDOW = 12


def converted(alpha=0.3):
    return ttnorm.convert_(small_network.network().double(), alpha)


def stream(count=36):
    g = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, 32, 32, generator=g, dtype=torch.float64)


def entropy(output):
    p = output.softmax(1)
    return -(p * p.log()).sum(1)


def naive(model, parameters, loss, x, batch_size, lr=0.01, after=lambda: None, momentum=None):
    """Backward after every batch, a step after every window; the outputs."""
    if momentum is None:
        optimiser = torch.optim.Adam(parameters, lr=lr)
    else:
        optimiser = torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    outputs, seen = [], 0
    for batch in x.split(batch_size):
        output = model(batch)
        loss(output).backward()
        outputs.append(output.detach())
        seen += len(batch)
        if seen >= WINDOW:
            optimiser.step()
            optimiser.zero_grad()
            after()
            seen = 0
    return torch.cat(outputs)


def same(ours, theirs, atol=1e-9):
    assert torch.allclose(ours, theirs, atol=atol)


@pytest.mark.parametrize("batch_size", [12, 5, 4, 1])  # 5: windows of 15
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_tent(batch_size, alpha):
    x = stream(37)  # the last batch is smaller
    model, other = converted(alpha), converted(alpha)
    method = tent(model, batch_size, lr=0.01, window=WINDOW)
    parameters = [p for m in ttn_layers(other).values() for p in (m.weight, m.bias)]
    same(method(x), naive(other, parameters, lambda y: entropy(y).mean(), x, batch_size))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        same(ours, theirs)


def test_tent_with_momentum_instead_of_adam():
    x, model, other = stream(), converted(), converted()
    method = tent(model, 4, lr=0.01, momentum=0.9, window=WINDOW)
    parameters = [p for m in ttn_layers(other).values() for p in (m.weight, m.bias)]
    expected = naive(other, parameters, lambda y: entropy(y).mean(), x, 4, momentum=0.9)
    same(method(x), expected)


def per_pixel(alpha=0.3):
    """A network that predicts one of 5 classes for every pixel."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1))
    return ttnorm.convert_(model.double(), alpha)


@pytest.mark.parametrize("name", ["tent", "swr"])
def test_predictions_of_pixels_count_alike(name):
    x, model, other = stream(24), per_pixel(), per_pixel()
    weights = {n: 0.5 for n, _ in model.named_parameters()}
    options = {} if name == "tent" else {"weights": weights, "strength": 0.0}
    method = METHODS[name].make(model, 4, lr=0.01, window=WINDOW, **options)
    parameters = [other[1].weight, other[1].bias] if name == "tent" else list(other.parameters())

    def loss(y):
        flat = y.movedim(1, -1).flatten(0, -2)  # every pixel is a sample
        if name == "tent":
            return entropy(flat).mean()
        mean = flat.softmax(1).mean(0)
        return 0.2 * entropy(flat).mean() + 0.25 * (mean * mean.log()).sum()

    same(method(x), naive(other, parameters, loss, x, 4))


@pytest.mark.parametrize(
    ("method", "setting", "expected"),
    [
        ("tent", Setting(), {"lr": 1e-3}),
        ("tent", Setting(batch_size=64), {"lr": 1e-4}),
        ("tent", Setting(scenario="continual"), {"lr": 1e-4}),
        ("tent", Setting(batch_size=16, norm="ttn"), {"lr": 5e-5}),
        ("tent", Setting(scenario="mixed", norm="ttn"), {"lr": 5e-6}),
        ("tent", Setting(task="imagenet"), {"lr": 2.5e-4, "momentum": 0.9, "window": 64}),
        ("tent", Setting(task="imagenet", norm="ttn"), {"lr": 5e-6, "momentum": 0.9, "window": 64}),
        ("tent", Setting(task="segmentation", batch_size=2), {"lr": 1e-6, "window": 2}),
        ("swr", Setting(), {"lr": 1e-3, "stable": False}),
        ("swr", Setting(batch_size=16), {"lr": 1e-4, "stable": False}),
        ("swr", Setting(norm="ttn"), {"lr": 1e-4, "stable": False, "strength": 40.0}),
        ("swr", Setting(scenario="mixed"), {"lr": 5e-5, "stable": True}),
        (
            "swr",
            Setting(task="imagenet", batch_size=16),
            {"lr": 2.5e-6, "momentum": 0.9, "window": 64},
        ),
        (
            "swr",
            Setting(task="segmentation", batch_size=4),
            {"lr": 1e-6, "strength": 500.0, "window": 4},
        ),
    ],
)
def test_settings_are_the_papers_or_chosen(method, setting, expected):
    assert METHODS[method].settings(setting) == expected


def test_what_never_starts_anew_is_told_from_what_does():
    endless = {name for name in SCENARIOS if Setting(scenario=name).endless}
    assert endless == {name for name, what in SCENARIOS.items() if what.reset == "never"}


def test_tent_changes_gamma_and_beta_alone():
    model = converted()
    before = copy.deepcopy(model.state_dict())
    tent(model, 4, window=WINDOW)(stream())
    changed = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == {"1.weight", "1.bias", "4.weight", "4.bias"}


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("batch_size", [12, 4, 1])
def test_swr(batch_size, stable):
    x, model, other = stream(), converted(), converted()
    weights = {name: i / 10 for i, (name, _) in enumerate(model.named_parameters())}
    method = swr(model, batch_size, weights=weights, lr=0.01, stable=stable, window=WINDOW)
    # theta* is theta as it was before its last update
    history = [[p.detach().clone() for p in other.parameters()]] * 2

    def loss(y):
        mean = y.softmax(1).mean(0)
        total = 0.2 * entropy(y).mean() + 0.25 * (mean * mean.log()).sum()
        anchor = history[0] if stable else history[-2]
        for w, p, at in zip(weights.values(), other.parameters(), anchor, strict=True):
            total = total + 10 * w * (p - at).square().sum()
        return total

    def remember():
        history.append([p.detach().clone() for p in other.parameters()])

    expected = naive(other, other.parameters(), loss, x, batch_size, after=remember)
    same(method(x), expected)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        same(ours, theirs)


def test_swr_wants_a_weight_for_every_parameter():
    with pytest.raises(ValueError, match=r"none for '\S+' and 9 more"):
        swr(converted(), 4, weights={})


def test_gradient_agreement_is_the_mean_cosine_of_every_samples_gradients():
    model = small_network.network()
    x, y = torch.rand(6, 3, 32, 32), torch.randint(0, 10, (6,))
    found = gradient_agreement(model, [(x[:4], y[:4]), (x[4:], y[4:])], samples=5, seed=3)
    g = torch.Generator().manual_seed(3)
    shifted = torch.cat([prior_shift(x[:4], g), prior_shift(x[4:5], g)])

    def gradients(image, label):
        model.zero_grad()
        F.cross_entropy(model(image[None]), label[None]).backward()
        return {name: p.grad.clone().flatten() for name, p in model.named_parameters()}

    pairs = [(gradients(x[i], y[i]), gradients(shifted[i], y[i])) for i in range(5)]
    scores = {
        name: sum(F.cosine_similarity(a[name], b[name], 0).item() for a, b in pairs) / 5
        for name in found
    }
    low, high = min(scores.values()), max(scores.values())
    for name, score in scores.items():
        assert found[name] == pytest.approx(((score - low) / (high - low)) ** 2, abs=1e-4)
    assert min(found.values()) == 0
    assert max(found.values()) == 1
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("batch_size", [12, 1])
def test_ttn_online(batch_size):
    x, model, other = stream(), converted(), converted()
    method = ttn_online(model, batch_size, lr=0.01, window=WINDOW)
    values = list(alphas(other).values())
    start = [a.clone() for a in values]
    count = sum(a.numel() for a in values)
    for a in values:
        a.requires_grad_()

    def loss(y):
        distance = sum((a - b).square().sum() for a, b in zip(values, start, strict=True))
        return entropy(y).mean() + distance / count

    def clamp():
        for a in values:
            a.data.clamp_(0, 1)

    same(method(x), naive(other, values, loss, x, batch_size, after=clamp))
    for ours, theirs in zip(alphas(model).values(), values, strict=True):
        same(ours, theirs)


def test_ttn_online_updates_after_every_batch_with_the_papers_rate():
    assert ttn_online(converted(), 16).room == 16
    for size, rate in RATES.items():
        assert settings(Setting(batch_size=size)) == {"lr": rate}
    assert settings(Setting(batch_size=190)) == {"lr": 1e-2}


def test_cotta_without_views_and_restoring():
    x, model = stream(), converted()
    student, teacher = converted(), converted()
    method = cotta(model, 4, lr=0.01, teacher_rate=0.9, views=0, restore=0, window=WINDOW)
    optimiser = torch.optim.Adam(student.parameters(), lr=0.01)
    expected = []
    for window in x.split(WINDOW):
        for batch in window.split(4):
            with torch.no_grad():
                taught = teacher(batch)
            loss = -(taught.softmax(1) * student(batch).log_softmax(1)).sum(1).mean()
            loss.backward()
            expected.append(taught)
        optimiser.step()
        optimiser.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
    same(method(x), torch.cat(expected))
    for ours, theirs in zip(model.parameters(), student.parameters(), strict=True):
        # teacher and student begin as one, and Adam divides rounding errors by rounding errors
        same(ours, theirs, atol=1e-6)


def test_cotta_asks_augmented_views_where_the_source_is_unsure():
    x = stream(WINDOW)
    outputs = [
        cotta(converted(), 4, threshold=threshold, views=3, window=WINDOW)(x)
        for threshold in (0.0, 1.0)
    ]
    same(outputs[0], cotta(converted(), 4, views=0, window=WINDOW)(x))
    assert (outputs[1] - outputs[0]).abs().max() > 1e-3


def test_cotta_decides_for_every_batch_on_its_own():
    x = stream(8)
    confidence = ttnorm_confidence(x)
    threshold = sum(confidence) / 2
    found = cotta(converted(), 4, threshold=threshold, views=3, window=WINDOW)(x)
    plain = cotta(converted(), 4, threshold=0.0, views=3, window=WINDOW)(x)
    sure = torch.tensor(confidence) >= threshold
    for index in range(2):
        part = slice(4 * index, 4 * index + 4)
        assert torch.equal(found[part], plain[part]) == bool(sure[index])


def ttnorm_confidence(x):
    """The source network's mean confidence in each of two batches of 4."""
    model = converted()
    with torch.no_grad():
        return [model(part).softmax(1).amax(1).mean().item() for part in x.split(4)]


def test_cotta_restores_about_as_many_parameters_as_it_should():
    model = converted()
    start = [p.detach().clone() for p in model.parameters()]
    cotta(model, 4, views=0, restore=0.3, window=WINDOW)(stream(WINDOW))
    equal = [(p == s).flatten() for p, s in zip(model.parameters(), start, strict=True)]
    assert 0.25 < torch.cat(equal).double().mean() < 0.45  # some never had a gradient


def test_flat_parameters_keep_their_memory_layout():
    model = small_network.network().to(memory_format=torch.channels_last)
    before = [(p.clone(), p.stride()) for p in model.parameters()]
    flat = FlatParameters(dict(model.named_parameters()))
    for p, (value, stride) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert p.stride() == stride
    flat.vector.data.mul_(2)
    for p, (value, _) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, 2 * value)


def test_parameters_of_two_dtypes_are_refused():
    with pytest.raises(ValueError, match="expected one dtype"):
        FlatParameters({"a": torch.zeros(2), "b": torch.zeros(2).double()})


def test_means_over_batches_count_a_smaller_last_one_by_its_own_size():
    values = torch.arange(14.0).view(7, 2)
    expected = torch.stack([part.mean(0) for part in values.split(3)])
    assert torch.allclose(batch_means(values, 3), expected)


def test_cotta_refuses_images_that_were_normalised():
    with pytest.raises(ValueError, match="expected"):
        cotta(converted(), 4)(3 * stream(4) - 1)


@pytest.mark.parametrize("options", [{"window": 0}, {"batch_size": 0}])
def test_sizes_below_one_are_refused(options):
    with pytest.raises(ValueError, match="expected at least 1"):
        tent(converted(), **{"batch_size": 4, **options})


def test_gradient_agreement_looks_at_the_same_images_whenever_it_is_asked():
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    loader = DeviceLoader(images, torch.randint(0, 10, (64,)), 8)
    model = small_network.network()
    first = gradient_agreement(model, loader, samples=16)
    assert gradient_agreement(model, loader, samples=16) == first


@pytest.mark.parametrize("at_once", [1, 3, 10])
def test_sliding_window_is_every_batch_with_the_last_inputs(at_once):
    x, batch_size, window = stream(20), 3, 8
    method = METHODS["sliding"].make(converted(1.0), batch_size, window=window)
    ours = torch.cat([method(part) for part in x.split(at_once * batch_size)])
    model, theirs = converted(1.0), []
    for begin in range(0, len(x), batch_size):
        last = x[max(0, begin + batch_size - window) : begin + batch_size]
        theirs.append(model(last)[-len(x[begin : begin + batch_size]) :])
    # the last batch is smaller, so its window begins later
    theirs[-1] = model(x[-window:])[-2:]
    same(ours, torch.cat(theirs))


def test_sliding_window_wants_room_for_a_batch_and_a_norm_without_a_memory():
    with pytest.raises(ValueError, match="at least the batch size"):
        METHODS["sliding"].make(converted(), 4, window=3)
    with pytest.raises(ValueError, match="remembers"):
        METHODS["sliding"].make(ttnorm.stream_(converted(), memory="pool"), 4)


def test_a_network_that_was_moved_afterwards_is_refused():
    """Its parameters would be others than those that are updated."""
    adapting = tent(converted().float(), 4, window=4)
    adapting(stream(4).float())
    adapting.models[0].double()
    with pytest.raises(RuntimeError, match="was moved, cast or given other parameters"):
        adapting(stream(4))


def test_parameters_that_were_replaced_afterwards_are_noticed():
    adapting = tent(converted(), 4, window=4)
    model = adapting.models[0]
    norm = next(m for m in model.modules() if isinstance(m, ttnorm.TTNorm2d))
    norm.weight = nn.Parameter(norm.weight.detach().clone())
    with pytest.raises(RuntimeError, match="was moved, cast or given other parameters"):
        adapting(stream(4))


def test_half_precision_is_refused():
    with pytest.raises(ValueError, match=r"are torch\.float16"):
        tent(converted().half(), 4)


def test_a_network_that_gives_no_tensor_is_refused():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = converted().float()

        def forward(self, x):
            return {"logits": self.network(x)}

    with pytest.raises(TypeError, match="gave a dict, expected a tensor"):
        tent(Named(), 4)(stream(4).float())


def test_agreement_is_measured_before_conversion():
    with pytest.raises(ValueError, match="expected the source network"):
        gradient_agreement(converted(), [(stream(4), torch.arange(4))])


def test_a_wrapped_network_with_a_stream_adapts():
    model = ttnorm.stream_(converted().float(), memory="pool")
    output = tent(nn.DataParallel(model), 4, window=4)(stream(4).float())
    assert output.shape == (4, 10)
