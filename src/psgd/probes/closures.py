"""Calls of the user's closure and of autograd, with checks that the closure does what the probe needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from .restore import Gradients

Closure = Callable[[], Any]


def evaluate(closure: Closure) -> Any:
    with torch.enable_grad():
        return closure()


def evaluate_loss(closure: Closure, probe: str) -> Any:
    """Call an ordinary closure (zero_grad, backward, return the loss) and check that it returned a loss.

    A closure may return None if there is no loss, as in frameworks that skip a mini-batch.
    """
    loss = evaluate(closure)
    if loss is None or isinstance(loss, Tensor) or number_of(loss) is not None:
        return loss
    raise ValueError(
        f"closure: it returned {describe(loss)}; {probe} wants the loss alone, as a tensor or a number, or None: "
        "the step is skipped if the loss is not finite"
    )


def evaluate_backward(closure: Closure, params: Sequence[Tensor], probe: str) -> Any:
    """Call an ordinary closure, and check that it computed gradients, unless it returned None instead of a loss."""
    before = [(p.grad, None if p.grad is None else p.grad._version) for p in params]
    loss = evaluate_loss(closure, probe)
    if loss is None:
        return None
    for p, (grad, version) in zip(params, before, strict=True):
        if p.grad is not None and (p.grad is not grad or p.grad._version != version):
            return loss
    raise ValueError(
        f"closure: it left no gradient on any parameter; {probe} wants a closure that calls backward() on the loss "
        "and returns it (HessianVector takes one that only returns the loss)"
    )


def evaluate_forward(closure: Closure, start: Gradients, who: str) -> Tensor:
    """Call a closure that only returns the loss, and check that it returned a loss and did not call ``backward``."""
    start.hide()
    try:
        loss = evaluate(closure)
        called_backward = any(p.grad is not None for p in start.params)
    finally:
        start.restore()
    if called_backward:
        raise ValueError(
            f"closure: it called backward(); {who} wants a closure that only returns the loss "
            "(FiniteDifference takes one that calls backward)"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"closure: it returned {describe(loss)}; {who} wants the loss as a tensor with one element that "
            "still knows its graph (no .item(), no .detach())"
        )
    return loss


#: parts of torch's errors if a derivative cannot be differentiated again: two of compiled models, one of attention
_ONCE_ONLY = ("support double backward", "requires create_graph=False", "derivative for")


def differentiate(
    of: Tensor | Sequence[Tensor], by: Sequence[Tensor], v: Sequence[Tensor] | None = None, create_graph: bool = False
) -> Sequence[Tensor | None]:
    """``torch.autograd.grad``, with advice in the error if an operation can be differentiated only once."""
    try:
        return torch.autograd.grad(of, by, v, create_graph=create_graph, allow_unused=True)
    except RuntimeError as error:
        if not any(words in str(error) for words in _ONCE_ONLY):
            raise
        raise RuntimeError(
            f"closure: HessianVector wants a model that can be differentiated twice, but {error}; FiniteDifference() "
            "wants one derivative only. Or call the model as it was before torch.compile, and attention by "
            "SDPBackend.MATH"
        ) from error


def describe(value: object) -> str:
    """Short description of a value that a closure returned."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} items"
    return repr(value)


def is_finite(loss: Any) -> bool:
    """Whether a loss that is not a tensor is finite; True for a value that is not a number, such as None."""
    number = number_of(loss)
    return number is None or math.isfinite(number)


def number_of(value: Any) -> float | None:
    """Value of a Python or NumPy number, or None if it is not a number."""
    if value is None or isinstance(value, float):  # the usual case, and far faster than the check below
        return value
    try:
        return float(value) if isinstance(value, SupportsFloat) else None
    except OverflowError:  # an integer that no float can hold
        return math.inf
    except (TypeError, ValueError):  # an array of several numbers
        return None
