"""Whitening: a probe that fits ``P`` to the gradients themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from .base import Evaluation, Noise, Probe
from .closures import Closure, evaluate_backward
from .restore import Gradients


class Whitening(Probe):
    """No second gradient: the pair is ``(v, g)`` with ``v ~ N(0, I)``, so that with ``c3`` ``P → E[g gᵀ]^(−1/2)``.

    Inverse-free factors take the expectation over ``v`` and draw no random numbers.

    It fits the ordinary loop, ``loss.backward(); optimizer.step()``; a closure may be given but is not needed. There is
    no secant equation between ``v`` and ``g``: the criteria ``c1`` and ``c2`` have nothing to fit here. Whitened
    gradients do not become smaller near a minimum, so ``lr`` should: 0.003 is a good start, and for large models
    0.0006.

    Args:
        of_average: whiten the average of the gradients, which is what a step with momentum preconditions, instead of
            the gradients themselves. Steps are then of one size whatever the noise, and cost less, as ``P`` from before
            its update is used, whose product with the average the update needs anyway.
        damping: see ``Probe``
    """

    needs_closure = False
    momentum = 0.9
    max_rms = 1.1

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
            loss = evaluate_backward(closure, params, "Whitening")
        return Evaluation(loss, [p.grad for p in params])
