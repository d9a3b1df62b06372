"""CIFAR in every layout it comes in: the same images, and clear errors for the rest."""

import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from ttnorm.data.cifar import load_cifar
from ttnorm.data.corrupted import load_corrupted
from ttnorm.data.loader import DeviceLoader


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    images = {
        "train": rng.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8),
        "test": rng.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8),
    }
    return images, {name: rng.integers(0, 10, len(x)).tolist() for name, x in images.items()}


def write_official(folder, data, hundred=False):
    images, labels = data
    key = "fine_labels" if hundred else "labels"
    root = folder / ("cifar-100-python" if hundred else "cifar-10-batches-py")
    root.mkdir()
    parts = {"test" if hundred else "test_batch": ("test", slice(None))}
    if hundred:
        parts["train"] = ("train", slice(None))
    else:
        parts |= {f"data_batch_{i + 1}": ("train", slice(8 * i, 8 * i + 8)) for i in range(5)}
    for name, (split, rows) in parts.items():
        flat = images[split][rows].transpose(0, 3, 1, 2).reshape(-1, 3072)
        content = {"data": flat, key: labels[split][rows], "batch_label": name}
        (root / name).write_bytes(pickle.dumps(content, protocol=2))


def write_npm(folder, data):
    images, labels = data
    for i in range(5):
        rows = images["train"][8 * i : 8 * i + 8].reshape(8, 1024, 3)
        Image.fromarray(rows).save(folder / f"data_batch_{i + 1}.png")
    Image.fromarray(images["test"].reshape(12, 1024, 3)).save(folder / "test_batch.png")
    for split in images:
        (folder / f"{split}_lables.json").write_text(json.dumps(labels[split]))


def equal(loaded, images, labels):
    assert loaded.images.dtype == torch.uint8
    assert np.array_equal(loaded.images.permute(0, 2, 3, 1).numpy(), images)
    assert loaded.labels.tolist() == labels


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    "write", [write_official, lambda *a: write_official(*a, hundred=True), write_npm]
)
def test_every_layout_gives_the_same_images(tmp_path, data, write, split):
    write(tmp_path, data)
    equal(load_cifar(tmp_path, split), data[0][split], data[1][split])


def test_sheets(tmp_path, data):
    images, labels = data
    first, second = images["train"][:24], images["train"][24:]
    for index, part in enumerate((first, second)):
        tiles = part.reshape(-1, 4, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 128, 3)
        Image.fromarray(tiles).save(tmp_path / f"train_{index}.webp", lossless=True)
    (tmp_path / "train_labels.json").write_text(json.dumps({"fine": labels["train"]}))
    equal(load_cifar(tmp_path, "train"), images["train"], labels["train"])


def test_the_official_folder_itself_will_do(tmp_path, data):
    write_official(tmp_path, data)
    equal(load_cifar(tmp_path / "cifar-10-batches-py", "test"), data[0]["test"], data[1]["test"])


def test_corrupted(tmp_path):
    rng = np.random.default_rng(0)
    images = np.lib.format.open_memmap(
        tmp_path / "fog.npy", "w+", dtype=np.uint8, shape=(50_000, 32, 32, 3)
    )
    images[40_000:40_003] = rng.integers(0, 256, (3, 32, 32, 3))
    images.flush()
    np.save(tmp_path / "labels.npy", np.arange(50_000) % 10)
    loaded = load_corrupted(tmp_path, "fog", 5)
    assert loaded.images.shape == (10_000, 3, 32, 32)
    assert np.array_equal(loaded.images[:3].permute(0, 2, 3, 1), images[40_000:40_003])
    assert loaded.labels[:3].tolist() == [0, 1, 2]


class TestErrors:
    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no folder"):
            load_cifar(tmp_path / "nothing", "train")

    def test_nothing_in_it(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="holds no CIFAR train set: expected"):
            load_cifar(tmp_path, "train")

    def test_both_sets_in_one_folder(self, tmp_path, data):
        write_official(tmp_path, data)
        (tmp_path / "cifar-100-python").mkdir()
        (tmp_path / "cifar-100-python" / "test").touch()
        with pytest.raises(ValueError, match="holds both CIFAR-10 and CIFAR-100"):
            load_cifar(tmp_path, "test")

    def test_a_pickle_of_something_else(self, tmp_path, data):
        write_official(tmp_path, data)
        path = tmp_path / "cifar-10-batches-py" / "test_batch"
        for content in ([1, 2], {"data": 3}, {"labels": [1]}):
            path.write_bytes(pickle.dumps(content))
            with pytest.raises(ValueError, match="test_batch is truncated or no CIFAR file"):
                load_cifar(tmp_path, "test")

    def test_sheets_without_labels(self, tmp_path, data):
        write_npm(tmp_path, data)
        (tmp_path / "test_lables.json").unlink()
        with pytest.raises(FileNotFoundError, match="There is no file"):
            load_cifar(tmp_path, "test")

    def test_split(self, tmp_path):
        with pytest.raises(ValueError, match="expected 'train' or 'test'"):
            load_cifar(tmp_path, "validation")

    def test_truncated_pickle(self, tmp_path, data):
        write_official(tmp_path, data)
        path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(ValueError, match="data_batch_3 is truncated or no CIFAR file"):
            load_cifar(tmp_path, "train")

    def test_a_pickle_with_code_in_it(self, tmp_path, data):
        write_official(tmp_path, data)
        path = tmp_path / "cifar-10-batches-py" / "test_batch"
        path.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
        with pytest.raises(ValueError, match=r"asks for os\.system, which no CIFAR file does"):
            load_cifar(tmp_path, "test")

    def test_truncated_picture(self, tmp_path, data):
        write_npm(tmp_path, data)
        path = tmp_path / "test_batch.png"
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(ValueError, match=r"test_batch.png is truncated or no picture"):
            load_cifar(tmp_path, "test")

    def test_a_sheet_that_is_not_there(self, tmp_path, data):
        write_npm(tmp_path, data)
        (tmp_path / "data_batch_3.png").unlink()
        with pytest.raises(FileNotFoundError, match=r"There is no file .*data_batch_3\.png\.$"):
            load_cifar(tmp_path, "train")

    def test_labels_that_do_not_match(self, tmp_path, data):
        write_npm(tmp_path, data)
        (tmp_path / "test_lables.json").write_text("[1, 2]")
        with pytest.raises(ValueError, match="12 images of uint8 and 2 labels"):
            load_cifar(tmp_path, "test")

    @pytest.mark.parametrize("labels", [{"coarse": [1]}, [1], {"fine": ["cat"]}, {"fine": 3}])
    def test_labels_of_another_kind(self, tmp_path, labels):
        Image.new("RGB", (32, 32)).save(tmp_path / "test_0.webp")
        (tmp_path / "test_labels.json").write_text(json.dumps(labels))
        with pytest.raises(ValueError, match=r"test_labels\.json holds no list of class numbers"):
            load_cifar(tmp_path, "test")

    def test_sheets_of_no_image_or_of_others(self, tmp_path, data):
        (tmp_path / "test_labels.json").write_text('{"fine": []}')
        Image.new("RGB", (32, 32)).save(tmp_path / "test_0.webp")
        with pytest.raises(ValueError, match="0 labels; expected uint8, and as many of both, one"):
            load_cifar(tmp_path, "test")
        other = tmp_path / "npm"
        other.mkdir()
        write_npm(other, data)
        Image.new("RGB", (50, 50)).save(other / "test_batch.png")
        with pytest.raises(ValueError, match=r"test_batch\.png has shape \(50, 50, 3\), expected"):
            load_cifar(other, "test")
        Image.new("RGB", (32, 40)).save(tmp_path / "test_0.webp")
        with pytest.raises(ValueError, match=r"test_0\.webp has shape \(40, 32, 3\), expected mul"):
            load_cifar(tmp_path, "test")

    @pytest.mark.parametrize("label", [None, 2**70])
    def test_labels_in_a_pickle_that_are_no_classes(self, tmp_path, data, label):
        write_official(tmp_path, data)
        path = tmp_path / "cifar-10-batches-py/test_batch"
        path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()) | {"labels": [label] * 12}))
        with pytest.raises(ValueError, match=f"{tmp_path} has labels that are no class numbers"):
            load_cifar(tmp_path, "test")

    def test_labels_out_of_range(self, tmp_path, data):
        write_npm(tmp_path, data)
        (tmp_path / "test_lables.json").write_text(json.dumps([0] * 11 + [100]))
        with pytest.raises(ValueError, match="labels from 0 to 100, expected 0-99"):
            load_cifar(tmp_path, "test")

    def test_corrupted_file_of_another_shape(self, tmp_path):
        np.save(tmp_path / "labels.npy", np.zeros(50, int))
        np.save(tmp_path / "fog.npy", np.zeros((10, 32, 32, 3), np.uint8))
        with pytest.raises(ValueError, match=r"fog.npy has shape \(10, 32, 32, 3\), expected"):
            load_corrupted(tmp_path, "fog", 5)

    def test_truncated_npy(self, tmp_path):
        np.save(tmp_path / "labels.npy", np.zeros(50_000, int))
        np.save(tmp_path / "fog.npy", np.zeros((50_000, 4), np.uint8))
        content = (tmp_path / "fog.npy").read_bytes()
        (tmp_path / "fog.npy").write_bytes(content[:1000])
        with pytest.raises(ValueError, match=r"fog.npy is truncated or no npy file"):
            load_corrupted(tmp_path, "fog", 5)

    def test_severity(self, tmp_path):
        with pytest.raises(ValueError, match="severity is 6, expected 1 to 5"):
            load_corrupted(tmp_path, "fog", 6)


class TestDeviceLoader:
    def loader(self, **options):
        images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 3, 2, 2)
        return DeviceLoader(images, torch.arange(10), **{"batch_size": 3, **options})

    def test_yields_every_image_once_in_the_unit_range(self):
        batches = list(self.loader(batch_size=5))
        labels = torch.cat([y for _, y in batches])
        assert sorted(labels.tolist()) == list(range(10))
        for x, y in batches:
            assert torch.equal(x[:, 0, 0, 0], y / 255)

    def test_leaves_out_a_smaller_last_batch(self):
        assert len(self.loader()) == len(list(self.loader())) == 3

    def test_every_pass_has_another_order_and_the_seed_decides(self):
        first, second = self.loader(), self.loader()
        orders = [torch.cat([y for _, y in loader]).tolist() for loader in (first, first, second)]
        assert orders[0] != orders[1]
        assert orders[0] == orders[2]

    def test_batch_size(self):
        with pytest.raises(ValueError, match="batch_size is 0, expected 1 to 10"):
            self.loader(batch_size=0)
