"""Base class of probes: a probe measures gradients and pairs ``(δθ, δg)``, and fits ``Q`` to its measurements."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..criteria import WITHOUT_SOLVES, Criterion
from ..groups.axes import restrict, support
from ..groups.base import Group, Groups, Preconditioned
from ..notice import warn
from ..ops.agreement import Fact, compare
from ..ops.distributed import average_, is_dtensor, several_ranks
from ..ops.look import between, seen
from ..tangent import Tangent, largest
from .closures import Closure
from .measured import Evaluation, Measured, Noise
from .restore import Gradients


class Probe(ABC):
    """Source of gradients and pairs, which also fits ``Q`` to them.

    Args:
        damping: threshold below which a curvature counts as noise, relative to the largest curvature of a block. If the
            gradient does not depend on a direction at all, ``P`` is bounded by the inverse of this curvature. The
            default is ``eps ** 0.75`` of the preconditioner's dtype. It lies between the curvatures that rounding hides
            from an exact product (``eps``) and from a finite difference (``eps ** 0.5``).
    """

    def __init__(self, damping: float | None = None) -> None:
        if damping is not None and not (isinstance(damping, (int, float)) and 0 <= damping < 1):
            raise ValueError(f"damping={damping!r}: {type(self).__name__} wants a number in [0, 1), or None")
        self.damping = damping

    #: process group over which gradients are averaged, for probes that compute gradients themselves
    group: Any = None
    _warned = False
    #: whether ``step`` must be given a closure
    needs_closure: bool = True
    #: whether the closure only returns the loss, without calling ``backward``
    forward_only: bool = False
    #: whether the closure is called twice for a mini-batch
    calls_twice: bool = False
    #: whether ``Q`` is fitted to gradients instead of pairs; ``fit_`` is then called even if there are no pairs
    whitens: bool = False
    #: whether ``Q`` is fitted to averaged gradients
    of_average: bool = False
    #: default of ``PSGD(momentum=…)``
    momentum: float = 0.9
    #: default of ``PSGD(max_rms=…)``
    max_rms: float = math.inf
    #: default of ``PSGD(lr=…)``: steps of a preconditioner that is fitted to curvature are of about the right length
    lr: float = 0.5
    #: default of ``PSGD(clip_steps=…)``
    clip_steps: float = 2.0

    @abstractmethod
    def __call__(
        self, closure: Closure | None, params: Sequence[Tensor], moved: Iterable[int], noise: Noise, start: Gradients
    ) -> Evaluation:
        """Evaluate the closure.

        Args:
            closure: the user's closure
            params: all parameters
            moved: positions of the parameters whose preconditioner will be updated
            noise: function that returns random numbers for these parameters
            start: gradients before the step
        """

    def fit_(self, Q: Groups, measured: Measured, criterion: Criterion, lr: float, ok: Tensor) -> Preconditioned | None:
        """``Q ← (I − lr / ‖∇E‖ · ∇E) Q``, with ``∇E`` from the measured pairs.

        Args:
            Q: all ``Q`` of a bucket
            measured: measurements for its blocks
            criterion: criterion that ``P`` is fitted to
            lr: step size of ``Q``
            ok: flag that is false if the step is skipped

        Returns:
            the product of the average and the ``P`` before the update, if fitting computes it anyway; else None
        """
        pairs = self._restricted(Q, measured)
        if measured.start:
            pairs = start_(Q, pairs, ok)
        self.descend_(Q, pairs, measured.sign, criterion, lr, ok)
        return None

    def _restricted(self, Q: Groups, measured: Measured) -> Iterator[list[Tensor]]:
        """Pairs in which ``δθ`` is zero in slices whose gradient is zero and does not change.

        With a nonzero ``δθ``, such slices, as those of a unit that is never active, would make ``P`` grow without
        bound. The gradients of other slices would then move them, as ``P`` couples the slices.
        """
        for group, pair, slices in zip(Q.groups, measured.pairs, measured.support(), strict=True):
            if slices is not None:
                changed = support(pair[1], group.dims)
                either = [torch.maximum(s, c.to(s.dtype)) for s, c in zip(slices, changed, strict=True)]
                pair[0] = restrict(pair[0], [each.to(pair[0].dtype) for each in either])
            yield pair

    def descend_(
        self, Q: Groups, pairs: Iterable[list[Tensor]], sign: float, criterion: Criterion, lr: float, ok: Tensor
    ) -> None:
        """Take one step of ``Q`` that descends the criterion for damped pairs ``[δθ, δg]``, one pair for each group."""

        def tangents() -> Iterator[tuple[Tangent, Tensor]]:
            for group, pair in zip(Q.groups, pairs, strict=True):
                if sign != 1:
                    pair[1] = pair[1] * sign
                pair[1], informative = self.damp(*pair)
                # After `pop`, only the criterion refers to the arrays, and frees each as soon as it has used it.
                yield criterion(group, pair.pop(0).to(Q.dtype), pair.pop(0).to(Q.dtype)), informative

        Q.descend_(tangents(), lr, ok)

    def chores(self, step: int, lr: float) -> Hashable:
        """Further work of the update of ``Q`` at this step.

        It is decided in advance, as it is part of the key of a captured CUDA graph.
        """
        return None

    def recordable(self, criterion: Criterion) -> bool:
        """Whether a CUDA graph can capture ``fit_``.

        ``fit_`` must then do the same work at every step, without random numbers and without the host.
        A class that overrides ``fit_``, ``descend_`` or ``damp`` is not recordable unless it overrides this method too.
        """
        return criterion in WITHOUT_SOLVES and self._fits_as(Probe)

    def _fits_as(self, known: Any) -> bool:
        """Whether ``Q`` is fitted by the functions of a class, and not by those of a class derived from it."""
        return all(getattr(type(self), name) is getattr(known, name) for name in ("fit_", "descend_", "damp"))

    def key(self, dtype: torch.dtype) -> Hashable:
        """Everything that captured steps of this probe depend on, for a ``Q`` of the given dtype."""
        return type(self), self.relative_damping(dtype), self.of_average

    def average_(self, evaluation: Evaluation) -> None:
        """Average gradients and their changes over the ranks of ``group``.

        Probes that compute gradients themselves need this, as ``DistributedDataParallel`` does not see these gradients.
        """
        if self.group is None:
            if several_ranks() and not self._warned:
                self._warned = True
                name = type(self).__name__
                warn(
                    f"{name} finds gradients by itself, so those of several ranks are not averaged; "
                    f"{name}(…, group=torch.distributed.group.WORLD) averages them"
                )
            return
        grads = [g for g in evaluation.grads if g is not None]
        facts = [
            Fact(lambda i: f"whether parameter {i} has a gradient", [g is not None for g in evaluation.grads]),
            Fact(lambda i: f"the parameter of pair {i}", list(evaluation.pairs)),
        ]
        advice = f"{type(self).__name__} can average what all ranks have"
        compare("closure", facts, advice, None, self.group, (grads or [evaluation.loss])[0].device)
        average_(grads, self.group)
        average_([dgrad for _, dgrad in evaluation.pairs.values()], self.group)

    def damp(self, dtheta: Tensor, dgrad: Tensor) -> tuple[Tensor, Tensor]:
        """``δg + damping · ‖δg‖ / ‖δθ‖ · δθ`` for each block of a stack, as if ``H`` were a little larger.

        The second result tells which pairs are worth fitting: those whose curvature ``‖δg‖ / ‖δθ‖`` lies between
        ``eps²`` and ``eps⁻²``. A value outside this range is not a curvature that the number format can represent, but
        shows a gradient that vanished or exploded. After fitting such a pair, ``P`` would be useless for ordinary
        gradients.
        """
        eps = torch.finfo(dgrad.dtype).eps
        damping = self.relative_damping(dgrad.dtype)
        curvature = largest(dgrad) / largest(dtheta)
        informative = between(curvature, eps**2, eps**-2)
        ratio = damping * curvature
        if not seen(ratio.device, lambda: informative):
            ratio = torch.where(informative, ratio, 0.0)
        return torch.addcmul(dgrad, dtheta, ratio.view(-1, *[1] * (dgrad.ndim - 1))), informative

    def relative_damping(self, dtype: torch.dtype) -> float:
        """The damping that the user chose, or the default for a preconditioner of this dtype."""
        return float(torch.finfo(dtype).eps) ** 0.75 if self.damping is None else self.damping

    def __repr__(self) -> str:
        options = ", ".join(
            f"{k}={v if not isinstance(v, nn.Module) else type(v).__name__}"
            for k, v in vars(self).items()
            if v is not None and not (k == "batched" and v is False) and k not in ("group", "_warned", "forward_only")
        )
        return f"{type(self).__name__}({options})"


def start_(Q: Groups, pairs: Iterable[list[Tensor]], ok: Tensor) -> Iterator[list[Tensor]]:
    """Start each ``Q`` that is still the identity at the size that its first pair shows."""
    for group, pair in zip(Q.groups, pairs, strict=True):
        if not group.seen_started():
            dtheta, dgrad = (torch.linalg.vector_norm(v.flatten(1).to(Q.dtype), dim=1) for v in pair)
            start_one_(group, dtheta, dgrad, ok)
        yield pair


def start_one_(group: Group, dtheta: Tensor | float, dgrad: Tensor, ok: Tensor) -> None:
    """``P = ‖δθ‖ / ‖δg‖ · I`` where ``Q`` is still the identity: the best fit to a pair among all multiples of ``I``.

    Args:
        group: stack of ``Q``
        dtheta: length of ``δθ``, for each block
        dgrad: length of ``δg``, for each block
        ok: flag that is false if the step is skipped
    """
    ratio = dtheta / dgrad
    # Outside this range, the gradient has vanished or exploded, see `Probe.damp`.
    eps = torch.finfo(torch.promote_types(dgrad.dtype, torch.float32)).eps
    group.start_(ratio.sqrt(), ok & (ratio > eps**2) & (ratio < eps**-2))


def check_whole(params: Iterable[Tensor], who: str) -> None:
    """Raise if ranks hold only parts of some parameters."""
    if any(is_dtensor(p) for p in params):
        raise ValueError(
            f"params: ranks hold only parts of them; {who} wants whole ones (FiniteDifference(), whose closure calls "
            "backward, and Whitening() take both)"
        )
