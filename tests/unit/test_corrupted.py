"""CIFAR-C files: the layout, the same bytes from any number of processes, and going on."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ttnorm.data import corrupted
from ttnorm.data.corrupted import load_corrupted, make_corrupted
from ttnorm.data.corruptions import corrupt
from ttnorm.data.images import Images

KINDS = ("gaussian_noise", "brightness")


@pytest.fixture(scope="module")
def clean():
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (30, 3, 32, 32), generator=g, dtype=torch.uint8)
    return Images(images, torch.arange(30) % 10)


def make(clean, folder, **options):
    make_corrupted(clean, folder, **{"corruptions": KINDS, "workers": 1, **options})


def test_the_layout_is_the_official_one(tmp_path, clean):
    make(clean, tmp_path)
    images, labels = np.load(tmp_path / "brightness.npy"), np.load(tmp_path / "labels.npy")
    assert (images.shape, images.dtype) == ((150, 32, 32, 3), np.uint8)
    assert np.array_equal(labels, np.tile(np.arange(30) % 10, 5))
    x = clean.images.permute(0, 2, 3, 1).numpy()
    for severity in range(1, 6):
        rows = slice((severity - 1) * 30, severity * 30)
        assert np.array_equal(images[rows], corrupt(x, "brightness", severity))
    loaded = load_corrupted(tmp_path, "brightness", 4)
    assert np.array_equal(loaded.images.permute(0, 2, 3, 1), images[90:120])


def test_two_processes_write_the_same_bytes(tmp_path, clean):
    many = Images(clean.images.repeat(20, 1, 1, 1), clean.labels.repeat(20))
    options = {"severities": [5], "corruptions": ["gaussian_noise"]}
    for workers in (1, 2):
        make(many, tmp_path / str(workers), workers=workers, **options)
    first, second = ((tmp_path / w / "gaussian_noise.npy").read_bytes() for w in "12")
    assert first == second


def test_severities_can_be_added_and_only_they_are_made(tmp_path, clean, monkeypatch):
    make(clean, tmp_path, severities=[5])
    with pytest.raises(ValueError, match=r"no images of severity 3\. Run ttnorm corrupt"):
        load_corrupted(tmp_path, "brightness", 3)
    before = load_corrupted(tmp_path, "brightness", 5).images
    make(clean, tmp_path, severities=[3, 5])
    assert torch.equal(load_corrupted(tmp_path, "brightness", 5).images, before)
    assert load_corrupted(tmp_path, "brightness", 3).images.any()
    monkeypatch.setattr(corrupted, "_make", lambda *_: pytest.fail("it was made again"))
    make(clean, tmp_path, severities=[3, 5])


def test_images_that_begin_with_a_black_one_are_there(tmp_path, clean, monkeypatch):
    images = clean.images.clone()
    images[0] = 0
    begins_black = Images(images, clean.labels)
    options = {"corruptions": ["contrast"], "severities": [5]}
    make(begins_black, tmp_path, **options)
    loaded = load_corrupted(tmp_path, "contrast", 5).images
    assert not loaded[0].any()
    assert loaded[1].any()
    monkeypatch.setattr(corrupted, "_make", lambda *_: pytest.fail("it was made again"))
    make(begins_black, tmp_path, **options)


def test_of_two_runs_at_once_one_works_and_the_other_finds_it_done(tmp_path, clean, monkeypatch):
    really, made, go_on = corrupted._make, [], threading.Event()

    def slow(pool, path, *rest):
        made.append(path.stem)
        assert go_on.wait(60)
        really(pool, path, *rest)

    monkeypatch.setattr(corrupted, "_make", slow)
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(make, clean, tmp_path, severities=[5]) for _ in range(2)]
        time.sleep(1)  # enough for the second, were it not to wait
        go_on.set()
        for run in runs:
            run.result()
    assert made == list(KINDS)
    assert load_corrupted(tmp_path, "brightness", 5).images.any()


def test_a_file_that_was_not_finished_is_made_again(tmp_path, clean):
    make(clean, tmp_path, severities=[5])
    whole = (tmp_path / "brightness.npy").read_bytes()
    (tmp_path / "brightness.npy").rename(tmp_path / "brightness.npy.partial")
    make(clean, tmp_path, severities=[5])
    assert (tmp_path / "brightness.npy").read_bytes() == whole
    assert not list(tmp_path.glob("*.partial"))


def test_killed_before_the_labels_were_written_it_goes_on(tmp_path, clean):
    make(clean, tmp_path, severities=[5])
    (tmp_path / "labels.npy").unlink()
    make(clean, tmp_path, severities=[5])
    assert load_corrupted(tmp_path, "brightness", 5).labels.tolist() == clean.labels.tolist()


class TestErrors:
    def test_other_people_s_files_are_not_written_over(self, tmp_path, clean):
        np.save(tmp_path / "fog.npy", np.zeros(3))
        with pytest.raises(ValueError, match="npy files that ttnorm did not make"):
            make(clean, tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["fog.npy"]

    @pytest.mark.parametrize("severity", [4, 5])
    def test_a_file_of_another_shape_or_dtype(self, tmp_path, clean, severity):
        make(clean, tmp_path, severities=[5])
        for odd in (np.full((150, 28, 28, 3), 7, np.uint8), np.zeros((150, 32, 32, 3))):
            np.save(tmp_path / "brightness.npy", odd)
            before = (tmp_path / "brightness.npy").read_bytes()
            with pytest.raises(ValueError, match=r"brightness\.npy has .*, expected .*elete it"):
                make(clean, tmp_path, severities=[severity])
            assert (tmp_path / "brightness.npy").read_bytes() == before

    def test_other_images_or_another_seed(self, tmp_path, clean):
        make(clean, tmp_path, severities=[5])
        with pytest.raises(ValueError, match="other images or another seed"):
            make(clean, tmp_path, seed=1)
        with pytest.raises(ValueError, match="other images or another seed"):
            make(Images(clean.images.flip(0), clean.labels), tmp_path)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"severities": [6]}, "severity is 6, expected 1 to 5"),
            ({"corruptions": ["mist"]}, "no corruption 'mist'"),
            ({"corruptions": ["frost"]}, "frost needs its textures"),
        ],
    )
    def test_nothing_is_written_when_something_is_wrong(self, tmp_path, clean, options, message):
        with pytest.raises(ValueError, match=message):
            make(clean, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    def test_a_script_that_its_own_workers_would_run(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "import torch\n"
            "from ttnorm.data.corrupted import make_corrupted\n"
            "from ttnorm.data.images import Images\n"
            "clean = Images(torch.ones(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2).long())\n"
            "make_corrupted(clean, 'out', corruptions=['brightness'], workers=1)\n"
        )
        ran = subprocess.run(
            [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode != 0
        assert 'call it under if __name__ == "__main__":' in ran.stderr

    def test_images_that_are_no_bytes(self, tmp_path):
        np.save(tmp_path / "labels.npy", np.zeros(10, int))
        np.save(tmp_path / "fog.npy", np.ones((10, 32, 32, 3), np.float32))
        with pytest.raises(ValueError, match=r"fog.npy has float32, expected uint8"):
            load_corrupted(tmp_path, "fog", 5)

    def test_labels_of_another_length(self, tmp_path):
        np.save(tmp_path / "labels.npy", np.zeros(13, int))
        with pytest.raises(ValueError, match=r"labels.npy has shape \(13,\), expected \(5 N,\)"):
            load_corrupted(tmp_path, "fog", 5)


def test_a_negative_seed_is_refused_and_claims_no_folder(tmp_path, clean):
    with pytest.raises(ValueError, match="seed is -1, expected 0 or more"):
        make(clean, tmp_path / "cc", seed=-1)
    assert not (tmp_path / "cc").exists()


def test_labels_that_a_killed_run_began_are_written_again(tmp_path, clean, monkeypatch):
    def killed(file, labels):
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            make(clean, tmp_path, severities=[5])
    make(clean, tmp_path, severities=[5])
    assert load_corrupted(tmp_path, "brightness", 5).labels.tolist() == clean.labels.tolist()
    assert not list(tmp_path.glob("*.partial"))


def test_some_images_alone_can_be_read(tmp_path, clean):
    make(clean, tmp_path, severities=[5])
    first = load_corrupted(tmp_path, "brightness", 5, which=slice(7))
    some = load_corrupted(tmp_path, "brightness", 5, which=[1, 4])
    every = load_corrupted(tmp_path, "brightness", 5)
    assert torch.equal(some.images, every.images[[1, 4]])
    assert torch.equal(first.images, every.images[:7])
    assert torch.equal(first.labels, every.labels[:7])
