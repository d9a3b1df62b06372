"""Samples that the source counts for beside those of a batch: alpha * n / (n + source_count)."""

import onnxruntime
import pytest
import small_network
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import ttnorm
from ttnorm.models import zoo
from ttnorm.surgery import borrowed
from ttnorm.tree import ttn_layers


def network(alpha=0.8, **options):
    return ttnorm.convert_(small_network.network(), alpha, **options)


def images(count, seed=0):
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) ** 2


@torch.no_grad()
@pytest.mark.parametrize(("samples", "share"), [(1, 1 / 3), (2, 1 / 2), (38, 38 / 40)])
def test_the_fewer_samples_the_less_of_alpha(samples, share):
    x = images(samples)
    torch.testing.assert_close(network(source_count=2.0)(x), network(0.8 * share)(x))
    assert not torch.allclose(network(source_count=2.0)(x), network()(x), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("count", [3, 8, 10])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_groups_are_batches_of_their_own_and_the_last_may_be_smaller(count, layout):
    model, x = network(source_count=2.0), images(count).contiguous(memory_format=layout)
    alone = torch.cat([model(part) for part in x.split(4)])
    with ttnorm.isolated(model, 4):
        torch.testing.assert_close(model(x), alone)


def test_no_samples_are_no_obstacle():
    model = network(source_count=2.0)
    assert model(images(0)).shape == (0, 10)
    with ttnorm.isolated(model, 4):
        assert model(images(0)).shape == (0, 10)


def test_it_is_in_the_file(tmp_path):
    path = tmp_path / "network.ttn.safetensors"
    ttnorm.save(network(source_count=2.0), path)
    for given, expected in ((None, 2.0), (0.0, 0.0), (5.0, 5.0)):
        model = ttnorm.load_(small_network.network(), path, source_count=given)
        assert {layer.source_count for layer in ttn_layers(model).values()} == {expected}
    assert "source_count=5" in repr(model)


def test_the_shipped_files_are_the_papers():
    model = ttnorm.load_(zoo.load("wrn40_2-cifar10"), zoo.alpha_files("wrn40_2-cifar10")["ttn"])
    assert {layer.source_count for layer in ttn_layers(model).values()} == {0.0}
    assert "source_count" not in repr(model)


def test_nothing_of_it_is_left_behind():
    model = network(source_count=2.0)
    with borrowed(model, alpha=0.0) as layers:
        assert {layer.source_count for layer in layers.values()} == {0.0}
    assert {layer.source_count for layer in ttn_layers(model).values()} == {2.0}
    ttnorm.revert_(model)
    assert not any("source_count" in m.__dict__ for m in model.modules())


def test_fewer_than_none_are_refused():
    model = small_network.network()
    with pytest.raises(ValueError, match="source_count is -1"):
        ttnorm.convert_(model, 0.5, source_count=-1)
    assert type(model[1]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="source_count is -1"):
        ttnorm.PostTrainConfig(source_count=-1)


def test_alpha_is_fitted_with_it():
    """Where the source counts for 2 samples, single images have a third of alpha."""
    model, loader = small_network.network(), [(images(12), torch.arange(12) % 10)]
    losses = {}
    for count in (0.0, 2.0):
        config = ttnorm.PostTrainConfig(
            epochs=1, lr=1e-9, init=0.9, mse=False, group_sizes=(1,), source_count=count
        )
        result = ttnorm.post_train_(model, loader, config, augment=lambda x, _: x)
        losses[count] = result.history[0]["ce"]
        assert {layer.source_count for layer in ttn_layers(model).values()} == {count}
        ttnorm.revert_(model)
    for count, alpha in ((0.0, 0.9), (2.0, 0.3)):
        with ttnorm.isolated(network(alpha), 1) as expected, torch.no_grad():
            loss = nn.functional.cross_entropy(expected(loader[0][0]), loader[0][1])
        assert losses[count] == pytest.approx(loss.item(), rel=1e-5)


def test_a_gradient_reaches_alpha_through_it():
    layer = ttnorm.TTNorm2d(3, alpha=0.5)
    layer.source_count, layer.alpha = 2.0, layer.alpha.requires_grad_()
    plain = ttnorm.TTNorm2d(3, alpha=0.25)
    plain.alpha.requires_grad_()
    for norm in (layer, plain):
        norm(images(2)).square().sum().backward()
    torch.testing.assert_close(layer.alpha.grad, plain.alpha.grad / 2)


@torch.no_grad()
def test_graphs_know_it_at_every_batch_size(tmp_path):
    model = network(source_count=2.0)
    path = tmp_path / "network.onnx"
    ttnorm.to_onnx(model, images(1), path)
    session = onnxruntime.InferenceSession(path)
    program = ttnorm.to_exported_program(model, images(1)).module()
    for size in (1, 2, 7):
        x = images(size, seed=size)
        (output,) = session.run(["output"], {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(output), model(x), rtol=0, atol=1e-5)
        torch.testing.assert_close(program(x), model(x), rtol=0, atol=1e-5)


@torch.no_grad()
def test_compiled_it_is_one_graph_for_all_batch_sizes():
    model, counter = network(source_count=2.0), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for size in (2, 3, 7, 50):
        torch.testing.assert_close(compiled(images(size)), model(images(size)))
    assert counter.frame_count == 1


@torch.no_grad()
@pytest.mark.parametrize("count", [8, 10])
def test_fused_and_folded_it_is_the_same(count):
    model, x = network(source_count=2.0), images(count)
    fused = ttnorm.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    with ttnorm.isolated(model, 4):
        torch.testing.assert_close(fused(x), model(x))
