"""``Q``: a stack of elements of a Lie group of matrices, written as a Kronecker product of factors.

A dense, a limited-memory and a diagonal ``Q`` are products of one factor; a Kronecker ``Q`` has one factor for each
axis of its block. A factor defines how a single matrix is stored and multiplied; ``Group`` combines the factors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ..normalize import MaxAbs, Normalization
from ..ops.look import seen
from ..ops.real import shaped
from ..tangent import Tangent, fold, unfold
from .balance import balancing_powers, scale_all_
from .factor import Factor, LeftFactor


class Group:
    """A stack of B elements ``Q = Q_0 ⊗ Q_1 ⊗ …`` acting on arrays of shape ``(B, *shape)``.

    The methods satisfy ``solve(apply(v)) = v``, ``solve_t(apply_t(v)) = v`` and ``⟨apply(u), v⟩ = ⟨u, apply_t(v)⟩``. In
    the coordinates of the paper (``left``), ``descend_`` moves ``Q`` against the gradient of the criterion that
    returned the tangent, projected onto the group.

    Args:
        dims: shape of a block as the group sees it: one length for each factor
        factors: factors of ``Q``, one for each of ``dims``
    """

    #: whether ``Groups.whiten_`` fits this group without random numbers
    whitens: bool = False
    #: whether the group uses the coordinates of the paper, ``dQ = E Q``, with ``a = Q δg`` and ``b = Q⁻ᵀ δθ``
    left: bool = True
    #: axis along which ``precondition_parts`` leaves the product with a diagonal factor to the caller
    scale_axis: int | None = None

    def __init__(self, dims: Sequence[int], factors: Sequence[Factor]) -> None:
        self.dims = tuple(dims)
        self.factors = tuple(factors)

    def apply(self, v: Tensor) -> Tensor:
        return self._along_axes("apply", v)

    def apply_t(self, v: Tensor) -> Tensor:
        return self._along_axes("apply_t", v)

    def solve(self, v: Tensor) -> Tensor:
        return self._along_axes("solve", v)

    def solve_t(self, v: Tensor) -> Tensor:
        return self._along_axes("solve_t", v)

    def a(self, dgrad: Tensor) -> Tensor:
        """A change of the gradient in the local coordinates of the group: here ``Q δg``."""
        return self.apply(dgrad)

    def b(self, dtheta: Tensor) -> Tensor:
        """A change of the parameters in the local coordinates of the group: here ``Q⁻ᵀ δθ``."""
        return self.solve_t(dtheta)

    def precondition(self, g: Tensor) -> Tensor:
        """``P g = Qᵀ Q g``"""
        return self.apply_t(self.apply(g))

    def precondition_parts(
        self, g: Tensor, keep: bool = False, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``P g`` as an array ``(B, *dims)``, and a scale by which it is still to be multiplied, or None.

        Args:
            g: gradients
            keep: whether ``Q`` will be used again before it changes
            out: tensor to write the array to, or None
        """
        v = self.precondition(g)
        return (v if out is None else out.copy_(v.view_as(out))), None

    def _along_axes(self, linear_map: str, v: Tensor) -> Tensor:
        shape = v.shape
        v = shaped(v, (len(v), *self.dims))
        for axis, factor in enumerate(self.factors):
            v = fold(getattr(factor, linear_map)(unfold(v, axis)), axis, v.shape)
        return shaped(v, shape)

    def descend_(
        self,
        tangent: Tangent,
        lr: float | Tensor,
        normalize: Normalization | None = None,
        usable: Tensor | None = None,
    ) -> None:
        """``Q_i ← (I − lr / ‖∇E_i‖ · ∇E_i) Q_i`` for every factor, in the blocks whose ``usable`` (B) is true.

        The tangent, which is as large as the parameters, is overwritten: its parts are scaled in place.
        """
        shape = (len(tangent.x), *self.dims)
        tangent = Tangent(shaped(tangent.x, shape), shaped(tangent.y, shape))
        informative = tangent.unit_()
        usable = informative if usable is None else usable & informative
        for axis, factor in enumerate(self.factors):
            assert isinstance(factor, LeftFactor)
            factor.descend_(tangent.unfold(axis), lr, normalize or MaxAbs(), usable, self.limit(tangent.x.dtype))
        self._balance_(usable)

    def start_(self, size: Tensor, usable: Tensor) -> None:
        """``Q ← size · Q`` for usable blocks (B) whose ``Q`` is still the identity; other blocks do not change.

        A step changes the diagonal of every factor, so a diagonal of ones shows that there has been no step yet.
        """
        diagonals = [factor.diagonal() for factor in self.factors]
        new = usable & torch.stack([(diagonal == 1).all(1) for diagonal in diagonals]).all(0)
        each = torch.where(new, size ** (1 / len(self.factors)), 1.0)[:, None]
        for factor, diagonal in zip(self.factors, diagonals, strict=True):
            factor.set_diagonal_(diagonal * each)

    def seen_started(self) -> bool:
        """Whether the host can tell, without waiting for the device, that no ``Q`` is the identity any more."""
        first = self.factors[0].diagonal()[:, 0]
        return seen(first.device, lambda: first != 1)

    def limit(self, dtype: torch.dtype) -> float:
        """Largest element that a factor may have so that ``P`` and ``P⁻¹`` stay well inside the number format."""
        return float(torch.finfo(dtype).max) ** (0.375 / len(self.factors))

    def _balance_(self, usable: Tensor) -> None:
        """Move scale between the factors to give all of them one size, so that none over- or underflows.

        The scales are powers of two with a product of one, so ``P`` keeps every bit.
        """
        if len(self.factors) == 1:
            return
        sizes = torch.stack([factor.diagonal().amax(-1) for factor in self.factors])
        # The distance of a logarithm from the mean of all is at most this share of their range.
        share = 1 - 1 / len(self.factors)
        if seen(sizes.device, lambda: sizes.amax(0) < 2 ** (0.499 / share) * sizes.amin(0)):
            return  # all powers would be zero
        logs = sizes.clamp_min(torch.finfo(sizes.dtype).tiny).log2()
        is_first = torch.zeros_like(logs[:, :1])
        is_first[0] = 1
        powers = balancing_powers(logs, usable, lambda x: x.mean(0), lambda x: x.sum(0), is_first)
        each = [
            (buffer, scale.view(-1, *[1] * (buffer.ndim - 1)))
            for factor, scale in zip(self.factors, powers.exp2(), strict=True)
            for buffer in factor.buffers().values()
        ]
        scale_all_([buffer for buffer, _ in each], [scale for _, scale in each])

    @property
    def one_group(self) -> bool:
        """Whether the matrices of each factor are one group."""
        return all(factor.one_group for factor in self.factors)

    def random_(self, generator: torch.Generator) -> None:
        """Fill the stack with random, well-conditioned elements, for tests."""
        for factor in self.factors:
            factor.random_(generator)

    def dense(self) -> Tensor:
        """``Q`` as a stack of matrices acting on flattened blocks: for tests and small problems."""
        Q, *rest = (factor.dense() for factor in self.factors)
        for factor in rest:
            Q = torch.stack([torch.kron(q, f) for q, f in zip(Q, factor, strict=True)])
        return Q

    def buffers(self) -> dict[str, Tensor]:
        """The tensors that hold the stack, each with leading dimension B."""
        return {
            f"Q{axis}_{part}": buffer
            for axis, factor in enumerate(self.factors)
            for part, buffer in factor.buffers().items()
        }

    def kind(self, name: str) -> Hashable:
        """Key of a buffer: buffers of one shape with the same key are handled together, in adjacent memory."""
        return name.partition("_")[2]

    def fault(self) -> tuple[Sequence[str], str] | None:
        """Names of buffers that are finite but from which fitting cannot continue, and why; see ``Factor.fault``."""
        for axis, factor in enumerate(self.factors):
            found = factor.fault()
            if found is not None:
                return [f"Q{axis}_{part}" for part in found[0]], found[1]
        return None

    def bind(self, buffers: dict[str, Tensor]) -> Group:
        """The same group with other tensors: ``group.bind(group.buffers())`` equals ``group``."""
        return type(self)(
            self.dims,
            [
                type(factor)(**{part: buffers[f"Q{axis}_{part}"] for part in factor.parts})
                for axis, factor in enumerate(self.factors)
            ],
        )

    def describe(self) -> str:
        return " ⊗ ".join(factor.describe() for factor in self.factors)

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers().values())

    def flops(self, update_every: int = 1) -> list[float]:
        """FLOPs of an average step of one block for each factor, if ``Q`` is fitted every ``update_every`` steps.

        The number for a factor is ``fit / update_every + precondition``, see ``LeftFactor.flops``. In a block of N
        elements, a factor of size n×n acts on ``N / n`` columns. The number is that for whitening, or for a pair that
        the probe has already measured.
        """
        numel = math.prod(self.dims)
        each = []
        for n, factor in zip(self.dims, self.factors, strict=True):
            assert isinstance(factor, LeftFactor)
            fit, precondition = factor.flops(numel // n)
            each.append(fit / update_every + precondition)
        return each
