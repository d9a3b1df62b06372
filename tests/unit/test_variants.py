"""Variants of post-training: files that are made once, and what is in them."""

import dataclasses
from unittest import mock

import pytest
import small_network
import torch

from ttnorm import artefact
from ttnorm.bench.records import variant_of
from ttnorm.bench.variants import OF_KIND, VARIANTS, Source, fit_variant
from ttnorm.data.images import Images
from ttnorm.models import zoo


@pytest.fixture
def source():
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (240, 3, 32, 32), generator=g, dtype=torch.uint8)
    train = Images(images, torch.randint(0, 10, (240,), generator=g))
    return Source(lambda: train, {"fog": Images(images // 2 + 100, train.labels)}, epochs=3)


@pytest.fixture
def fit(source, tmp_path):
    def fitted(name, seed=0, source=source):
        model = small_network.network()
        path = fit_variant(name, "small", model, source, seed, tmp_path)
        assert all(type(m).__name__ != "TTNorm2d" for m in model)  # it is not changed
        alpha, metadata = artefact.read(path)
        return path, torch.cat(list(alpha.values())), metadata

    return fitted


def record_with(path):
    return {"alpha": {"name": path.name}, "model": {"name": path.name.split(".")[0]}}


def test_a_file_that_was_fitted_otherwise_is_not_taken(fit, source):
    fit("default")
    with pytest.raises(ValueError, match=r"default.seed0.* fitted with lr = 0.001, expected 0.01"):
        fit("default", source=dataclasses.replace(source, config={"lr": 0.01}))
    with pytest.raises(ValueError, match="fitted with epochs = 3, expected 2"):
        fit("default", source=dataclasses.replace(source, epochs=2))


@pytest.mark.parametrize(
    "name", [n for n in VARIANTS if not any(c in n for c in ("frost", "snow"))]
)
def test_every_variant_can_be_fitted_and_is_its_own(fit, name, source):
    corruption = VARIANTS[name].corruption
    if corruption is not None:
        corrupted = {corruption: source.corrupted["fog"]}
        source = dataclasses.replace(source, corrupted=corrupted)
    path, alpha, _ = fit(name, source=source)
    assert alpha.min() >= 0
    assert alpha.max() <= 1
    assert variant_of(record_with(path)) == (name, 0)
    if name != "default":
        assert not torch.equal(alpha, fit("default")[1])


def test_a_source_s_own_shift_for_the_prior_is_a_variant_s_too(fit, source):
    strong = dataclasses.replace(source, prior=VARIANTS["prior-strong"].prior)
    _, expected, _ = fit("prior-strong")
    assert torch.equal(fit("default", source=strong)[1], expected)


@pytest.mark.parametrize("killed_while", ["the prior is written", "alpha is fitted"])
def test_a_fit_under_true_corruptions_that_was_killed_goes_on(
    fit, tmp_path, monkeypatch, killed_while
):
    path, expected, _ = fit("alpha-fog")
    path.unlink()
    place = {
        "the prior is written": "ttnorm.files.os.replace",
        "alpha is fitted": "ttnorm.bench.variants.optimise_alpha",
    }
    with monkeypatch.context() as killed:
        killed.setattr(place[killed_while], mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fit("alpha-fog")
    left = [p.suffix for p in tmp_path.iterdir()]
    assert left == ([".prior"] if killed_while == "alpha is fitted" else [])
    assert torch.equal(fit("alpha-fog")[1], expected)
    assert list(tmp_path.iterdir()) == [path]


def test_averages_are_those_of_the_default(fit):
    alpha, layers, constant = (fit(n)[1] for n in ("default", "layer-mean", "constant-mean"))
    assert torch.allclose(constant, alpha.mean().expand_as(alpha))
    assert torch.allclose(layers[:8], alpha[:8].mean().expand(8))
    assert torch.allclose(layers[8:], alpha[8:].mean().expand(16))


def test_a_file_that_is_there_is_not_made_again(fit):
    path, *_ = fit("default")
    before = path.stat().st_mtime_ns
    fit("default")
    assert path.stat().st_mtime_ns == before
    assert not list(path.parent.glob("*.checkpoint"))


def test_another_seed_is_another_alpha(fit):
    assert not torch.equal(fit("default", 0)[1], fit("default", 1)[1])


def test_shipped_files_are_variants_of_seed_0(tmp_path):
    """And no training image is looked at for them."""
    source = Source(lambda: pytest.fail("read"))  # 30 epochs
    for kind, name in OF_KIND.items():
        path = fit_variant(name, "wrn40_2-cifar10", None, source, 0, tmp_path)
        assert path == zoo.alpha_files("wrn40_2-cifar10")[kind]
        assert variant_of(record_with(path)) == (name, 0)
    assert variant_of({"alpha": None}) is None


def test_a_file_that_a_user_calls_so_is_no_variant_of_ours(tmp_path):
    mine = tmp_path / "wrn40_2-cifar10.mine.seed1.ttn.safetensors"
    assert variant_of(record_with(mine)) == ("default", 0)
