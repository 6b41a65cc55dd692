"""Targets of the panel of ``psgd bench defaults``, from AdamW and SGD with momentum alone.

The rule is in ``psgd.bench.panel``. All problems take about ten minutes::

    python tools/panel_targets.py [PROBLEM ...]
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from statistics import median

import torch
from torch import nn

from psgd.bench import panel

#: seeds that the benchmark does not use
SEEDS = (100, 101, 102)
#: two step sizes for each decade
RATES = [10 ** (k / 2) for k in range(-8, 1)]
#: share of the budget after which AdamW has the value that is the target
SHARE = 0.6


def adamw(model: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr or 0.0)


def momentum(model: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr or 0.0, momentum=0.9)


def ends(problem: panel.PanelProblem, make: panel.MakeOptimizer, target: float) -> dict[float, float]:
    """Return the median of the values at which runs end, for each step size."""
    found = {}
    for lr in RATES:
        values = [panel.run(problem, make, lr, seed, target=target).value for seed in seeds(problem)]
        found[lr] = median(value if math.isfinite(value) else math.inf for value in values)
    return found


def seeds(problem: panel.PanelProblem) -> tuple[int, ...]:
    return SEEDS if problem.random else SEEDS[:1]


def rounded_up(value: float) -> float:
    """Value with two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.2g}")


def target(problem: panel.PanelProblem) -> float:
    if problem.kind in ("function", "factorisation"):
        start = median(problem.make(seed).value() for seed in seeds(problem))
        for make in (adamw, momentum):
            found = ends(problem, make, 1e-6 * start)
            report(problem, make.__name__, found)
            if min(found.values()) < 1e-6 * start:
                return rounded_up(1e-6 * start)
        return rounded_up(1e-4 * start)
    found = ends(replace(problem, evaluations=round(SHARE * problem.evaluations)), adamw, -math.inf)
    report(problem, "adamw", found)
    return rounded_up(min(found.values()))


def report(problem: panel.PanelProblem, method: str, found: dict[float, float]) -> None:
    print(f"{problem.name}, {method}:", *(f"{lr:.1e} {value:.3g};" for lr, value in found.items()), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or panel.PROBLEMS:
        problem = panel.PROBLEMS[name]
        print(f"{name}: {target(problem):g}, in the code {problem.target:g}", flush=True)
