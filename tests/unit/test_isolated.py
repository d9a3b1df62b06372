"""Groups of a batch that are normalised on their own, and networks that cannot be cut so."""

import threading

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import ttnorm


class TestIsolated:
    def test_a_list_of_images_is_a_batch_of_them(self):
        class Listed(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm2d(3)

            def forward(self, images):
                return self.norm(torch.stack(images))

        model, x = ttnorm.convert_(Listed(), 1.0), torch.rand(5, 3, 4, 4)
        with ttnorm.isolated(model, 2):
            together = model(list(x))
        apart = torch.cat([model(list(part)) for part in x.split(2)])
        torch.testing.assert_close(together, apart)

    @pytest.mark.parametrize("group_size", [1, 3, 5, 10, 16])
    def test_equals_separate_forwards(self, small_network, images, group_size):
        ttnorm.convert_(small_network, alpha=0.6)
        with ttnorm.isolated(small_network, group_size):
            together = small_network(images)
        apart = torch.cat([small_network(part) for part in images.split(group_size)])
        torch.testing.assert_close(together, apart)

    def test_is_undone_after_an_exception(self, small_network):
        ttnorm.convert_(small_network, alpha=0.6)
        with pytest.raises(KeyError), ttnorm.isolated(small_network, 2):
            raise KeyError
        assert small_network[1].group_size is None

    def test_nests(self, small_network):
        ttnorm.convert_(small_network, alpha=0.6)
        with ttnorm.isolated(small_network, 4):
            with ttnorm.isolated(small_network, 2):
                assert small_network[1].group_size == 2
            assert small_network[1].group_size == 4

    def test_callers_that_come_and_go_in_any_order_stay_apart(self, small_network, images):
        """As threads do."""
        ttnorm.convert_(small_network, alpha=0.6)
        first, second = (ttnorm.isolated(small_network, 2) for _ in range(2))
        with first:
            expected = small_network(images)
            second.__enter__()
        assert torch.equal(small_network(images), expected)
        second.__exit__(None, None, None)
        assert small_network[1].group_size is None
        assert "_group_sizes" not in small_network[1].__dict__

    @pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"clips": x}, lambda x: [x]])
    def test_layers_that_see_other_samples_than_the_model_are_an_error(self, wrap):
        """Frames folded into the batch: groups of rows are not groups of the caller's samples."""

        class Video(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm2d(3)

            def forward(self, given):
                (clips,) = tree_leaves(given)
                return self.norm(clips.flatten(0, 1)).unflatten(0, clips.shape[:2])

        model, clips = ttnorm.convert_(Video(), alpha=1.0), torch.rand(4, 2, 3, 5, 5)
        with (
            ttnorm.isolated(model, 1),
            pytest.raises(ValueError, match="'norm' sees 8 samples in a batch of 4"),
        ):
            model(wrap(clips))
        model(wrap(clips))  # and the guard is gone

    def test_parts_of_the_model_may_be_called_on_their_own(self, small_network, images):
        ttnorm.convert_(small_network, alpha=1.0)
        with ttnorm.isolated(small_network, 4):
            small_network(images)
            small_network[1](torch.rand(6, 6, 4, 4))  # another number of samples

    def test_other_arguments_are_not_taken_for_the_batch(self):
        class Conditioned(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1d(3)

            def forward(self, time, strength, x):
                return self.norm(input=x) * time * strength

        model = ttnorm.convert_(Conditioned(), alpha=1.0)
        with ttnorm.isolated(model, 2):
            model(torch.tensor(2.0), torch.ones(1), x=torch.rand(6, 3))

    def test_reverting_inside_leaves_nothing_behind(self, small_network):
        attributes = small_network[1].__dict__.keys() - {"_class_before"}
        with ttnorm.isolated(ttnorm.convert_(small_network, alpha=1.0), 2):
            ttnorm.revert_(small_network)
        assert small_network[1].__dict__.keys() == attributes

    @pytest.mark.parametrize("group_size", [0, -1, 2.5, True])
    def test_wrong_sizes(self, small_network, group_size):
        ttnorm.convert_(small_network, alpha=0.6)
        with (
            pytest.raises(ValueError, match="expected a whole number"),
            ttnorm.isolated(small_network, group_size),
        ):
            pass


def test_threads_may_share_an_isolated_model(small_network):
    model = ttnorm.convert_(small_network.eval(), alpha=0.5)
    alone = {count: torch.rand(count, 3, 12, 12) for count in (2, 5)}
    errors = []

    def call(x, expected):
        try:
            for _ in range(30):
                with torch.no_grad():
                    torch.testing.assert_close(model(x), expected)
        except Exception as error:
            errors.append(error)

    with ttnorm.isolated(model, 1):
        with torch.no_grad():
            expected = {count: model(x) for count, x in alone.items()}
        threads = [
            threading.Thread(target=call, args=(x, expected[count])) for count, x in alone.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


def test_a_forward_goes_on_while_another_thread_leaves(small_network):
    model, x = ttnorm.convert_(small_network.eval(), alpha=0.5), torch.rand(4, 3, 12, 12)
    ready, inside, left = (threading.Event() for _ in range(3))

    def wait(*_):  # between what torch has looked up of hooks and its calls of them
        inside.set()
        left.wait(10)

    def other():
        with ttnorm.isolated(model, 2):
            ready.set()
            inside.wait(10)
        left.set()

    with ttnorm.isolated(model, 2), torch.no_grad():
        expected = model(x)
    handle = model.register_forward_pre_hook(wait)
    thread = threading.Thread(target=other)
    thread.start()
    ready.wait(10)
    with ttnorm.isolated(model, 2), torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    thread.join()
    handle.remove()


def test_a_fused_network_compares_what_its_norms_see(small_network, monkeypatch):
    fused = ttnorm.fuse(ttnorm.convert_(small_network.eval(), alpha=0.5))
    norm = next(m for m in fused.modules() if type(m).__name__ == "NormRelu")
    monkeypatch.setattr("ttnorm.kernels.usable", lambda x: True)
    x = torch.rand(4, 6, 5, 5)
    with torch.no_grad():
        assert norm._is_one_pass(x, None)
        with ttnorm.isolated(fused, 2):  # whose hooks are the norm's
            assert not norm._is_one_pass(x, None)


def test_isolated_again_and_again_compiles_once(small_network, images):
    compiled = torch.compile(ttnorm.convert_(small_network, 0.5), backend="eager", fullgraph=True)
    with ttnorm.isolated(compiled, 5):
        expected = compiled(images)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            with ttnorm.isolated(compiled, 5):
                assert torch.equal(compiled(images), expected)
