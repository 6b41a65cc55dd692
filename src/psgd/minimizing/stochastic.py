"""Minimisation of a function with noise: plain steps of ``PSGD``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..criteria import Criterion
from ..groups import Structure
from ..optimizer import PSGD
from ..probes import FiniteDifference, HessianVector, Probe, Whitening
from . import result
from .descent import Limits, Reason, State, Watch
from .objective import Objective

#: decay of the averages of values and gradients
SMOOTH = 0.99


def default_probe(objective: Objective) -> Probe:
    """Probe for pairs on one sample: by autograd, or by two gradients with the same ``rng``; else ``Whitening``."""
    if objective.exact:
        return HessianVector()
    return FiniteDifference() if any(objective.takes_rng) else Whitening()


def wander(
    objective: Objective,
    structure: Structure,
    criterion: Criterion,
    probe: Probe,
    lr: float | None,
    precond_lr: float | None,
    limits: Limits,
    seed: int,
    watch: Watch,
) -> tuple[State, Reason]:
    """Take ``maxiter`` steps: with learning rate ``lr`` for the first half, then with ever smaller ones down to zero.

    The result is the mean over the last quarter. A step moves ``x`` by at most ``lr · max(1, ‖x0‖)``. Values and
    gradients are reported as averages with decay 0.99, and the average of the gradient is compared with ``gtol``.
    """
    if probe.calls_twice and not any(objective.takes_rng):
        raise ValueError(
            "probe: FiniteDifference() takes two gradients of one sample; minimize wants fun(x, …, rng=) that draws "
            "from rng, or Whitening(), or HessianVector()"
        )
    if probe.forward_only and not objective.exact:
        raise ValueError("probe: HessianVector() differentiates fun; minimize wants a tensor x0 and no jac for it")
    if objective.is_difference and not objective.takes_rng[0]:
        raise ValueError(
            "jac: differences of fun take many values of one sample; minimize wants fun(x, …, rng=) that draws from "
            "rng, or jac"
        )
    start = objective.start
    theta = objective.given(start) if objective.numpy is None else torch.from_numpy(objective.given(start))
    theta.requires_grad_()
    whitening = probe.whitens
    length = max(1.0, float(start.norm()))
    size = max(1.0, length / math.sqrt(start.numel()))
    rate = (0.01 * size if whitening else 0.1) if lr is None else lr
    optimizer = PSGD(
        [theta],
        lr=rate,
        preconditioner=structure,
        criterion=criterion,
        probe=probe,
        precond_lr=0.1 if precond_lr is None else precond_lr,
        max_norm=None if whitening else length,
        seed=seed,
    )
    optimizer.tells_skipped = False  # the result does
    loss = _Closure(objective, theta, probe.forward_only)
    value, total, weight = 0.0, torch.zeros_like(start), 0.0
    mean, count = torch.zeros_like(start), 0
    useless = 0
    now = State(start, math.nan, torch.zeros_like(start))
    reason: Reason = result.DONE
    rest = 1 - SMOOTH
    while now.nit < limits.maxiter:
        if objective.nfev >= limits.maxfun:
            reason = result.MAXFUN
            break
        done = now.nit / limits.maxiter
        optimizer.param_groups[0]["lr"] = rate * min(1.0, 2 * (1 - done))
        objective.next_sample()
        f = float(optimizer.step(loss))
        g = loss.gradient if theta.grad is None else theta.grad.reshape(-1)  # FiniteDifference evaluates two
        if now.nit == 0 and not (math.isfinite(f) and bool(torch.isfinite(g).all())):
            raise ValueError(f"x0: fun is {f} there, or its gradient not finite; minimize wants another start")
        if f == -math.inf:
            reason = result.UNBOUNDED
            break
        if not (math.isfinite(f) and bool(torch.isfinite(g).all())):
            useless += 1
        else:
            value, total, weight = SMOOTH * value + rest * f, SMOOTH * total + rest * g, SMOOTH * weight + rest
        now.x, now.f, now.g = theta.detach().reshape(-1).clone(), value / weight, total / weight
        now.nit += 1
        if done >= 0.75:
            mean, count = mean + now.x, count + 1
        if (stop := watch(now)) is not None:
            reason = stop
            break
        if weight > 0.5 and float(now.g.abs().amax()) <= limits.gtol:
            reason = result.GRADIENT
            break
    if count:
        now.x = mean / count
    if reason == result.DONE and 2 * useless > now.nit:
        reason = result.USELESS
    if now.nit == 0:
        reason = result.MAXITER if reason == result.DONE else reason
        now.f, now.g = objective.value(start), objective.gradient(start)
    return now, reason


class _Closure:
    """Closure for ``PSGD.step``: returns a graph for ``HessianVector``, else writes gradients to ``.grad``."""

    def __init__(self, objective: Objective, theta: Tensor, graph: bool) -> None:
        self.objective, self.theta, self.graph = objective, theta, graph
        self.gradient = torch.zeros(theta.numel(), dtype=theta.dtype, device=theta.device)

    def __call__(self) -> Any:
        objective = self.objective
        if self.graph:
            objective.nfev += 1
            objective.njev += 1
            objective.nhev += 1
            loss = objective.graph(self.theta.clone())  # fun may change x in place, which must not move it
            (g,) = torch.autograd.grad(loss, self.theta, retain_graph=True)
            self.gradient = g.detach().reshape(-1)
            return loss
        x = self.theta.detach().reshape(-1).clone()
        f = objective.value(x)
        g = objective.gradient(x)
        self.gradient = g
        self.theta.grad = g.reshape(self.theta.shape)
        return f
