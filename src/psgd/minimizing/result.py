"""Result of a minimisation, and the reasons why it may stop."""

from __future__ import annotations

from typing import Any

#: reasons why a minimisation stopped: status, whether that is success, message
GRADIENT = (0, True, "Converged: the gradient is at most gtol.")
VALUE = (1, True, "Converged: the function no longer decreases by more than ftol.")
STEP = (2, True, "Converged: the last step was at most xtol.")
MAXITER = (3, False, "Maximum number of iterations reached.")
MAXFUN = (4, False, "Maximum number of function evaluations reached.")
LINE_SEARCH = (
    5,
    False,
    "No lower value was found: is the gradient right, and the function smooth?",
)
UNBOUNDED = (6, False, "The function seems to be unbounded below.")
DONE = (7, True, "All iterations were taken.")
USELESS = (8, False, "Most values or gradients were not finite, so most steps were left out.")
CALLBACK = (99, False, "`callback` raised `StopIteration`.")


class OptimizeResult(dict[str, Any]):
    """Result of ``minimize``: a dict whose items are also attributes, with the names that SciPy uses.

    Attributes:
        x: the solution, with the kind, shape and dtype of ``x0``
        fun: value of the function at ``x``
        jac: gradient of the function at ``x``, with the shape of ``x``
        nit: number of iterations
        nfev: number of evaluations of the function
        njev: number of evaluations of the gradient
        nhev: number of Hessian-vector products of ``probe``
        success: whether the minimisation converged
        status: number that tells why the minimisation stopped, see the page about ``minimize``
        message: text that tells why the minimisation stopped

    >>> r = OptimizeResult(x=1.0, success=True)
    >>> r.x == r["x"], dir(r)
    (True, ['success', 'x'])
    >>> r
     success: True
           x: 1.0
    """

    __delattr__ = dict.__delitem__

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as e:
            raise AttributeError(name) from e

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __dir__(self) -> list[str]:
        return sorted(self)

    def copy(self) -> OptimizeResult:
        """Copy with the same items."""
        return OptimizeResult(self)

    def __repr__(self) -> str:
        first = ("message", "success", "status", "fun", "x", "nit", "jac", "nfev", "njev", "nhev")
        names = [name for name in first if name in self] + sorted(set(self) - set(first))
        width = max((len(name) for name in names), default=0) + 1
        lines = []
        for name in names:
            value = self[name]
            text = value if name == "message" else _brief(value) if hasattr(value, "shape") else repr(value)
            lines.append(f"{name:>{width}}: " + text.replace("\n", "\n" + " " * (width + 2)))
        return "\n".join(lines) or f"{type(self).__name__}()"


def _brief(array: Any, most: int = 6) -> str:
    """Array in one line, with dots in the middle of a long one."""
    flat = [f"{float(v):.4g}" for v in array.reshape(-1)[:most]]
    if array.ndim == 0:
        return repr(array)
    dots = ", …" if array.reshape(-1).shape[0] > most else ""
    shape = "" if array.ndim == 1 and not dots else f" of shape {tuple(array.shape)}"
    return f"[{', '.join(flat)}{dots}]{shape}"
