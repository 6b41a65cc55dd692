"""A minimiser for functions of one array, with the interface of ``scipy.optimize.minimize``."""

from .minimizer import minimize
from .result import OptimizeResult

__all__ = ["OptimizeResult", "minimize"]
