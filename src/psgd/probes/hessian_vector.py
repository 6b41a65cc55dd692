"""Exact probe: products with the Hessian, by differentiating twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.real import as_real, from_real
from .base import Probe, check_whole
from .closures import Closure, differentiate, evaluate_forward
from .measured import Evaluation, Noise
from .restore import Gradients


class HessianVector(Probe):
    """The exact probe: ``δg = H δθ`` for ``δθ ~ N(0, I)``, by differentiating twice.

    The closure must return the loss without calling ``backward``. Nothing is written to ``.grad``. Every operation of
    the model must be twice differentiable.

    Args:
        group: process group over which gradients are averaged. ``DistributedDataParallel`` does not average them with
            this probe, so the closure should call the module that it wraps.
        damping: see ``Probe``
    """

    forward_only = True

    def __init__(self, *, group: Any = None, damping: float | None = None) -> None:
        super().__init__(damping)
        self.group = group

    def __call__(
        self, closure: Closure | None, params: Sequence[Tensor], moved: Iterable[int], noise: Noise, start: Gradients
    ) -> Evaluation:
        assert closure is not None
        check_whole(params, "HessianVector")
        loss = evaluate_forward(closure, start, "HessianVector")
        used = [i for i, p in enumerate(params) if p.requires_grad]
        moved = set(moved)
        grads: list[Tensor | None] = [None] * len(params)
        found = differentiate(loss, [params[i] for i in used], create_graph=bool(moved))
        for i, grad in zip(used, found, strict=True):
            grads[i] = grad
        if all(grad is None for grad in grads):
            raise ValueError("closure: the loss it returned does not depend on any parameter of the optimizer")

        result = Evaluation(loss.detach(), [None if g is None else g.detach() for g in grads])
        moved = [i for i in sorted(moved) if grads[i] is not None]
        if not moved:
            self.average_(result)
            return result
        dthetas = [noise(i) for i in moved]
        # A constant gradient has no graph and does not change.
        curved = [
            (g, v) for i, v in zip(moved, dthetas, strict=True) if (g := grads[i]) is not None and g.requires_grad
        ]
        products: Sequence[Tensor | None] = [None] * len(moved)
        if curved:
            products = differentiate(
                [g for g, _ in curved], [params[i] for i in moved], [from_real(v, g) for g, v in curved]
            )
        for i, dtheta, product in zip(moved, dthetas, products, strict=True):
            result.pairs[i] = (dtheta, torch.zeros_like(dtheta) if product is None else as_real(product.detach()))
        self.average_(result)
        return result
