"""The function to minimise, as the minimiser sees it: of a flat tensor, with its gradient, and with counters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..probes.noise import mix

FORWARD, CENTRAL = "2-point", "3-point"


class Objective:
    """The user's ``fun`` with its gradient, as functions of flat tensors that are never changed in place.

    The value and the gradient at one point share an evaluation, if the gradient is the next call.

    Args:
        fun: function of an array like ``x0``, of ``args``, and of a keyword ``rng``, if it has one
        x0: a tensor, a NumPy array, or what NumPy converts to one
        args: further arguments of ``fun`` and ``jac``
        jac: the gradient as a function; True if ``fun`` returns it too; ``"2-point"`` or ``"3-point"`` for
            differences of ``fun``; None for autograd or, with NumPy, for differences
        seed: seed of the generators that ``rng`` is
    """

    def __init__(self, fun: Callable[..., Any], x0: Any, args: Any, jac: Any, seed: int) -> None:
        if not callable(fun):
            raise TypeError(f"fun={fun!r}: minimize wants a function")
        if not (
            jac is None
            or isinstance(jac, bool)
            or callable(jac)
            or (isinstance(jac, str) and jac in (FORWARD, CENTRAL))
        ):
            raise ValueError(f"jac={jac!r}: minimize wants a function, True, {FORWARD!r}, {CENTRAL!r} or None")
        self.fun = fun
        self.args: tuple[Any, ...] = args if isinstance(args, tuple) else (args,)
        self.numpy: Any = None
        start = x0 if isinstance(x0, Tensor) else self._from_numpy(x0)
        self.start = _checked(start)
        self.shape = start.shape
        #: gradient as a function or a rule for differences; True, or None for autograd
        self.jac = jac if jac is not None and jac is not False else FORWARD if self.numpy is not None else None
        #: whether central differences may replace forward ones that are too coarse: if the user did not choose these
        self.refinable = self.jac == FORWARD and jac != FORWARD
        self.takes_rng = [_takes_rng(f, 1 + len(self.args)) for f in (fun, self.jac)]
        self.seed, self.sample = seed, 0
        self.nfev = self.njev = self.nhev = 0
        self._last: tuple[Tensor, Any, Any] | None = None

    def _from_numpy(self, x0: Any) -> Tensor:
        try:
            import numpy
        except ImportError:  # pragma: no cover
            raise TypeError("x0: minimize wants a torch.Tensor, or NumPy to be installed") from None
        self.numpy = numpy
        array = numpy.asarray(x0)
        if array.dtype.kind not in "biufc":
            raise TypeError(f"x0={x0!r}: minimize wants an array of numbers")
        if array.dtype.kind == "c":
            array = array.astype(numpy.complex128)  # refused later, also if it has a higher precision
        if array.dtype.kind in "biu" or array.dtype == numpy.float16 or array.dtype.itemsize > 16:
            array = array.astype(numpy.float64)
        if array.dtype.kind == "f":  # also long doubles, and other byte orders
            array = array.astype(numpy.float32 if array.dtype.itemsize == 4 else numpy.float64)
        return torch.from_numpy(array.copy())

    @property
    def exact(self) -> bool:
        """Whether Hessian-vector products are exact."""
        return self.jac is None

    @property
    def is_difference(self) -> bool:
        return self.jac in (FORWARD, CENTRAL)

    def given(self, x: Tensor) -> Any:
        """Copy of ``x`` with the kind and shape of ``x0``, for the user."""
        x = x.detach().reshape(self.shape).clone()
        return x if self.numpy is None else x.numpy()

    def value(self, x: Tensor) -> float:
        f, _ = self._evaluate(x)
        return f

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient, flat. Right after ``value`` at the same point it needs no further evaluation of ``fun``."""
        if self.is_difference:
            f, _ = self._evaluate(x)
            return self._differences(x, f)
        self.njev += 1
        if callable(self.jac):
            return self._flat(self.jac(self.given(x), *self.args, **self._rng(1)), x)
        _, rest = self._evaluate(x)
        if self.jac is True:
            return self._flat(rest, x)
        theta, loss = rest
        (g,) = torch.autograd.grad(loss, theta, retain_graph=True)
        return g.detach().reshape(-1)

    def product(self, x: Tensor, g: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Pair ``(δθ, δg)``: ``(v, H v)`` by autograd, else a difference of gradients along ``v``."""
        self.nhev += 1
        if self.exact:
            _, (theta, loss) = self._evaluate(x)
            (grad,) = torch.autograd.grad(loss, theta, create_graph=True)
            if not grad.requires_grad:
                return v, torch.zeros_like(v)
            (hv,) = torch.autograd.grad(grad, theta, v.reshape(theta.shape), retain_graph=True)
            return v, hv.detach().reshape(-1)
        eps = float(torch.finfo(x.dtype).eps)
        size = max(1.0, float(x.abs().amax()))
        step = (eps ** (0.25 if self.is_difference else 0.5) * size) * v
        moved = x + step
        return moved - x, self.gradient(moved) - g

    def refine(self) -> bool:
        """Switch to central differences; return False if there is nothing finer."""
        if not self.refinable:
            return False
        self.jac, self.refinable = CENTRAL, False
        return True

    def next_sample(self) -> None:
        """Start ``rng`` from another seed; until the next call every evaluation sees the same random numbers."""
        self.sample += 1
        self._last = None

    def _rng(self, which: int) -> dict[str, Any]:
        if not self.takes_rng[which]:
            return {}
        seed = mix(self.seed, self.sample)
        if self.numpy is not None:
            return {"rng": self.numpy.random.default_rng(seed)}
        return {"rng": torch.Generator(self.start.device).manual_seed(seed)}

    def _evaluate(self, x: Tensor) -> tuple[float, Any]:
        """Value, and what the gradient needs besides; the last evaluation is cached."""
        if self._last is not None and self._last[0] is x:
            return self._last[1], self._last[2]
        self._last = None
        self.nfev += 1
        rest: Any = None
        if self.jac is None:
            with torch.enable_grad():
                theta = self.given(x).requires_grad_()
                found = self.graph(theta)
                rest = (theta, found)
        else:
            found = self.fun(self.given(x), *self.args, **self._rng(0))
            if self.jac is True:
                if not isinstance(found, (tuple, list)) or len(found) != 2:
                    raise ValueError(f"fun: it returned {_name(found)}; with jac=True minimize wants (value, gradient)")
                found, rest = found
        f = _scalar(found.detach() if isinstance(found, Tensor) else found)
        self._last = (x, f, rest)
        return f, rest

    def graph(self, theta: Tensor) -> Tensor:
        """Value at ``theta``, which has the shape of ``x0``, with its autograd graph."""
        found = self.fun(theta, *self.args, **self._rng(0))
        self._check_graph(found)
        _scalar(found.detach())
        return found.reshape(())

    def _check_graph(self, found: Any) -> None:
        if isinstance(found, Tensor) and not found.requires_grad:
            raise ValueError(
                "fun: what it returned has no graph; for autograd it wants to be computed from x by torch, without "
                f"detach() or item(); else give jac=, or jac={FORWARD!r}"
            )
        if not isinstance(found, Tensor):
            raise ValueError(
                f"fun: it returned {_name(found)}; for a tensor x0 minimize wants a tensor with one element, or jac="
            )

    def _flat(self, g: Any, x: Tensor) -> Tensor:
        if self.numpy is not None and not isinstance(g, Tensor):
            g = torch.from_numpy(self.numpy.array(g, dtype=self.numpy.float64))
        if not isinstance(g, Tensor):
            raise ValueError(f"jac: it returned {_name(g)}; minimize wants a tensor of the shape of x0")
        if g.numel() != x.numel():
            raise ValueError(f"jac: it returned {_name(g)}; minimize wants the shape {tuple(self.shape)} of x0")
        return g.detach().reshape(-1).to(x.dtype, copy=True).to(x.device)

    def _differences(self, x: Tensor, f: float) -> Tensor:
        eps = float(torch.finfo(x.dtype).eps)
        central = self.jac == CENTRAL
        sizes = (eps ** (1 / 3 if central else 1 / 2) * x.abs().clamp_min(1)).tolist()
        at = x.tolist()
        g = []
        for i, (xi, h) in enumerate(zip(at, sizes, strict=True)):
            ahead, up = self._beside(x, i, xi + h)
            if central or ahead - ahead != 0:
                behind, down = self._beside(x, i, xi - h)
                if behind - behind != 0:
                    behind, down = f, xi
                if ahead - ahead != 0:
                    ahead, up = f, xi
                g.append((ahead - behind) / (up - down) if up != down else float("nan"))
            else:
                g.append((ahead - f) / (up - xi))
        self.njev += 1
        return torch.tensor(g, dtype=x.dtype, device=x.device)

    def _beside(self, x: Tensor, i: int, xi: float) -> tuple[float, float]:
        """Value with ``xi`` as coordinate ``i``, and ``xi`` after rounding."""
        other = x.clone()
        other[i] = xi
        self.nfev += 1
        found = self.fun(self.given(other), *self.args, **self._rng(0))
        return _scalar(found), float(other[i])


def _checked(x: Tensor) -> Tensor:
    if x.is_complex():
        raise ValueError(f"x0: it is of dtype {x.dtype}; minimize wants real numbers: torch.view_as_real makes them")
    if x.numel() == 0:
        raise ValueError(f"x0: it is empty, of shape {tuple(x.shape)}; minimize wants at least one number")
    if not x.is_floating_point():
        x = x.to(torch.float64)
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x0: it is of dtype {x.dtype}; minimize wants float32 or float64")
    x = x.detach().reshape(-1).clone()
    if not bool(torch.isfinite(x).all()):
        raise ValueError("x0: not all of it is finite")
    return x


def _scalar(found: Any) -> float:
    size: Sequence[int] = getattr(found, "shape", ())
    if found is None or isinstance(found, (tuple, list, str, dict)) or any(n != 1 for n in size):
        hint = " (jac=True is for a function that returns its gradient too)" if isinstance(found, tuple) else ""
        raise ValueError(f"fun: it returned {_name(found)}; minimize wants one number{hint}")
    if hasattr(found, "item"):
        found = found.item()
    if isinstance(found, complex):
        raise ValueError(f"fun: it returned {found!r}; minimize wants a real number")
    try:
        return float(found)
    except TypeError:
        raise ValueError(f"fun: it returned {_name(found)}; minimize wants one number") from None


def _takes_rng(f: Any, taken: int) -> bool:
    """Whether a function has a parameter ``rng`` after the first ``taken`` ones, which are passed by position."""
    if not callable(f):
        return False
    try:
        return "rng" in list(inspect.signature(f).parameters)[taken:]
    except (TypeError, ValueError):
        return False


def _name(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)
