"""ImageNet's folders, what is said about bad ones, and the networks for it."""

import itertools
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ttnorm.bench.job import Network
from ttnorm.bench.runs import stored_domains
from ttnorm.data import images
from ttnorm.data.corrupted import load_corrupted, make_corrupted
from ttnorm.data.corruptions import corrupt
from ttnorm.data.imagenet import (
    Preprocessing,
    load_imagenet,
    load_imagenet_c,
    split_folder,
    usable_files,
)
from ttnorm.data.imagenet import _prepared as prepared
from ttnorm.data.images import UnusableFile
from ttnorm.models import imagenet

SMALL = Preprocessing(resize=20, crop=16)


def picture(path, size=(16, 16), value=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(len(path.name))
    pixels = rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    if value is not None:
        pixels[:] = value
    Image.fromarray(pixels).save(path, "PNG" if path.suffix == ".png" else "JPEG")


def wordnet(folder):
    """The thousand folders, three of them with an image."""
    for number in range(1000):
        (folder / f"n{number:08d}").mkdir(parents=True)
    for number in (0, 7, 999):
        picture(folder / f"n{number:08d}" / f"{number}.JPEG", value=number // 4)
    return folder


def test_the_longer_side_is_rounded_as_torchvision_does(tmp_path):
    Image.new("RGB", (206, 309)).save(tmp_path / "picture.png")
    seen = []
    resize = Image.Image.resize

    def remembered(self, size, *args):
        seen.append(size)
        return resize(self, size, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Image.Image, "resize", remembered)
        prepared(tmp_path, Preprocessing(), "picture.png")
    assert seen == [(256, 384)]


def test_classes_are_numbered_in_the_order_of_wordnet_ids(tmp_path):
    loaded = load_imagenet(wordnet(tmp_path), SMALL)
    assert loaded.labels.tolist() == [0, 7, 999]
    assert (loaded.images.shape, loaded.images.dtype) == ((3, 3, 16, 16), torch.uint8)
    assert [int(x.float().mean().round()) for x in loaded.images] == [0, 1, 249]


def test_folders_may_be_named_by_class_number(tmp_path):
    for name in ("test/0007/a.jpg", "test/0012/b.jpg", "source/0003/c.jpg"):
        picture(tmp_path / name)
    assert load_imagenet(split_folder(tmp_path, "test"), SMALL).labels.tolist() == [7, 12]
    assert load_imagenet(split_folder(tmp_path, "source"), SMALL).labels.tolist() == [3]
    with pytest.raises(FileNotFoundError, match="has no folder test or val"):
        split_folder(tmp_path / "test", "test")


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (37, 61), (16, 16), (20, 16)])
def test_preprocessing_is_torchvision_s(tmp_path, size):
    from torchvision.transforms import v2

    picture(tmp_path / "0000/a.png", size)
    found = load_imagenet(tmp_path, SMALL).images[0]
    original = Image.open(tmp_path / "0000/a.png")
    if size != (16, 16):  # as ImageNet-C is: cropped already
        original = v2.CenterCrop(16)(v2.Resize(20)(original))
    assert np.array_equal(found.permute(1, 2, 0), np.asarray(original))


def test_as_many_images_as_wanted_are_drawn(tmp_path):
    for number in range(10):
        picture(tmp_path / f"{number:04d}/a.jpg")
    drawn = [load_imagenet(tmp_path, SMALL, most=4, seed=s).labels.tolist() for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 4


def imagenet_c(folder):
    for corruption in ("fog", "snow"):
        for name in ("0001/a.JPEG", "0001/b.JPEG", "0004/c.JPEG"):
            picture(folder / corruption / "5" / name, value=40 if corruption == "fog" else 80)
    return folder


def test_imagenet_c_has_the_same_images_under_every_corruption(tmp_path):
    loaded = load_imagenet_c(imagenet_c(tmp_path), ["fog", "snow"], 5, SMALL)
    assert loaded["fog"].labels.tolist() == loaded["snow"].labels.tolist() == [1, 1, 4]
    assert [int(loaded[c].images.float().mean()) for c in ("fog", "snow")] == [40, 80]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_a_subset_of_imagenet_c_is_spread_over_the_classes(tmp_path, count):
    for number, name in itertools.product(range(3), "ab"):
        picture(tmp_path / f"fog/5/{number:04d}/{name}.jpg", value=40 * number)
    network = Network("mine", nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), {})
    options = {"preprocessing": SMALL, "subset": count}
    stored = stored_domains(network, "imagenet", tmp_path, False, ["fog"], 5, **options)
    labels = {1: [0], 2: [0, 1], 3: [0, 1, 2], 5: [0, 0, 1, 1, 2], 6: [0, 0, 1, 1, 2, 2]}
    assert stored.labels.tolist() == labels[count]
    images = stored.read(["fog"]).images["fog"]
    assert [int(image.float().mean()) // 40 for image in images] == labels[count]


def test_what_one_corruption_lacks_is_left_out_of_all(tmp_path, caplog):
    folder = imagenet_c(tmp_path)
    (folder / "fog/5/0001/b.JPEG").write_bytes(b"no picture")
    with pytest.raises(UnusableFile, match=r"b\.JPEG is truncated or no picture.*skip_bad"):
        load_imagenet_c(folder, ["fog", "snow"], 5, SMALL)
    loaded = load_imagenet_c(folder, ["fog", "snow"], 5, SMALL, skip_bad=True)
    assert [loaded[c].labels.tolist() for c in ("fog", "snow")] == [[1, 4], [1, 4]]
    assert "1 of 3 left out" in caplog.text
    (folder / "fog/5/0001/b.JPEG").unlink()
    with pytest.raises(ValueError, match=r"b\.JPEG is not there under every corruption"):
        load_imagenet_c(folder, ["fog", "snow"], 5, SMALL)
    caplog.clear()
    loaded = load_imagenet_c(folder, ["fog", "snow"], 5, SMALL, skip_bad=True)
    assert loaded["snow"].labels.tolist() == [1, 4]
    assert "snow: 1 of 3 left out, for they are not there under every corruption" in caplog.text
    for name in ("0001/a.JPEG", "0004/c.JPEG"):
        (folder / "snow/5" / name).unlink()
    with pytest.raises(ValueError, match="has no image that is there under every corruption"):
        load_imagenet_c(folder, ["fog", "snow"], 5, SMALL, skip_bad=True)


def test_a_picture_too_large_to_be_one_is_named(tmp_path, monkeypatch):
    picture(tmp_path / "0000/a.png", (40, 30))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(UnusableFile, match=r"a\.png is truncated or no picture.*decompression"):
        load_imagenet(tmp_path, SMALL)


def test_corruptions_can_be_loaded_one_by_one(tmp_path):
    folder, both = imagenet_c(tmp_path), ["fog", "snow"]
    (folder / "fog/5/0001/a.JPEG").write_bytes(b"no picture")
    (folder / "snow/5/0004/c.JPEG").unlink()
    files = usable_files(folder, both, 5, skip_bad=True)
    assert files == {"0001/b.JPEG": 1}
    at_once = load_imagenet_c(folder, both, 5, SMALL, skip_bad=True)
    for corruption in both:
        alone = load_imagenet_c(folder, [corruption], 5, SMALL, files=files)
        assert alone.keys() == {corruption}
        for ours, theirs in zip(alone[corruption], at_once[corruption], strict=True):
            assert torch.equal(ours, theirs)


def test_what_other_processes_cannot_read_is_left_out_here(tmp_path):
    """As under torchrun: together they have the images that one would have."""
    folder = imagenet_c(tmp_path)
    (folder / "snow/5/0001/a.JPEG").write_bytes(b"no picture")
    (folder / "fog/5/0001/b.JPEG").write_bytes(b"no picture")
    told = []

    def exchange(bad):
        told.extend(bad)
        return [*bad, "0004/c.JPEG"]

    options = {"skip_bad": True, "ours": ["snow"], "exchange": exchange}
    assert usable_files(folder, ["fog", "snow"], 5, **options) == {"0001/b.JPEG": 1}
    assert told == ["0001/a.JPEG"]


def test_few_pictures_are_held_that_nobody_has_asked_for_yet(monkeypatch):
    monkeypatch.setattr(images, "READ_AHEAD", 3)
    begun = []
    each = images.read_each(range(20), begun.append, skip_bad=False, title="")
    for asked_for in range(20):
        assert next(each)[0] == asked_for
        assert len(begun) <= asked_for + 1 + 3
    assert sorted(begun) == list(range(20))


class TestErrors:
    def test_images_that_no_two_corruptions_share(self, tmp_path):
        folder = imagenet_c(tmp_path)
        for bad in ("fog/5/0001/a", "snow/5/0001/b", "snow/5/0004/c"):
            (folder / f"{bad}.JPEG").write_bytes(b"no picture")
        with pytest.raises(ValueError, match="no image that can be read under every corruption"):
            load_imagenet_c(folder, ["fog", "snow"], 5, SMALL, skip_bad=True)

    def test_say_what_to_do_in_python_and_on_the_command_line(self, tmp_path):
        folder = imagenet_c(tmp_path)
        (folder / "fog/5/0001/b.JPEG").write_bytes(b"no picture")
        with pytest.raises(UnusableFile, match=r"leave it out with skip_bad=True or --skip-bad\."):
            load_imagenet_c(folder, ["fog", "snow"], 5, SMALL)
        (folder / "fog/5/0001/b.JPEG").unlink()
        with pytest.raises(ValueError, match=r"such images out with skip_bad=True or --skip-bad\."):
            load_imagenet_c(folder, ["fog", "snow"], 5, SMALL)

    def test_an_unreadable_image_is_named_or_left_out_and_counted(self, tmp_path, caplog):
        picture(tmp_path / "0000/good.jpg")
        whole = (tmp_path / "0000/good.jpg").read_bytes()
        (tmp_path / "0000/torn.jpg").write_bytes(whole[:200])
        with pytest.raises(UnusableFile, match=r"torn\.jpg is truncated or no picture.*Mend it"):
            load_imagenet(tmp_path, SMALL)
        assert len(load_imagenet(tmp_path, SMALL, skip_bad=True).labels) == 1
        assert "1 of 2 left out" in caplog.text
        (tmp_path / "0000/good.jpg").unlink()
        with pytest.raises(ValueError, match="Of 1 files none can be used"):
            load_imagenet(tmp_path, SMALL, skip_bad=True)

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            ((), "expected the 1,000 classes"),
            (("cat", "dog"), "has folders cat, dog; expected the 1,000 classes"),
            (("n00000001", "n00000002"), "has 2 folders of WordNet ids, expected all 1,000"),
            (("0001", "0002", "0003", "cats"), "has folder cats; expected the 1,000 classes"),
            (("0001", ".hidden"), "no image in any"),
            (("1000",), "numbers of classes, 0000 to 0999"),
            (("0001",), "no image in any"),
        ],
    )
    def test_wrong_folders(self, tmp_path, names, message):
        for name in names:
            (tmp_path / name).mkdir()
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            load_imagenet(tmp_path)

    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no folder"):
            load_imagenet(tmp_path / "absent")
        with pytest.raises(FileNotFoundError, match=r"fog/5; expected fog/5/CLASS/\*\.JPEG"):
            load_imagenet_c(tmp_path, ["fog"])


def test_corruptions_of_larger_images_take_imagenets_parameters(tmp_path):
    for number in range(3):
        picture(tmp_path / f"val/{number + 800:04d}/a.png", (48, 48))
    clean = load_imagenet(tmp_path / "val", Preprocessing(resize=(48, 48), crop=48))
    options = {"corruptions": ["contrast"], "workers": 1}
    make_corrupted(clean, tmp_path / "c", severities=[5], **options)
    loaded = load_corrupted(tmp_path / "c", "contrast", 5, size=(48, 48), classes=1000)
    pixels = clean.images.permute(0, 2, 3, 1).numpy()
    assert np.array_equal(loaded.images.permute(0, 2, 3, 1), corrupt(pixels, "contrast", 5))
    assert loaded.labels.tolist() == [800, 801, 802]
    make_corrupted(clean, tmp_path / "c", severities=[1], **options)  # and 5 stays
    again = load_corrupted(tmp_path / "c", "contrast", 5, size=(48, 48), classes=1000)
    assert torch.equal(again.images, loaded.images)


class TestNetworks:
    @pytest.fixture(scope="class")
    def weights(self, tmp_path_factory):
        """A file of MobileNetV2's weights, random ones."""
        import torchvision

        path = tmp_path_factory.mktemp("weights") / "mobilenet_v2.pth"
        torch.save(torchvision.models.mobilenet_v2().state_dict(), path)
        return path

    def test_images_are_normalised_by_the_network_whose_layers_keep_their_names(self, weights):
        import torchvision

        model = imagenet.load("mobilenet_v2", weights)
        plain = torchvision.models.mobilenet_v2()
        plain.load_state_dict(torch.load(weights))
        assert model.state_dict().keys() == plain.state_dict().keys()
        x = torch.rand(2, 3, 32, 32)
        mean, std = ([t] for t in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        normal = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        with torch.no_grad():
            assert torch.equal(model(x), plain.eval()(normal))

    def test_efficientnets_weights_are_read_under_the_names_of_their_package(self, tmp_path):
        import timm

        theirs = timm.create_model("tf_efficientnet_lite0").eval()
        state = {("_conv_stem.weight" if i == 0 else f"_{i}"): t
                 for i, t in enumerate(theirs.state_dict().values())}  # fmt: skip
        torch.save(state, tmp_path / "lite0.pth")
        model = imagenet.load("efficientnet_lite0", tmp_path / "lite0.pth")
        x = torch.rand(1, 3, 32, 32)
        with torch.no_grad():
            assert torch.equal(model(x), theirs((x - 127 / 255) / (128 / 255)))

    def test_any_network_of_timm_s(self, tmp_path):
        import timm

        torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "w.pth")
        model = imagenet.load("timm/test_resnet", tmp_path / "w.pth")
        assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
        wanted = imagenet.preprocessing_of("timm/test_resnet")
        assert (wanted.crop, wanted.interpolation) == (160, "bilinear")

    @pytest.mark.parametrize("name", ["resnet18.a1_in1k", "resnet18.tv_in1k", "test_resnet"])
    def test_images_are_resized_and_cropped_as_timm_itself_does(self, name):
        import timm
        from timm.data import create_transform, resolve_data_config

        config = resolve_data_config({}, model=timm.create_model(name))
        resize, crop, *_ = create_transform(**config).transforms
        ours = imagenet.preprocessing_of(f"timm/{name}")
        assert (ours.resize, (ours.crop, ours.crop)) == (resize.size, crop.size)

    def test_weights_that_cannot_be_downloaded_are_asked_for(self, monkeypatch):
        def offline(*_, **__):
            raise URLError("no connection")

        monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
        with pytest.raises(ValueError, match=r"could not be downloaded .*no connection.*--weights"):
            imagenet.load("mobilenet_v2")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("resnet50", None, "holds the weights of no resnet50"),
            ("mobilenet_v2", b"x", "truncated or no file of weights"),
            ("mobilenet_v3", None, "There is no network 'mobilenet_v3'; there are resnet50"),
            ("timm/nothing", None, "has no network 'nothing'"),
        ],
    )
    def test_other_weights_are_refused(self, weights, tmp_path, name, content, message):
        path = weights
        if content is not None:
            path = tmp_path / "w.pth"
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            imagenet.load(name, path)
        with pytest.raises((FileNotFoundError, ValueError), match=r"There is no|has no network"):
            imagenet.load(name, tmp_path / "absent")
