"""Importing the library costs little beyond importing torch."""

import subprocess
import sys

# the compiler takes over a second, and the rest is for extras that may not be installed
HEAVY = ("torch._dynamo", "torch._inductor", "torchvision", "timm", "matplotlib", "onnx", "scipy")


def test_importing_it_imports_torch_and_little_more():
    code = f"import sys, ttnorm; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
