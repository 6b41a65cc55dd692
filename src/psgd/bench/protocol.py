"""The protocol of comparisons: how the settings of each optimizer are chosen, and with which seeds it is judged.

Every optimizer has the same number of learning rates, over the same factor, around its own default, and the same weight
decays. They are tuned with a seed that results are not reported for. ``docs/protocol.md`` is this page for readers of
the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from .isolate import Row

#: learning rates that every optimizer has, in half decades from its own default: seven, over a factor of a thousand
HALF_DECADES = (0, -1, 1, -2, 2, -3, 3)
#: most half decades beyond these, one at a time, while the best learning rate is the smallest or largest that was tried
FURTHER = 5
#: seed with which settings are compared
TUNING_SEED = 100
#: seeds of the results, with the best setting and with the default
TEST_SEEDS = (7, 8, 9)

#: roles of runs: to find the setting, with the one that was found, and with the default
TUNING, TUNED, DEFAULT = "tuning", "tuned", "default"

#: the protocol in a few sentences, to be printed beside a table
TEXT = (
    f"Protocol: every optimizer has {len(HALF_DECADES)} learning rates, half a decade apart, around its own default, "
    f"and while the best of them is at an end, up to {FURTHER} more there; all else is at its defaults. They are "
    f"compared with seed {TUNING_SEED}; the best, and the default in a row of its own, are then run with the seeds "
    f"{', '.join(map(str, TEST_SEEDS))}: the median, and the least and largest in brackets."
)


class Setting(NamedTuple):
    """Hyperparameters of a run; a weight decay of None is the optimizer's own."""

    lr: float
    weight_decay: float | None = None


def most_runs(seeds: int, rates: int = len(HALF_DECADES), weight_decays: int = 1) -> int:
    """Largest number of runs of one optimizer, with so many seeds of results, learning rates and weight decays."""
    return rates * weight_decays + FURTHER + 2 * seeds


class Search:
    """Settings to be tried for one optimizer, each told its score before the next is asked for.

    >>> search = Search(0.01)
    >>> for setting in search:
    ...     search.tell(abs(setting.lr - 1.0))
    >>> round(search.best.lr, 3), len(search.scores)
    (1.0, 9)

    Args:
        default: the optimizer's own learning rate
        rates: number of learning rates, the closest to the default of ``HALF_DECADES``
        weight_decays: weight decays, each of which is tried with each learning rate
    """

    def __init__(
        self, default: float, rates: int | None = None, weight_decays: Sequence[float | None] = (None,)
    ) -> None:
        self.default = default
        self.half_decades = HALF_DECADES[:rates]
        self.weight_decays = tuple(weight_decays)
        #: score by the number of half decades from the default, and the number of the weight decay
        self.scores: dict[tuple[int, int], Any] = {}
        self._present = (0, 0)

    def __iter__(self) -> Iterator[Setting]:
        """Settings, the default learning rate first; those outside of the usual range where the best is at its end."""
        for half_decades in self.half_decades:
            for decay in range(len(self.weight_decays)):
                self._present = (half_decades, decay)
                yield self._setting(self._present)
        for _ in range(FURTHER):
            best, decay = self._best()
            tried = sorted(k for k, other in self.scores if other == decay)
            if best not in (tried[0], tried[-1]):
                return
            self._present = (best - 1 if best == tried[0] else best + 1, decay)
            yield self._setting(self._present)

    def tell(self, score: Any) -> None:
        """Note the score of the present setting; lower ones are better."""
        self.scores[self._present] = score

    @property
    def best(self) -> Setting:
        """Setting with the lowest score; of equal ones that closest to the default."""
        return self._setting(self._best())

    def _best(self) -> tuple[int, int]:
        return min(self.scores, key=lambda key: (self.scores[key], abs(key[0]), key))

    def _setting(self, key: tuple[int, int]) -> Setting:
        half_decades, decay = key
        return Setting(float(f"{self.default * 10 ** (half_decades / 2):.3g}"), self.weight_decays[decay])


def runs(
    search: Search,
    seeds: Sequence[int],
    train: Callable[[Setting, int, str, Any], Iterable[Row]],
    score: Callable[[Sequence[Row]], Any],
    *,
    default_seeds: Sequence[int] | None = None,
) -> Iterator[Row]:
    """Yield the rows of all runs of one optimizer, each with the role of its run.

    Args:
        search: settings to be tried
        seeds: seeds of the results
        train: yields the rows of a run with a setting, a seed and a role. Its last argument is the lowest score so far,
            beyond which a run that tunes may be given up; None in the first run and in those that are judged.
        score: score of the rows of a run; lower ones are better
        default_seeds: seeds of the results with the default, if they are others
    """
    for setting in search:
        rows = []
        for row in train(setting, TUNING_SEED, TUNING, min(search.scores.values(), default=None)):
            rows.append(row)
            yield {"role": TUNING, **row}
        search.tell(score(rows))
    of_default = seeds if default_seeds is None else default_seeds
    for role, setting, some in ((TUNED, search.best, seeds), (DEFAULT, Setting(search.default), of_default)):
        for seed in some:
            for row in train(setting, seed, role, None):
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
