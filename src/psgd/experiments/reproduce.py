"""Reproduction of figures: does their runs, keeps finished ones, and writes each figure as soon as it is complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import pool
from .figure import Figure, Size
from .run import Result, Run
from .store import Store


@dataclass(frozen=True)
class Order:
    """A figure to reproduce, its size, and its first seed."""

    figure: Figure
    size: Size
    size_name: str
    first_seed: int = 0

    @classmethod
    def of(cls, figure: Figure, full: bool, seeds: int | None = None, first_seed: int = 0) -> Order:
        """Order for one of the sizes of a figure, with another number of seeds for all of its runs."""
        size = dict(figure.full if full else figure.quick)
        if seeds is not None:
            size |= {key: seeds for key in size if key.endswith("seeds")}
        return cls(figure, size, "full" if full else "quick", first_seed)

    def runs(self, device: str, data: Path | None = None) -> list[Run]:
        place = {"data": data} if self.figure.digits else {}
        runs = self.figure.all_runs(self.size, self.first_seed)
        return [replace(run, device=device, place=place) for run in runs]

    def unfinished(self, out: Path, device: str) -> bool:
        return any(Store(out).load(run) is None for run in self.runs(device))


@dataclass(frozen=True)
class Written:
    """Event of a figure that is complete, with its files."""

    figure: Figure
    summary: dict[str, Any]


@dataclass(frozen=True)
class Planned:
    """Event of the plan: all runs, and those of them that earlier commands have finished."""

    runs: list[Run]
    finished: list[Run]


def reproduce(
    orders: Sequence[Order], out: Path, *, jobs: int, device: str, data: Path | None = None
) -> Iterator[Planned | pool.Event | Written]:
    """Yield events as they happen: the plan, then rows, finished runs and written figures."""
    store = Store(out)
    wanted = {order.figure.name: order.runs(device, data) for order in orders}
    runs = [run for figure in wanted.values() for run in figure]
    results: dict[str, Result] = {run.key: found for run in runs if (found := store.load(run)) is not None}
    yield Planned(runs, [run for run in runs if run.key in results])
    waiting = {order.figure.name: order for order in orders}

    def complete() -> Iterator[Written]:
        for name, order in list(waiting.items()):
            if all(run.key in results for run in wanted[name]):
                del waiting[name]
                by_seed: dict[int, dict[str, Result]] = {}
                for run in wanted[name]:
                    by_seed.setdefault(run.seed, {})[run.label] = results[run.key]
                summary = order.figure.write(out, by_seed, order.size, order.size_name)
                yield Written(order.figure, summary)

    yield from complete()
    for event in pool.carry_out([run for run in runs if run.key not in results], jobs):
        if isinstance(event, pool.Finished):
            store.save(event.run, event.result)
            results[event.run.key] = event.result
            yield event
            yield from complete()
        else:
            yield event
