"""Post-training gives the same alpha again, also after it was stopped: seeds and checkpoints."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import random
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ttnorm
from ttnorm import PostTrainConfig, optimise_alpha, post_train_
from ttnorm.augment import shift_images
from ttnorm.identity import identity_of
from ttnorm.tree import CONFIG, known_of


@contextlib.contextmanager
def stopped_in_step(number):
    """Post-training is interrupted in this step."""
    steps = itertools.count(1)

    def shift_or_stop(*args, **kwargs):
        if next(steps) == number:
            raise KeyboardInterrupt
        return shift_images(*args, **kwargs)

    with mock.patch("ttnorm.posttrain.shift_images", shift_or_stop):
        yield


class Darker:
    """An augmentation that is an object."""

    def __call__(self, images, generator):
        return images / 2


class TestReproducible:
    CONFIG = PostTrainConfig(epochs=3, lr=0.02, prior_samples=20)

    def run(self, model, loader, **kwargs):
        result = post_train_(model, loader, kwargs.pop("config", self.CONFIG), **kwargs)
        ttnorm.revert_(model)
        return torch.cat(list(result.alpha.values()))

    def test_the_seed_decides_whatever_was_drawn_before(self, small_network, loader):
        first = self.run(small_network, loader)
        torch.rand(7), random.random(), np.random.rand()
        assert torch.equal(self.run(small_network, loader), first)
        other = self.run(small_network, loader, config=dataclasses.replace(self.CONFIG, seed=1))
        assert not torch.equal(other, first)

    def test_a_loader_with_its_own_generator(self, small_network, loader):
        own = torch.Generator().manual_seed(5)
        loader = DataLoader(loader.dataset, batch_size=10, shuffle=True, generator=own)
        first, state = self.run(small_network, loader), own.get_state()
        own.manual_seed(99)
        assert torch.equal(self.run(small_network, loader), first)
        assert torch.equal(own.get_state(), torch.Generator().manual_seed(99).get_state())
        assert not torch.equal(state, own.get_state())

    def test_a_batch_sampler_with_its_own_generator(self, small_network, loader):
        class Batches:
            def __init__(self):
                self.generator = torch.Generator().manual_seed(5)

            def __iter__(self):
                return iter(torch.randperm(40, generator=self.generator).view(4, 10).tolist())

            def __len__(self):
                return 4

        loader = DataLoader(loader.dataset, batch_sampler=Batches())
        first = self.run(small_network, loader)
        assert torch.equal(self.run(small_network, loader), first)

    def test_workers_that_outlive_an_epoch_are_warned_of(
        self, small_network, loader, tmp_path, caplog
    ):
        lasting = DataLoader(loader.dataset, batch_size=20, num_workers=1, persistent_workers=True)
        self.run(small_network, lasting, checkpoint=tmp_path / "run.safetensors")
        assert "persistent_workers" in caplog.text

    def test_nobody_s_random_state_moves(self, small_network, loader):
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        self.run(small_network, loader)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert (np.random.get_state()[1] == states[2]).all()

    @pytest.mark.parametrize("amp", [None, "float16"])
    @pytest.mark.parametrize("stop_after", [1, 2, 3])
    def test_a_stopped_run_goes_on_to_the_same_alpha(
        self, small_network, loader, tmp_path, stop_after, amp
    ):
        config = dataclasses.replace(self.CONFIG, amp=amp)
        expected = self.run(small_network, loader, config=config)
        checkpoint = tmp_path / "run.safetensors"
        # in the last batch of an epoch: before its checkpoint
        with stopped_in_step(4 * stop_after), pytest.raises(KeyboardInterrupt):
            self.run(small_network, loader, config=config, checkpoint=checkpoint)
        assert type(small_network[1]) is nn.BatchNorm2d
        assert checkpoint.exists() == (stop_after > 1)
        resumed = self.run(small_network, loader, config=config, checkpoint=checkpoint)
        assert torch.equal(resumed, expected)

    @pytest.mark.parametrize(
        "augment", [functools.partial(ttnorm.domain_shift, per="image"), Darker()]
    )
    def test_an_augmentation_is_recognised_in_another_process(self, augment):
        other = copy.deepcopy(augment)  # another object, at another address
        assert identity_of(augment) == identity_of(other)

    @pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
    def test_mean_and_std_of_any_kind(self, small_network, loader, tmp_path, kind):
        options = {"mean": kind([0.0] * 3), "std": kind([1.0] * 3)}
        options["checkpoint"] = tmp_path / "run.safetensors"
        first = self.run(small_network, loader, **options)
        assert torch.equal(self.run(small_network, loader, **options), first)

    def test_a_finished_run_is_read_not_run(self, small_network, loader, tmp_path, caplog):
        checkpoint = tmp_path / "run.safetensors"
        expected = self.run(small_network, loader, checkpoint=checkpoint)
        assert "finished" not in caplog.text
        assert torch.equal(self.run(small_network, [], checkpoint=checkpoint), expected)
        assert "the checkpoint is of a finished run" in caplog.text

    def test_a_loss_is_known_by_all_of_its_options(self, small_network, loader, tmp_path):
        checkpoint = tmp_path / "run.safetensors"
        plain, smooth = (nn.CrossEntropyLoss(label_smoothing=by) for by in (0.0, 0.5))
        weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 1.0]))
        first = self.run(small_network, loader, loss=plain, checkpoint=checkpoint)
        for other in (smooth, weighted):
            with pytest.raises(ValueError, match="its loss differs"):
                self.run(small_network, loader, loss=other, checkpoint=checkpoint)
        again = nn.CrossEntropyLoss()
        assert torch.equal(self.run(small_network, [], loss=again, checkpoint=checkpoint), first)

    def test_lambdas_are_told_apart(self, small_network, loader, tmp_path):
        losses = [lambda o, y: F.cross_entropy(o, y), lambda o, y: F.cross_entropy(-5 * o, y)]
        losses.append(lambda o, y: F.cross_entropy(-6 * o, y))
        checkpoint = tmp_path / "run.safetensors"
        self.run(small_network, loader, loss=losses[1], checkpoint=checkpoint)
        for other in (losses[0], losses[2]):
            with pytest.raises(ValueError, match="its loss differs"):
                self.run(small_network, loader, loss=other, checkpoint=checkpoint)
        self.run(small_network, loader, loss=lambda o, y: F.cross_entropy(-5 * o, y))

    def test_a_file_that_is_no_checkpoint_is_not_called_one(self, small_network, loader, tmp_path):
        path = tmp_path / "alpha.ttn.safetensors"
        ttnorm.save(ttnorm.convert_(copy.deepcopy(small_network), 0.1), path)
        with pytest.raises(ValueError, match="no checkpoint of post-training"):
            self.run(small_network, loader, checkpoint=path)

    def test_a_loss_with_a_temperature_of_its_own(self, small_network, loader):
        class Tempered(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("temperature", torch.tensor(2.0))

            def forward(self, output, y):
                return F.cross_entropy(output / self.temperature, y)

        assert self.run(small_network, loader, loss=Tempered()).isfinite().all()

    def test_another_run_s_checkpoint_is_refused(self, small_network, loader, tmp_path):
        checkpoint = tmp_path / "run.safetensors"
        self.run(small_network, loader, checkpoint=checkpoint)
        fine_tuned = copy.deepcopy(small_network)  # with its BatchNorm layers frozen
        next(fine_tuned.parameters()).data += 1
        with pytest.raises(ValueError, match="checkpoint of another run: its weights differs"):
            self.run(fine_tuned, loader, checkpoint=checkpoint)
        other = dataclasses.replace(self.CONFIG, lr=0.5)
        with pytest.raises(ValueError, match="checkpoint of another run: its config differs"):
            self.run(small_network, loader, config=other, checkpoint=checkpoint)
        with pytest.raises(ValueError, match="its loss differs"):
            self.run(small_network, loader, loss=F.multi_margin_loss, checkpoint=checkpoint)
        shift = ttnorm.domain_shift
        with pytest.raises(ValueError, match="its prior augmentation differs"):
            self.run(small_network, loader, prior_augment=shift, checkpoint=checkpoint)
        with pytest.raises(ValueError, match="its augmentation differs"):
            self.run(small_network, loader, augment=ttnorm.prior_shift, checkpoint=checkpoint)
        with pytest.raises(ValueError, match="its mean and std differs"):
            self.run(small_network, loader, mean=[0.0] * 3, std=[1.0] * 3, checkpoint=checkpoint)
        one, other = ({"1": torch.rand(6), "4": torch.rand(8)} for _ in range(2))
        own = tmp_path / "own.safetensors"
        optimise_alpha(small_network, loader, one, self.CONFIG, checkpoint=own)
        with pytest.raises(ValueError, match="prior is not the one"):
            optimise_alpha(small_network, loader, other, self.CONFIG, checkpoint=own)
        small_network[1].running_mean += 1
        with pytest.raises(ValueError, match="its network differs"):
            self.run(small_network, loader, checkpoint=checkpoint)

    def test_a_run_whose_scaler_skipped_every_step_resumes(self, small_network, loader, tmp_path):
        """Then Adam has no state yet."""
        config = PostTrainConfig(epochs=2, steps_per_epoch=1, amp="float16", prior_samples=20)
        options = {"loss": lambda o, y: 5e4 * F.cross_entropy(o, y), "config": config}
        options["checkpoint"] = tmp_path / "run.safetensors"
        with stopped_in_step(2), pytest.raises(KeyboardInterrupt):
            self.run(small_network, loader, **options)
        assert self.run(small_network, loader, **options).isfinite().all()


def brighter(images, generator, base):
    return base(images, generator)


def test_a_shift_that_is_given_another_resumes(small_network, tmp_path):
    loader = [(torch.rand(8, 3, 12, 12), torch.arange(8) % 4)]
    options = {"checkpoint": tmp_path / "run.safetensors"}
    shift = functools.partial(brighter, base=ttnorm.domain_shift)
    config = PostTrainConfig(epochs=1)
    first = post_train_(small_network, loader, config, augment=shift, **options)
    assert known_of(small_network, CONFIG)["augmentation"] == "brighter(base=domain_shift)"
    again = post_train_(ttnorm.revert_(small_network), [], config, augment=shift, **options)
    assert again.history == first.history


def test_a_sampler_is_in_the_epoch_it_was_in(small_network):
    x, y = torch.rand(16, 3, 12, 12), torch.arange(16) % 4
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    sampler.set_epoch(7)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    post_train_(small_network, loader, PostTrainConfig(epochs=2))
    assert sampler.epoch == 7
