"""Context without autocast: autocast is meant for the model, not for the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch


def without_autocast(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """Context that turns autocast off for the step's own products, even if the user calls ``step`` under autocast."""
    kinds = {device.type for device in devices}
    enabled = [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]
    if not enabled:
        return nullcontext()
    contexts = ExitStack()
    for kind in enabled:
        contexts.enter_context(torch.autocast(kind, enabled=False))
    return contexts
