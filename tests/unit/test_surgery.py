"""Conversion and back: nothing skipped, nothing mangled, everything as it was."""

import copy
import pickle

import numpy as np
import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchvision.ops import FrozenBatchNorm2d

import ttnorm
from ttnorm.surgery import borrowed, eval_mode
from ttnorm.tree import CONFIG, known_of, remember_

KINDS = [
    (nn.BatchNorm1d, (5, 4)),
    (nn.BatchNorm1d, (5, 4, 3)),
    (nn.BatchNorm2d, (5, 4, 3, 3)),
    (nn.BatchNorm3d, (5, 4, 2, 3, 3)),
    (nn.SyncBatchNorm, (5, 4, 3, 3)),
    (FrozenBatchNorm2d, (5, 4, 3, 3)),
    (BatchNormAct2d, (5, 4, 3, 3)),
]


def with_statistics(layer):
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    layer.weight.data.uniform_(-1, 1)
    layer.bias.data.uniform_(-1, 1)
    return layer.eval()


@pytest.mark.parametrize(("kind", "shape"), KINDS)
class TestEveryKind:
    def test_alpha_zero_changes_nothing_and_revert_gives_the_module_back(self, kind, shape):
        layer = with_statistics(kind(4))
        model, x = nn.Sequential(layer), torch.randn(shape)
        before, expected = copy.deepcopy(model.state_dict()), model(x)
        attributes = dict(layer.__dict__)

        ttnorm.convert_(model, alpha=0.0)
        torch.testing.assert_close(model(x), expected)

        ttnorm.revert_(model)
        assert model[0] is layer
        assert type(layer) is kind
        assert layer.__dict__.keys() == attributes.keys()
        assert torch.equal(model(x), expected)
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], before[key]) for key in before)

    def test_alpha_one_uses_the_batch(self, kind, shape):
        layer = with_statistics(kind(4))
        x = torch.randn(shape) * 3 + 2
        moved = ttnorm.convert_(nn.Sequential(layer), alpha=1.0)(100 * x - 7)
        torch.testing.assert_close(layer(x), moved, atol=1e-4, rtol=1e-4)

    def test_the_original_s_state_dict_loads_after_conversion(self, kind, shape):
        original = nn.Sequential(with_statistics(kind(4)))
        other = ttnorm.convert_(nn.Sequential(kind(4).eval()), alpha=0.3)
        other.load_state_dict(original.state_dict())
        x = torch.randn(shape)
        expected = ttnorm.convert_(original, alpha=0.3)(x)
        torch.testing.assert_close(other(x), expected)

    def test_a_converted_state_dict_carries_alpha(self, kind, shape):
        model = ttnorm.convert_(nn.Sequential(kind(4)), alpha=0.3)
        other = ttnorm.convert_(nn.Sequential(kind(4)), alpha=0.0)
        other.load_state_dict(model.state_dict())
        assert torch.equal(ttnorm.alphas(other)["0"], torch.full((4,), 0.3))

    def test_train_and_eval_give_the_same_output_and_change_no_state(self, kind, shape):
        model = ttnorm.convert_(nn.Sequential(with_statistics(kind(4))), alpha=0.3)
        before = copy.deepcopy(model.state_dict())
        x = torch.randn(shape)
        assert torch.equal(model.train()(x), model.eval()(x))
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    def test_copies_and_pickles_keep_alpha(self, kind, shape):
        model = ttnorm.convert_(nn.Sequential(with_statistics(kind(4))), alpha=0.3)
        x = torch.randn(shape)
        for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(clone(x), model(x))
            assert type(ttnorm.revert_(clone)[0]) is kind


def test_timm_s_activation_and_dropout_stay():
    layer = with_statistics(BatchNormAct2d(4, act_layer=nn.LeakyReLU, drop_layer=nn.Dropout))
    x = torch.randn(5, 4, 3, 3)
    expected = layer(x)
    assert torch.equal(ttnorm.convert_(nn.Sequential(layer), 0.0)(x), expected)
    assert isinstance(layer.act, nn.LeakyReLU)
    torch.testing.assert_close(
        layer.train()(x).eq(0).float().mean(), torch.tensor(0.5), atol=0.2, rtol=0
    )


def test_a_layer_used_in_two_places_stays_one_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.BatchNorm1d(4)
            self.again = nn.ModuleList([self.first, nn.BatchNorm1d(4)])

    model = ttnorm.convert_(Twice(), alpha=0.1)
    assert model.first is model.again[0]
    assert list(ttnorm.alphas(model)) == ["first", "again.1"]


def test_hooks_and_references_survive(small_network, images):
    calls, layer = [], small_network[1]
    layer.register_forward_hook(lambda *args: calls.append(1))
    ttnorm.convert_(small_network, alpha=0.1)
    small_network(images)
    assert calls == [1]
    assert small_network[1] is layer


def test_alpha_is_no_parameter(small_network):
    before = [name for name, _ in small_network.named_parameters()]
    ttnorm.convert_(small_network, alpha=0.1)
    assert [name for name, _ in small_network.named_parameters()] == before


def test_converting_again_sets_alpha(small_network):
    ttnorm.convert_(ttnorm.convert_(small_network, alpha=0.1), alpha=0.7)
    assert all((a == 0.7).all() for a in ttnorm.alphas(small_network).values())


def test_alpha_by_layer(small_network, images):
    alpha = {"1": torch.linspace(0, 1, 6), "4": 0.5}
    ttnorm.convert_(small_network, alpha)
    assert torch.equal(small_network[1].alpha, alpha["1"])
    assert torch.equal(small_network[4].alpha, torch.full((8,), 0.5))


def test_a_network_of_one_batchnorm_converts():
    layer = nn.BatchNorm2d(3)
    assert isinstance(ttnorm.convert_(layer, alpha=0.5), ttnorm.TTNorm2d)


def test_a_layer_built_as_ttnorm_reverts_to_batchnorm():
    for kind, expected in ((ttnorm.TTNorm1d, nn.BatchNorm1d), (ttnorm.TTNorm3d, nn.BatchNorm3d)):
        assert type(ttnorm.revert_(nn.Sequential(kind(3, alpha=0.5)))[0]) is expected


def test_alpha_may_be_a_number_of_numpy_s(small_network):
    ttnorm.convert_(small_network, np.float32(0.25))
    assert ttnorm.alphas(small_network)["1"].unique().tolist() == [0.25]


def test_names_ignore_wrappers(small_network):
    ttnorm.convert_(small_network, alpha=0.1)
    assert list(ttnorm.alphas(nn.DataParallel(small_network))) == ["1", "4"]
    assert list(ttnorm.alphas(torch.compile(small_network))) == ["1", "4"]
    assert list(ttnorm.alphas(AveragedModel(small_network))) == ["1", "4"]
    inside = nn.Sequential(nn.Identity(), torch.compile(small_network))
    assert list(ttnorm.alphas(inside)) == ["1.1", "1.4"]


def test_wrappers_and_the_network_share_what_is_known_of_alpha(small_network):
    compiled = torch.compile(small_network)
    remember_(ttnorm.convert_(compiled, alpha=0.1), CONFIG, {"made": "by hand"})
    assert known_of(small_network, CONFIG) == {"made": "by hand"}


def test_a_layer_without_values_can_be_printed():
    with torch.device("meta"):
        assert "3, eps=1e-05" in repr(ttnorm.TTNorm2d(3, alpha=0.5))


class TestRefused:
    """With a clear error, and the model as it was."""

    def refuses(self, layer, error, message):
        model = nn.Sequential(nn.BatchNorm2d(4), layer)
        with pytest.raises(error, match=message):
            ttnorm.convert_(model, alpha=0.1)
        assert type(model[0]) is nn.BatchNorm2d
        assert not hasattr(model[0], "alpha")

    def test_unknown_subclass(self):
        class Renorm(nn.BatchNorm2d):
            pass

        self.refuses(Renorm(4), TypeError, r"1 \(Renorm\) is a BatchNorm that ttnorm does not know")

    def test_unknown_class_with_running_statistics(self):
        class Homemade(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("running_mean", torch.zeros(4))
                self.register_buffer("running_var", torch.ones(4))

        self.refuses(Homemade(), TypeError, "Homemade")

    def test_without_running_statistics(self):
        layer = nn.BatchNorm2d(4, track_running_stats=False)
        self.refuses(layer, ValueError, "keeps no running statistics")

    def test_lazy(self):
        self.refuses(nn.LazyBatchNorm2d(), TypeError, "Run one forward first")

    def test_without_values(self):
        with torch.device("meta"):
            model = nn.Sequential(nn.BatchNorm2d(3))
        with pytest.raises(ValueError, match=r"'0' is on the meta device.*load_state_dict"):
            ttnorm.convert_(model, 0.1)

    def test_no_batchnorm(self):
        with pytest.raises(ValueError, match="Linear has no BatchNorm layers"):
            ttnorm.convert_(nn.Linear(3, 3), alpha=0.1)

    @pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
    def test_alpha_out_of_range(self, small_network, alpha):
        with pytest.raises(ValueError, match=r"expected values in \[0, 1\]"):
            ttnorm.convert_(small_network, alpha)
        assert type(small_network[1]) is nn.BatchNorm2d

    def test_one_tensor_for_all_layers(self, small_network):
        with pytest.raises(TypeError, match="alpha is a Tensor, expected a number, or a dict"):
            ttnorm.convert_(small_network, torch.rand(6))

    def test_alpha_of_another_shape(self, small_network):
        with pytest.raises(ValueError, match=r"alpha for '4' has shape \(6,\), expected \(8,\)"):
            ttnorm.convert_(small_network, {"1": torch.rand(6), "4": torch.rand(6)})

    def test_alpha_of_other_layers(self, small_network):
        with pytest.raises(ValueError, match=r"Missing: \['4'\]; unknown: \['5'\]"):
            ttnorm.convert_(small_network, {"1": torch.rand(6), "5": torch.rand(6)})

    def test_a_refused_alpha_does_not_forget_how_the_old_one_was_made(self, small_network):
        remember_(ttnorm.convert_(small_network, alpha=0.1), CONFIG, {"made": "by hand"})
        with pytest.raises(ValueError, match="expected values in"):
            ttnorm.convert_(small_network, alpha=2.0)
        assert known_of(small_network, CONFIG) == {"made": "by hand"}

    def test_a_layer_with_an_alpha_out_of_range(self):
        with pytest.raises(ValueError, match=r"alpha is 2.0, expected a number in \[0, 1\]"):
            ttnorm.TTNorm2d(3, alpha=2.0)

    def test_not_converted(self, small_network):
        with pytest.raises(ValueError, match=r"Call ttnorm\.convert_"):
            ttnorm.alphas(small_network)


def test_instance_norm_is_none_of_our_business(images):
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.BatchNorm2d(3))
    ttnorm.convert_(model, alpha=0.1)
    assert type(model[0]) is nn.InstanceNorm2d


def test_statistics_are_not_reset(small_network):
    """No forward would fill them in again, as swa_utils.update_bn expects."""
    before = copy.deepcopy(small_network.state_dict())
    ttnorm.convert_(small_network, 0.5)
    with pytest.raises(RuntimeError, match=r"Call ttnorm\.revert_"):
        torch.optim.swa_utils.update_bn([torch.rand(4, 3, 12, 12)], small_network)
    ttnorm.revert_(small_network)
    assert all(torch.equal(v, before[k]) for k, v in small_network.state_dict().items())


def test_borrowed_models_come_back_as_they_were(small_network):
    small_network[0].weight.requires_grad_(False)
    small_network[1].train()
    for converted in (False, True):
        if converted:
            ttnorm.convert_(small_network, alpha=0.3, cross_term=False)
        kind = type(small_network[1])
        with borrowed(small_network, alpha=0.0):
            assert not small_network[1].training
            assert not any(p.requires_grad for p in small_network.parameters())
            assert (small_network[1].alpha == 0).all()
        with pytest.raises(KeyError), borrowed(small_network, alpha=0.0):
            raise KeyError
        assert type(small_network[1]) is kind
        assert small_network[1].training
        assert not small_network[4].training
        assert [p.requires_grad for p in small_network.parameters()] == [False] + 9 * [True]
        if converted:
            assert (small_network[1].alpha == 0.3).all()
            assert not small_network[1].cross_term


def test_a_partly_converted_model_comes_back_partly_converted(small_network):
    ttnorm.convert_(small_network[1], alpha=0.3)
    with borrowed(small_network, alpha=0.0):
        assert isinstance(small_network[4], ttnorm.TTNorm2d)
    assert type(small_network[4]) is nn.BatchNorm2d
    assert (small_network[1].alpha == 0.3).all()


def test_wrong_input_dimensions_are_batchnorm_s_own_error():
    layer = ttnorm.TTNorm2d(3)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.rand(2, 3))


def test_a_layer_of_one_s_own_comes_back_as_the_batchnorm_it_extends():
    class Mine(ttnorm.TTNorm2d):
        pass

    model = ttnorm.revert_(nn.Sequential(Mine(3)))
    assert type(model[0]) is nn.BatchNorm2d
    assert model(torch.rand(2, 3, 4, 4)).shape == (2, 3, 4, 4)


def test_a_scripted_part_without_batchnorm_is_left_as_it_is():
    part = torch.jit.script(nn.Hardswish())
    model = ttnorm.convert_(nn.Sequential(part, nn.BatchNorm2d(4)), alpha=0.1)
    assert model[0] is part
    assert ttnorm.alphas(model).keys() == {"1"}


def test_networks_that_do_more_than_set_a_flag_come_back_in_their_mode(small_network):
    """As loralib's layers, which add what they learned to their weights in eval()."""

    class Merging(nn.Conv2d):
        merged = False

        def train(self, mode=True):
            super().train(mode)
            if self.merged == mode:
                self.weight.data += -1 if mode else 1
                self.merged = not mode
            return self

    for train in (True, False):
        for part in (True, False):
            conv = small_network[0] = Merging(3, 6, 3, padding=1)
            small_network.train(train)
            conv.train(part)
            weight = conv.weight.clone()
            with eval_mode(small_network):
                assert conv.merged
            assert (small_network.training, conv.training) == (train, part)
            assert (conv.merged, small_network[1].training) == (not part, train)
            torch.testing.assert_close(conv.weight, weight)


def test_a_network_of_inference_mode_is_refused_and_left_as_it_was(small_network):
    with torch.inference_mode():
        model = copy.deepcopy(small_network)
    with pytest.raises(ValueError, match=r"made or copied in torch\.inference_mode"):
        ttnorm.post_train_(model, [(torch.rand(8, 3, 12, 12), torch.arange(8) % 4)])
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert type(model[1]) is nn.BatchNorm2d


def test_a_copy_made_while_isolated_reverts_to_plain_batchnorm(small_network):
    with ttnorm.isolated(ttnorm.convert_(small_network, 0.5), 2):
        model = copy.deepcopy(small_network)
    assert vars(ttnorm.revert_(model)[1]).keys() == vars(nn.BatchNorm2d(6)).keys()


def test_what_is_known_of_a_part_stays_with_it(small_network):
    inner = ttnorm.convert_(small_network, 0.5)
    remember_(inner, CONFIG, {"epochs": 3})
    outer = nn.Sequential(inner, nn.Identity())
    with borrowed(outer, alpha=0.0):
        pass
    assert CONFIG not in outer.__dict__
    assert inner.__dict__[CONFIG] == {"epochs": 3}


def test_activation_checkpoints_change_no_name(small_network, tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    ttnorm.save(ttnorm.convert_(copy.deepcopy(small_network), 0.5), tmp_path / "a.safetensors")
    names = list(ttnorm.alphas(ttnorm.convert_(copy.deepcopy(small_network), 0.5)))
    small_network[1] = checkpoint_wrapper(small_network[1])
    ttnorm.load_(small_network, tmp_path / "a.safetensors")
    assert list(ttnorm.alphas(small_network)) == names
