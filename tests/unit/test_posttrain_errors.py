"""What post-training refuses: loaders, losses and options that cannot be meant."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ttnorm import PostTrainConfig, StreamConfig, optimise_alpha, post_train_
from ttnorm.posttrain_config import as_json


class TestWrongLoadersAndLosses:
    """Each with the name of what came, and what to do."""

    X, Y = torch.rand(8, 3, 12, 12), torch.zeros(8, dtype=torch.long)

    @pytest.mark.parametrize(
        ("loader", "message"),
        [
            (
                [(X, Y, Y)],
                r"a tuple of 3 \(Tensor, Tensor, Tensor\), expected a pair of tensors",
            ),
            ([{"x": X, "y": Y}], "yielded a dict, expected a pair of tensors"),
            ([X], r"yielded a tensor of shape \(8, 3, 12, 12\), expected a pair"),
            (iter([(X, Y)]), "is a list_iterator, which can be read only once"),
        ],
    )
    def test_loader(self, small_network, loader, message):
        with pytest.raises(TypeError, match=message):
            post_train_(small_network, loader)

    @pytest.mark.parametrize("sizes", [(0, 0), (5, 8)])
    def test_numbers_of_samples(self, small_network, sizes):
        batch = (self.X[: sizes[0]], self.Y[: sizes[1]])
        message = f"{sizes[0]} inputs and {sizes[1]} labels, expected as many"
        with pytest.raises(ValueError, match=message):
            post_train_(small_network, [batch])

    def test_a_network_that_returns_a_dict(self, small_network):
        class Segmenter(nn.Module):
            def __init__(self):
                super().__init__()
                self.network = small_network

            def forward(self, x):
                return {"out": self.network(x)}

        model, loader = Segmenter(), [(self.X, self.Y)]
        with pytest.raises(TypeError, match=r"returned a dict.*loss=lambda output, y"):
            post_train_(model, loader)
        loss = lambda output, y: F.cross_entropy(output["out"], y)  # noqa: E731
        post_train_(model, loader, PostTrainConfig(epochs=1), loss=loss)

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            (torch.full((8,), 7), "There is a label 7, and the network tells 4 classes apart"),
            (torch.full((8,), -1), "There is a label -1, and the network tells 4 classes apart"),
            (
                torch.zeros(8, 1).long(),
                r"shape \(8, 1\) and the output \(8, 4\), expected .*\(8,\)",
            ),
            (torch.ones(8, 4), "are not how likely each class is.*BCEWithLogitsLoss"),
            (torch.tensor([1.0, 1.0, -1.0, 0.0]).expand(8, 4), "at least 0 and add up to 1"),
        ],
    )
    def test_labels_that_do_not_fit(self, small_network, labels, message):
        with pytest.raises(ValueError, match=message):
            post_train_(small_network, [(self.X, labels)])

    def test_numbers_to_predict(self, small_network):
        with pytest.raises(TypeError, match=r"Labels are torch.float32, expected classes.*loss="):
            post_train_(small_network, [(self.X, self.Y.float())])

    def test_a_data_set_in_the_place_of_a_loader(self, small_network):
        samples = TensorDataset(self.X, self.Y)
        with pytest.raises(ValueError, match=r"one sample, as a data set does. Pass .*DataLoader"):
            post_train_(small_network, samples)

    @pytest.mark.parametrize("wrong", [Tensor.numpy, Tensor.double, lambda x: x[:3]])
    def test_an_augmentation_that_gives_something_else(self, small_network, wrong):
        with pytest.raises(TypeError, match=r"The augmentation returned .*expected torch.float32"):
            post_train_(small_network, [(self.X, self.Y)], augment=lambda x, _: wrong(x))

    def test_a_loss_per_sample(self, small_network):
        loss = functools.partial(F.cross_entropy, reduction="none")
        with pytest.raises(ValueError, match=r"tensor of shape \(8,\), expected one number"):
            post_train_(small_network, [(self.X, self.Y)], loss=loss)


class TestConfigErrors:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("init", "zeros"),
            ("init", 1.5),
            ("granularity", "pixel"),
            ("average", "channel"),
            ("schedule", "step"),
            ("shift", "pixel"),
            ("amp", "int8"),
            ("dynamic_batch", (200, 4)),
            ("dynamic_batch", (4,)),
            ("dynamic_batch", ()),
            ("dynamic_batch", (0.5, 4)),
            ("group_sizes", ()),
            ("group_sizes", (4, 0)),
            ("group_sizes", (4.0,)),
            ("group_sizes", (True, 2)),
            ("epochs", 1.5),
            ("prior_samples", 8.5),
            ("steps_per_epoch", 1.5),
            ("patience", True),
            ("group_sizes", 4),
            ("epochs", -1),
            ("lr", 0.0),
            ("lambda_", float("nan")),
            ("source_count", float("nan")),
            ("patience", 0),
            ("steps_per_epoch", 0),
            ("prior_samples", 0),
        ],
    )
    def test_wrong_values_are_named(self, field, value):
        with pytest.raises(ValueError, match=f"{field} is .*expected"):
            PostTrainConfig(**{field: value})

    def test_numpy_s_numbers_are_numbers(self):
        given = {"epochs": np.int64(2), "init": np.float32(0.5), "seed": np.int32(1)}
        config = PostTrainConfig(**given, early_stop=np.float64(0.5), steps_per_epoch=np.int64(3))
        assert as_json(config)["epochs"] == 2
        assert StreamConfig(window=np.int64(9), slots=np.int64(3)) == StreamConfig(
            window=9, slots=3
        )

    def test_early_stop_without_a_prior_to_watch(self):
        with pytest.raises(ValueError, match=r"early_stop is 0.01, expected None"):
            PostTrainConfig(early_stop=0.01, init=0.1, mse=False)

    def test_missing_prior(self, small_network, loader):
        with pytest.raises(ValueError, match="needs a prior"):
            optimise_alpha(small_network, loader, None)

    def test_another_network_s_prior(self, small_network, loader):
        with pytest.raises(ValueError, match="estimated on another one"):
            optimise_alpha(small_network, loader, {"1": torch.rand(6)})

    def test_options_that_are_no_config(self, small_network, loader):
        with pytest.raises(TypeError, match="config is a dict, expected a PostTrainConfig"):
            post_train_(small_network, loader, {"epochs": 1})
