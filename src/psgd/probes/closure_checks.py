"""Checks of a closure that is called twice: it must not fetch another mini-batch, change buffers or add to gradients.

Each of these mistakes gives numbers that look right, and a preconditioner that is wrong. They are looked for in the
first steps only, and each causes one warning. Ranks do not communicate, and the host does not wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ..notice import warn
from ..ops.distributed import is_dtensor, number_of_ranks
from ..ops.real import as_real, precise_dtype
from ..ops.streams import Arrival, capturing
from .base import Probe
from .closures import Closure, number_of
from .measured import Evaluation
from .reachable import modules_of

#: number of steps with two calls that are checked
STEPS = 10
#: number of these steps that must be wrong for a warning, and number in which even the sign of the change must be wrong
_WRONG, _OPPOSITE = 7, 2
#: allowed ratio of the change of the loss to that which gradients predict, as a closure may return a multiple of it
_FACTOR = 4.0
#: rounding error of the loss, relative to its size: that of bfloat16, as the closure may use autocast
_ROUNDING = 2.0**-8


class ClosureChecks:
    """Observer of the calls of an optimizer's closure in its first steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._calls: _Calls | None = None
        self._gradients = _OldGradients()
        self._buffers_seen = False
        #: numbers of the steps so far, see ``_row``, and their copy on its way to the host
        self._rows: list[Tensor] = []
        self._sent: Arrival | None = None

    def watch(self, closure: Closure | None, probe: Probe, params: Sequence[Tensor]) -> Closure | None:
        """Closure for the probe: that of the user or, in the first steps, one that calls and observes it."""
        self._calls = None
        self._receive()
        twice = probe.calls_twice and not probe.forward_only
        if closure is None or not twice or self._steps >= STEPS or capturing():
            return closure
        restored = getattr(probe, "module", None)
        buffers = None if self._buffers_seen else _Buffers(closure, restored)
        self._calls = _Calls(closure, params, self._gradients, buffers)
        return self._calls

    def judge(self, evaluation: Evaluation) -> None:
        """Warn of mistakes that were observed in a step.

        Args:
            evaluation: result of the probe
        """
        calls, self._calls = self._calls, None
        if calls is None:
            return
        self._gradients.remember(calls.params)
        if len(calls.losses) == 2:
            self._steps += 1
            self._buffers_seen = True
            first, second = calls.losses
            if (row := _row(first, second, evaluation)) is not None:
                self._rows.append(row)
            if self._steps == STEPS and len(self._rows) >= _WRONG:
                self._sent = Arrival(torch.stack(self._rows))
        self._gradients.speak()
        if calls.buffers is not None:
            calls.buffers.speak()
        self._receive()

    def _receive(self) -> None:
        """Judge the losses, if their copy has arrived at the host."""
        rows = None if self._sent is None else self._sent.read()
        if rows is None:
            return
        self._rows, self._sent = [], None
        if disagrees(rows.tolist()):
            warn(
                "closure: it seems to fetch another mini-batch at its second call: from one call to the other the loss "
                "changes far more than its gradients say. FiniteDifference wants both calls to see the same data, so "
                "fetch them before the closure, draw random numbers of NumPy or Python there too (those of torch, as "
                "of dropout, are the same in both calls), and carry no state over. If the model computes in bfloat16, "
                "the cause may be rounding: FiniteDifference(std=0.09)"
            )


class _Calls:
    """Closure that calls the user's closure, and keeps its losses and observations.

    Args:
        closure: the user's closure
        params: all parameters
        gradients: observer of whether the first call adds to old gradients
        buffers: observer of the buffers that the second call changes, or None
    """

    def __init__(
        self, closure: Closure, params: Sequence[Tensor], gradients: _OldGradients, buffers: _Buffers | None
    ) -> None:
        self.closure, self.params = closure, params
        self.gradients, self.buffers = gradients, buffers
        self.losses: list[Any] = []

    def __call__(self) -> Any:
        first = not self.losses
        if first:
            loss = self.gradients.during(self.closure, self.params)
        elif self.buffers is not None:
            loss = self.buffers.during(self.closure)
        else:
            loss = self.closure()
        # A copy, as a closure may return the same tensor each time, for example from a replayed CUDA graph.
        self.losses.append(loss.detach().clone() if isinstance(loss, Tensor) else loss)
        return loss


# Another mini-batch.


def _row(first: Any, second: Any, evaluation: Evaluation) -> Tensor | None:
    """``f(θ + δθ) − f(θ)``, ``f(θ)``, ``g · δθ`` and ``g' · δθ``, on the device; None if there is no loss.

    The result is also None for sharded parameters, as a rank could compute only parts of these products.
    """
    pairs, grads = evaluation.pairs, evaluation.grads
    if not pairs or any(is_dtensor(g) for g in grads if g is not None):
        return None
    device = next(iter(pairs.values()))[0].device
    change, size = _difference(first, second)
    if change is None or size is None or device.type == "meta":
        return None
    slopes = [_dot(as_real(g), dtheta) for i, (dtheta, _) in pairs.items() if (g := grads[i]) is not None]
    bends = [_dot(dgrad, dtheta) for dtheta, dgrad in pairs.values()]
    slope, bend = (torch.stack([part.to(device) for part in parts]).sum() for parts in (slopes, bends))
    numbers = [
        value.to(device, torch.float32)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=torch.float32, device=device)
        for value in (change, size)
    ]
    return torch.stack([*numbers, slope.to(torch.float32), (slope + bend).to(torch.float32)])


def _difference(first: Any, second: Any) -> tuple[Tensor, Tensor] | tuple[float, float] | tuple[None, None]:
    """Change of the loss, and the first loss; tensors stay tensors, as the host would have to wait to read them."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        alike = isinstance(first, Tensor) and isinstance(second, Tensor) and first.numel() == second.numel() == 1
        return ((second - first).reshape(()), first.reshape(())) if alike else (None, None)
    a, b = number_of(first), number_of(second)
    known = a is not None and b is not None and max(abs(a), abs(b)) < 1e37
    return (b - a, a) if known and a is not None and b is not None else (None, None)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    dtype = precise_dtype([a, b])
    return torch.dot(a.reshape(-1).to(dtype), b.reshape(-1).to(dtype))


def disagrees(rows: Sequence[Sequence[float]]) -> bool:
    """Whether in most steps the loss changes far more than the trapezoid rule predicts from the gradients at both ends.

    A closure may return a multiple of the loss that it differentiates, or clip gradients. The change is then larger
    than predicted, but never has the other sign. The mean of gradients over ranks may be shorter than the gradient of
    one rank, by the square root of the number of ranks.

    Args:
        rows: for each step ``f(θ + δθ) − f(θ)``, ``f(θ)``, ``g · δθ`` and ``g' · δθ``
    """
    factor = _FACTOR * math.sqrt(number_of_ranks())
    wrong = opposite = 0
    for change, size, slope, slope_there in rows:
        expected = (slope + slope_there) / 2
        allowed = factor * (abs(slope) + abs(slope_there)) + _ROUNDING * abs(size)
        if abs(change - expected) > allowed and math.isfinite(change):
            wrong += 1
            opposite += change * expected <= 0
    return wrong >= _WRONG and opposite >= _OPPOSITE


# Gradients of the step before.


class _OldGradients:
    """Check whether a closure adds to the gradients that the step before has used already.

    Gradients that were computed or cleared between the steps are not checked, as users may accumulate gradients. One
    parameter is observed. If its gradient is the same tensor after the first call, it may have been cleared in place.
    In the next step, a hook therefore observes whether the first change of this tensor is an addition.
    """

    def __init__(self) -> None:
        self._left: tuple[int, TensorWeakRef, int] | None = None
        self._suspicious = self._found = self._done = False

    def remember(self, params: Sequence[Tensor]) -> None:
        """Remember a gradient as a step leaves it, with its version."""
        self._left = None
        for i, p in enumerate(params):
            if p.grad is not None and p.requires_grad and p.is_leaf and not is_dtensor(p):
                self._left = i, TensorWeakRef(p.grad), p.grad._version
                return

    def during(self, closure: Closure, params: Sequence[Tensor]) -> Any:
        """Call the closure."""
        p, grad = self._untouched(params)
        if p is None or grad is None:
            return closure()
        if not self._suspicious:
            loss = closure()
            self._suspicious = p.grad is grad
            return loss
        before, added = grad._version, list[bool]()
        handle = p.register_post_accumulate_grad_hook(
            lambda p: added.append(p.grad is grad and grad._version == before + 1)
        )
        try:
            return closure()
        finally:
            handle.remove()
            self._found = added[:1] == [True]
            self._done = added[:1] == [False]

    def _untouched(self, params: Sequence[Tensor]) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Remembered parameter and its gradient, if the gradient is unchanged since the step before; else None."""
        if self._left is None or self._done:
            return None, None
        i, left, version = self._left
        grad = params[i].grad if i < len(params) else None
        same = grad is not None and left() is grad and grad._version == version
        return (params[i], grad) if same and grad is not None else (None, None)

    def speak(self) -> None:
        if self._found and not self._done:
            self._done = True
            warn(
                "closure: it adds to the gradients of the step before; FiniteDifference wants a closure that clears "
                "them, by optimizer.zero_grad(), before it calls backward"
            )


# Buffers.


class _Buffers:
    """Check whether the second call changes buffers that nothing restores.

    Args:
        closure: the user's closure
        restored: module whose buffers the probe restores, or None
    """

    def __init__(self, closure: Closure, restored: nn.Module | None) -> None:
        self._known = set() if restored is None else {id(b) for b in restored.buffers()}
        self._closure = closure
        self._changed: set[str] = set()

    def during(self, closure: Closure) -> Any:
        """Call the closure."""
        modules = [m for module in modules_of(self._closure) for m in module.modules()]
        before = {(m, name): (b, _version(b)) for m in modules for name, b in m._buffers.items() if b is not None}
        loss = closure()
        # Kernels of batch normalisation do not change the versions of their statistics; its counter of batches changes.
        self._changed = {
            type(m).__name__
            for (m, name), (b, version) in before.items()
            if id(b) not in self._known and (m._buffers.get(name) is not b or _version(b) != version)
        }
        return loss

    def speak(self) -> None:
        if self._changed:
            names = ", ".join(sorted(self._changed))
            warn(
                f"closure: it changes buffers of {names}, and FiniteDifference calls it twice; "
                "FiniteDifference(module=model) restores them to their values after the first call"
            )


def _version(b: Tensor) -> int:
    """Number of changes in place; 0 for tensors from inference mode, which do not count them."""
    return 0 if b.is_inference() else b._version
