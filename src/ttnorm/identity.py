"""What tells a user's function from another in any process, for a run to go on as it began."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .files import checksum

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_TOLD_BY_REPR = (np.generic, torch.dtype, torch.device, range, slice, PurePath)
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_THEIR_OWN = vars(nn.Module())  # what torch keeps in every module
_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_NOT_LOOKED_INTO = (*_RANDOM, logging.Logger)  # change with use, and know all other loggers
_NOT_THEIRS = {*sys.stdlib_module_names, "torch"}  # whose code no user changes


def name_of(function: Any) -> str:
    """What people call it.

    Example:
        >>> name_of(partial(sorted, reverse=True)), name_of(nn.MSELoss())
        ('sorted(reverse=True)', 'MSELoss')
    """
    if isinstance(function, partial):
        given = [_argument(value) for value in function.args]
        given += [f"{name}={_argument(value)}" for name, value in function.keywords.items()]
        return f"{name_of(function.func)}({', '.join(given)})"
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def identity_of(function: Any) -> str:
    """Its name, and a hash over its code and the values that it holds or closes over.

    What it calls by a global name is not looked at.

    Raises:
        ValueError: where it holds what cannot be compared.

    Example:
        >>> identity_of(nn.HuberLoss(delta=2.0)) == identity_of(nn.HuberLoss(delta=3.0))
        False
    """
    try:
        content = repr(_content(function, {}))
    except Exception as error:  # tensors without values, structures without end
        raise ValueError(
            f"{name_of(function)} holds what a checkpoint cannot compare ({error}). Pass a "
            "function that holds less, or no checkpoint."
        ) from error
    return f"{name_of(function)} {hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _argument(value: Any) -> str:
    if callable(value):
        return name_of(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_argument, value))})"
    # the repr of others may hold an address, or all of their values
    return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__


def _content(value: Any, met: dict[int, tuple[int, Any]]) -> Any:
    """Nothing but plain values, by which two things can be compared; no address is among them.

    Args:
        met: what was met on the way here, by address and kept alive: things may hold themselves.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, _TOLD_BY_REPR):
        return repr(value)
    if id(value) in met:
        return ["met before", met[id(value)][0]]
    met[id(value)] = (len(met), value)

    def inner(values: Any) -> list[Any]:
        return [_content(v, met) for v in values]

    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), checksum({"": value}, {})]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, dict):
        return inner(pair for item in value.items() for pair in item)
    if isinstance(value, (list, tuple)):
        return inner(value)
    if isinstance(value, (set, frozenset)):
        # apart from each other, for their order is not the same in another process
        return sorted(repr(_content(v, dict(met))) for v in value)
    if isinstance(value, partial):
        return inner((value.func, value.args, value.keywords))
    if isinstance(value, MethodType):
        return inner((value.__func__, value.__self__))
    if isinstance(value, CodeType):
        return inner((value.co_code, value.co_names, value.co_consts))
    if isinstance(value, FunctionType):
        cells = [_inside(cell) for cell in value.__closure__ or ()]
        defaults = (value.__defaults__, value.__kwdefaults__)
        return inner((value.__qualname__, value.__code__, *defaults, cells))
    if isinstance(value, (type, BuiltinFunctionType)):
        return value.__qualname__
    if isinstance(value, ModuleType):
        return value.__name__
    kind = type(value)
    held = {} if isinstance(value, _NOT_LOOKED_INTO) else _held_by(value)
    return [kind.__qualname__, inner(_code_of(kind)), _content(held, met)]


def _held_by(value: Any) -> dict[str, Any]:
    """The values that an object holds, by name."""
    if isinstance(value, nn.Module):
        # not its mode, which is the fit's to choose, nor hooks, nor what it last drew
        return {
            k: v
            for k, v in vars(value).items()
            if k in _OF_MODULES or not (k in _THEIR_OWN or _is_passing(k, v))
        }
    slots = {slot for part in type(value).__mro__ for slot in _slots(part) if hasattr(value, slot)}
    held = {slot: getattr(value, slot) for slot in sorted(slots)} | getattr(value, "__dict__", {})
    if not held:
        # made in C: what it is pickled as, where it can be
        with contextlib.suppress(Exception):
            held["pickled"] = pickle.dumps(value)
    return held


def _is_passing(name: str, value: Any) -> bool:
    """Whether a module probably has it for the time being: a tensor or None in private."""
    return name.startswith("_") and (value is None or not isinstance(value, _PLAIN))


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _inside(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "nothing yet"


def _code_of(kind: type) -> list[Any]:
    """What a class and its bases define, but for those of torch and of Python itself."""
    members = [
        (name, getattr(member, "__func__", member))  # of static and class methods
        for part in kind.__mro__
        if part.__module__.partition(".")[0] not in _NOT_THEIRS
        for name, member in vars(part).items()
    ]
    return [
        member
        for name, member in members
        if isinstance(member, FunctionType)
        or (isinstance(member, (*_PLAIN, tuple)) and not name.startswith("__"))
    ]
