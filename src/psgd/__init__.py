"""Preconditioned stochastic gradient descent for PyTorch."""

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

__version__ = "0.1.0"

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
