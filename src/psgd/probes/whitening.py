"""Whitening: ``Q`` is fitted to the gradients themselves, ``P → E[g gᵀ]^(−1/2)``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..criteria import IN_EXPECTATION, Criterion
from ..groups.axes import restrict
from ..groups.base import Groups, Preconditioned
from ..groups.inverse_free import Chores
from .base import Probe, start_, start_one_
from .closures import Closure, evaluate_loss
from .measured import Average, Evaluation, Measured, Noise
from .noise import mix
from .restore import Gradients


class Whitening(Probe):
    """Probe that whitens gradients and needs no second gradient.

    The pair is ``(v, g)`` with ``v ~ N(0, I)``, so that ``c3`` gives ``P = E[g gᵀ]^(−1/2)``. Inverse-free factors use
    the expectation over ``v`` and draw no random numbers.

    This probe works with the ordinary training loop, ``loss.backward(); optimizer.step()``. A closure is not needed. If
    one is given, the optimizer uses the gradients that are present after its call, if any, as torch's optimizers do.
    There is no secant equation between ``v`` and ``g``, so the criteria ``c1`` and ``c2`` have nothing to fit and are
    refused. Whitened gradients do not become smaller near a minimum, so the learning rate should. A learning rate of
    0.001 is a good start.

    Args:
        of_average: whiten the average of the gradients, which a step with momentum preconditions, instead of the
            gradients themselves. The size of steps then does not depend on the noise. Steps also cost less: they use
            the ``P`` before its update, and the update computes the product of this ``P`` and the average anyway.
        damping: see ``Probe``
    """

    needs_closure = False
    whitens = True
    max_rms = 1.1
    lr = 0.001
    clip_steps = math.inf  # whitened steps have size one, and `max_rms` limits them

    def __init__(self, of_average: bool = True, *, damping: float | None = None) -> None:
        super().__init__(damping)
        if not isinstance(of_average, bool):
            raise TypeError(f"of_average={of_average!r}: Whitening wants True or False")
        self.of_average = of_average

    def __call__(
        self, closure: Closure | None, params: Sequence[Tensor], moved: Iterable[int], noise: Noise, start: Gradients
    ) -> Evaluation:
        loss = None
        if closure is not None:
            start.save()
            loss = evaluate_loss(closure, "Whitening")
        return Evaluation(loss, [p.grad for p in params])

    def fit_(self, Q: Groups, measured: Measured, criterion: Criterion, lr: float, ok: Tensor) -> Preconditioned | None:
        """Fit ``Q`` to the pair ``(v, g)``: in expectation over ``v ~ N(0, I)`` if ``Q`` can, else for one ``v``.

        ``v`` is zero in slices without a gradient. A part of the model that no longer gets gradients therefore does not
        change ``P``. Otherwise ``P`` would grow as fast as the average of the gradients fades.
        """
        of_average = self.of_average or not measured.average.averaged
        fitted = measured.average if of_average else measured.gradients()
        if Q.whitens and criterion in IN_EXPECTATION:
            chores, support = measured.chores, measured.support()
            assert isinstance(chores, Chores)
            if measured.start and chores.first:
                _start_(Q, fitted, support, ok)
            whitened = Q.whiten_(
                [g.to(Q.dtype) for g in fitted.arrays],
                lr,
                self.relative_damping(Q.dtype) * chores.damping,
                ok,
                fitted.weight,
                tidy=chores.tidy,
                outs=measured.outs() if of_average else None,
                support=support,
                rescale=measured.start and chores.tidy,
                lengths=fitted.lengths,
            )
            return whitened if of_average else None
        gs = fitted.unbiased()
        # No variable refers to these arrays, only the pair does, so that they are freed when it drops them.
        pairs: Iterable[list[Tensor]] = (
            [next(measured.noise) if slices is None else restrict(next(measured.noise), slices), next(gs)]
            for slices in measured.support()
        )
        if measured.start:
            pairs = start_(Q, pairs, ok)
        self.descend_(Q, pairs, measured.sign, criterion, lr, ok)
        return None

    def chores(self, step: int, lr: float) -> Chores:
        """Chores of an update: all in the first step, and in a step that the user captures, which may be the only one.

        In other steps the choice is pseudorandom, so that no schedule of updates can miss any chore.
        """
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if step == 0:
            return Chores.at_first()
        return Chores.all() if capturing else Chores.of(mix(step), lr)

    def recordable(self, criterion: Criterion) -> bool:
        return criterion in IN_EXPECTATION and self._fits_as(Whitening)


def _start_(Q: Groups, gs: Average, support: Sequence[list[Tensor] | None], ok: Tensor) -> None:
    """``P = ‖v‖ / ‖g‖ · I`` for blocks whose ``Q`` is still the identity, so that ``P g`` has size one.

    ``v`` is one in slices that have a gradient and zero elsewhere, see ``Whitening.fit_``.
    """
    for group, g, slices in zip(Q.groups, gs.unbiased(), support, strict=True):
        if group.seen_started():
            continue
        length = torch.linalg.vector_norm(g.flatten(1).to(Q.dtype), dim=1)
        drawn = g[0].numel() if slices is None else torch.stack([each.sum(1) for each in slices]).prod(0).to(Q.dtype)
        start_one_(group, drawn**0.5, length, ok)
