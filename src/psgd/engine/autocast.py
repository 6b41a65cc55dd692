"""Autocast is for the model, not for the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def without_autocast(devices: Iterable[torch.device]) -> Iterator[None]:
    """Compute the step's own products without autocast, also if the whole step is under it."""
    with ExitStack() as contexts:
        for kind in {device.type for device in devices}:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                contexts.enter_context(torch.autocast(kind, enabled=False))
        yield
