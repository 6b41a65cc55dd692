"""Ctrl-C while modules are imported."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ends_at_once() -> Iterator[None]:
    """End the process with one line if it is interrupted here.

    Modules in C, such as those of torch and numpy, turn a ``KeyboardInterrupt`` during their import into other errors,
    which nothing can tell from a broken installation.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: Any) -> None:
    os.write(2, b"psgd: interrupted\n")
    os._exit(130)
