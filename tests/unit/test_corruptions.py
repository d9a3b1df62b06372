"""The corruptions: the same bytes however they are made, and what each is meant to do."""

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from ttnorm.data import corruptions
from ttnorm.data.corruptions import CORRUPTIONS, corrupt


@pytest.fixture
def textures(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(1, 6):
        picture = Image.fromarray(rng.integers(60, 256, (300, 400, 3), dtype=np.uint8))
        picture.save(tmp_path / f"frost{i}.{'png' if i < 4 else 'jpg'}")
    return tmp_path


@pytest.fixture
def images():
    """Smooth pictures with a few sharp edges."""
    rng = np.random.default_rng(1)
    x = ndimage.zoom(rng.random((6, 5, 5, 3)), (1, 6.4, 6.4, 1), order=1)
    x[:, 8:14, 8:20] = rng.random((6, 1, 1, 3))
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)


@pytest.mark.parametrize("name", CORRUPTIONS)
class TestEvery:
    @pytest.mark.parametrize("severity", [1, 5])
    def test_keeps_shape_and_dtype_and_leaves_the_input_alone(
        self, images, textures, name, severity
    ):
        before = images.copy()
        out = corrupt(images, name, severity, textures=textures)
        assert out.shape == images.shape
        assert out.dtype == np.uint8
        assert np.array_equal(images, before)
        assert not np.array_equal(out, images)

    def test_a_part_has_the_bytes_it_has_in_the_whole(self, images, textures, name):
        whole = corrupt(images, name, 5, textures=textures)
        part = corrupt(images[2:4], name, 5, first=2, textures=textures)
        assert np.array_equal(part, whole[2:4])

    def test_imagenet_sizes(self, textures, name):
        rng = np.random.default_rng(2)
        large = (ndimage.zoom(rng.random((1, 8, 8, 3)), (1, 28, 28, 1), order=1) * 255).astype(
            np.uint8
        )
        out = corrupt(large, name, 3, textures=textures)
        assert out.shape == (1, 224, 224, 3)
        assert not np.array_equal(out, large)


# the severities of elastic_transform trade one kind of distortion for another
@pytest.mark.parametrize("name", [n for n in CORRUPTIONS if n != "elastic_transform"])
def test_severity_grows(images, textures, name):
    change = [
        np.abs(corrupt(images, name, s, textures=textures) - images.astype(float)).mean()
        for s in (1, 5)
    ]
    assert change[1] > change[0]


@pytest.mark.parametrize(
    "name", ["gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "snow", "fog"]
)
def test_the_seed_decides(images, name):
    runs = [corrupt(images, name, 5, seed=seed) for seed in (1, 1, 2)]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_gaussian_noise_has_the_deviation_it_is_given():
    grey = np.full((4, 32, 32, 3), 128, np.uint8)
    noise = corrupt(grey, "gaussian_noise", 5) / 255
    assert abs(noise.std() - 0.10) < 0.005


def test_impulse_noise_hits_the_share_it_is_given():
    grey = np.full((8, 32, 32, 3), 128, np.uint8)
    out = corrupt(grey, "impulse_noise", 5)
    assert abs((out != 128).mean() - 0.07) < 0.01
    assert set(np.unique(out)) == {0, 128, 255}


@pytest.mark.parametrize("factor", [1.0, 1.07, 1.25, 1.75, 2.25])
def test_zoom_is_scipy_s(factor):
    x = np.random.default_rng(0).random((2, 32, 32, 3))
    kept = int(np.ceil(32 / factor))
    start = (32 - kept) // 2
    centre = x[:, start : start + kept, start : start + kept]
    zoomed = ndimage.zoom(centre, (1, factor, factor, 1), order=1)
    trim = (zoomed.shape[1] - 32) // 2
    expected = zoomed[:, trim : trim + 32, trim : trim + 32]
    assert np.allclose(corruptions._zoom(x, factor), expected)


def test_motion_blur_moves_light_one_way_and_keeps_its_amount():
    x = np.zeros((32, 32))
    x[16, 16] = 1
    out = corruptions._motion(x, 6, 2.0, 0.0)
    assert np.isclose(out.sum(), 1)
    assert out[16, 16] == out.max()
    assert out[16, :17].sum() > 0.999  # each pixel gathers what lies along the direction
    down = corruptions._motion(x, 6, 2.0, 90.0)
    assert down[:17, 16].sum() > 0.999


def test_glass_blur_takes_values_from_neighbours_only(images):
    sharp = corruptions.glass_blur(
        images, (1e-6, 1, 2), [np.random.default_rng(i) for i in range(len(images))]
    )
    for before, after in zip(images, sharp, strict=True):
        assert {tuple(p) for p in after.reshape(-1, 3)} <= {tuple(p) for p in before.reshape(-1, 3)}


def test_plasma_is_a_cloud_in_the_unit_range():
    cloud = corruptions._plasma(32, 2.0, np.random.default_rng(0))
    assert cloud.min() == 0
    assert cloud.max() == 1
    neighbours = np.abs(np.diff(cloud)).mean()
    assert neighbours < 0.3 * np.abs(cloud - cloud.mean()).mean()


class TestErrors:
    def test_unknown_name(self, images):
        with pytest.raises(ValueError, match="no corruption 'rain'; there are"):
            corrupt(images, "rain", 5)

    def test_severity(self, images):
        with pytest.raises(ValueError, match="severity is 0, expected 1 to 5"):
            corrupt(images, "fog", 0)

    def test_images(self, images):
        with pytest.raises(ValueError, match=r"float64 .*expected uint8 \(N, H, W, 3\)"):
            corrupt(images / 255, "fog", 5)

    def test_frost_without_textures(self, images, tmp_path):
        with pytest.raises(ValueError, match="frost needs its textures"):
            corrupt(images, "frost", 5)
        with pytest.raises(FileNotFoundError, match=r"There is no picture .*frost1\.png"):
            corrupt(images, "frost", 5, textures=tmp_path)
