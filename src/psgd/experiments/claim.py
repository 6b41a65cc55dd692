"""Claims as code: statements of the paper about a figure, as predicates over the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from .run import Results

#: share of all seeds that must agree
SHARE = 0.8


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and the numbers that show it."""

    holds: bool
    measured: str


@dataclass(frozen=True)
class Claim:
    """One statement about a figure.

    Args:
        name: name of the predicate
        text: the statement
        labels: labels of the runs that it is about
        check: decides for one seed, given the results of these runs in this order
        together: whether ``check`` decides once instead, given for each label the results of all seeds
        source: origin of the statement, ``"paper"`` or ``"ours"``
        note: a remark for the reader
    """

    name: str
    text: str
    labels: Sequence[str]
    check: Callable[..., Verdict]
    together: bool = False
    source: str = "paper"
    note: str = ""

    def is_measured(self, results: Results) -> bool:
        """Whether there are runs that decide it: a short version of a figure may leave some of them out."""
        return any(all(label in by_label for label in self.labels) for by_label in results.values())

    def judge(self, results: Results) -> dict[str, Any]:
        """Verdict over all seeds that have the runs of the claim, as a dict for the files."""
        seeds = [seed for seed, by_label in results.items() if all(label in by_label for label in self.labels)]
        found = [[results[seed][label] for label in self.labels] for seed in seeds]
        verdicts = [self.check(*arguments) for arguments in found] if not self.together else []
        if self.together and found:
            total = self.check(*zip(*found, strict=True))
        else:
            agreeing = sum(verdict.holds for verdict in verdicts)
            holds = bool(verdicts) and agreeing >= SHARE * len(verdicts)
            total = Verdict(holds, _summary(verdicts, agreeing))
        each = [{"seed": seed, **asdict(verdict)} for seed, verdict in zip(seeds, verdicts, strict=False)]
        return {
            "name": self.name,
            "text": self.text,
            "source": self.source,
            **asdict(total),
            "note": self.note,
            "seeds": each,
        }


def when(moment: float) -> str:
    """Moment on a curve, in words; infinity means that it never happens."""
    return f"{moment:g}" if isfinite(moment) else "never"


def _summary(verdicts: Sequence[Verdict], agreeing: int) -> str:
    if not verdicts:
        return "not measured"
    if len(verdicts) == 1:
        return verdicts[0].measured
    return f"{agreeing} of {len(verdicts)} seeds; the first: {verdicts[0].measured}"
