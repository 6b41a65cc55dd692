"""The protocol of comparisons: how the learning rate of each optimizer is chosen, and with which seeds it is judged.

Every optimizer has the same number of learning rates, over the same factor, around its own default. They are tuned with
a seed that results are not reported for. ``docs/protocol.md`` is this page for readers of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from .isolate import Row

#: learning rates that every optimizer has, in half decades from its own default: seven, over a factor of a thousand
HALF_DECADES = (0, -1, 1, -2, 2, -3, 3)
#: most half decades beyond these, one at a time, while the best learning rate is the smallest or largest that was tried
FURTHER = 5
#: seed with which learning rates are compared
TUNING_SEED = 100
#: seeds of the results, with the best learning rate and with the default
TEST_SEEDS = (7, 8, 9)

#: roles of runs: to find the learning rate, with the one that was found, and with the default
TUNING, TUNED, DEFAULT = "tuning", "tuned", "default"

#: the protocol in a few sentences, to be printed beside a table
TEXT = (
    f"Protocol: every optimizer has {len(HALF_DECADES)} learning rates, half a decade apart, around its own default, "
    f"and while the best of them is at an end, up to {FURTHER} more there; all else is at its defaults. They are "
    f"compared with seed {TUNING_SEED}; the best, and the default in a row of its own, are then run with the seeds "
    f"{', '.join(map(str, TEST_SEEDS))}: the median, and the least and largest in brackets."
)


def most_runs(seeds: int) -> int:
    """Largest number of runs of one optimizer, with so many seeds of results."""
    return len(HALF_DECADES) + FURTHER + 2 * seeds


class Search:
    """Learning rates to be tried for one optimizer, each told its score before the next is asked for.

    >>> search = Search(0.01)
    >>> for lr in search:
    ...     search.tell(abs(lr - 1.0))
    >>> round(search.best, 3), len(search.scores)
    (1.0, 9)

    Args:
        default: the optimizer's own learning rate
    """

    def __init__(self, default: float) -> None:
        self.default = default
        #: score by the number of half decades from the default
        self.scores: dict[int, Any] = {}
        self._present = 0

    def __iter__(self) -> Iterator[float]:
        """Learning rates, the default first; those outside of the usual range only where the best is at its end."""
        for self._present in HALF_DECADES:
            yield self._rate(self._present)
        for _ in range(FURTHER):
            best, tried = self._best(), sorted(self.scores)
            if best not in (tried[0], tried[-1]):
                return
            self._present = best - 1 if best == tried[0] else best + 1
            yield self._rate(self._present)

    def tell(self, score: Any) -> None:
        """Note the score of the present learning rate; lower ones are better."""
        self.scores[self._present] = score

    @property
    def best(self) -> float:
        """Learning rate with the lowest score; of equal ones that closest to the default."""
        return self._rate(self._best())

    def _best(self) -> int:
        return min(self.scores, key=lambda k: (self.scores[k], abs(k), k))

    def _rate(self, half_decades: int) -> float:
        return float(f"{self.default * 10 ** (half_decades / 2):.3g}")


def runs(
    default: float,
    seeds: Sequence[int],
    train: Callable[[float, int, Any], Iterable[Row]],
    score: Callable[[Sequence[Row]], Any],
) -> Iterator[Row]:
    """Yield the rows of all runs of one optimizer, each with the role of its run.

    Args:
        default: the optimizer's own learning rate
        seeds: seeds of the results
        train: yields the rows of a run with a learning rate and a seed. Its last argument is the lowest score so far,
            beyond which a run that tunes may be given up; None in the first run and in those that are judged.
        score: score of the rows of a run; lower ones are better
    """
    search = Search(default)
    for lr in search:
        rows = []
        for row in train(lr, TUNING_SEED, min(search.scores.values(), default=None)):
            rows.append(row)
            yield {"role": TUNING, **row}
        search.tell(score(rows))
    for role, lr in ((TUNED, search.best), (DEFAULT, default)):
        for seed in seeds:
            for row in train(lr, seed, None):
                yield {"role": role, **row}


def spread(values: list[float], digits: int = 3) -> str:
    """Median with the least and largest in brackets.

    >>> spread([3.0, 1.0, 2.5])
    '2.5 (1–3)'
    """
    shown = [
        f"{value:,.0f}" if value >= 999.5 else f"{value:.{digits}g}"
        for value in (median(values), min(values), max(values))
    ]
    return shown[0] if len(values) == 1 else f"{shown[0]} ({shown[1]}–{shown[2]})"
