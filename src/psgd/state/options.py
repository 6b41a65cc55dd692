"""Options of a param group: the values that each may have, and an error that names them."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

#: largest whole number of an option, and of the number of steps, which is an int64
_MOST = 2**63 - 1


def _number(value: Any) -> bool:
    """Whether torch can compute with a value: it is no ``Fraction``, and no integer beyond the range of a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    if isinstance(value, numbers.Integral):
        return abs(int(value)) <= sys.float_info.max
    return not isinstance(value, numbers.Rational)


def _whole(value: Any, least: int, most: int = _MOST) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= most


def _rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            return False
        if value.device.type != "cpu":  # reading it would make the host wait, so `flags.rate_is_valid` checks it
            return True
        value = value.item()
    return _number(value) and 0 <= value < math.inf


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_rate, "a finite number of at least 0, or a tensor with one"),
    "precond_lr": (lambda v: _number(v) and 0 < v < 1, "a number between 0 and 1, both excluded"),
    "precond_boost": (lambda v: _number(v) and 1 <= v < math.inf, "a finite number of at least 1"),
    "momentum": (lambda v: _number(v) and 0 <= v < 1, "a number of at least 0 and less than 1"),
    "weight_decay": (lambda v: _number(v) and 0 <= v < math.inf, "a finite number of at least 0"),
    "update_every": (lambda v: _whole(v, 1), "a whole number of at least 1 and less than 2⁶³"),
    "update_anneal": (lambda v: _whole(v, 0), "a whole number of at least 0 and less than 2⁶³"),
    "max_rms": (lambda v: _number(v) and v > 0, "a positive number, which may be infinite"),
    "max_norm": (lambda v: v is None or (_number(v) and v > 0), "a positive number, or None for no limit"),
    "clip_outliers": (lambda v: _number(v) and v > 1, "a number greater than 1, which may be infinite"),
    "clip_steps": (lambda v: _number(v) and v > 1, "a number greater than 1, which may be infinite"),
    "adapt_lr": (lambda v: _number(v) and 0 <= v < 1, "a number of at least 0 and less than 1"),
    "seed": (lambda v: _whole(v, -(2**63), 2**64 - 1), "a whole number of at least −2⁶³ and less than 2⁶⁴"),
    "maximize": (lambda v: isinstance(v, bool), "True or False"),
}

NAMES = tuple(_RULES)


def check(options: Mapping[str, Any], where: str = "") -> None:
    """Raise ``ValueError`` for the first option whose value is not allowed."""
    for name, (allowed, right) in _RULES.items():
        if name not in options:
            raise ValueError(f"{name}{where}: missing; PSGD wants {right}")
        if not allowed(options[name]):
            raise ValueError(f"{name}={_shown(options[name])}{where}: PSGD wants {right}")
    if options["adapt_lr"] and not options["momentum"]:
        raise ValueError(f"adapt_lr={options['adapt_lr']!r}{where}: PSGD wants momentum with it, or adapt_lr=0")


def _shown(value: Any) -> str:
    """Text of a value; for an integer with thousands of digits, which Python refuses to print, its size."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return f"{'−' if value < 0 else ''}2**{value.bit_length() - 1}…"
    return repr(value)
