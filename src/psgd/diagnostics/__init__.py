"""Effect of a preconditioner on a problem: the three properties of Section III.B of the paper.

* *eigenvalue spread gain*: the spread of ``H`` divided by the spread of ``PH``. The spread is the standard deviation of
  the logarithms of the absolute eigenvalues. The gain is 1 for plain SGD; larger is better.
* *mean absolute eigenvalue* of ``PH``: 1 is best, as the learning rate then needs no tuning.
* *noise suppression gain*: ``tr(H⁻²) / tr(P²)``, the energy of the gradient noise after Newton's method divided by
  its energy after preconditioning.

``properties`` computes them exactly for matrices. ``model_properties`` estimates them for an optimizer and a closure
without forming a matrix. The eigenvalues of ``PH`` are those of the symmetric ``Q H Qᵀ`` (Proposition 1).
"""

from .matrices import (
    Properties,
    eigenvalue_spread,
    eigenvalue_spread_gain,
    mean_abs_eigenvalue,
    noise_suppression_gain,
    preconditioned_eigenvalues,
    properties,
)
from .model import EstimatedProperties, Spectrum, model_properties, model_spectrum

__all__ = [
    "EstimatedProperties",
    "Properties",
    "Spectrum",
    "eigenvalue_spread",
    "eigenvalue_spread_gain",
    "mean_abs_eigenvalue",
    "model_properties",
    "model_spectrum",
    "noise_suppression_gain",
    "preconditioned_eigenvalues",
    "properties",
]
