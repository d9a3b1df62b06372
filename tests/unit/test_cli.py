"""The command line, on a user's own network and loader given as MODULE:FUNCTION."""

import dataclasses
import subprocess
import sys
import textwrap
from collections import OrderedDict

import pytest
import torch
import torchvision
from torch import nn
from typer.testing import CliRunner

import ttnorm
from ttnorm import artefact, cli
from ttnorm.bench.experiments import EXPERIMENTS
from ttnorm.bench.scenarios import SCENARIOS
from ttnorm.cli.printing import histogram
from ttnorm.methods import METHODS
from ttnorm.models import imagenet
from ttnorm.norms import NORMS

USER_CODE = """
    import torch
    from torch import nn

    def network():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(6, 4),
        ).eval()

    made = network()

    def loader():
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(3, 8, 3, 10, 10, generator=generator)
        y = torch.randint(4, (3, 8), generator=generator)
        return list(zip(x, y))

    def normalised():
        return [(2 * x - 1, y) for x, y in loader()]

    def four_channels():
        return [(torch.rand(8, 4, 10, 10), y) for _, y in loader()]

    def many_classes():
        return [(x, y + 11) for x, y in loader()]

    def fractions():
        return [(x, y.float()) for x, y in loader()]

    def nothing_at_all():
        return None

    def no_network():
        return 3

    def broken():
        raise ValueError("a mistake of the user's own")

    def shift(images, generator):
        return 1 - images

    def loss(output, y):
        return nn.functional.cross_entropy(output, y)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(textwrap.dedent(USER_CODE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def run(*args):
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


@pytest.fixture
def alpha_file(project):
    result = run("post-train", "mine:network", "mine:loader", "mine.ttn.safetensors", "--epochs", 2)
    assert result.exit_code == 0, result.output
    return project / "mine.ttn.safetensors"


def test_post_train_writes_a_file_that_loads(alpha_file):
    import mine

    model = ttnorm.load_(mine.network(), alpha_file)
    assert isinstance(model[1], ttnorm.TTNorm2d)
    assert artefact.read(alpha_file).metadata["config"]["epochs"] == 2


def test_post_train_equals_the_library_call(alpha_file):
    import mine

    config = ttnorm.PostTrainConfig(epochs=2)
    expected = ttnorm.post_train_(mine.network(), mine.loader(), config).alpha
    assert torch.equal(artefact.read(alpha_file).alpha["1"], expected["1"].cpu())


def test_post_train_takes_every_option(project):
    options = (
        "--epochs 1 --lr 0.01 --schedule constant --init 0.3 --ce --mse --lambda 0.1 "
        "--granularity layer --average constant --dynamic-batch 2 8 --group-sizes 1,4 "
        "--source-count 2 "
        "--shift image --early-stop 0.01 --patience 2 --steps-per-epoch 2 --amp bfloat16 "
        "--no-sync-statistics --prior-samples 8 --seed 3 --loss mine:loss --mean 0.5,0.5,0.5 "
        "--std 0.5,0.5,0.5 --checkpoint run.safetensors --device cpu"
    )
    result = run(
        "post-train", "mine:network", "mine:normalised", "out.safetensors", *options.split()
    )
    assert result.exit_code == 0, result.output
    config = artefact.read(project / "out.safetensors").metadata["config"]
    defaults = dataclasses.asdict(ttnorm.PostTrainConfig())
    left = {name for name, value in defaults.items() if config[name] == value}
    assert left == {"ce", "mse"}  # given, but as they are anyway
    assert config["dynamic_batch"] == [2, 8]
    assert config["group_sizes"] == [1, 4]
    assert config["init"] == 0.3
    assert config["mean"] == config["std"] == [0.5, 0.5, 0.5]
    assert (project / "run.safetensors").exists()


def test_a_network_may_be_given_in_the_place_of_a_function(project):
    result = run("post-train", "mine:made", "mine:loader", "made.safetensors", "--epochs", 0)
    assert result.exit_code == 0, result.output
    assert (project / "made.safetensors").exists()


def test_shifts_may_be_the_user_s(project):
    line = "post-train mine:network mine:loader out.safetensors --epochs 1 --device cpu"
    result = run(*line.split(), "--augment", "mine:shift", "--prior-augment", "mine:shift")
    assert result.exit_code == 0, result.output
    config = artefact.read(project / "out.safetensors").metadata["config"]
    assert config["augmentation"] == "shift"
    assert config["prior augmentation"] == "shift"


def test_info_cuts_nothing_off_where_it_goes_to_a_file(tmp_path):
    name = "a_name_that_is_longer_than_a_window_is_wide_" * 2
    model = nn.Sequential(OrderedDict({name: nn.BatchNorm2d(4)}))
    path = tmp_path / "long.safetensors"
    artefact.save(ttnorm.convert_(model, 0.97), path)
    output = run("info", path).output
    assert f"{name} " in output
    assert "·" * 19 + "▇" in output


def test_info_shows_layers_and_how_it_was_made(alpha_file):
    result = run("info", alpha_file)
    assert result.exit_code == 0
    assert "1 layers, 6 channels, mean alpha 0." in result.output
    assert "epochs=2" in result.output


def test_info_shows_the_source_count_that_a_file_has(alpha_file):
    import mine

    model = ttnorm.load_(mine.network(), alpha_file, source_count=2)
    ttnorm.save(model, "counted.safetensors")
    assert "source_count=2.0" in run("info", "counted.safetensors").output


def test_histogram_has_a_bar_where_the_alphas_are():
    bars = histogram(torch.tensor([0.0] * 8 + [0.51, 1.0]))
    assert len(bars) == 20
    assert bars == "▇" + "·" * 9 + "▁" + "·" * 8 + "▁"


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_export_writes_a_graph(alpha_file, suffix):
    result = run("export", "mine:network", alpha_file, f"mine.{suffix}", "--shape", "3,10,10")
    assert result.exit_code == 0, result.output
    assert (alpha_file.parent / f"mine.{suffix}").stat().st_size > 1000


def test_a_network_with_a_file_of_weights_is_exported(project):
    model = torchvision.models.mobilenet_v2(weights=None).eval()
    torch.save(model.state_dict(), "weights.pth")
    loaded = imagenet.load("mobilenet_v2", project / "weights.pth")
    ttnorm.save(ttnorm.convert_(loaded, 0.1), "alpha.safetensors")
    line = "export mobilenet_v2 alpha.safetensors out.pt2 --shape 3,32,32 --weights weights.pth"
    result = run(*line.split())
    assert result.exit_code == 0, result.output
    assert (project / "out.pt2").is_file()


def test_export_says_when_the_network_does_not_take_the_shape(alpha_file):
    result = run("export", "mine:network", alpha_file, "mine.onnx", "--shape", "5,10,10")
    assert "does not take --shape 5,10,10" in str(result.exception)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("post-train mine mine:loader x", "'mine' is no network: expected wrn40_2-cifar10"),
        ("post-train mine:nothing mine:loader x", "mine has no function 'nothing'"),
        ("post-train absent:network mine:loader x", "There is no module 'absent' to import"),
        ("post-train mine:network mine:loader no/x", "no/x cannot be written"),
        ("post-train mine:network mine:loader x --device gpu", "--device is 'gpu', expected cpu"),
        ("export mine:network absent x.onnx --shape 3x10x10", "--shape is '3x10x10', expected"),
        ("post-train mine:no_network mine:loader x", "returned a int, expected a torch.nn.Module"),
        (
            "post-train mine:network mine:loader x --init much",
            "--init is 'much', which is no number",
        ),
        ("post-train mine:network mine:normalised x", "pass the mean and std"),
        (
            "post-train mine:network mine:four_channels x",
            "mine:network does not take (2, 4, 10, 10)",
        ),
        ("post-train mine:network mine:many_classes x", "mine:network has 4 classes"),
        ("post-train mine:network mine:fractions x", "expected whole numbers: y.long()"),
        ("post-train mine:network mine:nothing_at_all x", "returned a NoneType, expected batches"),
        ("post-train mine:network mine:loader x --std 0,1,1", "std is [0.0, 1.0, 1.0], expected"),
        ("info absent.safetensors", "There is no file absent.safetensors"),
        ("export mine:network absent x.onnx --shape 3.5,8,8", "--shape is '3.5,8,8', expected"),
        ("post-train mine:network mine:loader x --checkpoint no/c", "no/c cannot be written"),
        ("export mine:network absent x.tflite --shape 3,10,10", "expected .onnx or .pt2"),
    ],
)
def test_mistakes_are_one_line_without_a_traceback(project, args, message):
    command = [sys.executable, "-m", "ttnorm", *args.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=project)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_mistakes_in_the_user_s_code_keep_their_traceback(project):
    command = [sys.executable, "-m", "ttnorm", "post-train", "mine:broken", "mine:loader", "x"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=project)
    assert result.returncode == 1
    assert "a mistake of the user's own" in result.stderr
    assert "in broken" in result.stderr


def test_help_names_every_command():
    result = run("--help")
    commands = ("train-source", "post-train", "info", "export", "corrupt", "evaluate", "report")
    for command in (*commands, "demo"):
        assert command in result.output


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("evaluate", [*NORMS, *METHODS, *SCENARIOS]),
        ("reproduce", [name for name in EXPERIMENTS if not name.startswith("table")]),
    ],
)
def test_help_names_every_choice(command, names, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # no name is broken over two lines
    words = run(command, "--help").output.replace(",", " ").replace(";", " ").split()
    assert not set(names) - set(words)
