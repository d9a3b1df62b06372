"""Source networks: AugMix as PIL does it, training that learns, checkpoints that come back."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from typer.testing import CliRunner

import ttnorm
from ttnorm import artefact, cli
from ttnorm.data.cifar import load_cifar
from ttnorm.data.images import Images
from ttnorm.files import fingerprint
from ttnorm.models import augmix, zoo
from ttnorm.models.train_source import (
    TrainConfig,
    consistency_loss,
    crop_and_flip,
    error,
    train_source,
)

TINY = TrainConfig(depth=10, width=1, epochs=4, batch_size=20)


@pytest.fixture
def pictures():
    """Smooth random pictures with values in 0..255."""
    coarse = torch.rand(16, 3, 5, 5) * torch.rand(16, 3, 1, 1)
    return (255 * torch.nn.functional.interpolate(coarse, 32, mode="bicubic").clamp(0, 1)).round()


@pytest.fixture
def data():
    """Two classes, told apart by their colour."""
    labels = torch.arange(80) % 2
    images = torch.randint(60, 120, (80, 3, 32, 32), dtype=torch.uint8)
    images[:, 0] += (labels * 100).to(torch.uint8)[:, None, None]
    return Images(images, labels)


def with_pil(pictures, operation):
    arrays = pictures.byte().permute(0, 2, 3, 1).numpy()
    out = np.stack([np.asarray(operation(Image.fromarray(a))) for a in arrays])
    return torch.from_numpy(out).permute(0, 3, 1, 2).float()


class TestOperations:
    def test_equalize(self, pictures):
        assert torch.equal(augmix.equalize(pictures), with_pil(pictures, ImageOps.equalize))

    def test_autocontrast(self, pictures):
        expected = with_pil(pictures, ImageOps.autocontrast)
        difference = (augmix.autocontrast(pictures) - expected).abs()
        assert difference.max() <= 1  # PIL truncates in float64
        assert (difference > 0).float().mean() < 0.02

    def test_constant_pictures_stay(self):
        flat = torch.full((1, 3, 32, 32), 90.0)
        assert torch.equal(augmix.autocontrast(flat), flat)
        assert torch.equal(augmix.equalize(flat), flat)

    @pytest.mark.parametrize("bits", [3, 4])
    def test_posterize(self, pictures, bits):
        expected = with_pil(pictures, lambda p: ImageOps.posterize(p, bits))
        assert torch.equal(augmix.posterize(pictures, torch.full((16,), float(bits))), expected)

    def test_solarize(self, pictures):
        expected = with_pil(pictures, lambda p: ImageOps.solarize(p, 180))
        assert torch.equal(augmix.solarize(pictures, torch.full((16,), 180.0)), expected)

    @pytest.mark.parametrize(
        ("name", "transform"),
        [
            ("shear_x", (1, 0.075, 0, 0, 1, 0)),
            ("shear_y", (1, 0, 0, 0.075, 1, 0)),
            ("translate_x", (1, 0, 2, 0, 1, 0)),
            ("translate_y", (1, 0, 0, 0, 1, 2)),
            ("rotate", None),
        ],
    )
    def test_geometry_agrees_with_pil_away_from_the_border(self, pictures, name, transform):
        chosen = torch.full((16,), float(augmix.OPERATIONS.index(name)))
        level = torch.full((16,), 2.5)
        moved = augmix.affine(pictures, *augmix._matrix(chosen, level, torch.ones(16), 32))

        def operation(picture):
            if transform is None:
                return picture.rotate(7, resample=Image.BILINEAR)
            return picture.transform((32, 32), Image.AFFINE, transform, resample=Image.BILINEAR)

        inner = (slice(None), slice(None), slice(4, -4), slice(4, -4))
        assert (moved - with_pil(pictures, operation)).abs()[inner].max() <= 1


class TestAugMix:
    def test_stays_in_the_unit_range_and_changes_images(self):
        images = torch.rand(32, 3, 32, 32)
        mixed = augmix.augmix(images)
        assert mixed.min() >= 0
        assert mixed.max() <= 1 + 1e-6
        assert (mixed - images).abs().mean() > 0.02

    def test_a_generator_makes_it_reproducible(self):
        images = torch.rand(8, 3, 32, 32)
        runs = [augmix.augmix(images, torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
        assert torch.equal(runs[0], runs[1])
        assert not torch.equal(runs[0], runs[2])

    def test_all_operations_are_drawn(self):
        draw = augmix._Draw(torch.device("cpu"), torch.Generator().manual_seed(0))
        drawn = draw.integers(2000, len(augmix.OPERATIONS))
        assert sorted(drawn.unique().tolist()) == list(range(9))


def test_crops_are_windows_of_the_padded_image():
    images = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4)).float() / 255
    crops = crop_and_flip(images, torch.Generator().manual_seed(0))
    flips = 0
    for crop, whole in zip(crops, padded, strict=True):
        windows = whole.unfold(1, 32, 1).unfold(2, 32, 1)  # (3, 9, 9, 32, 32)
        matches = [
            (windows == view[:, None, None]).all(-1).all(-1).all(0).any()
            for view in (crop, crop.flip(-1))
        ]
        assert any(matches)
        flips += not matches[0]
    assert 16 < flips < 48


def test_the_loss_is_cross_entropy_where_all_views_agree():
    logits, labels = torch.randn(6, 4), torch.randint(4, (6,))
    loss = consistency_loss(logits.repeat(3, 1), labels, 12.0)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels))
    apart = consistency_loss(torch.cat((logits, -logits, logits)), labels, 12.0)
    assert apart > loss + 1


def test_training_learns_and_the_seed_decides(data):
    runs = [train_source(data, data, TINY)[0].state_dict() for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    model, history = train_source(data, data, TINY)
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["test_error"] == error(model, data) < 25
    assert not model.training


def test_fewer_images_than_a_batch_are_refused(data):
    config = dataclasses.replace(TINY, batch_size=len(data.labels) + 1)
    with pytest.raises(ValueError, match=f"There are {len(data.labels)} images, expected a batch"):
        train_source(data, data, config)


@pytest.mark.parametrize(("name", "limit"), [("wrn40_2-cifar10", 5.2), ("wrn40_2-cifar100", 24.5)])
def test_shipped_networks_come_with_their_recipe_and_alpha_files(name, limit):
    model, metadata = zoo.load_checkpoint(zoo.ASSETS / f"{name}.safetensors")
    assert metadata["history"][-1]["test_error"] <= limit
    assert metadata["config"] == dataclasses.asdict(TrainConfig())
    assert metadata["fingerprint"] == fingerprint(model)
    files = zoo.alpha_files(name)
    for kind, batch in (("ttn", None), ("dynamic", [4, 200]), ("strong", None)):
        ttnorm.load_(model, files[kind])  # refuses a file of another network
        config = artefact.read(files[kind]).metadata["config"]
        paper = dataclasses.asdict(ttnorm.PostTrainConfig()) | {"dynamic_batch": batch}
        for later in ("group_sizes", "source_count"):  # options that came after these files
            assert not paper.pop(later)
        assert paper.items() <= config.items()


def test_the_shipped_network_is_what_its_log_says():
    """On the thousand embedded test images, within what a thousand can tell."""
    model, metadata = zoo.load_checkpoint(zoo.ASSETS / "wrn40_2-cifar10.safetensors")
    test = load_cifar(Path(ttnorm.__file__).parent / "demo/assets/cifar10", "test")
    assert abs(error(model, test) - metadata["history"][-1]["test_error"]) < 1.5


class TestCheckpoints:
    def test_come_back_with_their_history(self, data, tmp_path):
        model, history = train_source(data, data, TINY)
        zoo.save_checkpoint(model, tmp_path / "x.safetensors", TINY, history)
        stored, metadata = zoo.load_checkpoint(tmp_path / "x.safetensors")
        x = torch.rand(4, 3, 32, 32)
        torch.testing.assert_close(stored(x), model(x), rtol=1e-2, atol=1e-2)  # float16 weights
        assert metadata["history"] == json.loads(json.dumps(history))
        assert metadata["config"]["epochs"] == 4

    def test_unknown_names_list_the_choices(self):
        with pytest.raises(ValueError, match="no network 'vgg'; there are wrn40_2-cifar10"):
            zoo.load("vgg")

    def test_another_safetensors_file(self, tmp_path):
        from safetensors.torch import save_file

        save_file({"x": torch.rand(3)}, tmp_path / "x.safetensors")
        with pytest.raises(ValueError, match="no checkpoint of a source network"):
            zoo.load_checkpoint(tmp_path / "x.safetensors")


def test_the_command_trains_from_a_folder(data, tmp_path):
    for split in ("train", "test"):
        tiles = data.images.permute(0, 2, 3, 1).numpy().reshape(8, 10, 32, 32, 3)
        sheet = tiles.transpose(0, 2, 1, 3, 4).reshape(256, 320, 3)
        Image.fromarray(sheet).save(tmp_path / f"{split}_0.webp", lossless=True)
        labels = json.dumps({"fine": data.labels.tolist()})
        (tmp_path / f"{split}_labels.json").write_text(labels)
    output = tmp_path / "tiny.safetensors"
    options = "--depth 10 --width 1 --epochs 2 --batch-size 20 --device cpu"
    command = ["train-source", str(tmp_path), str(output), *options.split()]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert "test error" in result.output
    assert zoo.load_checkpoint(output)[1]["classes"] == 2
