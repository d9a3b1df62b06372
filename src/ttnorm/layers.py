"""Test-time normalization layers: BatchNorm's own parameters and buffers, and alpha.

The convention, everywhere: alpha = 0 is the source, alpha = 1 is the test batch.

A layer's output never depends on `.train()` or `.eval()`, and no forward changes its state. `alpha`
is a buffer, so that a method which optimises "all parameters" cannot move it by accident.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .distributed import group_to_reduce, sum_over_ranks
from .functional import test_time_norm


class TTNormBase(nn.Module):
    """What every test-time normalization layer shares: Eq. 2 in `standardise`."""

    # Any: for BatchNorm these are optional parameters and buffers, for a frozen layer all buffers.
    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    alpha: Tensor
    eps: float

    group_size: int | None = None  # see `ttnorm.isolated`
    cross_term: bool = True  # see `ttnorm.functional.mix_moments`
    source_count: float = 0.0  # see `alpha_for`
    sync: bool = False  # reduce the batch's moments over `process_group`, None being all ranks
    process_group: dist.ProcessGroup | None = None

    def reset_running_stats(self) -> None:
        """What `torch.optim.swa_utils.update_bn` calls before forwards that fill them in again."""
        if "alpha" not in self._buffers:  # in BatchNorm's constructor
            return super().reset_running_stats()  # type: ignore[misc]
        raise RuntimeError(
            "The statistics of a test-time normalization layer are the source's, and no forward "
            "changes them. Call ttnorm.revert_(model) to estimate them anew."
        )

    def standardise(self, x: Tensor) -> Tensor:
        if not self.source_count:
            return self._with_alpha(x, self.alpha)
        if self.group_size is None:
            return self._with_alpha(x, self.alpha_for(self._samples_of_all_ranks(x)))
        size = min(self.group_size, x.shape[0])
        rest = x.shape[0] % size if size else 0
        if not rest:
            return self._with_alpha(x, self.alpha_for(size))
        # a last group of fewer samples has an alpha of its own
        parts = [(x[:-rest], size), (x[-rest:], rest)]
        return torch.cat([self._with_alpha(part, self.alpha_for(n)) for part, n in parts])

    def alpha_for(self, samples: int | Tensor) -> Tensor:
        """alpha * n / (n + source_count) for a batch of n samples.

        The source counts as `source_count` samples beside the batch's, so that small batches are
        trusted less.
        """
        if not self.source_count:
            return self.alpha
        return (self.alpha * (samples / (samples + self.source_count))).to(self.alpha.dtype)

    def _samples_of_all_ranks(self, x: Tensor) -> int | Tensor:
        """In the batch that the statistics are of."""
        group = group_to_reduce(self.process_group) if self.sync else None
        if group is None:
            return x.shape[0]
        samples = torch.tensor(x.shape[0], dtype=torch.float64, device=x.device)
        return sum_over_ranks(group, samples)[0]

    def _with_alpha(self, x: Tensor, alpha: Tensor) -> Tensor:
        return test_time_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            alpha,
            self.eps,
            group_size=self.group_size,
            cross_term=self.cross_term,
            process_group=group_to_reduce(self.process_group) if self.sync else None,
        )

    def forward(self, input: Tensor) -> Tensor:  # BatchNorm's name for it, as a keyword too
        self._check_input_dim(input)  # type: ignore[operator]  # and its check
        return self.standardise(input)

    def extra_repr(self) -> str:
        text = f"{self.running_mean.numel()}, eps={self.eps}"
        if self.alpha.is_meta:
            return text
        low, high = torch.aminmax(self.alpha)
        text += f", alpha={self.alpha.mean():.3f} [{low:.3f}, {high:.3f}]"
        return f"{text}, source_count={self.source_count:g}" if self.source_count else text

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The state dict of the network before conversion has no alpha and must load all the same.
        state_dict.setdefault(prefix + "alpha", self.alpha)
        super()._load_from_state_dict(state_dict, prefix, *args)


class _TTNorm(TTNormBase):
    """The constructor of the layers below; `ttnorm.convert_` makes them out of BatchNorm layers."""

    def __init__(
        self,
        num_features: int,
        *,
        alpha: float = 0.0,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is {alpha}, expected a number in [0, 1].")
        super().__init__(num_features, eps=eps, affine=affine, device=device, dtype=dtype)
        self.register_buffer("alpha", torch.full_like(self.running_mean, alpha))


class TTNorm1d(_TTNorm, nn.BatchNorm1d):
    """Test-time normalization of (N, C) or (N, C, L), in place of `BatchNorm1d`."""


class TTNorm2d(_TTNorm, nn.BatchNorm2d):
    """Test-time normalization of (N, C, H, W), in place of `BatchNorm2d`.

    Args:
        num_features: C.
        alpha: trust in the batch's statistics; 0 is BatchNorm in eval mode, 1 in train mode.

    Example:
        >>> layer = TTNorm2d(3, alpha=0.1)
        >>> layer(torch.randn(4, 3, 8, 8)).shape
        torch.Size([4, 3, 8, 8])
    """


class TTNorm3d(_TTNorm, nn.BatchNorm3d):
    """Test-time normalization of (N, C, D, H, W), in place of `BatchNorm3d`."""


class TTSyncNorm(TTNormBase, nn.SyncBatchNorm):
    """In place of `SyncBatchNorm`: the batches of all ranks count as one."""

    sync = True


class TTNormAct2d(TTNormBase, nn.BatchNorm2d):
    """In place of timm's `BatchNormAct2d`: its dropout and activation stay."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.act(self.drop(super().forward(x)))


class TTFrozenNorm2d(TTNormBase):
    """In place of torchvision's `FrozenBatchNorm2d`: weight and bias stay buffers."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() != 4:
            raise ValueError(f"expected 4D input (got {x.dim()}D input)")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)  # a frozen layer counts no batches
        super()._load_from_state_dict(state_dict, prefix, *args)
