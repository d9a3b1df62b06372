"""What `ttnorm demo` runs, and the CIFAR-10 images it runs on."""

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
