"""Wide residual networks for small images (Zagoruyko and Komodakis, 2016).

The modules are named as in the public AugMix checkpoints, which therefore load as they are.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class WideResNet(nn.Module):
    """A pre-activation residual network of `depth` convolutions, `width` times as wide as usual.

    Takes images in [0, 1] and maps them to [-1, 1] itself.

    Args:
        depth: 6 n + 4, where n is the number of units in each of the three blocks.
        width: multiplies the 16, 32, 64 channels of the blocks.
        num_classes: outputs.

    Example:
        >>> import torch
        >>> WideResNet(depth=10, width=1)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, depth: int = 40, width: int = 2, num_classes: int = 10) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth is {depth}, expected 6 n + 4: 10, 16, 22, 28, 34, 40, ...")
        units = (depth - 4) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = Block(units, 16, 16 * width, stride=1)
        self.block2 = Block(units, 16 * width, 32 * width, stride=2)
        self.block3 = Block(units, 32 * width, 64 * width, stride=2)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(64 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(2 * x - 1)
        x = self.block3(self.block2(self.block1(x)))
        x = F.adaptive_avg_pool2d(self.relu(self.bn1(x)), 1)
        return self.fc(x.flatten(1))


class Block(nn.Module):
    """A run of units at one resolution; the first one changes width and stride."""

    def __init__(self, units: int, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        widths = [inputs] + [outputs] * (units - 1)
        strides = [stride] + [1] * (units - 1)
        self.layer = nn.Sequential(
            *(Unit(width, outputs, s) for width, s in zip(widths, strides, strict=True))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Unit(nn.Module):
    """BatchNorm, ReLU, convolution, twice, and the sum with what came in."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.convShortcut = (
            None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        activated = self.relu1(self.bn1(x))
        y = self.conv2(self.relu2(self.bn2(self.conv1(activated))))
        # where the shape changes, the shortcut starts behind the first activation
        shortcut = x if self.convShortcut is None else self.convShortcut(activated)
        return shortcut + y
