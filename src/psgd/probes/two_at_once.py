"""Both gradients of a finite difference at once: the model is evaluated for a stack of two sets of parameters.

The paper suggests this for parallel hardware: half as many products, each twice as large. A single CPU thread gains
nothing. The parameters of the module are swapped while the closure runs, so ``θ`` itself is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..ops.real import as_real, from_real
from .closures import describe

#: name of the probe in errors
WHO = "FiniteDifference(batched=True)"


class _Holder(nn.Module):
    """Module whose forward pass calls a closure, because ``functional_call`` needs a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, closure: Callable[[], Any]) -> Any:
        return closure()


def gradients(loss: Tensor, params: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of a loss; None for frozen parameters and for parameters that it does not depend on."""
    used = [p for p in params if p.requires_grad]
    found = iter(torch.autograd.grad(loss, used, allow_unused=True))
    grads = [next(found) if p.requires_grad else None for p in params]
    _check_dependence(grads)
    return grads


def measure(
    closure: Callable[[], Any], module: nn.Module, params: Sequence[Tensor], beside: Mapping[int, Tensor]
) -> tuple[Tensor, list[Tensor | None], dict[int, tuple[Tensor, Tensor]]]:
    """Loss and gradients at ``θ``, and the pairs ``(δθ, δg)`` of the parameters that move, by position.

    Args:
        closure: closure that returns the loss, and uses the parameters through ``module`` only
        module: module with all parameters
        params: parameters of the optimizer
        beside: ``θ + δθ`` as real arrays, by position; for the other parameters ``δθ`` is zero
    """
    torch.clear_autocast_cache()  # it would return weights from before the swap
    try:
        moved = {i: from_real(theta, params[i]) for i, theta in beside.items()}
        loss, both = _two_gradients(closure, module, params, moved)
    finally:
        torch.clear_autocast_cache()
    grads = [None if (g := both.get(i)) is None else g[0] for i in range(len(params))]
    pairs = {
        i: (theta - as_real(params[i].detach()), as_real(both[i][1] - both[i][0]))
        for i, theta in beside.items()
        if i in both
    }
    return loss, grads, pairs


def _two_gradients(
    closure: Callable[[], Any], module: nn.Module, params: Sequence[Tensor], moved: Mapping[int, Tensor]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Loss at ``θ``, and the stacked gradients at ``θ`` and ``θ + δθ`` of the parameters that it depends on.

    Ordinary autograd differentiates through ``vmap``: unlike ``torch.func.grad`` it can tell a parameter that is not
    used from one whose gradient is zero. Buffers get their values from the evaluation at ``θ``.
    """
    holder = _Holder(module)
    places = _places(holder, params)
    buffers = {name: b for path, m in holder.named_modules() for name, b in m.named_buffers(path, recurse=False)}
    replaced: set[str] = set()

    def loss_and_buffers(theta: dict[int, Tensor], given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        swapped = {**{name: theta[i] for i, names in places.items() for name in names}, **given}
        loss = functional_call(holder, swapped, (closure,), tie_weights=False)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"closure: it returned {describe(loss)}; {WHO} wants the loss as a tensor with one element"
            )
        replaced.update(name for name, b in given.items() if swapped[name] is not b)
        return loss.reshape(()), {name: swapped[name].detach() for name in given}

    with torch.enable_grad():
        thetas = {
            i: torch.stack([params[i].detach(), moved.get(i, params[i]).detach()]).requires_grad_() for i in places
        }
        stacked = {name: torch.stack([b.detach(), b.detach()]) for name, b in buffers.items()}
        try:
            losses, after = vmap(loss_and_buffers, randomness="same")(thetas, stacked)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise _explained(error) from error
    if not losses.requires_grad:
        _check_dependence([])
    # The parameters themselves come last: the loss should not depend on them, as the module used the swapped ones.
    inputs = [*thetas.values(), *(params[i] for i in places)]
    found = torch.autograd.grad(losses, inputs, torch.ones_like(losses), allow_unused=True)
    for (i, names), outside in zip(places.items(), found[len(places) :], strict=True):
        if outside is not None:
            raise ValueError(
                f"closure: it uses parameter {i}, {names[0].removeprefix('module.')}, not by way of the module; {WHO} "
                "wants all parameters to be reached through it, at each call"
            )
    both = {i: g for i, g in zip(places, found, strict=False) if g is not None}
    _check_dependence(list(both.values()))
    for name, b in buffers.items():
        if name in replaced:
            path, _, last = name.rpartition(".")
            setattr(holder.get_submodule(path), last, after[name][0].clone())
        elif 0 not in b.stride():  # otherwise it is expanded, and cannot have been written to
            b.copy_(after[name][0])
    return losses[0].detach(), both


def _places(holder: _Holder, params: Sequence[Tensor]) -> dict[int, list[str]]:
    """Names of the trainable parameters in the module, by position; tied weights have several names.

    Each attribute of a module has one name here, even if the module can be reached on several paths because it is used
    more than once. ``functional_call`` alone would swap its weights once for each path, and restore the wrong ones.
    """
    known: dict[int, list[str]] = {}
    for path, m in holder.named_modules():
        for name, p in m.named_parameters(path, recurse=False, remove_duplicate=False):
            known.setdefault(id(p), []).append(name)
    for i, p in enumerate(params):
        if p.requires_grad and id(p) not in known:
            raise ValueError(
                f"module={type(holder.module).__name__}: parameter {i} of the optimizer, of shape {tuple(p.shape)}, is "
                f"not in it; {WHO} wants a module with all of them"
            )
    return {i: known[id(p)] for i, p in enumerate(params) if p.requires_grad}


def _check_dependence(grads: Sequence[Tensor | None]) -> None:
    if all(grad is None for grad in grads):
        raise ValueError("closure: the loss it returned does not depend on any parameter of the optimizer")


def _explained(error: Exception) -> ValueError:
    if "backward() called inside" in str(error):
        return ValueError(
            f"closure: it called backward(); {WHO} wants a closure that only returns the loss (batched=False takes one "
            "that calls backward)"
        )
    return ValueError(
        f"module: it could not be evaluated for two sets of parameters at once ({str(error).strip()}); "
        "where torch.func.vmap is in the way, FiniteDifference(batched=False) works, with a closure that calls backward"
    )
