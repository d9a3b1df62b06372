"""What classes do to moments: measured on images, and taken off."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ttnorm
from ttnorm import PostTrainConfig, post_train_
from ttnorm.classes import (
    Classes,
    classes_of,
    effect_of,
    measure_classes,
    predicted,
    spread_of,
    sum_up,
    without_class,
)
from ttnorm.tree import CLASSES, known_of


def test_classes_are_the_means_of_their_images():
    labels, effect = torch.arange(600) % 3, torch.randn(3, 5)
    mean, var = effect[labels] + 0.01 * torch.randn(600, 5), effect[labels].exp()
    codes, directions = measure_classes(sum_up(mean, var, labels, 3))
    of_mean, of_log_var = (codes @ directions).chunk(2, 1)
    expected = effect - effect.mean(0)
    torch.testing.assert_close(of_mean, expected, atol=1e-2, rtol=0)
    torch.testing.assert_close(of_log_var, expected, atol=1e-2, rtol=0)


def test_what_is_chance_is_left_out():
    labels = torch.arange(400) % 100  # four images of each class, which mean nothing
    codes, directions = measure_classes(
        sum_up(torch.randn(400, 50), torch.ones(400, 50), labels, 100)
    )
    seen, _ = (codes @ directions).chunk(2, 1)
    # 0.25 is what the means of four images vary by
    assert seen.square().mean() < 0.02


def test_a_class_without_an_image_and_many_classes():
    labels = torch.arange(900) % 90
    classes = measure_classes(sum_up(torch.randn(900, 8), torch.rand(900, 8), labels, 100))
    assert classes.codes.shape == (100, 16)  # no more directions than numbers
    assert torch.isfinite(classes.codes).all()


def test_classes_without_an_image_change_nothing_for_the_others():
    """A network of a thousand classes that is post-trained on images of ten."""
    labels = torch.arange(2000) % 10
    mean, var = torch.randn(10, 6)[labels] / 2 + torch.randn(2000, 6), torch.ones(2000, 6)
    few, many = (measure_classes(sum_up(mean, var, labels, number)) for number in (10, 1000))
    effect = many.codes @ many.directions
    torch.testing.assert_close(effect[:10], few.codes @ few.directions)
    assert not effect[10:].any()
    assert few.codes.any()
    torch.testing.assert_close(spread_of(many), spread_of(few))


def test_a_network_may_end_in_a_softmax():
    classes, logits = Classes(torch.eye(3), torch.ones(3, 2)), torch.randn(5, 3)
    expected = predicted(logits, classes)
    torch.testing.assert_close(predicted(logits.softmax(1), classes), expected)
    torch.testing.assert_close(predicted(logits.log_softmax(1), classes), expected)
    half = logits.softmax(1).half()
    torch.testing.assert_close(predicted(half, classes), expected, atol=1e-3, rtol=0)


def test_it_is_said_why_nothing_is_known_of_classes(small_network, caplog):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = small_network

        def forward(self, x):
            return {"logits": self.network(x)}

    assert classes_of(Named(), [(torch.rand(8, 3, 12, 12), torch.arange(8) % 4)]) is None
    assert "the network returned a dict" in caplog.text


def test_frames_count_as_if_they_were_of_no_class():
    classes = Classes(torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.5, 0.2]]))
    mean, var = torch.tensor([[0.5], [-0.5]]), torch.tensor([[0.2], [-0.2]]).exp()
    sure = 100 * torch.eye(2)
    mean, var = without_class((mean, var), effect_of(predicted(sure, classes), classes))
    torch.testing.assert_close(mean, torch.zeros(2, 1))
    torch.testing.assert_close(var, torch.ones(2, 1))
    assert spread_of(classes).tolist() == [0.25]


@pytest.mark.parametrize(
    "labels",
    [
        torch.zeros(8, 2, 2).long(),
        torch.full((8,), 4),
        torch.linspace(-1, 1, 32).view(8, 4),  # numbers to predict
        torch.tensor([0, 1, 1, 0]).expand(8, 4),  # several classes at once
    ],
)
def test_labels_that_are_no_classes_tell_nothing(small_network, labels):
    x = torch.rand(8, 3, 12, 12)
    assert classes_of(small_network, [(x, labels)]) is None
    assert classes_of(small_network, []) is None


class TestLabels:
    """Of whatever kind a loss takes."""

    @pytest.fixture
    def images(self):
        return torch.rand(64, 3, 12, 12), torch.arange(64) % 4

    def test_one_that_is_ignored_is_left_out(self, small_network, images):
        x, y = images
        expected = classes_of(small_network, [(x[1:], y[1:])])
        actual = classes_of(small_network, [(x, torch.cat((torch.tensor([-100]), y[1:])))])
        torch.testing.assert_close(actual.codes @ actual.directions,
                                   expected.codes @ expected.directions)  # fmt: skip

    @pytest.mark.parametrize("dtype", [torch.float32, torch.long])
    def test_how_likely_each_class_is(self, small_network, images, dtype):
        x, y = images
        expected = classes_of(small_network, [(x, y)])
        actual = classes_of(small_network, [(x, F.one_hot(y, 4).to(dtype))])
        assert torch.equal(actual.codes, expected.codes)

    def test_pixels_have_no_class(self, small_network, images):
        x, y = images
        assert classes_of(small_network, [(x, y[:, None, None].expand(-1, 12, 12))]) is None


def test_a_norm_that_is_not_used_knows_no_class(small_network):
    """An auxiliary head that is for training alone, say."""
    x, y = torch.rand(64, 3, 12, 12), torch.arange(64) % 4
    expected = classes_of(small_network, [(x, y)])
    small_network.head = nn.Identity()
    small_network.head.norm = nn.BatchNorm2d(5)
    actual = classes_of(small_network, [(x, y)])
    of_mean, of_log_var = (actual.codes @ actual.directions).chunk(2, 1)
    assert (of_mean[:, -5:] == 0).all()
    assert (of_log_var[:, -5:] == 0).all()
    first, _ = (expected.codes @ expected.directions).chunk(2, 1)
    torch.testing.assert_close(of_mean[:, :-5], first, atol=1e-5, rtol=1e-4)


def test_an_embedding_beside_class_labels_is_no_prediction(small_network, caplog):
    """With a loss that holds the head, as in metric learning."""
    x, last = torch.rand(64, 3, 12, 12) * torch.rand(64, 3, 1, 1), small_network[-1]
    last.bias.data = -last.weight.data @ small_network[:-1](x).mean(0)
    predicted = small_network(x).argmax(1)
    assert len(predicted.unique()) > 1
    loader = [(x, torch.arange(64) % 4)]
    head, config = nn.Linear(4, 4), PostTrainConfig(epochs=1, prior_samples=64)
    loss = lambda output, y: F.cross_entropy(head(output), y)  # noqa: E731
    post_train_(small_network, loader, config, loss=loss)
    assert known_of(small_network, CLASSES) is None
    assert "do not agree with the labels" in caplog.text
    post_train_(ttnorm.revert_(small_network), [(x, predicted)], config, loss=loss)
    assert known_of(small_network, CLASSES) is not None
