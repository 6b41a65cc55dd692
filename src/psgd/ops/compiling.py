"""Functions that ``torch.compile`` leaves as they are, without importing the compiler with the package."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(reason: str) -> Callable[[F], F]:
    """Decorator like ``torch.compiler.disable``, which would import the compiler at once.

    That takes as long as to import torch. Here it is imported at the first call, when it is there already: the
    constructor of torch's optimizers imports it.

    Args:
        reason: why it is not compiled, for the compiler's logs
    """

    def decorate(function: F) -> F:
        @cache
        def disabled() -> Any:
            return torch.compiler.disable(function)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return disabled()(*args, **kwargs)

        # The compiler asks for these two by name. `disable(reason=…)` would set the second, but is not in torch 2.7.
        run._torchdynamo_disable = True  # type: ignore[attr-defined]
        run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate
