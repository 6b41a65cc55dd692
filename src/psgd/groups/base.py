"""Interfaces of this folder: ``Structure`` makes the ``Group`` of a block; ``Groups`` are all groups of a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..normalize import Normalization
from ..ops.power import power_iteration
from ..ops.real import shaped
from ..ops.slices import measure_slices
from ..ops.streams import at_once
from ..tangent import Tangent, unfold
from .factor import Factor, LeftFactor
from .group import Group

__all__ = ["Factor", "Group", "Groups", "LeftFactor", "Preconditioned", "Scaled", "Structure", "joined"]


@dataclass
class Scaled:
    """Arrays ``scale · v`` of a stack, ``(B, *dims)``; the product is left to the code that scales the step anyway."""

    v: Tensor
    scale: Tensor | None
    #: length of each slice of ``scale · v`` along the axis of the scale, in the shape of the scale, once it is known
    slices: Tensor | None = None
    #: product of each slice of a matrix with the unit vector that is stretched most, in the shape of the scale, if an
    #: estimate of that vector is known
    stretch: Tensor | None = None

    def length(self, x: Tensor | None = None) -> Tensor:
        """Length of each array; not finite if an element is not, or if its square overflows.

        Args:
            x: estimate of the vector that each matrix stretches most, ``(B, n, 1)`` and of any length, or None
        """
        if self.scale is None:
            dtype = torch.promote_types(self.v.dtype, torch.float32)
            return torch.linalg.vector_norm(self.v.flatten(1), dim=1, dtype=dtype)
        self.slices, self.stretch = measure_slices(self.v, self.scale, x=None if x is None else unit(x))
        return torch.linalg.vector_norm(self.slices.flatten(1), dim=1)

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """``scale · v`` in a dtype; finds the lengths of its slices on the way."""
        if self.scale is None:
            return self.v.to(dtype)
        out = torch.empty_like(self.v, dtype=dtype)
        self.slices, _ = measure_slices(self.v, self.scale, out)
        return out

    def find_stretch(self, rows: Tensor, x: Tensor) -> None:
        """Find ``stretch`` from the slices, as rows of matrices ``(B, n, m)``, and from ``x`` as in ``length``."""
        assert self.slices is not None
        self.stretch = torch.bmm(rows, unit(x).to(rows.dtype)).view_as(self.slices).to(self.slices.dtype)

    def limit_slices_(self, most: float, divisor: Tensor | None) -> Tensor | None:
        """Shorten slices along the axis of the scale to a root mean square of ``most``.

        Args:
            most: largest root mean square
            divisor: number for each block by which the array is still to be divided, or None

        Returns:
            new length of each array, before the division, or None if there is no such axis
        """
        if self.scale is None or self.slices is None:
            return None
        size = self.v[0].numel() / self.slices[0].numel()
        bound = most * size**0.5
        if divisor is not None:
            bound = bound * divisor.view(-1, *[1] * (self.v.ndim - 1))
        shorter = (bound / self.slices).clamp_(max=1)
        self.slices = self.slices * shorter
        if self.stretch is not None:
            self.stretch = self.stretch * shorter
        self.scale = self.scale * shorter.to(self.scale.dtype)
        return torch.linalg.vector_norm(self.slices.flatten(1), dim=1)

    def spectral_norm(self, axis: int) -> Tensor | None:
        """Largest singular value of each array, as a matrix with one row for each slice along the axis of the scale.

        The result is an estimate, which except for rounding is never too large. If ``stretch`` is known, the result is
        its length, or that of the longest slice, which may lie in another direction. Otherwise it is found by power
        iteration from two starts: the sum of all slices, which contains a direction that many slices share, and the
        longest slice, for the case that it dominates alone. The result is None if the lengths of slices are unknown.
        """
        if self.scale is None or self.slices is None:
            return None
        if self.stretch is not None:
            longest = self.slices.flatten(1).amax(1)
            return torch.maximum(torch.linalg.vector_norm(self.stretch.flatten(1), dim=1), longest)
        M, scale = unfold(self.v, axis), self.scale.flatten(1).unsqueeze(2).to(self.v.dtype)
        squares = scale.square()
        longest = self.slices.flatten(1).argmax(1).view(-1, 1, 1)
        row = M.gather(1, longest.expand(-1, 1, M.shape[2])).mT
        starts = torch.cat([row, torch.bmm(M.mT, squares)], 2)
        _, square = power_iteration(lambda x: torch.bmm(M.mT, squares * torch.bmm(M, x)), starts, iterations=2)
        return square.amax((1, 2)).sqrt()

    def times(self, rate: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """``rate · scale · v`` for one rate per block, ``(B, *shape)``, in one pass; ``v`` may be overwritten."""
        factor = rate.view(-1, *[1] * (self.v.ndim - 1))
        if self.scale is not None:
            factor = factor * self.scale
        if self.v.dtype == dtype:
            product = self.v.mul_(factor)
        else:
            product = torch.mul(self.v, factor, out=torch.empty_like(self.v, dtype=dtype))
        return shaped(product, (len(product), *shape))

    def dot(self, other: Tensor) -> Tensor:
        """Inner product of each array with the corresponding one of another tensor with as many elements."""
        wide = torch.promote_types(other.dtype, torch.float32)
        product = self.v.to(wide) * other.reshape(self.v.shape)
        if self.scale is not None:
            product = product * self.scale
        return product.flatten(1).sum(1).to(other.dtype)


def unit(x: Tensor) -> Tensor:
    """Columns ``(B, n, 1)`` with a length of one, in float32 or better; zero if they are zero."""
    return torch.nn.functional.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=1)


def dots(scaled: Sequence[Scaled], others: Sequence[Tensor]) -> Tensor:
    """Inner product of each block of some groups with the corresponding block of other tensors."""
    return joined([a.dot(other) for a, other in zip(scaled, others, strict=True)])


@dataclass
class Preconditioned:
    """``P g`` of all blocks of a bucket.

    Args:
        arrays: arrays of each group
        length: length of each block, ``(B,)``, after the division by ``divisor``
        divisor: number for each block by which the arrays are still to be divided, or None
    """

    arrays: list[Scaled]
    length: Tensor
    divisor: Tensor | None = None


class Groups:
    """Groups that are fitted and applied together.

    This class handles them one after the other, which works with any structure.

    Args:
        groups: stacks of blocks on one device and with one dtype
        normalize: normalisation of the step of ``Q``
    """

    #: whether ``whiten_`` fits ``Q`` to the expectation over ``v`` in closed form, without random numbers
    whitens: bool = False
    #: whether the work is the same at every step and never waits for the device, so that a CUDA graph can capture it
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
            tangents: for each group its tangent, which is overwritten, and a flag for each block that tells whether its
                tangent is informative
            lr: step size of ``Q``
            ok: flag that is false if the step is skipped
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
            gs: gradients, one array for each group
            keep: whether ``Q`` will be used again before it changes
            outs: for each group the tensor to write the result to, or None
        """
        each = zip(self.groups, gs, outs or [None] * len(gs), strict=True)
        tasks = [partial(_precondition, group, g, self.dtype, keep, out) for group, g, out in each]
        arrays = at_once(tasks, gs, self.device)
        return Preconditioned(arrays, self._lengths(arrays))

    def _lengths(self, arrays: Sequence[Scaled]) -> Tensor:
        """Length of each block."""
        return joined([a.length() for a in arrays])

    def whiten_(
        self,
        gs: list[Tensor],
        lr: float,
        damping: float,
        ok: Tensor,
        weight: Tensor | None = None,
        tidy: bool = True,
        outs: Sequence[Tensor | None] | None = None,
        support: Sequence[list[Tensor] | None] | None = None,
        rescale: bool = False,
        lengths: Tensor | None = None,
    ) -> Preconditioned:
        """Take one step of every ``Q`` towards whitening ``g``, or ``g / weight``; only if ``whitens`` is true."""
        raise TypeError(f"{self.groups[0].describe()}: only structures that whiten in closed form have whiten_")

    def keeps_P(self) -> bool:
        """Whether each ``P`` that is kept between rare updates belongs to the present ``Q``."""
        return True

    def forget_P(self) -> None:
        """Mark each ``P`` that is kept as outdated; it is computed again, in place, when it is needed."""

    def confirm_P(self) -> None:
        """Mark each ``P`` that is kept as that of the present ``Q``, after a replayed CUDA graph computed it."""


def _precondition(group: Group, g: Tensor, dtype: torch.dtype, keep: bool, out: Tensor | None) -> Scaled:
    return Scaled(*group.precondition_parts(g.to(dtype), keep, out))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` that costs nothing for a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Structure(ABC):
    """Structure of ``P``, which creates the group for a block of a given shape."""

    def together(self, groups: Sequence[Group], normalize: Normalization | None = None) -> Groups:
        """Combine the groups of a bucket in one object, which fits and applies all of them.

        A structure may override this method to return a faster object.
        """
        return Groups(groups, normalize)

    def precond_lr(self, whitening: bool, size: int = 1) -> float:
        """Default of ``PSGD(precond_lr=…)``, the step size of ``Q``, for blocks of at most ``size`` elements."""
        return 0.01 if whitening else 0.05

    def precond_boost(self, whitening: bool) -> float:
        """Default of ``PSGD(precond_boost=…)``, the factor of that step size in the first updates of ``Q``."""
        return 3.0

    #: whether ``Q`` may be any matrix, so that it can represent everything that one pair shows
    universal: bool = False

    @property
    def exact_precond_lr(self) -> float:
        """Default step size of ``Q`` in ``psgd.minimize``, for pairs without noise."""
        return 0.05

    def smaller(self, groups: Iterable[Group]) -> Iterator[Structure]:
        """Structures of the same kind that use less and less memory for the blocks of these groups; none by default."""
        return iter(())

    @property
    def inverts(self) -> bool:
        """Whether fitting inverts ``Q``, which is not possible in bfloat16."""
        return True

    @property
    def own_normalization(self) -> bool:
        """Whether the group normalises the step of ``Q`` in its own way, so that ``normalize`` cannot be chosen."""
        return False

    @abstractmethod
    def init(self, shape: Sequence[int], *, batch: int = 1, dtype: torch.dtype, device: torch.device | str) -> Group:
        """Create a stack of ``batch`` identities.

        On the device ``"meta"`` the stack uses no memory, and shows how much memory it would use elsewhere.
        """
