"""Functions that ``torch.compile`` leaves as they are, without importing the compiler with the package."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(reason: str) -> Callable[[F], F]:
    """Decorator like ``torch.compiler.disable``, but without importing the compiler at once.

    That import costs as much time as importing torch. Here it happens at the first call. By then, the constructor of
    torch's optimizers has imported the compiler already.

    Args:
        reason: reason why the function is not compiled, for the compiler's logs
    """

    def decorate(function: F) -> F:
        @cache
        def disabled() -> Any:
            return torch.compiler.disable(function)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return disabled()(*args, **kwargs)

        # The compiler reads these two attributes. `disable(reason=…)` would set the second, but is not in torch 2.7.
        run._torchdynamo_disable = True  # type: ignore[attr-defined]
        run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate
