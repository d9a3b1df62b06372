"""Two processes give what one gives: synchronised statistics, the prior, post-training."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ttnorm import artefact

WORKER = Path(__file__).with_name("distributed_worker.py")


def launch(processes, output):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*torchrun, f"--nproc-per-node={processes}", WORKER, output],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return load_file(output)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    return [launch(n, folder / f"{n}.safetensors") for n in (1, 2)]


@pytest.mark.parametrize("kind", ["", "counted "])
@pytest.mark.parametrize("name", ["output", "input gradient", "weight gradient", "alpha gradient"])
def test_sync_layers_treat_the_batches_of_all_ranks_as_one(results, name, kind):
    one, two = (r[kind + name] for r in results)
    torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layer", ["1", "4"])
def test_the_prior_is_that_of_one_process(results, layer):
    one, two = (r[f"prior {layer}"] for r in results)
    torch.testing.assert_close(two, one)


@pytest.mark.parametrize("kind", ["alpha", "default alpha"])
def test_post_training_gives_the_alpha_of_one_process(results, kind):
    """With one draw per batch, and with the default shifts that also draw per image."""
    moved = []
    for layer in ("1", "4"):
        one, two = (r[f"{kind} {layer}"] for r in results)
        torch.testing.assert_close(two, one, rtol=0, atol=1e-6)
        moved.append((one - results[0][f"prior {layer}"]).abs().max())
    assert max(moved) > 1e-2


@pytest.mark.parametrize("known", ["content", "classes"])
def test_ranks_know_the_same_of_source_images(results, known):
    """Each has seen others, and streams on all of them are to come out alike."""
    first, second = results[1][f"{known} of ranks"]
    assert torch.equal(first, second)


def test_ranks_with_other_numbers_of_batches_are_refused(results):
    """One of them would wait for ever."""
    assert [r["uneven"].tolist() for r in results] == [[0], [1, 1]]


def test_a_checkpoint_of_two_ranks_resumes(results):
    for layer in ("1", "4"):
        assert torch.equal(results[1][f"resumed {layer}"], results[1][f"alpha {layer}"])


USER_CODE = """
    import os
    import torch
    from distributed_worker import network

    def loader():
        rank, ranks = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1)))
        torch.manual_seed(2)
        x, y = torch.rand(4, 16, 3, 10, 10, dtype=torch.float64), torch.randint(4, (4, 16))
        return [(a.chunk(ranks)[rank], b.chunk(ranks)[rank]) for a, b in zip(x, y)]
"""


def test_the_command_line_under_torchrun_writes_what_one_process_writes(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(USER_CODE))
    one = ["-m", "ttnorm"]
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *one]
    alphas = []
    for name, program in (("one", one), ("two", two)):
        arguments = ["post-train", "mine:network", "mine:loader", f"{name}.safetensors"]
        options = ["--epochs", "2", "--lr", "0.02", "--device", "cpu"]
        result = subprocess.run(
            [sys.executable, *program, *arguments, *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(WORKER.parent), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        alphas.append(artefact.read(tmp_path / f"{name}.safetensors").alpha)
    for layer in ("1", "4"):
        torch.testing.assert_close(alphas[1][layer], alphas[0][layer], rtol=0, atol=1e-6)
