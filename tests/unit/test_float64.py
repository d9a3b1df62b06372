"""Devices without float64, such as Apple's, are asked for none."""

import copy

import pytest
import torch

import ttnorm
from ttnorm import float64
from ttnorm.bench.scores import class_overlap


def test_what_has_no_float64_hands_its_values_to_the_cpu(monkeypatch):
    assert float64.in_float64(torch.ones(2, device="meta")).is_meta
    monkeypatch.setattr(float64, "DEVICES_WITHOUT", ("meta",))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        float64.in_float64(torch.ones(2, device="meta"))


def test_nothing_else_turns_to_float64(small_network, monkeypatch):
    def refuse(self):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(torch.Tensor, "double", refuse)
    x, y = torch.rand(12, 3, 12, 12), torch.arange(12) % 4
    config = ttnorm.PostTrainConfig(epochs=1)
    ttnorm.post_train_(small_network, [(x, y)], config)
    assert ttnorm.fold_(ttnorm.convert_(copy.deepcopy(small_network), 0.0)) == ["1", "4"]
    ttnorm.stream_(small_network)
    small_network(x)
    assert ttnorm.health(small_network)[None].frames == 12
    masks = torch.randint(0, 3, (2, 5, 5))
    assert class_overlap(masks, masks, 3).tolist() == [1, 1, 1]
