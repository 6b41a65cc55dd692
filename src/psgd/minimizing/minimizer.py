"""``minimize``: checks its arguments, and calls the minimisation with or without noise."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..criteria import Criterion, c3
from ..groups import Dense, Diagonal, Kronecker, Structure
from ..probes import Probe
from ..state import checks
from . import result
from .descent import Limits, Reason, State, descend
from .metric import Metric
from .objective import FORWARD, Objective
from .result import OptimizeResult
from .stochastic import default_probe, wander

#: largest number of elements that get a dense Q by default
MAX_DENSE = 512


def minimize(
    fun: Callable[..., Any],
    x0: Any,
    args: Any = (),
    *,
    jac: Any = None,
    bounds: Any = None,
    constraints: Any = (),
    tol: float | None = None,
    callback: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    gtol: float | None = None,
    ftol: float | None = None,
    xtol: float | None = None,
    maxiter: int | None = None,
    maxfun: int | None = None,
    disp: bool = False,
    stochastic: bool = False,
    preconditioner: Structure | None = None,
    criterion: Criterion = c3,
    probe: Probe | None = None,
    precond_lr: float | None = None,
    lr: float | None = None,
    seed: int = 0,
) -> OptimizeResult:
    """Minimise a function of one array by preconditioned gradient descent.

    The interface is that of ``scipy.optimize.minimize``. If ``x0`` is a tensor, autograd computes the gradient, and the
    result is a tensor. If ``x0`` is a NumPy array, or something that converts to one, the result is a NumPy array.
    ``x0`` may have any shape and is not changed; float32 stays float32, and integers become float64.

    Without noise, each iteration searches along a preconditioned direction for a lower value, and fits ``Q`` to the
    change of the gradient. With the paper's criterion and a dense ``Q``, this is a quasi-Newton method that does not
    depend on the sign of curvature. With ``stochastic=True``, ``minimize`` takes plain steps of ``PSGD``.

    Args:
        fun: the function, called as ``fun(x, *args)``. If it has a keyword ``rng``, it gets a generator, of torch or
            NumPy, that gives the same numbers at every call. With ``stochastic``, the numbers are the same at every
            call of one iteration.
        x0: starting point
        args: further arguments of ``fun`` and ``jac``
        jac: the gradient, called as ``jac(x, *args)``; or True, if ``fun`` returns ``(value, gradient)``; or
            ``"2-point"`` or ``"3-point"`` for finite differences of ``fun``. The default is autograd for tensors. For
            arrays it is forward differences, and central differences near the solution.
        bounds: not supported; raises an error
        constraints: not supported; raises an error
        tol: the same as ``gtol``
        callback: ``callback(xk)`` or ``callback(intermediate_result)``, called after each iteration; if it raises
            ``StopIteration``, the minimisation stops
        options: the keywords below as a dict, as with SciPy
        gtol: the minimisation has converged if no element of the gradient is larger. The default is the square root of
            the machine precision, or its cubic root with ``jac="2-point"``. With ``stochastic``, the gradient is an
            average over some hundred iterations, and the default is 0.
        ftol: the minimisation has converged after three iterations that each made the function lower by at most
            ``ftol · max(|f|, 1)``. By default this applies only if the difference is rounding. Not supported with
            ``stochastic``.
        xtol: the minimisation has converged after a step of at most ``xtol · max(|x|, 1)``; by default 0. Not supported
            with ``stochastic``.
        maxiter: largest number of iterations; by default 200 for each element of ``x0``, and at least 1000
        maxfun: number of evaluations of ``fun`` after which no new iteration begins; by default there is no limit
        disp: print why the minimisation stopped
        stochastic: whether the function has noise
        preconditioner: structure of ``P``; by default ``Dense()`` up to 512 elements, then
            ``Kronecker(inverse_free=False)`` for matrices and ``Diagonal()`` for vectors
        criterion: criterion that ``P`` is fitted to
        probe: source of pairs. Without noise, ``HessianVector()`` or ``FiniteDifference()`` adds a pair in a random
            direction at each iteration to the pair of the step. With noise, the default is ``HessianVector()`` with
            autograd, ``FiniteDifference()`` if ``fun`` has a keyword ``rng``, and otherwise ``Whitening()``.
        precond_lr: step size of ``Q``; without noise, its largest step size
        lr: learning rate with ``stochastic``. The default is 0.1, or 0.01 with ``Whitening()``, multiplied by the root
            mean square of ``x0`` if that is more than 1.
        seed: seed of the random numbers; no global generator is used

    Returns:
        ``x``, ``fun``, ``jac``, ``nit``, ``nfev``, ``njev``, ``nhev``, ``success``, ``status`` and ``message``

    >>> import torch, psgd
    >>> def rosenbrock(x):
    ...     return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()
    >>> result = psgd.minimize(rosenbrock, torch.tensor([-1.2, 1.0], dtype=torch.float64))
    >>> result.success, result.message, result.fun < 1e-12
    (True, 'Converged: the gradient is at most gtol.', True)
    """
    if options:
        given = {"gtol": gtol, "ftol": ftol, "xtol": xtol, "maxiter": maxiter, "maxfun": maxfun}
        given |= {"precond_lr": precond_lr, "lr": lr, "disp": disp or None}
        for name in options:
            if name not in given:
                raise ValueError(f"options: {name!r} is not among {', '.join(given)}")
            if given[name] is not None:
                raise ValueError(f"options: {name!r} is given twice")
        merged: dict[str, Any] = {**given, **options}
        gtol, ftol, xtol, maxiter, maxfun = (merged[k] for k in ("gtol", "ftol", "xtol", "maxiter", "maxfun"))
        precond_lr, lr, disp = merged["precond_lr"], merged["lr"], bool(merged["disp"])
    _unsupported("bounds", bounds)
    _unsupported("constraints", constraints)
    for name, number in (("tol", tol), ("gtol", gtol), ("ftol", ftol), ("xtol", xtol), ("lr", lr)):
        _tolerance(name, number)
    _count("maxiter", maxiter)
    _count("maxfun", maxfun)
    if precond_lr is not None and not (_is_number(precond_lr) and 0 < precond_lr < 1):
        raise ValueError(f"precond_lr={precond_lr!r}: minimize wants a number between 0 and 1, both excluded")
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise ValueError(f"seed={seed!r}: minimize wants a whole number")
    checks.function("criterion", criterion, "c1, c2, c3 or a function like them")
    if preconditioner is not None:
        checks.choice("preconditioner", preconditioner, Structure)
    if probe is not None:
        checks.choice("probe", probe, Probe)
    if not stochastic and probe is not None and probe.whitens:
        raise ValueError(f"probe={probe!r}: there is nothing to whiten without noise; minimize wants stochastic=True")
    if not stochastic and lr is not None:
        raise ValueError(f"lr={lr!r}: without noise a line search finds it; minimize wants None, or stochastic=True")
    if stochastic and (ftol is not None or xtol is not None):
        raise ValueError("ftol, xtol: single values and steps say little with noise; minimize wants gtol or maxiter")

    with torch.inference_mode(False):  # derivatives are needed in every mode of the caller
        objective = Objective(fun, x0, args, jac, int(seed))
        n, eps = objective.start.numel(), float(torch.finfo(objective.start.dtype).eps)
        digits = 1 / 3 if objective.jac == FORWARD and not objective.refinable else 1 / 2
        limits = Limits(
            gtol=next((v for v in (gtol, tol) if v is not None), 0.0 if stochastic else eps**digits),
            ftol=ftol,
            xtol=0.0 if xtol is None else xtol,
            maxiter=max(1000, 200 * n) if maxiter is None else maxiter,
            maxfun=math.inf if maxfun is None else maxfun,
        )
        shape = tuple(objective.shape) or (1,)
        structure = _structure(shape) if preconditioner is None else preconditioner
        watch = _watch(callback, objective)
        if stochastic:
            chosen = default_probe(objective) if probe is None else probe
            now, reason = wander(objective, structure, criterion, chosen, lr, precond_lr, limits, int(seed), watch)
        else:
            metric = Metric(structure, shape, objective.start, criterion, precond_lr)
            now, reason = descend(objective, metric, limits, int(probe is not None), int(seed), watch)
        found = _result(objective, now, reason)
    if disp:
        print(found.message)
        for text, name in (("value", "fun"), ("iterations", "nit"), ("evaluations", "nfev"), ("gradients", "njev")):
            print(f"  {text}: {found[name]}")
    return found


def _structure(shape: tuple[int, ...]) -> Structure:
    if math.prod(shape) <= MAX_DENSE:
        return Dense()
    return Kronecker(inverse_free=False) if sum(n > 1 for n in shape) > 1 else Diagonal()


def _watch(callback: Callable[..., Any] | None, objective: Objective) -> Callable[[State], Reason | None]:
    """Callback in either of SciPy's two forms, as a function of the state."""
    if callback is None:
        return lambda now: None
    if not callable(callback):
        raise TypeError(f"callback={callback!r}: minimize wants a function, or None")
    try:
        modern = set(inspect.signature(callback).parameters) == {"intermediate_result"}
    except (TypeError, ValueError):
        modern = False

    def watch(now: State) -> Reason | None:
        try:
            if modern:
                callback(intermediate_result=_result(objective, now, None))
            else:
                callback(objective.given(now.x))
        except StopIteration:
            return result.CALLBACK
        return None

    return watch


def _result(objective: Objective, now: State, reason: Reason | None) -> OptimizeResult:
    found = OptimizeResult(x=objective.given(now.x), fun=now.f, jac=objective.given(now.g), nit=now.nit)
    found.update(nfev=objective.nfev, njev=objective.njev, nhev=objective.nhev)
    if reason is not None:
        found.update(zip(("status", "success", "message"), reason, strict=True))
    return found


def _unsupported(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, (tuple, list)) and not value):
        raise ValueError(f"{name}: minimize is for functions of all x; scipy.optimize.minimize has methods with {name}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _tolerance(name: str, value: Any) -> None:
    if value is not None and not (_is_number(value) and 0 <= value < math.inf):
        raise ValueError(f"{name}={value!r}: minimize wants a finite number of at least 0, or None")


def _count(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0):
        raise ValueError(f"{name}={value!r}: minimize wants a whole number of at least 0, or None")
