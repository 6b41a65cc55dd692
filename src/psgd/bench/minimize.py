"""``psgd.minimize`` compared with the methods of SciPy: gradients and seconds until a function is as low as 1e-8."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Picture

from ..experiments.figure import Table
from ..minimizing import minimize
from .benchmark import Benchmark, Plan
from .charts import OURS, THEIRS, bars
from .isolate import MissingPackageError, Outcome, Row, Task

TARGET = 1e-8
PSGD, SCIPY = "psgd.minimize", ("BFGS", "L-BFGS-B", "Newton-CG")
#: options with which none of SciPy's methods stops before the target
ENDLESS: dict[str, dict[str, Any]] = {
    "BFGS": {"gtol": 0.0, "maxiter": 10**6},
    "L-BFGS-B": {"gtol": 0.0, "ftol": 0.0, "maxiter": 10**6, "maxfun": 10**7},
    "Newton-CG": {"xtol": 0.0, "maxiter": 10**6},
}

Array = Any


@dataclass(frozen=True)
class Function:
    """A function whose minimum is 0, its gradient, and a point to start from."""

    value: Callable[[Array], float]
    gradient: Callable[[Array], Array]
    start: Array


def rosenbrock(n: int) -> Function:
    def value(x: Array) -> float:
        return float((100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum())

    def gradient(x: Array) -> Array:
        bend = x[1:] - x[:-1] ** 2
        g = np.zeros_like(x)
        g[:-1] = -400 * x[:-1] * bend - 2 * (1 - x[:-1])
        g[1:] += 200 * bend
        return g

    return Function(value, gradient, np.tile([-1.2, 1.0], n // 2))


def beale() -> Function:
    powers, aims = np.array([1, 2, 3]), np.array([1.5, 2.25, 2.625])

    def value(x: Array) -> float:
        return float(((aims - x[0] + x[0] * x[1] ** powers) ** 2).sum())

    def gradient(x: Array) -> Array:
        rest = 2 * (aims - x[0] + x[0] * x[1] ** powers)
        return np.array([rest @ (x[1] ** powers - 1), rest @ (powers * x[0] * x[1] ** (powers - 1))])

    return Function(value, gradient, np.array([1.0, 1.0]))


def himmelblau() -> Function:
    def value(x: Array) -> float:
        return float((x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2)

    def gradient(x: Array) -> Array:
        a, b = x[0] ** 2 + x[1] - 11, x[0] + x[1] ** 2 - 7
        return np.array([4 * x[0] * a + 2 * b, 2 * a + 4 * x[1] * b])

    return Function(value, gradient, np.array([0.0, 0.0]))


def powell() -> Function:
    """Powell's function, whose Hessian is singular at the minimum."""

    def value(x: Array) -> float:
        a, b, c, d = x
        return float((a + 10 * b) ** 2 + 5 * (c - d) ** 2 + (b - 2 * c) ** 4 + 10 * (a - d) ** 4)

    def gradient(x: Array) -> Array:
        a, b, c, d = x
        p, q, r, s = 2 * (a + 10 * b), 10 * (c - d), 4 * (b - 2 * c) ** 3, 40 * (a - d) ** 3
        return np.array([p + s, 10 * p + r, q - 2 * r, -q - s])

    return Function(value, gradient, np.array([3.0, -1.0, 0.0, 1.0]))


def quadratic(n: int, condition: float = 1e8) -> Function:
    """Quadratic function with eigenvalues from ``condition ** -0.5`` to ``condition ** 0.5``, not along the axes."""
    random = np.random.default_rng(0)
    V, _ = np.linalg.qr(random.standard_normal((n, n)))
    H = (V * np.logspace(-0.5, 0.5, n, base=condition)) @ V.T
    return Function(lambda x: float(0.5 * x @ (H @ x)), lambda x: H @ x, random.standard_normal(n))


PROBLEMS: dict[str, Callable[[], Function]] = {
    "Rosenbrock, n = 2": lambda: rosenbrock(2),
    "Rosenbrock, n = 100": lambda: rosenbrock(100),
    "Rosenbrock, n = 1000": lambda: rosenbrock(1000),
    "Beale": beale,
    "Himmelblau": himmelblau,
    "Powell, singular": powell,
    "quadratic, n = 10, condition 1e8": lambda: quadratic(10),
    "quadratic, n = 100, condition 1e8": lambda: quadratic(100),
}


class Reached(Exception):  # noqa: N818
    """Signal that the target was reached: nothing more is measured."""


def work(*, problem: str, method: str) -> Iterator[Row]:
    """Measure evaluations and processor seconds until a value is at most ``TARGET``, however a method ends."""
    if method != PSGD:
        try:
            scipy = importlib.import_module("scipy.optimize")
        except ImportError:
            raise MissingPackageError("scipy") from None
    function = PROBLEMS[problem]()
    small = rosenbrock(2)
    minimize(small.value, small.start, jac=small.gradient, maxiter=3)  # what is loaded and set up only once
    seen = {"value": float("inf"), "functions": 0, "gradients": 0}

    def value(x: Array) -> float:
        seen["functions"] += 1
        f = function.value(x)
        seen["value"] = min(seen["value"], f)
        if f <= TARGET:
            raise Reached
        return f

    def gradient(x: Array) -> Array:
        seen["gradients"] += 1
        return function.gradient(x)

    begin = time.process_time()
    try:
        if method == PSGD:
            minimize(value, function.start, jac=gradient)
        else:
            scipy.minimize(value, function.start, jac=gradient, method=method, options=ENDLESS[method])
    except Reached:
        pass
    yield {"seconds": time.process_time() - begin, **seen}


def tasks(plan: Plan) -> list[Task]:
    names = list(PROBLEMS) if plan.model is None else [plan.model]
    if plan.quick and plan.model is None:
        names = [name for name in names if "1000" not in name]
    return [
        Task(f"{name}; {method}", work, {"problem": name, "method": method}, plan.limit or 120.0)
        for name in names
        for method in (PSGD, *SCIPY)
    ]


def _by_problem(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Outcome]]:
    found: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        settings = outcome.task.settings
        found.setdefault(settings["problem"], {})[settings["method"]] = outcome
    return found


def reached(outcome: Outcome) -> bool:
    return bool(outcome.rows) and outcome.row["value"] <= TARGET


def table(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for problem, group in _by_problem(outcomes).items():
        rows.append([problem, "", "", "", ""])
        for method, outcome in group.items():
            row = outcome.row
            cells = [f"{row[k]:,}" for k in ("gradients", "functions")] if outcome.rows else ["–", "–"]
            cells += [f"{row['seconds']:.3g}", f"{row['value']:.1e}"] if outcome.rows else ["–", "–"]
            rows.append([f"  {method}", *cells])
    caption = "until the function was at most 1e-8, or until a method gave up, with the lowest value that it saw"
    return Table(caption, ("", "gradients", "functions", "seconds", "value"), rows)


def draw(outcomes: Sequence[Outcome]) -> Picture:
    """Draw the numbers of gradients: unlike seconds, they are the same on every machine."""
    groups = _by_problem(outcomes)
    lines = max(1, -(-len(groups) // 2))
    picture = Picture(figsize=(8, 1.3 * lines), layout="constrained")
    panels = list(picture.subplots(lines, 2, squeeze=False).flat)
    for panel in panels[len(groups) :]:
        panel.set_axis_off()
    for panel, (problem, group) in zip(panels, groups.items(), strict=False):
        colors = {method: OURS if method == PSGD else THEIRS for method in group}
        missing = {method: "failed" if o.failure else "not reached" for method, o in group.items()}
        values = {method: float(o.row["gradients"]) if reached(o) else None for method, o in group.items()}
        bars(panel, values, colors, "gradients", missing)
        panel.set_title(problem, fontsize="medium")
    return picture


BENCHMARK = Benchmark(
    "minimize",
    "Gradients and seconds to a value of 1e-8",
    "psgd.minimize with default settings and methods of scipy.optimize.minimize that are not stopped by their own "
    "tolerances, from the usual starts, with gradients in NumPy: evaluations and seconds of the processor until the "
    "function is at most 1e-8 above its minimum. OMP_NUM_THREADS=1 keeps SciPy to one thread too.",
    tasks,
    table,
    draw,
    models=tuple(PROBLEMS),
    peers=(),
)
