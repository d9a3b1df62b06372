"""What every method owes its users, over every normalisation."""

import copy
import itertools
import logging

import pytest
import small_network
import torch

from ttnorm.methods import METHODS
from ttnorm.methods.swr import gradient_agreement
from ttnorm.norms import NORMS, apply_norm_
from ttnorm.surgery import alphas

REMEMBERING = {"mixnorm", *(name for name, norm in NORMS.items() if norm.remembers)}
# a sliding window is for norms that remember nothing
PAIRS = [
    p for p in itertools.product(METHODS, NORMS) if p[0] != "sliding" or p[1] not in REMEMBERING
]
FORWARD = ("none", "sliding")  # what adapts no parameters
GRADIENT = [name for name in METHODS if name not in FORWARD]
WINDOW, BATCH = 12, 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return small_network.with_alphas(tmp_path_factory.mktemp("alpha")).alpha_files


@pytest.fixture(scope="module")
def weights():
    g = torch.Generator().manual_seed(3)
    x, y = torch.rand(16, 3, 32, 32, generator=g), torch.randint(0, 10, (16,), generator=g)
    return gradient_agreement(small_network.network(), [(x, y)], samples=16)


@pytest.fixture
def make(files, weights):
    def made(method, norm, seen=0, **options):
        model = apply_norm_(
            small_network.network().double(),
            norm,
            batch_size=BATCH,
            alpha_file=files.get(NORMS[norm].alpha_file or ""),
        )
        METHODS["none"].make(model, BATCH)(stream(seen, seed=1))
        if method == "swr":
            options["weights"] = weights
        if method == "cotta":
            options = {"views": 2, "restore": 0.1} | options
        if method != "none":
            options = {"window": WINDOW} | options
        if method not in FORWARD:
            options = {"lr": 0.01} | options
        return model, METHODS[method].make(model, BATCH, **options)

    return made


def stream(count=36, seed=0):
    g = torch.Generator().manual_seed(seed)
    return 0.3 * torch.rand(count, 3, 32, 32, generator=g, dtype=torch.float64)


def run(method, x, at_once):
    """Outputs of consecutive parts; some are valid only until the next call."""
    return torch.cat([method(part).clone() for part in x.split(at_once)])


@pytest.mark.parametrize(("name", "norm"), PAIRS)
class TestEveryPair:
    def test_gives_an_output_for_every_sample(self, make, name, norm):
        _, method = make(name, norm)
        for count in (WINDOW, 1, 7, 30):
            output = method(stream(count))
            assert output.shape == (count, 10)
            assert output.isfinite().all()
            assert not output.requires_grad

    def test_a_batch_of_nothing_gives_nothing_and_changes_nothing(self, make, name, norm):
        model, method = make(name, norm)
        before = copy.deepcopy(model.state_dict())
        assert method(stream(0)).shape == (0, 10)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    def test_reset_restores_bit_for_bit(self, make, name, norm):
        model, method = make(name, norm)
        before = copy.deepcopy(model.state_dict())
        first = run(method, stream(), BATCH)
        method(stream(5))  # and stop in the middle of a window
        method.reset()
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])
        assert torch.equal(run(method, stream(), BATCH), first)

    def test_reset_gives_back_what_a_norm_had_seen_before(self, make, name, norm):
        _, method = make(name, norm, seen=8)
        first = run(method, stream(), BATCH)
        method.reset()
        assert torch.equal(run(method, stream(), BATCH), first)

    def test_inference_mode_changes_nothing(self, make, name, norm):
        expected = run(make(name, norm)[1], stream(), BATCH)
        _, method = make(name, norm)
        with torch.inference_mode():
            actual = run(method, stream(), BATCH)
        assert torch.equal(actual, expected)

    def test_it_adapts_and_alpha_stays(self, make, name, norm):
        model, method = make(name, norm)
        before = copy.deepcopy(model.state_dict())
        run(method, stream(), WINDOW)
        changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
        is_alpha = {key.endswith("alpha") for key in changed}
        assert is_alpha == (
            {True} if name == "ttn-online" else set() if name in FORWARD else {False}
        )
        assert not any("running" in key for key in changed)

    def test_train_and_eval_mode_are_the_same(self, make, name, norm):
        outputs = []
        for mode in (True, False):
            model, method = make(name, norm)
            model.train(mode)
            outputs.append(run(method, stream(), WINDOW))
        assert torch.equal(*outputs)

    def test_a_saved_state_goes_on_elsewhere(self, make, name, norm, tmp_path):
        x = stream(44)
        _, method = make(name, norm)
        run(method, x[:20], BATCH)  # in the middle of a window
        torch.save(method.state_dict(), tmp_path / "state.pt")
        expected = run(method, x[20:], BATCH)
        _, other = make(name, norm)
        other.load_state_dict(torch.load(tmp_path / "state.pt"))
        assert torch.equal(run(other, x[20:], BATCH), expected)


# but for CoTTA's views: in MixNorm's stream they come in another order
@pytest.mark.parametrize(
    ("name", "norm"),
    [
        # its teacher sees other views with the window than batch by batch, and remembers them
        p
        for p in PAIRS
        if p[0] != "cotta" or p[1] not in REMEMBERING
    ],
)
def test_a_window_at_once_is_the_window_batch_by_batch(make, name, norm):
    outputs = [run(make(name, norm)[1], stream(), size) for size in (WINDOW, BATCH, 36)]
    assert torch.allclose(outputs[0], outputs[1], atol=1e-9)
    assert torch.allclose(outputs[0], outputs[2], atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_a_network_without_test_time_norms_is_refused(name, weights):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.ReLU())
    options = {"weights": {"0.weight": 0.0, "0.bias": 0.0}} if name == "swr" else {}
    with pytest.raises(ValueError, match="no test-time normalization layers"):
        METHODS[name].make(model, BATCH, **options)(torch.rand(4, 3, 8, 8))


@pytest.mark.parametrize(("name", "norm"), itertools.product(GRADIENT, ["tbn", "ttn", "mixnorm"]))
@pytest.mark.parametrize("at_once", [WINDOW, BATCH])
def test_a_broken_sample_does_not_destroy_the_network(make, name, norm, at_once, caplog):
    model, method = make(name, norm)
    run(method, stream(WINDOW), at_once)
    good = copy.deepcopy(model.state_dict())
    x = stream(WINDOW, seed=1)
    x[3] = float("nan")
    with caplog.at_level(logging.WARNING, "ttnorm"):
        run(method, x, at_once)
    assert "undone" in caplog.text
    for key, value in model.state_dict().items():
        assert torch.equal(value, good[key])
    before = {key: value.clone() for key, value in good.items()}
    assert run(method, stream(WINDOW, seed=2), at_once).isfinite().all()
    assert any(not torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", GRADIENT)
def test_another_methods_state_is_refused(make, name):
    _, method = make(name, "ttn")
    with pytest.raises(ValueError, match="another method"):
        method.load_state_dict({"seen": 3})
    with pytest.raises(ValueError, match="another norm"):
        method.load_state_dict(make(name, "mixnorm")[1].state_dict())
    state = method.state_dict()
    state["parameters"] = state["parameters"][:-1]
    with pytest.raises(ValueError, match="another network"):
        method.load_state_dict(state)


def test_alpha_of_ttn_online_stays_between_the_source_and_the_batch(make):
    model, method = make("ttn-online", "ttn", lr=1.0)
    run(method, stream(), BATCH)
    values = torch.cat(list(alphas(model).values()))
    assert values.min() >= 0
    assert values.max() <= 1
