"""A run: one training, a function of its settings and its seed alone; and its result."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import Any

import torch

from .. import __version__

#: one point of every curve of a run
Row = dict[str, float]


@dataclass(frozen=True)
class Run:
    """A training: ``work(seed=…, device=…, **place, **settings)`` yields the rows of the curves.

    ``work`` is a function at the top of a module, so that another process can find it.

    Args:
        figure: name of its figure
        label: name that is unique among the runs of the figure and the seed
        seed: seed of everything random in it
        work: yields the rows
        settings: all else that the result depends on; strings, numbers and lists of them
        rows: number of rows; it yields fewer if it ends early
        seconds: approximate time; only to order the runs and to estimate the time that is left
        alone: whether it measures time, and so must not share the machine with other runs
        device: device of the tensors
        place: arguments that the result does not depend on, such as the folder of the data
    """

    figure: str
    label: str
    seed: int
    work: Callable[..., Iterator[Row]]
    settings: Mapping[str, Any]
    rows: int
    seconds: float
    alone: bool = False
    device: str = "cpu"
    place: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{self.figure}, {self.label}, seed {self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that decide the result: two runs with the same identity have the same result."""
        return {
            "figure": self.figure,
            "label": self.label,
            "seed": self.seed,
            "settings": dict(self.settings),
            "device": self.device,
            "psgd": __version__,
        }

    @property
    def key(self) -> str:
        """Short name of the identity, for a file."""
        text = json.dumps(self.identity, sort_keys=True)
        return f"{self.figure}-seed{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def execute(self) -> Iterator[tuple[Row, float]]:
        """Yield the rows, each with the seconds of work so far."""
        torch.set_num_threads(1)  # the sums of a product depend on how many threads share it
        rows = self.work(seed=self.seed, device=self.device, **self.place, **self.settings)
        seconds = 0.0
        while True:
            begin = time.perf_counter()
            row = next(rows, None)
            seconds += time.perf_counter() - begin
            if row is None:
                return
            yield row, seconds


@dataclass(frozen=True)
class Result:
    """Curves of a finished run, its seconds, and its environment."""

    label: str
    seed: int
    settings: Mapping[str, Any]
    rows: list[Row]
    seconds: float
    environment: Mapping[str, Any]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]

    def last(self, name: str, points: int = 1) -> float:
        """Mean of the last points of a curve; infinite if one of them is not finite."""
        values = self.column(name)[-points:]
        return fmean(values) if all(map(isfinite, values)) else float("inf")

    def first_below(self, name: str, level: float, along: str = "iteration") -> float:
        """First moment at which a curve is below a level; infinite if it never is."""
        return next((row[along] for row in self.rows if row.get(name, float("inf")) < level), float("inf"))


#: the results of one figure: by seed, then by label
Results = Mapping[int, Mapping[str, Result]]


def of_first_seed(results: Results) -> Mapping[str, Result]:
    """Results of the first seed, which has all runs of a figure."""
    return next(iter(results.values()))
