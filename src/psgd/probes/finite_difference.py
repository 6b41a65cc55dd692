"""Probe of the paper: the difference of two gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.distributed import aligned, local
from ..ops.real import as_real
from . import two_at_once as batched
from .base import Probe, check_whole
from .closures import Closure, evaluate, evaluate_backward, evaluate_forward
from .measured import Evaluation, Noise
from .restore import Gradients, RandomState
from .two_at_once import WHO


class FiniteDifference(Probe):
    """The paper's probe: ``δg = g(θ + δθ) − g(θ)`` for a small random ``δθ``, by calling the closure twice.

    It works with the same closures as ``torch.optim.LBFGS``: the closure clears the gradients, calls ``backward`` and
    returns the loss. Both calls must see the same mini-batch. Dropout uses the same mask in both calls, because the
    state of torch's random generators is restored between them. ``θ`` is restored bit for bit, and ``δθ`` is the change
    after rounding.

    Args:
        std: standard deviation of ``δθ``. The default, as in the paper, is the square root of the machine precision of
            each parameter's dtype. If the model computes in lower precision, as under autocast, use the square root of
            the machine precision of that dtype: 0.09 for bfloat16.
        module: model whose buffers, such as the statistics of batch normalisation, are restored to their values after
            the first of the two calls
        batched: evaluate both gradients at once, by ``torch.func.vmap``, on hardware that a single evaluation does not
            fill. The closure must then only return the loss, and use all parameters through ``module``. ``θ`` is not
            changed, and nothing is written to ``.grad``.
        group: with ``batched``, the process group over which gradients are averaged
        damping: see ``Probe``
    """

    calls_twice = True

    def __init__(
        self,
        std: float | None = None,
        *,
        module: nn.Module | None = None,
        batched: bool = False,
        group: Any = None,
        damping: float | None = None,
    ) -> None:
        super().__init__(damping)
        if group is not None and not batched:
            raise ValueError("group: only FiniteDifference(batched=True) wants one; else backward() averages gradients")
        self.group = group
        is_number = isinstance(std, (int, float)) and not isinstance(std, bool)
        if std is not None and not (is_number and 0 < std <= sys.float_info.max):
            raise ValueError(f"std={std!r}: FiniteDifference wants a positive number, or None")
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(f"module={module!r}: FiniteDifference wants a torch.nn.Module, or None")
        if batched and module is None:
            raise ValueError(f"module=None: {WHO} wants the torch.nn.Module that the closure evaluates")
        self.std = std
        self.module = module
        self.batched = self.forward_only = bool(batched)

    def __call__(
        self, closure: Closure | None, params: Sequence[Tensor], moved: Iterable[int], noise: Noise, start: Gradients
    ) -> Evaluation:
        assert closure is not None
        moved = list(moved)
        if self.batched:
            return self._at_once(closure, params, moved, noise, start)
        random_before = RandomState(params) if moved else None
        start.save()
        loss = evaluate_backward(closure, params, "FiniteDifference")
        start.forget_untouched()
        made = [p.grad for p in params]
        grads = list(made)
        result = Evaluation(loss, grads)
        moved = [i for i in moved if grads[i] is not None]
        if random_before is None or not moved:
            return result
        # The second backward pass may write to gradients from before the step, or to ones that share a flat buffer.
        for i, grad in enumerate(made):
            if grad is not None and not grad.is_sparse:
                shared = local(grad).untyped_storage().nbytes() != local(grad).nbytes
                if shared or grad is start.grads[i]:
                    grads[i] = grad.clone()

        random_after = RandomState(params)
        buffers = [] if self.module is None else list(self.module.buffers())
        saved_buffers = [b.clone() for b in buffers]
        thetas = [as_real(local(params[i].detach())) for i in moved]
        saved = [theta.clone(memory_format=torch.preserve_format) for theta in thetas]
        try:
            for i, theta in zip(moved, thetas, strict=True):
                theta.add_(noise(i), alpha=self._std(theta))
            start.restore()
            random_before.restore()
            torch.clear_autocast_cache()  # it would return the old weights
            evaluate(closure)
            for i, theta, old in zip(moved, thetas, saved, strict=True):
                p, grad = params[i], grads[i]
                assert grad is not None
                dgrad = torch.zeros_like(grad) if p.grad is None else p.grad - grad
                p.grad = None  # frees the second gradient at once
                result.pairs[i] = (theta - old, as_real(local(aligned(dgrad, p))))
        finally:
            try:
                torch._foreach_copy_(thetas, saved)
            except BaseException:
                torch._foreach_copy_(thetas, saved)
                raise
            for b, old in zip(buffers, saved_buffers, strict=True):
                b.copy_(old)
            random_after.restore()
            torch.clear_autocast_cache()
        for p, grad, tensor in zip(params, grads, made, strict=True):
            if tensor is not None and grad is not None and grad is not tensor:
                tensor.copy_(grad)
            p.grad = tensor
        return result

    def _std(self, theta: Tensor) -> float:
        return float(torch.finfo(theta.dtype).eps) ** 0.5 if self.std is None else self.std

    def _at_once(
        self, closure: Closure, params: Sequence[Tensor], moved: Sequence[int], noise: Noise, start: Gradients
    ) -> Evaluation:
        assert self.module is not None
        check_whole(params, WHO)
        moved = [i for i in moved if params[i].requires_grad]
        if not moved:
            loss = evaluate_forward(closure, start, WHO)
            result = Evaluation(loss.detach(), batched.gradients(loss, params))
            self.average_(result)
            return result
        thetas = {i: as_real(params[i].detach()) for i in moved}
        beside = {i: torch.add(theta, noise(i), alpha=self._std(theta)) for i, theta in thetas.items()}
        start.hide()
        try:
            result = Evaluation(*batched.measure(closure, self.module, params, beside))
        finally:
            start.restore()
        self.average_(result)
        return result
