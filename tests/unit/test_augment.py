"""The simulated shifts: in range, reproducible, per batch or per image, on images of any kind."""

from functools import partial

import pytest
import torch

from ttnorm.augment import (
    Drawn,
    _blur,
    domain_shift,
    moves_pixels,
    numbers_drawn,
    prior_shift,
    shift_images,
)

SHIFTS = [prior_shift, domain_shift]
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("per", ["batch", "image"])
class TestEveryShift:
    @pytest.mark.parametrize(
        "shape", [(4, 3, 32, 32), (4, 1, 8, 8), (2, 4, 17, 40), (1, 3, 224, 160)]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_stays_in_the_unit_range_and_keeps_shape_and_dtype(self, shift, per, shape, dtype):
        images = torch.rand(shape, dtype=dtype)
        shifted = shift(images, seeded(), per=per)
        assert shifted.shape == images.shape
        assert shifted.dtype == dtype
        assert shifted.min() >= 0
        assert shifted.max() <= 1
        assert (shifted - images).abs().mean() > 0.01

    def test_the_generator_is_the_only_source_of_randomness(self, shift, per):
        images = torch.rand(6, 3, 16, 16)
        first = shift(images, seeded(1), per=per)
        state = torch.get_rng_state()
        assert torch.equal(shift(images, seeded(1), per=per), first)
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(shift(images, seeded(2), per=per), first)

    def test_the_input_is_not_changed(self, shift, per):
        images = torch.rand(6, 3, 16, 16)
        before = images.clone()
        shift(images, seeded(), per=per)
        assert torch.equal(images, before)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("per", ["batch", "image"])
@pytest.mark.parametrize("shift", SHIFTS)
def test_numbers_drawn_beforehand_give_the_same_shift(shift, per, channels):
    images = torch.rand(6, channels, 16, 16)
    augment = partial(shift, per=per)
    count = numbers_drawn(augment, 6, channels)
    numbers = torch.rand(count, generator=seeded(3))
    generator = seeded(3)
    expected = augment(images, generator)
    assert torch.equal(augment(images, Drawn(numbers)), expected)
    # and the generator is where it would have been
    after = seeded(3)
    torch.rand(count, generator=after)
    assert torch.equal(after.get_state(), generator.get_state())


def test_numbers_drawn_are_those_of_every_rank_s_images(monkeypatch):
    augment = partial(domain_shift, per="image")
    alone = numbers_drawn(augment, 1, 3)
    monkeypatch.setattr("ttnorm.augment.world_size", lambda: 16)
    assert numbers_drawn(augment, 1, 3) == 16 * alone


def test_no_more_numbers_are_taken_than_were_drawn():
    drawn = Drawn(torch.rand(5))
    assert len(drawn.take(3)) == 3
    with pytest.raises(AssertionError, match="6 numbers were taken of 5 that were drawn"):
        drawn.take(3)


def test_a_blur_goes_with_the_size_of_images_and_with_the_strength():
    board = torch.zeros(1, 1, 64, 64)
    board[..., ::2, ::2] = board[..., 1::2, 1::2] = 1

    def left(size, **options):
        """Of a chessboard's contrast."""
        images = board.repeat(1, 1, size // 64, size // 64)
        return domain_shift(images, seeded(0), parts=("blur",), **options).std()

    assert left(64) > 2 * left(256)
    assert left(64) > 2 * left(64, strength=4)


@pytest.mark.parametrize("shift", [domain_shift, prior_shift])
def test_strength_widens_what_is_drawn(shift):
    gray = torch.full((400, 3, 4, 4), 0.3)

    def spread(strength):
        shifted = shift(gray, seeded(), parts=("jitter",), per="image", strength=strength)
        assert ((shifted >= 0) & (shifted <= 1)).all()
        return shifted.mean((1, 2, 3)).std()

    assert spread(0.5) < 0.6 * spread(1) < 0.6 * 0.6 * spread(2)
    assert spread(4).isfinite()  # where a range would reach below 0
    with pytest.raises(ValueError, match="strength is 0, expected a positive number"):
        spread(0)


def test_what_moves_pixels_is_known():
    assert moves_pixels(domain_shift)
    assert not moves_pixels(partial(domain_shift, parts=("jitter", "blur")))
    assert moves_pixels(partial(prior_shift, parts=("jitter", "flip")))
    assert not moves_pixels(prior_shift)
    assert not moves_pixels(lambda images, generator: images)


def test_what_others_draw_is_not_known():
    assert numbers_drawn(lambda images, generator: images, 4, 3) is None


def test_the_blur_is_that_of_kornia():
    from kornia.filters import gaussian_blur2d

    images = torch.rand(4, 3, 17, 23, dtype=torch.float64)
    sigma = torch.tensor([0.001, 0.1, 0.3, 0.5], dtype=torch.float64)
    expected = gaussian_blur2d(images, (5, 5), sigma[:, None].expand(-1, 2), "replicate")
    assert torch.allclose(_blur(images, sigma), expected, atol=1e-12)
    expected = gaussian_blur2d(images, (25, 25), 8 * sigma[:, None].expand(-1, 2), "replicate")
    assert torch.allclose(_blur(images, 8 * sigma, 4.0), expected, atol=1e-12)


@pytest.mark.parametrize("shift", SHIFTS)
def test_per_batch_shifts_all_images_alike_but_for_the_flip(shift):
    image = torch.rand(1, 3, 16, 16)
    for seed in range(5):
        shifted = shift(image.expand(8, -1, -1, -1), seeded(seed), per="batch")
        for other in shifted[1:]:
            same = torch.allclose(other, shifted[0], atol=1e-5)
            # a flip comes last, so a flipped image is the mirror of an unflipped one
            assert same or torch.allclose(other.flip(-1), shifted[0], atol=1e-5)


@pytest.mark.parametrize("shift", SHIFTS)
def test_per_image_draws_for_every_image(shift):
    shifted = shift(torch.rand(1, 3, 16, 16).expand(8, -1, -1, -1), seeded(), per="image")
    assert len({tuple(image.flatten().tolist()) for image in shifted}) == 8


def test_flips_are_drawn_per_image_whatever_the_shift_is():
    gradient = torch.linspace(0.2, 0.8, 16).expand(32, 3, 16, 16)
    shifted = domain_shift(gradient, seeded(), per="batch")
    rising = (shifted[..., 12:].mean((1, 2, 3)) > shifted[..., :4].mean((1, 2, 3))).sum()
    assert 0 < rising < 32


def test_domain_shift_repeats_the_edge_instead_of_inventing_black():
    shifted = domain_shift(torch.full((64, 1, 16, 16), 0.9), seeded(), per="image")
    assert (shifted.amax((1, 2, 3)) - shifted.amin((1, 2, 3))).max() < 1e-3


@pytest.mark.parametrize(("invert", "expected"), [(0.1, 0.08), (0.5, 0.4), (1.0, 0.8)])
def test_prior_shift_greys_some_images_and_inverts_as_many_as_it_is_told(invert, expected):
    red = torch.tensor([0.9, 0.1, 0.1]).view(1, 3, 1, 1).expand(1000, 3, 8, 8)
    shifted = prior_shift(red, seeded(), invert=invert).mean((2, 3))
    grey = (shifted.amax(1) - shifted.amin(1)) < 1e-4
    inverted = shifted[:, 0] < shifted[:, 1] - 1e-3  # seen where it is not grey
    assert grey.float().mean().item() == pytest.approx(0.2, abs=0.05)
    assert inverted.float().mean().item() == pytest.approx(expected, abs=0.05)


class TestNormalisedImages:
    def normalised(self, images):
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
        return (images - mean) / std

    def test_are_shifted_as_if_they_were_not(self):
        images = torch.rand(4, 3, 16, 16)
        expected = self.normalised(domain_shift(images, seeded()))
        got = shift_images(self.normalised(images), domain_shift, seeded(), MEAN, STD)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_rounding_is_forgiven_in_half_precision(self, dtype):
        images = self.normalised(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 4, 4))
        shift_images(images.to(dtype), lambda x, g: x, None, MEAN, STD)

    def test_without_mean_and_std_are_an_error_that_says_so(self):
        with pytest.raises(
            ValueError, match=r"expected \[0, 1\]. If the loader normalises.*mean=, std="
        ):
            shift_images(self.normalised(torch.rand(4, 3, 16, 16)), domain_shift, seeded())

    def test_with_the_wrong_mean_and_std_too(self):
        with pytest.raises(ValueError, match=r"expected \[0, 1\]"):
            shift_images(torch.randn(4, 3, 16, 16), domain_shift, seeded(), [0.9] * 3, [0.5] * 3)

    def test_wrong_number_of_channels(self):
        with pytest.raises(ValueError, match="have 2 values, expected one per channel: 3"):
            shift_images(torch.rand(4, 3, 16, 16), domain_shift, seeded(), [0.5, 0.5], STD)


@pytest.mark.parametrize("shift", SHIFTS)
class TestErrors:
    def test_range(self, shift):
        with pytest.raises(ValueError, match=r"span \[0, 255\].*divide by 255"):
            shift(torch.tensor([0.0, 255.0]).expand(2, 3, 4, 2))

    def test_nan(self, shift):
        with pytest.raises(ValueError, match=r"span \[nan, nan\]"):
            shift(torch.full((2, 3, 4, 4), float("nan")))

    def test_integers(self, shift):
        with pytest.raises(TypeError, match="uint8, expected floating point"):
            shift(torch.zeros(2, 3, 4, 4, dtype=torch.uint8))

    def test_not_images(self, shift):
        with pytest.raises(ValueError, match=r"works on images \(N, C, H, W\), got shape \(2, 3\)"):
            shift(torch.rand(2, 3))

    def test_unknown_per(self, shift):
        with pytest.raises(ValueError, match="expected 'batch' or 'image'"):
            shift(torch.rand(2, 3, 4, 4), per="pixel")
