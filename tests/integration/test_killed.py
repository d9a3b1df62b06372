"""What is killed, without warning and at any moment, ends where it would have."""

import random
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

from ttnorm import artefact
from ttnorm.bench.records import read_records

PROGRAM = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    def network():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(16, 4),
        )
        return model.eval()

    def loader():
        torch.manual_seed(1)
        data = TensorDataset(torch.rand(200, 3, 32, 32), torch.randint(4, (200,)))
        return DataLoader(data, batch_size=20, shuffle=True)
"""
POST_TRAIN = ["post-train", "mine:network", "mine:loader"]
OPTIONS = ["--epochs", "12", "--lr", "0.02", "--device", "cpu"]
DOMAINS = ("fog", "snow", "contrast", "pixelate")


@pytest.fixture
def project(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(PROGRAM))
    return tmp_path


def start(project, *arguments):
    command = [sys.executable, "-m", "ttnorm", *map(str, arguments)]
    return subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL)


def finish_in_spite_of_kills(begin, watched, wanted=3):
    """Start again and again; kill while the watched file grows, until that happened so often."""
    kills, chance = 0, random.Random(0)
    for _ in range(20):
        process = begin()
        if kills < wanted:
            before = watched.stat().st_mtime_ns if watched.exists() else 0
            while process.poll() is None:  # wait until it has got a little further ...
                if watched.exists() and watched.stat().st_mtime_ns > before:
                    break
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.05))  # ... and hit it wherever it is
            process.send_signal(signal.SIGKILL)
            kills += process.wait(timeout=60) == -signal.SIGKILL
        elif process.wait(timeout=120) == 0:
            break
    assert kills == wanted


def test_killed_and_started_again_post_training_gives_the_same_alpha(project):
    assert start(project, *POST_TRAIN, "whole.safetensors", *OPTIONS).wait(timeout=120) == 0
    checkpoint = project / "run.safetensors"
    arguments = [*POST_TRAIN, "killed.safetensors", *OPTIONS, "--checkpoint", checkpoint]
    finish_in_spite_of_kills(lambda: start(project, *arguments), checkpoint)
    whole, killed = (
        artefact.read(project / f"{name}.safetensors").alpha["1"] for name in ("whole", "killed")
    )
    assert torch.equal(whole, killed)


def test_killed_and_started_again_evaluation_loses_and_doubles_nothing(project):
    rng = np.random.default_rng(0)
    for name in DOMAINS:
        np.save(project / f"{name}.npy", rng.integers(0, 256, (1000, 32, 32, 3), dtype=np.uint8))
    np.save(project / "labels.npy", np.arange(1000) % 4)
    options = [f"--corruption={name}" for name in DOMAINS]
    options += ["--norm=tbn", "--norm=alpha-bn", "--norm=mixnorm", "--scenario=continual"]
    options += ["--network=mine:network", "--data=.", "--device=cpu"]
    assert start(project, "evaluate", "whole.jsonl", *options).wait(timeout=120) == 0
    finish_in_spite_of_kills(
        lambda: start(project, "evaluate", "killed.jsonl", *options), project / "killed.jsonl"
    )
    whole, killed = (read_records([project / f"{name}.jsonl"]) for name in ("whole", "killed"))
    for record in whole + killed:
        del record["seconds"]
    assert len(whole) == 3 * 6 * 4
    assert killed == whole
