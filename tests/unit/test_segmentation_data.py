"""Street scenes in the layouts they come in, and what is said about bad files."""

import numpy as np
import pytest
from PIL import Image

from ttnorm.data.images import VOID, UnusableFile
from ttnorm.data.label_maps import CITYSCAPES_CLASSES
from ttnorm.data.segmentation import LAYOUTS, load_scenes

SIZE = (6, 8)
# by data set: frame, mask, and labels in the file with the classes that they are
TREES = {
    "cityscapes": (
        "leftImg8bit/val/bonn/bonn_0_1_leftImg8bit.png",
        "gtFine/val/bonn/bonn_0_1_gtFine_labelIds.png",
        {7: "road", 8: "sidewalk", 23: "sky", 26: "car", 33: "bicycle", 0: None, 29: None},
    ),
    "bdd100k": (
        "images/10k/val/a.jpg",
        "labels/sem_seg/masks/val/a.png",
        {0: "road", 10: "sky", 18: "bicycle", 255: None},
    ),
    "mapillary": (
        "validation/images/a.jpg",
        "validation/labels/a.png",
        {13: "road", 24: "road", 2: "sidewalk", 27: "sky", 61: "truck", 65: None, 16: None},
    ),
    "gtav": (
        "images/00007.png",
        "labels/00007.png",
        {7: "road", 11: "building", 26: "car", 34: None, 0: None},
    ),
    "synthia": (
        "RGB/0000003.png",
        "GT/LABELS/0000003.png",
        {3: "road", 1: "sky", 21: "wall", 11: "bicycle", 0: None, 22: None},
    ),
    "camvid": ("val/0016E5_1.png", "valannot/0016E5_1.png", {0: "sky", 10: "bicyclist", 11: None}),
}


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parts[-2] == "LABELS":  # 16 bits, instances in the second channel
        import cv2

        deep = np.zeros((*pixels.shape, 3), np.uint16)
        deep[..., 2], deep[..., 1] = pixels, 700
        cv2.imwrite(str(path), deep)
    else:
        picture = Image.fromarray(pixels)
        if path.parts[-2] == "labels":  # as Mapillary and GTAV do
            picture.putpalette([i % 256 for i in range(768)])
        picture.save(path)


def tree(folder, dataset, labels=None, size=SIZE):
    frame, mask, meaning = TREES[dataset]
    values = list(meaning) if labels is None else labels
    pixels = np.resize(np.array(values, np.uint8), size)
    save(folder / frame, np.full((*size, 3), 100, np.uint8))
    save(folder / mask, pixels)
    return folder


@pytest.mark.parametrize("dataset", TREES)
def test_every_layout_is_read_and_its_labels_become_classes(tmp_path, dataset):
    loaded = load_scenes(dataset, tree(tmp_path, dataset), "val")
    assert loaded.images.shape == (1, 3, *SIZE)
    names = LAYOUTS[dataset].classes
    expected = [VOID if n is None else names.index(n) for n in TREES[dataset][2].values()]
    assert loaded.labels[0].flatten()[: len(expected)].tolist() == expected


@pytest.mark.parametrize("dataset", ["cityscapes", "bdd100k", "mapillary", "gtav", "synthia"])
def test_every_class_of_cityscapes_is_somewhere_in_the_map(dataset):
    found = set(LAYOUTS[dataset].labels.values())
    assert found == {*range(len(CITYSCAPES_CLASSES)), VOID}


def test_the_older_layout_of_bdd100k(tmp_path):
    save(tmp_path / "images/val/a.jpg", np.zeros((*SIZE, 3), np.uint8))
    save(tmp_path / "labels/val/a_train_id.png", np.full(SIZE, 13, np.uint8))
    assert (load_scenes("bdd100k", tmp_path, "val").labels == 13).all()


def test_version_2_of_mapillary(tmp_path):
    save(tmp_path / "training/images/a.jpg", np.zeros((*SIZE, 3), np.uint8))
    save(tmp_path / "training/v1.2/labels/a.png", np.full(SIZE, 55, np.uint8))
    assert (load_scenes("mapillary", tmp_path, "train").labels == 13).all()


def test_gtavs_splits(tmp_path):
    from scipy.io import savemat

    for number in (1, 2, 3):
        save(tmp_path / f"images/{number:05d}.png", np.full((*SIZE, 3), number, np.uint8))
        save(tmp_path / f"labels/{number:05d}.png", np.full(SIZE, 7, np.uint8))
    assert len(load_scenes("gtav", tmp_path, "val").labels) == 3
    savemat(tmp_path / "split.mat", {"trainIds": [1], "valIds": [2, 3], "testIds": []})
    loaded = load_scenes("gtav", tmp_path, "val")
    assert loaded.images[:, 0, 0, 0].tolist() == [2, 3]
    with pytest.raises(ValueError, match=r"split\.mat has no day; expected the split train"):
        load_scenes("gtav", tmp_path, "day")


def test_frames_of_some_sequences_only(tmp_path):
    for name in ("0001TP_1", "0016E5_1", "0016E5_2"):
        save(tmp_path / f"train/{name}.png", np.zeros((*SIZE, 3), np.uint8))
        save(tmp_path / f"trainannot/{name}.png", np.zeros(SIZE, np.uint8))
    day = load_scenes("camvid", tmp_path, "train", keep=lambda name: "0001TP" not in name)
    assert len(day.labels) == 2


def test_frames_and_masks_are_resized_alike(tmp_path):
    left = np.where(np.arange(8) < 4, 3, 8) * np.ones((6, 1))
    save(tmp_path / "val/a_1.png", np.zeros((*SIZE, 3), np.uint8))
    save(tmp_path / "valannot/a_1.png", left.astype(np.uint8))
    loaded = load_scenes("camvid", tmp_path, "val", size=(12, 16))
    assert loaded.images.shape == (1, 3, 12, 16)
    assert loaded.labels[0, 0].tolist() == [3] * 8 + [8] * 8


class TestErrors:
    def two(self, folder):
        """Two good frames of CamVid, to be spoilt."""
        for number in (1, 2):
            save(folder / f"val/a_{number}.png", np.zeros((*SIZE, 3), np.uint8))
            save(folder / f"valannot/a_{number}.png", np.zeros(SIZE, np.uint8))
        return folder

    def spoil(self, folder, what):
        if what == "label":
            save(folder / "valannot/a_2.png", np.full(SIZE, 77, np.uint8))
        elif what == "missing":
            (folder / "valannot/a_2.png").unlink()
        elif what == "frame":
            (folder / "val/a_2.png").write_bytes(b"no picture")
        elif what == "mask":
            (folder / "valannot/a_2.png").write_bytes(b"no picture")
        elif what == "bits":
            Image.fromarray(np.ones(SIZE, bool)).save(folder / "valannot/a_2.png")
        elif what == "shape":
            save(folder / "valannot/a_2.png", np.zeros((2, 2), np.uint8))
        else:
            save(folder / "val/a_2.png", np.zeros((4, 4, 3), np.uint8))
            save(folder / "valannot/a_2.png", np.zeros((4, 4), np.uint8))

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            ("label", r"valannot/a_2\.png has label 77, which camvid does not have"),
            ("missing", r"val/a_2\.png has no mask: there is no file .*valannot/a_2\.png"),
            ("frame", r"val/a_2\.png is truncated or no picture"),
            ("mask", r"valannot/a_2\.png is truncated or no picture"),
            ("bits", r"valannot/a_2\.png has bool, expected numbers of classes"),
            ("shape", r"valannot/a_2\.png has shape \(2, 2\), expected \(6, 8\) as its frame"),
            ("size", r"val/a_2\.png is \(4, 4\), and others are \(6, 8\)\. Resize it"),
        ],
    )
    def test_a_bad_file_is_named_or_left_out_and_counted(self, tmp_path, caplog, what, message):
        self.spoil(self.two(tmp_path), what)
        with pytest.raises(UnusableFile, match=message):
            load_scenes("camvid", tmp_path, "val")
        assert len(load_scenes("camvid", tmp_path, "val", skip_bad=True).labels) == 1
        assert "1 of 2 left out" in caplog.text

    def test_of_the_first_frame_it_is_said_what_to_do_as_well(self, tmp_path):
        (self.two(tmp_path) / "val/a_1.png").write_bytes(b"no picture")
        with pytest.raises(UnusableFile, match=r"a_1\.png is truncated.*Mend it or take it away"):
            load_scenes("camvid", tmp_path, "val")

    def test_synthia_masks_that_are_no_pictures(self, tmp_path):
        tree(tmp_path, "synthia")
        (tmp_path / "GT/LABELS/0000003.png").write_bytes(b"no picture")
        with pytest.raises(UnusableFile, match=r"0000003\.png is truncated or no picture"):
            load_scenes("synthia", tmp_path, "val")

    def test_wrong_folders_and_names(self, tmp_path):
        with pytest.raises(ValueError, match="There is no data set 'kitti'; there are cityscapes"):
            load_scenes("kitti", tmp_path, "val")
        with pytest.raises(FileNotFoundError, match="There is no folder"):
            load_scenes("camvid", tmp_path / "absent", "val")
        for dataset in LAYOUTS:
            with pytest.raises(
                FileNotFoundError, match=f"holds no frames of {dataset}, val: expected"
            ):
                load_scenes(dataset, tmp_path, "val")
