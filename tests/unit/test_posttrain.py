"""Post-training: every switch of the paper, and no trace on the network."""

import copy
import dataclasses
import functools
import itertools

import digits
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ttnorm
from ttnorm import PostTrainConfig, optimise_alpha, post_train_
from ttnorm.tree import CLASSES, CONTENT, known_of


@pytest.fixture
def prior():
    return {"1": torch.linspace(0.1, 0.6, 6), "4": torch.linspace(0, 0.7, 8)}


def flat(alpha):
    return torch.cat(list(alpha.values()))


class TestObjective:
    """Which terms count, and where alpha starts."""

    def test_mse_alone_goes_to_the_prior(self, small_network, loader, prior):
        config = PostTrainConfig(epochs=60, lr=0.05, init="random", ce=False)
        result = optimise_alpha(small_network, loader, prior, config)
        torch.testing.assert_close(flat(result.alpha), flat(prior), atol=0.02, rtol=0)

    def test_ce_alone_leaves_the_prior(self, small_network, loader, prior):
        config = PostTrainConfig(epochs=5, lr=0.02, mse=False)
        free = optimise_alpha(small_network, loader, prior, config)
        held = optimise_alpha(
            small_network, loader, prior, dataclasses.replace(config, mse=True, lambda_=100.0)
        )
        distance = [(flat(r.alpha) - flat(prior)).square().mean() for r in (free, held)]
        assert distance[0] > 4 * distance[1]
        assert free.history[-1]["ce"] < free.history[0]["ce"]

    def test_neither_term_keeps_the_start(self, small_network, loader, prior):
        result = optimise_alpha(small_network, loader, prior, PostTrainConfig(ce=False, mse=False))
        assert torch.equal(flat(result.alpha), flat(prior))
        assert result.history == []

    def test_an_autocast_around_it_changes_nothing(self, small_network, loader, prior):
        config = PostTrainConfig(epochs=2, lr=0.01)
        expected = optimise_alpha(small_network, loader, prior, config).alpha
        with torch.autocast("cpu", torch.bfloat16):
            actual = optimise_alpha(small_network, loader, prior, config).alpha
            again = ttnorm.estimate_prior(small_network, loader, generator=torch.Generator())
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
        assert all(a.dtype == torch.float32 for a in again.values())

    def test_zero_epochs_keep_the_start(self, small_network, loader, prior):
        result = optimise_alpha(small_network, loader, prior, PostTrainConfig(epochs=0))
        assert torch.equal(flat(result.alpha), flat(prior))

    def test_init_constant(self, small_network, loader):
        config = PostTrainConfig(init=0.3, mse=False, epochs=0)
        assert (flat(optimise_alpha(small_network, loader, None, config).alpha) == 0.3).all()

    def test_init_random_depends_on_the_seed(self, small_network, loader):
        starts = [
            flat(
                optimise_alpha(
                    small_network,
                    loader,
                    None,
                    PostTrainConfig(init="random", mse=False, epochs=0, seed=seed),
                ).alpha
            )
            for seed in (1, 1, 2)
        ]
        assert torch.equal(starts[0], starts[1])
        assert not torch.equal(starts[0], starts[2])
        assert starts[0].min() >= 0
        assert starts[0].max() < 1

    def test_the_gradient_is_that_of_the_loss(self, small_network, prior):
        """One step of Adam moves every alpha by lr against the sign of its gradient."""
        x, y = torch.rand(10, 3, 12, 12), torch.randint(4, (10,))
        config = PostTrainConfig(epochs=1, lr=1e-3, lambda_=0.5)
        identity = lambda images, generator: images  # noqa: E731
        start = {name: a + 0.2 for name, a in prior.items()}
        result = optimise_alpha(small_network, [(x, y)], start, config, augment=identity)
        moved = flat(result.alpha) - flat(start)

        ttnorm.convert_(small_network, start)
        layers = [small_network[1], small_network[4]]
        for layer in layers:
            layer.alpha = layer.alpha.clone().requires_grad_()
        F.cross_entropy(small_network(x), y).backward()  # at the start the MSE is zero
        gradient = torch.cat([layer.alpha.grad for layer in layers])
        clear = gradient.abs() > 1e-4  # Adam's epsilon shortens the step where there is none
        torch.testing.assert_close(moved[clear], -1e-3 * gradient[clear].sign(), rtol=1e-2, atol=0)

    @pytest.mark.parametrize(("granularity", "values"), [("layer", 2), ("constant", 1)])
    def test_init_random_is_random_at_every_granularity(
        self, small_network, loader, granularity, values
    ):
        starts = []
        for seed in range(8):
            config = PostTrainConfig(
                init="random", mse=False, epochs=0, granularity=granularity, seed=seed
            )
            alpha = flat(optimise_alpha(small_network, loader, None, config).alpha)
            assert len(alpha.unique()) == values
            starts.append(alpha)
        # a mean over channels would stay around 0.5
        assert torch.stack(starts).std() > 0.2


class TestGranularity:
    def test_layer(self, small_network, loader, prior):
        config = PostTrainConfig(epochs=2, lr=0.02, granularity="layer")
        alpha = optimise_alpha(small_network, loader, prior, config).alpha
        assert all(len(a.unique()) == 1 for a in alpha.values())
        assert alpha["1"][0] != alpha["4"][0]

    def test_constant(self, small_network, loader, prior):
        config = PostTrainConfig(epochs=2, lr=0.02, granularity="constant")
        alpha = optimise_alpha(small_network, loader, prior, config).alpha
        assert len(flat(alpha).unique()) == 1
        assert flat(alpha)[0] != flat(prior).mean()

    @pytest.mark.parametrize("average", ["layer", "constant"])
    def test_average_afterwards(self, small_network, loader, prior, average):
        config = PostTrainConfig(epochs=2, lr=0.02)
        alpha = optimise_alpha(small_network, loader, prior, config).alpha
        averaged = optimise_alpha(
            small_network, loader, prior, dataclasses.replace(config, average=average)
        ).alpha
        if average == "layer":
            expected = {name: a.mean().expand_as(a) for name, a in alpha.items()}
        else:
            expected = {name: flat(alpha).mean().expand_as(a) for name, a in alpha.items()}
        torch.testing.assert_close(averaged, expected)


class TestLoop:
    def test_alpha_stays_in_the_unit_interval(self, small_network, loader, prior):
        config = PostTrainConfig(epochs=4, lr=0.5, mse=False)
        alpha = flat(optimise_alpha(small_network, loader, prior, config).alpha)
        assert alpha.min() == 0
        assert alpha.max() == 1

    def test_cosine_falls_to_zero_and_constant_does_not(self, small_network, loader, prior):
        rates = {
            schedule: [
                row["lr"]
                for row in optimise_alpha(
                    small_network, loader, prior, PostTrainConfig(epochs=4, schedule=schedule)
                ).history
            ]
            for schedule in ("cosine", "constant")
        }
        assert rates["constant"] == [1e-3] * 4
        assert rates["cosine"] == sorted(rates["cosine"], reverse=True)
        assert rates["cosine"][-1] < 5e-5

    def test_dynamic_batch_draws_sizes_from_the_range(self, small_network, prior):
        sizes = []

        def count(images, generator):
            sizes.append(len(images))
            return images

        x, y = torch.rand(300, 3, 12, 12), torch.randint(4, (300,))
        loader = DataLoader(TensorDataset(x, y), batch_size=30)
        config = PostTrainConfig(epochs=10, dynamic_batch=(4, 200))
        optimise_alpha(small_network, loader, prior, config, augment=count)
        assert min(sizes) < 10
        assert max(sizes) > 25
        assert all(4 <= size <= 30 for size in sizes)

    def test_groups_are_normalised_on_their_own(self, small_network, prior):
        """A step in groups has the loss of so many small batches."""
        light = torch.tensor([0.1, 0.5, 1.0]).repeat_interleave(4)[:, None, None, None]
        x, y = light * torch.rand(12, 3, 12, 12), torch.randint(4, (12,))
        found = {}
        small = list(zip(x.split(4), y.split(4), strict=True))
        for sizes, batches in (((4,), [(x, y)]), (None, small), ((12,), [(x, y)])):
            config = PostTrainConfig(epochs=1, group_sizes=sizes, lr=1e-9)
            result = optimise_alpha(
                small_network, batches, prior, config, augment=lambda images, _: images
            )
            found[sizes] = result.history[0]["ce"]
        assert found[4,] == pytest.approx(found[None], rel=1e-5)
        assert found[12,] != pytest.approx(found[None], rel=1e-3)

    def test_group_sizes_are_drawn_and_leave_no_sample_out(self, small_network, prior):
        seen, sizes = [], set()

        def count(images, generator):
            seen.append(len(images))
            return images

        def note(module, args):
            sizes.update(layer.group_size for layer in ttnorm.tree.ttn_layers(module).values())

        small_network.register_forward_pre_hook(note)
        x, y = torch.rand(60, 3, 12, 12), torch.randint(4, (60,))
        loader = DataLoader(TensorDataset(x, y), batch_size=30)
        config = PostTrainConfig(epochs=10, group_sizes=(1, 7, 64))
        optimise_alpha(small_network, loader, prior, config, augment=count)
        assert set(seen) == {30}
        assert sizes == {1, 7, 64}

    def test_the_shift_is_drawn_per_batch_or_per_image(self, small_network, prior):
        image = torch.rand(1, 3, 12, 12).expand(10, -1, -1, -1)
        seen = []
        small_network.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
        for shift in ("batch", "image"):
            config = PostTrainConfig(epochs=1, shift=shift)
            optimise_alpha(small_network, [(image, torch.zeros(10).long())], prior, config)
        brightness = [x.mean((1, 2, 3)) for x in seen]
        assert brightness[0].std() < 1e-6
        assert brightness[1].std() > 1e-3

    def test_early_stop_when_the_mse_saturates(self, small_network, loader, prior):
        config = PostTrainConfig(epochs=200, lr=0.01, schedule="constant", early_stop=0.05)
        result = optimise_alpha(small_network, loader, prior, config)
        assert 4 <= len(result.history) < 100
        recent = [row["mse"] for row in result.history[-4:]]
        assert all(abs(b - a) <= 0.05 * a for a, b in itertools.pairwise(recent))

    def test_steps_per_epoch(self, small_network, loader, prior):
        calls = []
        small_network.register_forward_hook(lambda *_: calls.append(1))
        config = PostTrainConfig(epochs=3, steps_per_epoch=2)
        optimise_alpha(small_network, loader, prior, config)
        assert len(calls) == 6

    @pytest.mark.parametrize("amp", ["bfloat16", "float16"])
    def test_amp_follows_float32(self, small_network, loader, prior, amp):
        results = [
            flat(
                optimise_alpha(
                    small_network, loader, prior, PostTrainConfig(epochs=4, lr=0.01, amp=dtype)
                ).alpha
            )
            for dtype in (None, amp)
        ]
        assert not torch.equal(results[0], results[1])
        moved = (results[0] - flat(prior)).norm()
        assert (results[0] - results[1]).norm() < 0.2 * moved

    def test_amp_does_not_touch_the_shift(self, small_network, loader, prior):
        seen = []
        small_network.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for amp in (None, "bfloat16"):
            config = PostTrainConfig(epochs=1, steps_per_epoch=1, amp=amp)
            optimise_alpha(small_network, loader, prior, config)
        assert seen[1].dtype == torch.float32
        assert torch.equal(seen[0], seen[1])

    def test_a_loader_without_a_length(self, small_network, loader, prior):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter([(torch.rand(3, 12, 12), 1)] * 20)

        config = PostTrainConfig(epochs=2)
        result = optimise_alpha(small_network, DataLoader(Stream(), batch_size=5), prior, config)
        assert len(result.history) == 2

    def test_a_loss_that_is_not_finite_is_an_error(self, small_network, prior):
        y = torch.full((4,), -100)  # every label ignored: a mean over nothing
        loader = [(torch.rand(4, 3, 12, 12), y)]
        with pytest.raises(ValueError, match="loss was not finite in epoch 1"):
            optimise_alpha(small_network, loader, prior, PostTrainConfig(epochs=1))

    def test_an_empty_loader_is_an_error(self, small_network, prior):
        with pytest.raises(ValueError, match="yielded no batches"):
            optimise_alpha(small_network, [], prior, PostTrainConfig(epochs=1))


class TestPostTrain:
    def test_changes_nothing_but_the_norm_layers(self, small_network, loader):
        small_network.train()
        before = {k: v.clone() for k, v in small_network.state_dict().items()}
        result = post_train_(small_network, loader, PostTrainConfig(epochs=1))
        assert all(torch.equal(v, small_network.state_dict()[k]) for k, v in before.items())
        assert all(p.requires_grad and p.grad is None for p in small_network.parameters())
        assert all(module.training for module in small_network.modules())
        assert torch.equal(flat(ttnorm.alphas(small_network)), flat(result.alpha))
        assert not any(a.requires_grad for a in ttnorm.alphas(small_network).values())

    def test_normalised_images_with_mean_and_std(self, small_network):
        x, y = torch.rand(20, 3, 12, 12), torch.randint(4, (20,))
        config = PostTrainConfig(epochs=1)
        with pytest.raises(ValueError, match=r"pass the mean and std"):
            post_train_(small_network, [(2 * x - 1, y)], config)
        assert type(small_network[1]) is nn.BatchNorm2d
        post_train_(small_network, [(2 * x - 1, y)], config, mean=[0.5] * 3, std=[0.5] * 3)

    def test_no_prior_where_nothing_needs_one(self, small_network, loader):
        def fails(images, generator):
            raise AssertionError

        config = PostTrainConfig(epochs=1, init=0.2, mse=False)
        result = post_train_(small_network, loader, config, prior_augment=fails)
        assert result.prior is None

    def test_what_an_earlier_run_knew_of_classes_is_forgotten(self, small_network, loader):
        config = PostTrainConfig(epochs=1, prior_samples=8)
        ttnorm.post_train_(small_network, loader, config)
        several = [(x, (F.one_hot(y, 4) + F.one_hot(y, 4).roll(1, 1)).float()) for x, y in loader]
        loss = F.binary_cross_entropy_with_logits  # several classes at once
        ttnorm.post_train_(small_network, several, config, loss=loss)
        assert known_of(small_network, CLASSES) is None

    def test_numbers_of_numpy_are_numbers(self, small_network, loader, tmp_path):
        config = PostTrainConfig(epochs=1, lr=np.float32(1e-3), lambda_=np.float32(2))
        ttnorm.post_train_(small_network, loader, config)
        ttnorm.save(small_network, tmp_path / "alpha.safetensors")

    def test_segmentation_with_ignored_pixels(self):
        model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1))
        y = torch.randint(4, (8, 10, 10))
        y[:, :2] = 255
        loss = functools.partial(F.cross_entropy, ignore_index=255)
        loader = [(torch.rand(2, 3, 10, 10), y[i : i + 2]) for i in range(0, 8, 2)]
        result = post_train_(model, loader, PostTrainConfig(epochs=2), loss=loss)
        assert flat(result.alpha).isfinite().all()

    def test_inside_isolated_it_is_what_it_is_outside(self, small_network, loader):
        config = PostTrainConfig(epochs=1, lr=0.1)
        outside = post_train_(small_network, loader, config)
        with ttnorm.isolated(small_network, 1):
            inside = post_train_(small_network, loader, config)
            assert small_network[1].group_size == 1
        assert torch.equal(flat(inside.alpha), flat(outside.alpha))

    def test_an_interrupted_run_leaves_the_network_as_it_was(self, small_network, loader):
        def stop(images, generator):
            raise KeyboardInterrupt

        ttnorm.convert_(small_network, alpha=0.25)
        with pytest.raises(KeyboardInterrupt):
            post_train_(small_network, loader, augment=stop)
        assert (flat(ttnorm.alphas(small_network)) == 0.25).all()

    def test_a_loader_that_fails_does_so_before_the_fit(self, small_network, loader):
        """What streams ask of source images is measured first: nothing is fitted in vain."""
        passes = []

        class Failing:
            def __iter__(self):
                passes.append(1)
                if len(passes) == 3:
                    raise OSError("the disk is gone")
                return iter(loader)

        fitted = []
        loss = lambda o, y: fitted.append(1) or F.cross_entropy(o, y)  # noqa: E731
        config = PostTrainConfig(epochs=1, init=0.1, mse=False)
        with pytest.raises(OSError, match="the disk is gone"):
            post_train_(small_network, Failing(), config, loss=loss)
        assert len(fitted) == 0
        assert type(small_network[1]) is nn.BatchNorm2d

    def test_helps_under_a_shift_it_has_not_seen(self):
        """Digits in fog: better than the source's statistics, and far better than none at B = 1."""
        train, test = digits.load_digits()
        model = digits.train_network(train, epochs=10)
        loader = DataLoader(TensorDataset(*train), batch_size=200, shuffle=True)
        post_train_(model, loader, PostTrainConfig(epochs=10, lr=5e-3))
        learned = {name: a.clone() for name, a in ttnorm.alphas(model).items()}

        def error(alpha, size):
            return digits.error(ttnorm.convert_(model, alpha), test, "fog", size)

        assert error(learned, 200) < 0.7 * error(0.0, 200)
        assert error(learned, 1) < 0.9 * error(1.0, 1)


class TestOddLoaders:
    """What is measured of source images besides alpha asks nothing more of a loader."""

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
    def test_labels_of_any_whole_number(self, small_network, dtype):
        batch = (torch.rand(16, 3, 12, 12), torch.randint(4, (16,)).to(dtype))
        post_train_(small_network, [batch], PostTrainConfig(epochs=1))
        assert small_network.__dict__[CLASSES].codes.shape[0] == 4

    def test_batches_that_were_made_in_inference_mode(self, small_network):
        with torch.inference_mode():
            batch = (torch.rand(16, 3, 12, 12), torch.randint(4, (16,)))
        result = post_train_(small_network, [batch], PostTrainConfig(epochs=1))
        assert len(result.history) == 1

    def test_one_that_gives_class_after_class_is_warned_of(self, small_network, prior, caplog):
        images = torch.rand(48, 3, 8, 8)
        config, message = PostTrainConfig(epochs=2), "have the same label"
        for labels, warnings in ((torch.arange(48) % 3, 0), (torch.arange(48) // 16, 1)):
            pairs = list(zip(images.split(16), labels.split(16), strict=True))
            optimise_alpha(small_network, pairs, prior, config)
            assert caplog.text.count(message) == warnings

    def test_images_that_the_network_changes_are_given_to_it_unchanged(self, changing_network):
        x, y = torch.rand(32, 3, 12, 12), torch.randint(4, (32,))
        before = x.clone()
        post_train_(changing_network, [(x, y)], PostTrainConfig(epochs=2))
        assert torch.equal(x, before)

    def test_in_inference_mode_it_is_what_it_is_outside(self, small_network, loader):
        config = PostTrainConfig(epochs=1)
        expected = post_train_(copy.deepcopy(small_network), loader, config).alpha
        with torch.inference_mode():
            actual = post_train_(small_network, loader, config).alpha
        assert all(torch.equal(actual[name], expected[name]) for name in expected)

    def test_labels_that_say_how_likely_each_class_is(self, small_network):
        x, y = torch.rand(16, 3, 12, 12), torch.randint(4, (16,))
        config = PostTrainConfig(epochs=1)
        expected = post_train_(copy.deepcopy(small_network), [(x, y)], config).alpha
        actual = post_train_(small_network, [(x, F.one_hot(y, 4))], config).alpha
        assert all(torch.allclose(actual[name], expected[name]) for name in expected)

    def test_nor_does_a_shift_that_gives_them_back_let_it_change_them(self, changing_network):
        x, y = torch.rand(32, 3, 12, 12), torch.randint(4, (32,))
        before, same = x.clone(), {}
        same["augment"] = same["prior_augment"] = lambda images, generator: images
        post_train_(changing_network, [(x, y)], PostTrainConfig(epochs=2), **same)
        assert torch.equal(x, before)

    def test_a_single_image(self, small_network):
        batch = (torch.rand(1, 3, 12, 12), torch.tensor([2]))
        post_train_(small_network, [batch], PostTrainConfig(epochs=1, init=0.1, mse=False))
        assert CONTENT not in small_network.__dict__  # one says nothing of how they vary


def test_what_folds_into_the_batch_is_fitted_without_a_prior():
    """Streams cannot tell its frames apart, which is no reason to lose alpha."""

    class Video(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.head = nn.BatchNorm2d(3), nn.Linear(3, 4)

        def forward(self, x):
            frames = self.bn(x.flatten(0, 1)).mean((2, 3))
            return self.head(frames.unflatten(0, x.shape[:2]).mean(1))

    model, loader = Video().eval(), [(torch.rand(8, 2, 3, 6, 6), torch.arange(8) % 4)]
    config = PostTrainConfig(epochs=1, init=0.1, mse=False)
    post_train_(model, loader, config, augment=lambda x, _: x)
    assert type(model.bn).__name__ == "TTNorm2d"
    assert not {CONTENT, CLASSES} & model.__dict__.keys()


class TestOnesOwn:
    """Losses, shifts and loaders of a user's own."""

    X, Y = torch.rand(16, 3, 12, 12), torch.arange(16) % 4
    CONFIG = PostTrainConfig(epochs=1, prior_samples=16)

    def test_a_container_of_no_modules_is_a_loss_and_a_shift_all_the_same(self, small_network):
        called = []

        class Loss(nn.ModuleList):
            def forward(self, output, y):
                called.append("loss")
                return F.cross_entropy(output, y)

        class Shift(nn.ModuleList):
            def forward(self, images, generator):
                called.append("shift")
                return images / 2

        loader = [(self.X, self.Y)]
        post_train_(small_network, loader, self.CONFIG, loss=Loss(), augment=Shift())
        assert set(called) == {"loss", "shift"}

    def test_parameters_of_a_loss_keep_their_gradients(self, small_network):
        head = nn.Linear(4, 4)
        head.weight.grad = torch.full_like(head.weight, 7.0)
        loss = lambda output, y: F.cross_entropy(head(output), y)  # noqa: E731
        post_train_(small_network, [(self.X, self.Y)], self.CONFIG, loss=loss)
        assert (head.weight.grad == 7).all()
        assert head.bias.grad is None

    def test_a_loader_that_does_not_implement_its_length(self, small_network):
        class Endless:
            def __len__(self):
                raise NotImplementedError

            def __iter__(self):
                return iter([(TestOnesOwn.X, TestOnesOwn.Y)] * 2)

        result = post_train_(small_network, Endless(), self.CONFIG)
        assert len(result.history) == 1

    def test_sizes_may_be_numpy_s(self):
        config = PostTrainConfig(group_sizes=np.array([1, 4]).tolist(), dynamic_batch=[4, 8])
        numpy = PostTrainConfig(
            group_sizes=(np.int64(1), np.int32(4)), dynamic_batch=(np.int64(4), np.int64(8))
        )
        assert (numpy.group_sizes, numpy.dynamic_batch) == ((1, 4), (4, 8))
        assert numpy == config


def test_the_default_dtype_of_torch_is_no_part_of_it(small_network, loader, prior):
    config = PostTrainConfig(epochs=2, lr=0.01)
    expected = optimise_alpha(small_network, loader, prior, config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        result = optimise_alpha(small_network, loader, prior, config)
    finally:
        torch.set_default_dtype(before)
    assert flat(result.alpha).dtype == torch.float32
    assert torch.equal(flat(result.alpha), flat(expected.alpha))
