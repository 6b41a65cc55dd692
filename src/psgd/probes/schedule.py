"""When ``Q`` is updated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


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

    def updates_before(t: int) -> float:
        within = min(t, anneal)
        return anneal / math.log(every) * (1 - every ** (-within / anneal)) + (t - within) / every

    return step == 0 or math.floor(updates_before(step + 1)) > math.floor(updates_before(step))
