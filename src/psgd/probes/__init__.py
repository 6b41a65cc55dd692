"""Probes: sources of gradients and pairs ``(δθ, δg)``. A probe measures them, and fits ``Q`` to its measurements."""

from .base import Probe, start_
from .closure_checks import ClosureChecks
from .finite_difference import FiniteDifference
from .hessian_vector import HessianVector
from .measured import Average, Evaluation, Measured, Noise
from .noise import Noise as Draw
from .restore import Gradients
from .schedule import is_due, rate_of_Q
from .whitening import Whitening

__all__ = [
    "Average",
    "ClosureChecks",
    "Draw",
    "Evaluation",
    "FiniteDifference",
    "Gradients",
    "HessianVector",
    "Measured",
    "Noise",
    "Probe",
    "Whitening",
    "is_due",
    "rate_of_Q",
    "start_",
]
