"""Numbers of a param group: the values that each may have, and an error that names them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            return False
        if value.device.type != "cpu":  # reading it would make the host wait: `flags.rate_is_valid` checks it there
            return True
        value = value.item()
    return _number(value) and 0 <= value < math.inf


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_rate, "a finite number of at least 0, or a tensor with one"),
    "precond_lr": (lambda v: _number(v) and 0 < v < 1, "a number between 0 and 1, both excluded"),
    "momentum": (lambda v: _number(v) and 0 <= v < 1, "a number of at least 0 and less than 1"),
    "weight_decay": (lambda v: _number(v) and 0 <= v < math.inf, "a finite number of at least 0"),
    "update_every": (lambda v: _whole(v) and v >= 1, "a whole number of at least 1"),
    "update_anneal": (lambda v: _whole(v) and v >= 0, "a whole number of at least 0"),
    "max_rms": (lambda v: _number(v) and v > 0, "a positive number, which may be infinite"),
    "max_norm": (lambda v: v is None or (_number(v) and v > 0), "a positive number, or None for no limit"),
    "clip_outliers": (lambda v: _number(v) and v > 1, "a number greater than 1, which may be infinite"),
    "seed": (_whole, "a whole number"),
    "maximize": (lambda v: isinstance(v, bool), "True or False"),
}

NAMES = tuple(_RULES)


def check(options: Mapping[str, Any], where: str = "") -> None:
    """Raise ``ValueError`` for the first option whose value is not allowed."""
    for name, (allowed, right) in _RULES.items():
        if name not in options:
            raise ValueError(f"{name}{where}: missing; PSGD wants {right}")
        if not allowed(options[name]):
            raise ValueError(f"{name}={options[name]!r}{where}: PSGD wants {right}")
