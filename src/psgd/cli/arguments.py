"""Arguments of commands: checks that come before anything is done, and errors that name the argument."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import typer

from .output import FailedError


def names(wanted: Sequence[str], known: Collection[str], hint: str) -> list[str]:
    """Names of a list in which ``all`` stands for all that are known, each once."""
    names = [name for word in wanted for name in (known if word == "all" else [word])]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}, all", param_hint=hint)
    return list(dict.fromkeys(names))


def check_device(device: str) -> None:
    """Raise unless it is a device that torch can use here."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="'--device'")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise typer.BadParameter(f"{device!r} cannot be used: {reason}", param_hint="'--device'") from None


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def try_writing(directory: Path) -> None:
    """Write a file to a directory, so that an error comes now and not after minutes of training."""
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()


@contextmanager
def writing(path: Path, hint: str = "'--out'") -> Iterator[None]:
    """Report errors of writing as wrong arguments, before anything is done."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror or error}", param_hint=hint) from None


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Report errors of writing as failures, after something was done."""
    try:
        yield
    except OSError as error:
        raise FailedError(f"cannot write {path}: {error.strerror or error}") from None
