"""Two processes give what one gives: synchronised statistics, the prior, post-training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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


@pytest.mark.parametrize("name", ["output", "input gradient", "weight gradient", "alpha gradient"])
def test_sync_layers_treat_the_batches_of_all_ranks_as_one(results, name):
    one, two = (r[name] for r in results)
    torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layer", ["1", "4"])
def test_the_prior_is_that_of_one_process(results, layer):
    one, two = (r[f"prior {layer}"] for r in results)
    torch.testing.assert_close(two, one)


@pytest.mark.parametrize("layer", ["1", "4"])
@pytest.mark.parametrize("kind", ["alpha", "default alpha"])
def test_post_training_gives_the_alpha_of_one_process(results, kind, layer):
    """With one draw per batch, and with the default shifts that also draw per image."""
    one, two = (r[f"{kind} {layer}"] for r in results)
    torch.testing.assert_close(two, one, rtol=0, atol=1e-6)
    assert (one - results[0][f"prior {layer}"]).abs().max() > 1e-2  # it did move


def test_a_checkpoint_of_two_ranks_resumes(results):
    for layer in ("1", "4"):
        assert torch.equal(results[1][f"resumed {layer}"], results[1][f"alpha {layer}"])
