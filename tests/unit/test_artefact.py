"""The alpha file: comes back exactly, and is refused when it is not for this network."""

import copy
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from streaming import knowing_its_source
from torch import nn

import ttnorm
from ttnorm import artefact
from ttnorm.files import checksum, read_safetensors, write_atomically
from ttnorm.routing import Content
from ttnorm.tree import CLASSES, CONTENT, known_of


@pytest.fixture
def path(tmp_path):
    return tmp_path / "network.ttn.safetensors"


@pytest.fixture
def saved(small_network, path):
    """A plain network, and the alpha file that was made for it."""
    alpha = {"1": torch.rand(6), "4": torch.rand(8)}
    ttnorm.save(ttnorm.convert_(copy.deepcopy(small_network), alpha), path)
    return small_network, alpha


def rewrite(path, tensors=None, **changes):
    """The file again with other tensors or metadata, its checksum made to fit."""
    with safe_open(path, framework="pt") as file:
        old = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
    tensors, metadata = tensors or old, metadata | changes
    del metadata["sha256"]
    metadata["sha256"] = checksum(tensors, metadata)
    save_file(tensors, path, metadata={key: json.dumps(v) for key, v in metadata.items()})


def refuses(model, path, message, **options):
    before = copy.deepcopy(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        ttnorm.load_(model, path, **options)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class TestRoundTrip:
    def test_alpha_comes_back_exactly(self, saved, path):
        model, alpha = saved
        ttnorm.load_(model, path)
        assert all(torch.equal(ttnorm.alphas(model)[name], alpha[name]) for name in alpha)

    def test_into_a_network_that_is_converted_already(self, saved, path):
        model, alpha = saved
        ttnorm.load_(ttnorm.convert_(model, alpha=0.0), path)
        assert torch.equal(ttnorm.alphas(model)["1"], alpha["1"])

    def test_the_cross_term_is_part_of_it(self, small_network, path):
        ttnorm.save(ttnorm.convert_(small_network, 0.3, cross_term=False), path)
        assert not ttnorm.load_(ttnorm.revert_(small_network), path)[1].cross_term

    def test_how_it_was_made_travels_along(self, small_network, path):
        loader = [(torch.rand(8, 3, 12, 12), torch.randint(4, (8,)))]
        config = ttnorm.PostTrainConfig(epochs=1, lambda_=0.25)
        ttnorm.post_train_(small_network, loader, config)
        ttnorm.save(small_network, path)
        made = artefact.read(path).metadata["config"]
        assert made["lambda_"] == 0.25
        assert made["augmentation"] == "domain_shift"
        # and on through a second file
        ttnorm.save(ttnorm.load_(ttnorm.revert_(small_network), path), path)
        assert artefact.read(path).metadata["config"] == made
        # but not into the file of an alpha that was set by hand
        ttnorm.save(ttnorm.convert_(small_network, alpha=0.5), path)
        assert artefact.read(path).metadata["config"] == {}

    def test_it_is_alpha_and_nothing_else(self, saved, path):
        assert path.stat().st_size < 4096
        assert artefact.read(path).alpha.keys() == {"1", "4"}

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_a_network_cast_after_training_is_still_the_network(self, saved, path, dtype):
        model, alpha = saved
        ttnorm.load_(model.to(dtype), path)
        torch.testing.assert_close(ttnorm.alphas(model)["1"], alpha["1"].to(dtype), rtol=0, atol=0)

    def test_a_file_from_a_half_precision_network_fits_the_original(self, saved, path):
        model, _ = saved
        half = ttnorm.convert_(copy.deepcopy(model).half(), alpha=0.5)
        ttnorm.save(half, path)
        ttnorm.load_(model, path)

    def test_saving_over_a_file_replaces_it_whole(self, saved, path):
        model, _ = saved
        ttnorm.save(ttnorm.convert_(model, alpha=0.5), path)
        assert [file.name for file in path.parent.iterdir()] == [path.name]
        assert (artefact.read(path).alpha["1"] == 0.5).all()


class TestRefused:
    def test_another_architecture(self, saved, path):
        other = nn.Sequential(nn.BatchNorm2d(3))
        refuses(other, path, r"another network: 2 layers there, 1 here.*\['1', 6\] there")

    def test_another_architecture_is_refused_even_when_not_strict(self, saved, path):
        refuses(nn.Sequential(nn.BatchNorm2d(3)), path, "another network", strict=False)

    def test_another_checkpoint(self, saved, path):
        model, alpha = saved
        model[1].running_var[0] += 1e-3
        refuses(model, path, "other running statistics: another checkpoint")
        ttnorm.load_(model, path, strict=False)
        assert torch.equal(ttnorm.alphas(model)["1"], alpha["1"])

    def test_what_streams_know_of_another_checkpoint_is_left_out(self, small_network, path):
        ttnorm.save(knowing_its_source(small_network), path)
        other = ttnorm.revert_(copy.deepcopy(small_network))
        assert known_of(ttnorm.load_(other, path), CONTENT) is not None
        other[1].running_var[0] += 1e-3
        ttnorm.load_(other, path, strict=False)
        assert (known_of(other, CONTENT), known_of(other, CLASSES)) == (None, None)

    @pytest.mark.parametrize("keep", [0, 4, 100, -1, -30])
    def test_truncated(self, saved, path, keep):
        content = path.read_bytes()
        path.write_bytes(content[:keep])
        refuses(saved[0], path, "truncated, damaged")

    def test_what_others_write(self, saved, path):
        save_file({"weight": torch.ones(2)}, path, metadata={"format": "pt"})
        refuses(saved[0], path, "is a safetensors file but no alpha file")

    def test_a_network_whose_layers_have_other_options(self, saved, path):
        model = ttnorm.convert_(saved[0], 0.5)
        ttnorm.convert_(model[:3], 0.5, source_count=5)
        with pytest.raises(ValueError, match=r"Layers have source_count of 0\.0, 5\.0, expected"):
            ttnorm.save(model, path)

    def test_a_flipped_bit_in_the_values(self, saved, path):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        refuses(saved[0], path, "does not match its checksum")

    def test_any_damaged_byte_of_the_header(self, saved, path):
        model, _ = saved
        content = path.read_bytes()
        header = int.from_bytes(content[:8], "little")
        for position in range(8 + header):
            damaged = bytearray(content)
            damaged[position] ^= 0x15
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"damaged|no alpha file|has format"):
                ttnorm.load_(model, path)

    @pytest.mark.parametrize("value", [float("nan"), -0.01, 1.01, float("inf")])
    def test_values_that_are_no_alpha(self, saved, path, value):
        model, alpha = saved
        rewrite(path, tensors={**alpha, "4": torch.full((8,), value)})
        refuses(model, path, r"alpha for '4' has values outside \[0, 1\] or NaN")

    def test_shapes_that_contradict_the_fingerprint(self, saved, path):
        model, alpha = saved
        rewrite(path, tensors={**alpha, "4": torch.rand(9)})
        refuses(model, path, r"alpha for '4' has shape \(9,\), expected \(8,\)")

    def test_a_newer_format(self, saved, path):
        rewrite(path, format_version=2, ttnorm="9.9")
        refuses(saved[0], path, r"format 2, written by ttnorm 9.9; .* Upgrade ttnorm")

    def test_a_safetensors_file_of_something_else(self, saved, path):
        save_file({"weight": torch.rand(3)}, path)
        refuses(saved[0], path, "no alpha file")

    def test_a_pickle(self, saved, path):
        torch.save({"1": torch.rand(6)}, path)
        refuses(saved[0], path, "no safetensors file")

    def test_a_missing_file(self, saved, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no file"):
            ttnorm.load_(saved[0], tmp_path / "nothing.safetensors")

    def test_a_network_of_incomparable_precision(self, saved, path):
        model, _ = saved
        ttnorm.save(ttnorm.convert_(copy.deepcopy(model).bfloat16(), alpha=0.5), path)
        refuses(model.half(), path, "saved from a bfloat16 network and this one is float16")

    def test_saving_values_that_are_no_alpha(self, small_network, path):
        ttnorm.convert_(small_network, alpha=0.5)[1].alpha[0] = 1.5
        with pytest.raises(ValueError, match="alpha for '1' has values outside"):
            ttnorm.save(small_network, path)
        assert not path.exists()

    def test_saving_an_unconverted_network(self, small_network, path):
        with pytest.raises(ValueError, match="no test-time normalization layers"):
            ttnorm.save(small_network, path)
        assert not path.exists()


def test_what_streams_need_is_refused_where_it_is_not_finite(small_network, path):
    model = ttnorm.convert_(small_network, 0.1)
    model.__dict__[CONTENT] = Content(torch.zeros(2), torch.tensor([[1e6, 0], [0, 1.0]]))
    with pytest.raises(ValueError, match=r"content/whitening.* not finite. Post-train"):
        ttnorm.save(model, path)  # a million is infinite in the half precision of a file
    assert not path.exists()
    model.__dict__[CONTENT] = Content(torch.zeros(2), torch.eye(2))
    ttnorm.save(model, path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["content/whitening"][0, 0] = float("inf")
    rewrite(path, tensors)
    refuses(small_network, path, "not finite")


def test_files_are_as_open_as_the_umask_has_it(small_network, tmp_path):
    before = os.umask(0o027)
    try:
        ttnorm.save(ttnorm.convert_(small_network, 0.5), tmp_path / "x.ttn.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "x.ttn.safetensors").stat().st_mode & 0o777 == 0o640


def test_threads_that_write_one_file_do_not_meet(tmp_path):
    path, values = tmp_path / "one.safetensors", {"a": torch.zeros(1000)}

    def write(number):
        for _ in range(30):
            write_atomically(path, values, {"number": number})

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(write, number) for number in range(8)]:
            done.result()
    assert read_safetensors(path)[0]["a"].equal(values["a"])
    assert list(tmp_path.iterdir()) == [path]
