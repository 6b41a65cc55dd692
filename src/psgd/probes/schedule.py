"""When ``Q`` is updated, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: number of updates with the first of three step sizes of ``Q``, and with the second, see ``rate_of_Q``
YOUNG = 150


def is_due(options: Mapping[str, Any], step: int) -> bool:
    """Whether ``Q`` is updated at a step: every step at first, then ever more rarely, and after ``update_anneal`` steps
    every ``update_every`` steps.

    The rate falls exponentially from 1 to ``1 / update_every``; an update is due when its sum passes a whole number.

    >>> [step for step in range(60) if is_due({"update_every": 10, "update_anneal": 30}, step)]
    [0, 1, 2, 3, 4, 6, 8, 10, 12, 15, 19, 24, 32, 42, 52]
    """
    every, anneal = options["update_every"], options["update_anneal"]
    if every == 1 or anneal == 0:
        return bool(step % every == 0)
    before, after = (math.floor(updates_before(options, t)) for t in (step, step + 1))
    return step == 0 or after > before


def updates_before(options: Mapping[str, Any], step: int) -> float:
    """Number of updates before a step."""
    every, anneal = options["update_every"], options.get("update_anneal", 0)
    if every == 1:
        return step
    within = min(step, anneal)
    fast = anneal / math.log(every) * (1 - every ** (-within / anneal)) if anneal else 0.0
    return fast + (step - within) / every


def rate_of_Q(options: Mapping[str, Any], step: int) -> float:
    """Step size of ``Q``: first ``precond_boost`` times ``precond_lr``, then the mean of both, and last ``precond_lr``.

    A ``Q`` that knows little has far to go; later a smaller step averages over more gradients. There are three values
    only, so that steps on a GPU need not be recorded anew.

    >>> [rate_of_Q({"precond_lr": 0.1, "precond_boost": 3.0, "update_every": 1}, step) for step in (0, 150, 300)]
    [0.3, 0.2, 0.1]
    """
    boost = options["precond_boost"]
    if boost == 1:
        return float(options["precond_lr"])
    age = updates_before(options, step) // YOUNG
    factor = (boost, (1 + boost) / 2, 1.0)[min(int(age), 2)]
    return min(float(f"{options['precond_lr'] * factor:.12g}"), max(options["precond_lr"], 0.9))
