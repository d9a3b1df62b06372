"""Networks that give every pixel a class: built, trained, kept, post-trained and scored."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ttnorm
from ttnorm.bench.evaluate import evaluate
from ttnorm.bench.job import Domains, Job, Network
from ttnorm.bench.records import RecordFile, read_records
from ttnorm.bench.scores import class_overlap, score
from ttnorm.data.images import VOID, Images
from ttnorm.data.loader import DeviceLoader
from ttnorm.methods.swr import gradient_agreement
from ttnorm.models.segmentation import (
    DeepLabV3Plus,
    load_checkpoint,
    save_checkpoint,
    with_encoder_weights,
)
from ttnorm.models.train_segmentation import (
    SegmentationConfig,
    scale_crop_and_flip,
    train_segmentation,
)
from ttnorm.posttrain_config import PostTrainConfig


def scenes(count=8, size=(40, 48)):
    """Light ground and dark sky, with a stripe that does not count."""
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 100, (count, 3, *size), generator=g, dtype=torch.uint8)
    masks = torch.zeros(count, *size, dtype=torch.uint8)
    images[:, :, size[0] // 2 :] += 150
    masks[:, size[0] // 2 :] = 1
    masks[:, :, :4] = VOID
    return Images(images, masks)


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = DeepLabV3Plus("mobilenet_v2", classes=3)
    config = SegmentationConfig(epochs=30, batch_size=4, lr=2e-3)
    history = train_segmentation(model, scenes(), config)
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    return model


def test_a_trained_network_finds_the_ground(trained):
    data = scenes()
    with torch.no_grad():
        predicted = trained(data.images.float() / 255).argmax(1)
    assert class_overlap(predicted, data.labels, 3)[:2].min() > 0.7


@pytest.mark.parametrize(("amp", "dtype"), [(None, torch.float32), (True, torch.bfloat16)])
def test_training_is_in_bfloat16_where_that_is_asked_for(amp, dtype):
    model, seen = DeepLabV3Plus("mobilenet_v2", classes=3), set()
    first = next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d))
    first.register_forward_hook(lambda module, x, y: seen.add(y.dtype))
    (row,) = train_segmentation(
        model, scenes(), SegmentationConfig(epochs=1, batch_size=4, amp=amp)
    )
    assert math.isfinite(row["loss"])
    assert seen == {dtype}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_batch_of_one_frame_is_refused():
    with pytest.raises(ValueError, match="batch_size is 1, expected at least 2"):
        SegmentationConfig(batch_size=1)


def test_a_checkpoint_is_the_network(trained, tmp_path):
    path = tmp_path / "n.safetensors"
    save_checkpoint(trained, path, SegmentationConfig(), [])
    loaded = load_checkpoint(path)
    x = torch.rand(1, 3, 40, 48)
    with torch.no_grad():
        assert (loaded(x) - trained(x)).abs().max() < 0.05  # convolutions are kept in half
    ttnorm.save(ttnorm.convert_(loaded, 0.1), tmp_path / "a.ttn.safetensors")
    with pytest.raises(ValueError, match="no checkpoint of a segmentation network"):
        load_checkpoint(tmp_path / "a.ttn.safetensors")


@pytest.mark.parametrize("encoder", ["mobilenet_v2", "resnet50"])
def test_an_encoder_takes_torchvisions_weights(tmp_path, encoder):
    import torchvision

    state = torchvision.models.get_model(encoder).state_dict()
    torch.save(state, tmp_path / "w.pth")
    model = with_encoder_weights(encoder, 5, tmp_path / "w.pth")
    name = next(iter(state))
    assert torch.equal(model.network.encoder.state_dict()[name], state[name])
    other = "resnet50" if encoder == "mobilenet_v2" else "mobilenet_v2"
    with pytest.raises(ValueError, match=f"holds the weights of no {other}"):
        with_encoder_weights(other, 5, tmp_path / "w.pth")
    with pytest.raises(ValueError, match="There is no encoder 'vgg'"):
        DeepLabV3Plus("vgg", 5)


def test_frames_and_masks_are_moved_alike():
    g = torch.Generator().manual_seed(1)
    masks = torch.randint(0, 3, (6, 1, 1), generator=g).expand(6, 24, 32).contiguous().byte()
    masks[:, :12] = 7
    frames = masks[:, None].repeat(1, 3, 1, 1) * 20
    for _ in range(5):
        x, y = scale_crop_and_flip(frames, masks, (0.5, 2.0), g)
        seen = y != -100
        assert seen.any()
        difference = (x[:, 0] * 255 - 20 * y).abs()[seen]
        assert (difference < 1).float().mean() > 0.9  # all but a row where colours blend


def test_post_training_leaves_out_what_is_void(trained):
    data = scenes()
    loader = DeviceLoader(*data, batch_size=2)
    config = PostTrainConfig(epochs=1, lr=1e-2, prior_samples=4)
    shift = ttnorm.prior_shift
    result = ttnorm.optimise_alpha(
        trained, loader, ttnorm.estimate_prior(trained, loader, samples=4), config, augment=shift
    )
    assert np.isfinite(result.history[0]["ce"])


def test_a_shift_that_moves_pixels_without_their_labels_is_warned_of(trained, caplog):
    batches = list(DeviceLoader(*scenes(4), batch_size=2))
    config = PostTrainConfig(epochs=1, init=0.1, mse=False)
    still = functools.partial(ttnorm.domain_shift, parts=("jitter", "blur"))
    ttnorm.optimise_alpha(trained, batches, None, config, augment=still)
    assert "moves pixels" not in caplog.text
    ttnorm.optimise_alpha(trained, batches, None, config)
    assert "moves pixels without their labels" in caplog.text


def test_the_prior_is_of_pixels_that_count(trained):
    def of_pixels(output, y):
        counts = y != -100
        return F.cross_entropy(output.movedim(1, -1)[counts], y[counts])

    batches = list(DeviceLoader(*scenes(), batch_size=2))
    first, second = (
        ttnorm.estimate_prior(
            trained, batches, samples=4, loss=loss, generator=torch.Generator().manual_seed(0)
        )
        for loss in (None, of_pixels)
    )
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=0.05, rtol=0)


class TestScores:
    def test_overlap_against_counting(self):
        rng = np.random.default_rng(0)
        predicted, labels = rng.integers(0, 4, (2, 20, 7, 9))
        labels[rng.random(labels.shape) < 0.2] = VOID
        found = class_overlap(torch.tensor(predicted), torch.tensor(labels), 5)
        seen = labels != VOID
        for c in range(4):
            both = ((predicted == c) & (labels == c)).sum()
            either = (((predicted == c) | (labels == c)) & seen).sum()
            assert found[c].item() == pytest.approx(both / either)
        assert found[4].isnan()

    def test_a_class_that_is_nowhere_does_not_count(self):
        labels = torch.tensor([[[0, 0, 1, VOID]]])
        assert score(torch.tensor([[[0, 1, 1, 2]]]), labels, 3) == {
            "miou": 0.5,
            "iou": [0.5, 0.5, None],
        }


def test_every_row_of_the_papers_table_can_be_scored(trained, tmp_path):
    data = scenes()
    alpha = tmp_path / "a.ttn.safetensors"
    ttnorm.save(ttnorm.convert_(copy.deepcopy(trained), 0.2), alpha)
    agreement = gradient_agreement(trained, DeviceLoader(*data, batch_size=4), samples=4)
    network = Network("small", trained, {"ttn": alpha}, agreement)
    dark = (data.images.float() * 0.5).byte()
    domains = Domains("camvid", 0, {"day": data.images, "dusk": dark}, data.labels)
    rows = [("source", "none"), ("tbn", "none"), ("ttn", "none")]
    rows += [(norm, method) for method in ("tent", "swr") for norm in ("tbn", "ttn")]
    jobs = [Job(norm=n, method=m, batch_size=2) for n, m in rows]
    evaluate(network, domains, jobs, RecordFile(tmp_path / "r.jsonl"))
    records = read_records([tmp_path / "r.jsonl"])
    assert len(records) == 2 * len(rows)
    assert all(0 <= r["miou"] <= 1 and len(r["iou"]) == 3 and "wrong" not in r for r in records)
    source = next(r for r in records if (r["norm"], r["domain"]) == ("source", "day"))
    assert min(source["iou"][:2]) > 0.7
    swr = next(r for r in records if r["method"] == "swr")["config"]["method"]
    assert (swr["lr"], swr["strength"], swr["window"]) == (1e-6, 500.0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "cotta"}, "cotta is for networks that predict a class for an image"),
        ({"scenario": "class-sorted"}, "class-sorted is for images of one class each"),
    ],
)
def test_what_needs_a_class_for_every_image_is_refused(trained, tmp_path, options, message):
    data = scenes()
    domains = Domains("camvid", 0, {"day": data.images}, data.labels)
    with pytest.raises(ValueError, match=message):
        evaluate(
            Network("small", trained),
            domains,
            [Job(norm="tbn", batch_size=2, **options)],
            RecordFile(tmp_path / "r.jsonl"),
        )
