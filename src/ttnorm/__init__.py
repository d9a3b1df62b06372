"""Test-time normalization for PyTorch: networks with BatchNorm that adapt in a plain forward."""

from . import functional
from .artefact import load_, save
from .augment import domain_shift, prior_shift
from .export import to_exported_program, to_onnx
from .fold import fold_
from .fuse import fuse
from .layers import TTNorm1d, TTNorm2d, TTNorm3d
from .posttrain import PostTrainConfig, PostTrainResult, optimise_alpha, post_train_
from .prior import estimate_prior
from .surgery import alphas, convert_, isolated, revert_
from .version import __version__

__all__ = [
    "PostTrainConfig",
    "PostTrainResult",
    "TTNorm1d",
    "TTNorm2d",
    "TTNorm3d",
    "__version__",
    "alphas",
    "convert_",
    "domain_shift",
    "estimate_prior",
    "fold_",
    "functional",
    "fuse",
    "isolated",
    "load_",
    "optimise_alpha",
    "post_train_",
    "prior_shift",
    "revert_",
    "save",
    "to_exported_program",
    "to_onnx",
]
