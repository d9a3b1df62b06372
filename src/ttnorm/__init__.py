"""Test-time normalization for PyTorch: networks with BatchNorm that adapt in a plain forward."""

from . import functional
from .artefact import load_, save
from .augment import domain_shift, prior_shift
from .export import to_exported_program, to_onnx
from .fold import fold_
from .fuse import fuse
from .isolation import isolated
from .layers import TTNorm1d, TTNorm2d, TTNorm3d
from .posttrain import PostTrainResult, optimise_alpha, post_train_
from .posttrain_config import PostTrainConfig
from .prior import estimate_prior
from .stream import (
    Health,
    health,
    load_stream_,
    reset_stream_,
    save_stream,
    stream_,
    stream_state,
    streams,
)
from .stream_config import StreamConfig
from .surgery import alphas, convert_, end_stream_, revert_
from .version import __version__

__all__ = [
    "Health",
    "PostTrainConfig",
    "PostTrainResult",
    "StreamConfig",
    "TTNorm1d",
    "TTNorm2d",
    "TTNorm3d",
    "__version__",
    "alphas",
    "convert_",
    "domain_shift",
    "end_stream_",
    "estimate_prior",
    "fold_",
    "functional",
    "fuse",
    "health",
    "isolated",
    "load_",
    "load_stream_",
    "optimise_alpha",
    "post_train_",
    "prior_shift",
    "reset_stream_",
    "revert_",
    "save",
    "save_stream",
    "stream_",
    "stream_state",
    "streams",
    "to_exported_program",
    "to_onnx",
]
