"""``P = QᵀQ`` of a minimisation without noise, fitted to exact pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..criteria import Criterion
from ..groups import Group, Structure
from ..normalize import Spectral
from ..state.memory import available_bytes, readable
from ..tangent import Tangent

#: misfit of a pair below which it is not worth a further descent
FITTED = 0.1


class Metric:
    """Group of the library, fitted by its own descents along the tangents of a criterion.

    With noise the step size of ``Q`` has to be small. Without noise it can be chosen such that a pair fits afterwards:
    for criterion 3, ``S = a aᵀ − b bᵀ`` vanishes if ``a = ±b``, which is the secant equation ``P δg = ±δθ``. So with
    the pair of each step of the parameters ``P`` is that of a quasi-Newton method, except for the sign, which it does
    not see.

    ``P`` starts as a multiple of the identity, ``‖δθ‖ / ‖δg‖`` of the first pair: ``Q`` is fitted in units in which
    that is one.

    Args:
        structure: structure of ``Q``
        shape: shape of the array that it acts on
        like: a tensor of the same dtype and device
        criterion: criterion that ``Q`` is fitted to
        precond_lr: the largest step of ``Q``; by default 0.9 for ``Dense``, which fits every pair at once, 0.5 for
            inverse-free factors, 0.3 for other ``Kronecker`` factors, and 0.05 for the rest, which cannot fit one pair
            without forgetting the others
    """

    def __init__(
        self,
        structure: Structure,
        shape: Sequence[int],
        like: Tensor,
        criterion: Criterion,
        precond_lr: float | None = None,
    ) -> None:
        self.structure, self.shape, self.criterion = structure, tuple(shape), criterion
        needed, free = structure.init(shape, dtype=like.dtype, device="meta").nbytes(), available_bytes(like.device)
        if free is not None and needed > free:
            raise ValueError(
                f"preconditioner={structure!r}: Q would take {readable(needed)} on {like.device}, where "
                f"{readable(free)} are free; minimize wants Kronecker(), LowRank() or Diagonal() here"
            )
        self.dense = structure.universal
        self.cap = structure.exact_precond_lr if precond_lr is None else precond_lr
        #: number of descents for a pair: a dense Q has room for all that one pair says, and a small one costs little
        self.descents = max(1, min(4, 400 // like.numel())) if self.dense else 1
        self._like = like
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.group: Group = self.structure.init(self.shape, dtype=self._like.dtype, device=self._like.device)
        self.unit: float | None = None

    def precondition(self, g: Tensor) -> Tensor:
        """``P g``"""
        return self.group.precondition(g.reshape(1, *self.shape)).reshape(-1) * (self.unit or 1.0)

    def fit(self, dtheta: Tensor, dgrad: Tensor) -> None:
        """Fit ``Q`` to a pair. A pair without information about curvature is ignored."""
        eps = float(torch.finfo(dgrad.dtype).eps)
        size, change = float(dtheta.norm()), float(dgrad.norm())
        if not (0 < size < math.inf and eps**2 * size < change < eps**-2 * size):
            return
        if self.unit is None:
            self.unit = size / change
        dtheta = (dtheta / (size * math.sqrt(self.unit))).reshape(1, *self.shape)
        dgrad = (dgrad * (math.sqrt(self.unit) / size)).reshape(1, *self.shape)
        try:
            self._descend(dtheta, dgrad)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # c1 divides by Q, which may have become singular
            self.reset()

    def _descend(self, dtheta: Tensor, dgrad: Tensor) -> None:
        for k in range(self.descents):
            tangent = self.criterion(self.group, dtheta.clone(), dgrad.clone())
            rate = self._rate(tangent, dtheta, dgrad)
            if not rate > (FITTED if k else 1e-3):
                return
            lr = min(rate, self.cap)
            if self.structure.own_normalization:
                self.group.descend_(tangent, self.cap)
            else:
                self.group.descend_(tangent, lr, Spectral())

    def _rate(self, tangent: Tangent, dtheta: Tensor, dgrad: Tensor) -> float:
        """Step size after which the pair fits, to first order: ``S`` relative to ``‖a‖² + ‖b‖²``.

        If ``S`` is diagonal, ``I − μ S`` changes ``P`` by ``2 μ S``. In a triangular matrix, elements off the diagonal
        are present once instead of twice, and need up to four times the step.
        """
        if not tangent.is_difference:
            a, b = self.group.a(dgrad), self.group.b(dtheta)
            return float((a - b).norm() / (a.norm() + b.norm()))
        x, y = tangent.x.reshape(-1), tangent.y.reshape(-1)
        xx, yy, xy = (float(v) for v in (x.dot(x), y.dot(y), x.dot(y)))
        squares, size = 2 * (xx * yy + xy * xy), 2 * xx + yy / 2
        if not (0 < squares < math.inf and size > 0):
            return 0.0
        off = x * y
        on_diagonal = 4 * float(off.dot(off)) / squares
        return (abs(xy) + math.sqrt(xx * yy)) / size * 2 / (1 + 3 * on_diagonal)
