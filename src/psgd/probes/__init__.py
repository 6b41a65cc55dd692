"""Where a pair ``(δθ, δg)`` comes from: a probe measures it, and fits ``Q`` to what it measured."""

from .base import Evaluation, Noise, Probe
from .finite_difference import FiniteDifference
from .hessian_vector import HessianVector
from .whitening import Whitening

__all__ = ["Evaluation", "FiniteDifference", "HessianVector", "Noise", "Probe", "Whitening"]
