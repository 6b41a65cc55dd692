"""Where a pair ``(δθ, δg)`` comes from.

A probe evaluates loss and gradients once for the step of the parameters and, where a preconditioner is to be updated,
measures how the gradients change.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import batched
from .batched import WHO
from .closures import Closure, differentiate, evaluate, evaluate_backward, evaluate_forward
from .real import like, real
from .tangent import largest
from .team import aligned, average_, is_divided, local, several_ranks
from .undo import Gradients, RandomState

#: standard normal numbers of the shape and dtype of ``real(parameter)``, for the parameter at a position
Noise = Callable[[int], Tensor]


@dataclass
class Evaluation:
    """Loss and gradients at the parameters and, by position, the pairs that were measured around them."""

    loss: Any
    grads: list[Tensor | None]
    pairs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Probe(ABC):
    """Evaluates gradients and measures pairs.

    Args:
        damping: the curvature, relative to the largest seen in a block, below which it counts as noise. Where the
            gradient does not depend on a direction at all, it bounds ``P`` by the inverse of this curvature. The
            default, ``eps ** 0.75`` of the preconditioner's dtype, lies between what rounding hides from an exact
            product (``eps``) and from a finite difference (``eps ** 0.5``).
    """

    def __init__(self, damping: float | None = None) -> None:
        if damping is not None and not (isinstance(damping, (int, float)) and 0 <= damping < 1):
            raise ValueError(f"damping={damping!r}: {type(self).__name__} wants a number in [0, 1), or None")
        self.damping = damping

    #: ranks that gradients are averaged over, where the probe finds them by itself
    group: Any = None
    _warned = False
    #: whether ``step`` must be given a closure
    needs_closure: bool = True
    #: what PSGD takes where it is not told otherwise
    momentum: float = 0.0
    max_rms: float = math.inf

    @abstractmethod
    def __call__(
        self, closure: Closure | None, params: Sequence[Tensor], moved: Iterable[int], noise: Noise, start: Gradients
    ) -> Evaluation:
        """Evaluate the closure.

        Args:
            closure: the user's closure
            params: all parameters
            moved: positions of those whose preconditioner is to be updated
            noise: random numbers for them
            start: the gradients as they were before the step
        """

    def average_(self, evaluation: Evaluation) -> None:
        """Take the means of gradients and of their changes over the ranks of a group.

        For probes that find gradients by themselves: nobody else, such as ``DistributedDataParallel``, sees those.
        """
        if self.group is None:
            if several_ranks() and not self._warned:
                self._warned = True
                name = type(self).__name__
                warnings.warn(
                    f"{name} finds gradients by itself, so those of several ranks are not averaged; "
                    f"{name}(…, group=torch.distributed.group.WORLD) averages them",
                    stacklevel=2,
                )
            return
        average_([g for g in evaluation.grads if g is not None], self.group)
        average_([dgrad for _, dgrad in evaluation.pairs.values()], self.group)

    def damp(self, dtheta: Tensor, dgrad: Tensor) -> tuple[Tensor, Tensor]:
        """``δg + damping · ‖δg‖ / ‖δθ‖ · δθ``, block by block of a stack: as if ``H`` were a little larger.

        Also says which pairs are worth fitting: those whose curvature ``‖δg‖ / ‖δθ‖`` lies between ``eps²`` and
        ``eps⁻²``. What is outside is no curvature that a number format could work with but a gradient that vanished or
        exploded; following it, ``P`` would be of no use when ordinary gradients are back.
        """
        eps = torch.finfo(dgrad.dtype).eps
        damping = self.relative_damping(dgrad.dtype)
        curvature = largest(dgrad) / largest(dtheta)
        informative = (curvature > eps**2) & (curvature < eps**-2)
        ratio = torch.where(informative, damping * curvature, 0.0)
        return torch.addcmul(dgrad, dtheta, ratio.view(-1, *[1] * (dgrad.ndim - 1))), informative

    def relative_damping(self, dtype: torch.dtype) -> float:
        """The damping that was asked for, or the default for a preconditioner of this dtype."""
        return float(torch.finfo(dtype).eps) ** 0.75 if self.damping is None else self.damping

    def __repr__(self) -> str:
        options = ", ".join(
            f"{k}={v if not isinstance(v, nn.Module) else type(v).__name__}"
            for k, v in vars(self).items()
            if v is not None and not (k == "batched" and v is False) and k not in ("group", "_warned")
        )
        return f"{type(self).__name__}({options})"


class FiniteDifference(Probe):
    """The paper's probe: ``δg = g(θ + δθ) − g(θ)`` for a small random ``δθ``, by calling the closure twice.

    It works with the closure that ``torch.optim.LBFGS`` takes: one that clears the gradients, calls ``backward`` and
    returns the loss. Both calls must see the same mini-batch; dropout sees the same mask, as the random numbers of
    torch are replayed. ``θ`` comes back bit for bit, and ``δθ`` is what rounding let through.

    Args:
        std: standard deviation of ``δθ``; the default is the paper's, the square root of the machine precision of
            each parameter's dtype. Where the model computes in less, as under autocast or mixed precision, take that
            of its dtype: 0.09 for bfloat16.
        module: a model whose buffers, such as the statistics of batch normalisation, are to be left as the first
            of the two calls made them
        batched: evaluate both gradients at once, by ``torch.func.vmap``, for hardware that a single evaluation leaves
            idle. The closure then only returns the loss, and reaches all parameters through ``module``; ``θ`` is not
            touched, and nothing is written to ``.grad``.
        group: with ``batched``, the process group that gradients are averaged over
        damping: see ``Probe``
    """

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
        if std is not None and not (isinstance(std, (int, float)) and 0 < std < float("inf")):
            raise ValueError(f"std={std!r}: FiniteDifference wants a positive number, or None")
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(f"module={module!r}: FiniteDifference wants a torch.nn.Module, or None")
        if batched and module is None:
            raise ValueError(f"module=None: {WHO} wants the torch.nn.Module that the closure evaluates")
        self.std = std
        self.module = module
        self.batched = bool(batched)

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
        # The second backward pass may write into tensors that were there before, or that share a flat buffer.
        for i, grad in enumerate(made):
            if grad is not None and not grad.is_sparse:
                shared = local(grad).untyped_storage().nbytes() != local(grad).nbytes
                if shared or grad is start.grads[i]:
                    grads[i] = grad.clone()

        random_after = RandomState(params)
        buffers = [] if self.module is None else list(self.module.buffers())
        saved_buffers = [b.clone() for b in buffers]
        thetas = [real(local(params[i].detach())) for i in moved]
        saved = [theta.clone(memory_format=torch.preserve_format) for theta in thetas]
        try:
            for i, theta in zip(moved, thetas, strict=True):
                theta.add_(noise(i), alpha=self._std(theta))
            start.restore()
            random_before.restore()
            torch.clear_autocast_cache()  # it would hold the weights as they were
            evaluate(closure)
            for i, theta, old in zip(moved, thetas, saved, strict=True):
                p, grad = params[i], grads[i]
                assert grad is not None
                dgrad = torch.zeros_like(grad) if p.grad is None else p.grad - grad
                p.grad = None  # lets go of the second gradient at once
                result.pairs[i] = (theta - old, real(local(aligned(dgrad, p))))
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
        _check_whole(params, WHO)
        moved = [i for i in moved if params[i].requires_grad]
        if not moved:
            loss = evaluate_forward(closure, start, WHO)
            result = Evaluation(loss.detach(), batched.gradients(loss, params))
            self.average_(result)
            return result
        thetas = {i: real(params[i].detach()) for i in moved}
        beside = {i: torch.add(theta, noise(i), alpha=self._std(theta)) for i, theta in thetas.items()}
        start.hide()
        try:
            result = Evaluation(*batched.measure(closure, self.module, params, beside))
        finally:
            start.restore()
        self.average_(result)
        return result


class HessianVector(Probe):
    """The exact probe: ``δg = H δθ`` for ``δθ ~ N(0, I)``, by differentiating twice.

    The closure returns the loss and does not call ``backward``; gradients stay where they are, in ``.grad`` nothing is
    written. Every operation of the model must be twice differentiable.

    Args:
        group: the process group that gradients are averaged over. ``DistributedDataParallel`` would not do it: let the
            closure call the module inside of it.
        damping: see ``Probe``
    """

    def __init__(self, *, group: Any = None, damping: float | None = None) -> None:
        super().__init__(damping)
        self.group = group

    def __call__(
        self, closure: Closure | None, params: Sequence[Tensor], moved: Iterable[int], noise: Noise, start: Gradients
    ) -> Evaluation:
        assert closure is not None
        _check_whole(params, "HessianVector")
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
        # A gradient that is constant has no graph, and changes nothing.
        curved = [
            (g, v) for i, v in zip(moved, dthetas, strict=True) if (g := grads[i]) is not None and g.requires_grad
        ]
        products: Sequence[Tensor | None] = [None] * len(moved)
        if curved:
            products = differentiate(
                [g for g, _ in curved], [params[i] for i in moved], [like(g, v) for g, v in curved]
            )
        for i, dtheta, product in zip(moved, dthetas, products, strict=True):
            result.pairs[i] = (dtheta, torch.zeros_like(dtheta) if product is None else real(product.detach()))
        self.average_(result)
        return result


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


def _check_whole(params: Iterable[Tensor], who: str) -> None:
    if any(is_divided(p) for p in params):
        raise ValueError(
            f"params: ranks hold only parts of them; {who} wants whole ones (FiniteDifference(), whose closure calls "
            "backward, and Whitening() take both)"
        )
