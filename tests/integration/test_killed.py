"""Post-training that is killed, without warning and at any moment, ends where it would have."""

import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from ttnorm import artefact

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
ARGUMENTS = ["post-train", "mine:network", "mine:loader"]
OPTIONS = ["--epochs", "12", "--lr", "0.02", "--device", "cpu"]


@pytest.fixture
def project(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(PROGRAM))
    return tmp_path


def start(project, output, *options):
    command = [sys.executable, "-m", "ttnorm", *ARGUMENTS, output, *OPTIONS, *options]
    return subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL)


def test_killed_and_started_again_it_gives_the_same_alpha(project):
    assert start(project, "whole.safetensors").wait(timeout=120) == 0
    checkpoint, kills, chance = project / "run.safetensors", 0, random.Random(0)
    for _ in range(20):
        process = start(project, "killed.safetensors", "--checkpoint", checkpoint)
        if kills < 3:
            before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
            while process.poll() is None:  # wait until it has got a little further ...
                if checkpoint.exists() and checkpoint.stat().st_mtime_ns > before:
                    break
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.05))  # ... and hit it wherever it is
            process.send_signal(signal.SIGKILL)
            kills += process.wait(timeout=60) == -signal.SIGKILL
        elif process.wait(timeout=120) == 0:
            break
    assert kills == 3
    whole, killed = (
        artefact.read(project / f"{name}.safetensors").alpha["1"] for name in ("whole", "killed")
    )
    assert torch.equal(whole, killed)
