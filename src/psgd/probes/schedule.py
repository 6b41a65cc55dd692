"""Schedule of the updates of ``Q``: the steps at which they are due, and their step size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: number of updates with the largest step size of ``Q``, see ``rate_of_Q``
YOUNG = 150


def is_due(options: Mapping[str, Any], step: int) -> bool:
    """Whether ``Q`` is updated at a step.

    At first it is updated at every step, then more and more rarely, and after ``update_anneal`` steps every
    ``update_every`` steps. The number of updates per step falls exponentially from 1 to ``1 / update_every``, and an
    update is due when the sum of these numbers passes an integer.

    >>> [step for step in range(60) if is_due({"update_every": 10, "update_anneal": 30}, step)]
    [0, 1, 2, 3, 4, 6, 8, 10, 12, 15, 19, 24, 32, 42, 52]
    """
    every, anneal = options["update_every"], options["update_anneal"]
    if every == 1 or anneal == 0:
        return bool(step % every == 0)
    before, after = (math.floor(updates_before(options, t)) for t in (step, step + 1))
    return step == 0 or after > before


def updates_before(options: Mapping[str, Any], step: int) -> float:
    """Number of updates before a step, as a real number: the sum of the rates of all earlier steps."""
    every, anneal = options["update_every"], options.get("update_anneal", 0)
    if every == 1:
        return step
    within = min(step, anneal)
    fast = anneal / math.log(every) * (1 - every ** (-within / anneal)) if anneal else 0.0
    return fast + (step - within) / every


def rate_of_Q(options: Mapping[str, Any], step: int) -> float:
    """Step size of ``Q``: ``precond_boost · precond_lr`` for ``YOUNG`` updates, then ``∝ 1 / age`` to ``precond_lr``.

    At first ``Q`` is far from its optimum and needs long steps; later a smaller step averages over more pairs. The step
    size falls by factors of ``√2``: it has few values, so that CUDA graphs are rarely captured again.

    >>> options = {"precond_lr": 0.1, "precond_boost": 4.0, "update_every": 1}
    >>> [round(rate_of_Q(options, step), 3) for step in (0, 150, 220, 300, 430, 600)]
    [0.4, 0.4, 0.283, 0.2, 0.141, 0.1]
    """
    boost, lr = options["precond_boost"], options["precond_lr"]
    if boost == 1:
        return float(lr)
    age = max(math.floor(updates_before(options, step)) / YOUNG, 1.0)
    factor = boost * 2 ** -(math.floor(2 * math.log2(age)) / 2)
    if factor <= 1:
        return float(lr)
    return min(float(f"{lr * factor:.12g}"), max(lr, 0.9))
