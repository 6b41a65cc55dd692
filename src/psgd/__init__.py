"""Preconditioned stochastic gradient descent for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import closed_form, diagnostics, monitor
    from .blocks import Affine, Joint, PerTensor
    from .criteria import c1, c2, c3
    from .groups import Dense, Diagonal, Kronecker, LimitedMemory, LowRank
    from .minimizing import OptimizeResult, minimize
    from .monitor import Monitor
    from .normalize import MaxAbs, MaxDiag, Spectral
    from .notice import PSGDWarning
    from .optimizer import PSGD
    from .planning import Plan, plan
    from .probes import FiniteDifference, HessianVector, Whitening
    from .recipes import newton, whiten

__version__ = "0.2.0"

__all__ = [
    "PSGD",
    "Affine",
    "Dense",
    "Diagonal",
    "FiniteDifference",
    "HessianVector",
    "Joint",
    "Kronecker",
    "LimitedMemory",
    "LowRank",
    "MaxAbs",
    "MaxDiag",
    "Monitor",
    "OptimizeResult",
    "PSGDWarning",
    "PerTensor",
    "Plan",
    "Spectral",
    "Whitening",
    "c1",
    "c2",
    "c3",
    "closed_form",
    "diagnostics",
    "minimize",
    "monitor",
    "newton",
    "plan",
    "whiten",
]

#: module of each public name that is not a module itself
_HOMES = {
    "blocks": ("Affine", "Joint", "PerTensor"),
    "criteria": ("c1", "c2", "c3"),
    "groups": ("Dense", "Diagonal", "Kronecker", "LimitedMemory", "LowRank"),
    "minimizing": ("OptimizeResult", "minimize"),
    "monitor": ("Monitor",),
    "normalize": ("MaxAbs", "MaxDiag", "Spectral"),
    "notice": ("PSGDWarning",),
    "optimizer": ("PSGD",),
    "planning": ("Plan", "plan"),
    "probes": ("FiniteDifference", "HessianVector", "Whitening"),
    "recipes": ("newton", "whiten"),
}


if not TYPE_CHECKING:  # type checkers would take every name for one that there is

    def __getattr__(name: str) -> Any:
        """Import a public name or a module when it is first used, so that ``psgd --help`` does not wait for torch."""
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is not None:
            value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
            return value
        try:
            return import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
