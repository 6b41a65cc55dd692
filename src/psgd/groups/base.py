"""``Q``: a stack of elements of a Lie group of matrices, written as a Kronecker product of factors.

A dense, a limited-memory and a diagonal ``Q`` are products of one factor; a Kronecker ``Q`` has one factor for each
axis of its block. A factor knows how a single matrix is stored; ``Group`` knows the rest; ``Groups`` are all of a
bucket; a ``Structure`` makes them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..normalize import MaxAbs, Normalization
from ..ops.streams import at_once
from ..tangent import Tangent, fold, unfold
from .balance import balancing_powers
from .factor import Factor, LeftFactor

__all__ = ["Factor", "Group", "Groups", "LeftFactor", "Preconditioned", "Scaled", "Structure", "joined"]


class Group:
    """A stack of B elements ``Q = Q_0 ⊗ Q_1 ⊗ …`` acting on arrays of shape ``(B, *shape)``.

    Laws: ``solve(apply(v)) = v``, ``solve_t(apply_t(v)) = v``, ``⟨apply(u), v⟩ = ⟨u, apply_t(v)⟩``, and ``descend_``
    moves along minus the gradient of the criterion that gave the tangent, projected onto the group.

    Args:
        dims: how the group sees a block: its sizes along the axes of the factors
        factors: one for each of ``dims``
    """

    #: whether ``Groups.whiten_`` fits it without random numbers
    whitens: bool = False
    #: whether its coordinates are those of the paper, ``dQ = E Q``, with ``a = Q δg`` and ``b = Q⁻ᵀ δθ``
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
        """A change of the gradient as the local coordinates of the group show it: here ``Q δg``."""
        return self.apply(dgrad)

    def b(self, dtheta: Tensor) -> Tensor:
        """A change of the parameters as the local coordinates of the group show it: here ``Q⁻ᵀ δθ``."""
        return self.solve_t(dtheta)

    def precondition(self, g: Tensor) -> Tensor:
        """``P g = Qᵀ Q g``"""
        return self.apply_t(self.apply(g))

    def precondition_parts(
        self, g: Tensor, keep: bool = False, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``P g`` as an array, and what it still has to be multiplied with, if anything; both ``(B, *dims)``.

        Args:
            g: gradients
            keep: ``Q`` will be used again before it changes
            out: where the array is to be
        """
        v = self.precondition(g)
        return (v if out is None else out.copy_(v.view_as(out))), None

    def _along_axes(self, linear_map: str, v: Tensor) -> Tensor:
        shape = v.shape
        v = v.reshape(shape[0], *self.dims)
        for axis, factor in enumerate(self.factors):
            v = fold(getattr(factor, linear_map)(unfold(v, axis)), axis, v.shape)
        return v.reshape(shape)

    def descend_(
        self,
        tangent: Tangent,
        lr: float | Tensor,
        normalize: Normalization | None = None,
        usable: Tensor | None = None,
    ) -> None:
        """``Q_i ← (I − lr / ‖∇E_i‖ · ∇E_i) Q_i`` for every factor, where ``usable`` (B) is true.

        The tangent is as large as the parameters, and used up: its parts are scaled in place.
        """
        count = tangent.x.shape[0]
        tangent = Tangent(tangent.x.reshape(count, *self.dims), tangent.y.reshape(count, *self.dims))
        informative = tangent.unit_()
        usable = informative if usable is None else usable & informative
        for axis, factor in enumerate(self.factors):
            assert isinstance(factor, LeftFactor)
            factor.descend_(tangent.unfold(axis), lr, normalize or MaxAbs(), usable, self.limit(tangent.x.dtype))
        self._balance_(usable)

    def limit(self, dtype: torch.dtype) -> float:
        """Largest elements that a factor may have, so that ``P`` and ``P⁻¹`` stay well inside the number format."""
        return float(torch.finfo(dtype).max) ** (0.375 / len(self.factors))

    def _balance_(self, usable: Tensor) -> None:
        """Move scale between the factors until all are of one size, so that none over- or underflows.

        By powers of two, whose product is one: ``P`` keeps every bit.
        """
        if len(self.factors) == 1:
            return
        sizes = torch.stack([factor.diagonal().amax(-1) for factor in self.factors])
        logs = sizes.clamp_min(torch.finfo(sizes.dtype).tiny).log2()
        is_first = torch.zeros_like(logs[:, :1])
        is_first[0] = 1
        powers = balancing_powers(logs, usable, lambda x: x.mean(0), lambda x: x.sum(0), is_first)
        for factor, scale in zip(self.factors, powers.exp2(), strict=True):
            for buffer in factor.buffers().values():
                buffer.mul_(scale.view(-1, *[1] * (buffer.ndim - 1)))

    @property
    def one_group(self) -> bool:
        """Whether the matrices of each factor are one group."""
        return all(factor.one_group for factor in self.factors)

    def random_(self, generator: torch.Generator) -> None:
        """Become a stack of random elements, well-conditioned: for tests."""
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

    def bind(self, buffers: dict[str, Tensor]) -> Group:
        """The same group over other tensors: ``group.bind(group.buffers())`` equals ``group``."""
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
        """For each factor what a step of one block takes on average, where ``Q`` is fitted at every so many steps.

        A factor of n of the N elements of a block sees ``N / n`` columns. It is ``fit / update_every + precondition``,
        see ``LeftFactor.flops``. Whitening is meant, or a pair that the probe has found.
        """
        numel = math.prod(self.dims)
        each = []
        for n, factor in zip(self.dims, self.factors, strict=True):
            assert isinstance(factor, LeftFactor)
            fit, precondition = factor.flops(numel // n)
            each.append(fit / update_every + precondition)
        return each


@dataclass
class Scaled:
    """Arrays ``scale · v`` of a stack, ``(B, *dims)``: the product is left to whoever scales the step anyway."""

    v: Tensor
    scale: Tensor | None

    def length(self) -> Tensor:
        """Length of each array; not finite if an element is not, or if its square overflows."""
        dtype = torch.promote_types(self.v.dtype, torch.float32)
        if self.scale is None:
            return torch.linalg.vector_norm(self.v.flatten(1), dim=1, dtype=dtype)
        axes = [i for i in range(1, self.v.ndim) if self.scale.shape[i] == 1]
        rows = torch.linalg.vector_norm(self.v, dim=axes, keepdim=True, dtype=dtype)
        return torch.linalg.vector_norm((rows * self.scale).flatten(1), dim=1)

    def times(self, rate: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """``rate · scale · v`` for a rate of each block, ``(B, *shape)``, in one pass; the arrays are used up."""
        factor = rate.view(-1, *[1] * (self.v.ndim - 1))
        if self.scale is not None:
            factor = factor * self.scale
        if self.v.dtype == dtype:
            return self.v.mul_(factor).view(len(self.v), *shape)
        return torch.mul(self.v, factor, out=torch.empty_like(self.v, dtype=dtype)).view(len(self.v), *shape)


@dataclass
class Preconditioned:
    """``P g`` of all blocks of a bucket.

    Args:
        arrays: for each group
        length: for each block, ``(B,)``
        divisor: for each block what the arrays are still to be divided by, if anything; the length is already
    """

    arrays: list[Scaled]
    length: Tensor
    divisor: Tensor | None = None


class Groups:
    """Groups that are fitted and applied together: here one after the other, which any structure can do.

    Args:
        groups: stacks of blocks on one device and with one dtype
        normalize: how a step of ``Q`` is normalised
    """

    #: whether ``whiten_`` fits ``Q`` to the expectation over ``v`` in closed form, without random numbers
    whitens: bool = False
    #: whether the work is the same at every step and never waits for the device, so that a CUDA graph can record it
    recordable: bool = False

    def __init__(self, groups: Sequence[Group], normalize: Normalization | None = None) -> None:
        self.groups = list(groups)
        self.normalize = normalize
        self.counts = [len(next(iter(group.buffers().values()))) for group in self.groups]
        like = next(iter(self.groups[0].buffers().values()))
        self.dtype, self.device = like.dtype, like.device

    def descend_(self, tangents: Iterable[tuple[Tangent, Tensor]], lr: float, ok: Tensor) -> None:
        """``Q ← (I − lr / ‖∇E‖ · ∇E) Q`` for every group.

        Args:
            tangents: for each group its tangent, which is used up, and for each of its blocks whether it says anything
            lr: step size
            ok: whether there is a step at all
        """
        each = iter(tangents)
        for group in self.groups:
            tangent, informative = next(each)
            group.descend_(tangent, lr, self.normalize, ok & informative)
            del tangent  # before the next is made: each is as large as two gradients

    def precondition(
        self, gs: Sequence[Tensor], keep: bool = False, outs: Sequence[Tensor | None] | None = None
    ) -> Preconditioned:
        """``P g`` for an array ``(B, *dims)`` of each group.

        Args:
            gs: gradients
            keep: whether ``Q`` will be used again before it changes
            outs: for each group where the result is to be, or None
        """
        each = zip(self.groups, gs, outs or [None] * len(gs), strict=True)
        tasks = [partial(_precondition, group, g, self.dtype, keep, out) for group, g, out in each]
        done = at_once(tasks, gs, self.device)
        return Preconditioned([scaled for scaled, _ in done], joined([length for _, length in done]))

    def whiten_(
        self,
        gs: list[Tensor],
        lr: float,
        damping: float,
        ok: Tensor,
        weight: Tensor | None = None,
        tidy: bool = True,
        outs: Sequence[Tensor | None] | None = None,
    ) -> Preconditioned:
        """One step of every ``Q`` towards whitening ``g``, or ``g / weight``, where ``whitens`` is true."""
        raise TypeError(f"{self.groups[0].describe()}: only structures that whiten in closed form have whiten_")

    def keeps_P(self) -> bool:
        """Whether each ``P`` that is kept between rare updates is that of the present ``Q``."""
        return True

    def forget_P(self) -> None:
        """Have each ``P`` that is kept formed anew, at its place, when it is needed."""

    def confirm_P(self) -> None:
        """Note that each ``P`` that is kept is that of the present ``Q``: a replayed recording formed it."""


def _precondition(group: Group, g: Tensor, dtype: torch.dtype, keep: bool, out: Tensor | None) -> tuple[Scaled, Tensor]:
    scaled = Scaled(*group.precondition_parts(g.to(dtype), keep, out))
    return scaled, scaled.length()


def joined(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` that costs nothing for a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Structure(ABC):
    """Form of ``P``: makes the group for a block of a given shape."""

    def together(self, groups: Sequence[Group], normalize: Normalization | None = None) -> Groups:
        """The groups of a bucket as one object, which fits and applies all of them; a structure may have a fast one."""
        return Groups(groups, normalize)

    def precond_lr(self, whitening: bool) -> float:
        """Step size of ``Q`` where PSGD is not told otherwise: the paper's."""
        return 0.01

    #: whether ``Q`` may be any matrix, so that it has room for all that one pair says
    universal: bool = False

    @property
    def exact_precond_lr(self) -> float:
        """Step size of ``Q`` for pairs without noise, where ``psgd.minimize`` is not told otherwise."""
        return 0.05

    def smaller(self, groups: Iterable[Group]) -> Iterator[Structure]:
        """Structures of the same kind that keep less and less for the blocks of these groups; none by default."""
        return iter(())

    @property
    def inverts(self) -> bool:
        """Whether ``Q`` is inverted to fit it: not in bfloat16."""
        return True

    @property
    def own_normalization(self) -> bool:
        """Whether the step of ``Q`` is normalised in the group's own way, so that there is nothing to choose."""
        return False

    @abstractmethod
    def init(self, shape: Sequence[int], *, batch: int = 1, dtype: torch.dtype, device: torch.device | str) -> Group:
        """A stack of ``batch`` identities. On the device ``"meta"`` it takes no memory and tells what it would take."""
