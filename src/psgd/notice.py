"""Warnings about uses that work but are probably not intended, in a category of their own."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

#: folders of psgd and torch, whose frames lie between the user's code and the place that warns
_BETWEEN = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))


class PSGDWarning(UserWarning):
    """Category of all warnings about how an optimizer is used.

    ``warnings.filterwarnings("ignore", category=psgd.PSGDWarning)`` turns them off. With ``"error"`` instead of
    ``"ignore"``, it turns them into errors.
    """


def warn(message: str) -> None:
    """Issue a warning that names the line of the user's program that led to it."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, PSGDWarning, stacklevel=depth)
