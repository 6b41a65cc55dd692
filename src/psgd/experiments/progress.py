"""Progress of the runs: bars on a terminal, and elsewhere a line for each finished run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from .pool import Advanced, Event, Finished
from .reproduce import Planned, Written
from .run import Result, Row

#: seconds without a finished run after which a plain line shows the progress of the others
PATIENCE = 30.0


class TimeLeft:
    """Estimate of the time that is left, from the expected and the actual seconds of the runs."""

    def __init__(self, plan: Planned, jobs: int) -> None:
        self.jobs = jobs
        finished = {run.key for run in plan.finished}
        self._left = {run.key: run.seconds for run in plan.runs if run.key not in finished}
        self._alone = {run.key for run in plan.runs if run.alone}
        self._taken: dict[str, float] = {}
        self._expected: dict[str, float] = {}

    def update(self, event: Event) -> None:
        run = event.run
        share = 1.0 if isinstance(event, Finished) else min(event.rows / run.rows, 1.0)
        self._taken[run.key] = event.result.seconds if isinstance(event, Finished) else event.seconds
        self._expected[run.key] = run.seconds * share
        self._left[run.key] = run.seconds * (1 - share)

    def __str__(self) -> str:
        alone = sum(left for key, left in self._left.items() if key in self._alone)
        together = sum(self._left.values()) - alone
        slowness = sum(self._taken.values()) / max(sum(self._expected.values()), 1e-9) if self._taken else 1.0
        seconds = slowness * (together / self.jobs + alone)
        return f"about {timedelta(seconds=round(seconds))} left"


def show(console: Console, events: Iterable[Planned | Event | Written], jobs: int) -> Iterator[Written]:
    """Show all events, and yield those of written figures."""
    display = _bars if console.file.isatty() else _lines
    stream = iter(events)
    plan = next(stream)
    assert isinstance(plan, Planned)
    if plan.finished:
        console.print(f"{len(plan.finished)} of {len(plan.runs)} runs were finished before.", highlight=False)
    return display(console, plan, stream, jobs)


def _value(row: Row) -> str:
    """The loss, if there is one, or another measured number."""
    name = next((name for name in ("loss", *reversed(row)) if name in row), "")
    return f"{name} {row[name]:.4g}" if name else ""


def _lines(
    console: Console, plan: Planned, events: Iterator[Planned | Event | Written], jobs: int
) -> Iterator[Written]:
    left = TimeLeft(plan, jobs)
    done, last = len(plan.finished), time.monotonic()
    for event in events:
        if isinstance(event, Advanced | Finished):
            left.update(event)
        if isinstance(event, Finished):
            done += 1
            last = time.monotonic()
            text = f"[{done}/{len(plan.runs)}] {event.run.name}: {_end(event.result)}; {left}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif isinstance(event, Advanced) and time.monotonic() - last > PATIENCE:
            last = time.monotonic()
            text = f"{event.run.name}: {event.rows}/{event.run.rows}, {_value(event.row)}; {left}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif isinstance(event, Written):
            yield event


def _end(result: Result) -> str:
    value = _value(result.rows[-1]) if result.rows else "nothing"
    return f"{value} after {result.seconds:.1f} s"


def _bars(console: Console, plan: Planned, events: Iterator[Planned | Event | Written], jobs: int) -> Iterator[Written]:
    left = TimeLeft(plan, jobs)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[status]}"))
    with Progress(*columns, console=console, transient=True) as bars:
        total = bars.add_task("all runs", total=len(plan.runs), completed=len(plan.finished), status=str(left))
        tasks: dict[str, TaskID] = {}
        for event in events:
            if isinstance(event, Advanced | Finished):
                left.update(event)
                bars.update(total, status=str(left))
            if isinstance(event, Advanced):
                key = event.run.key
                if key not in tasks:
                    tasks[key] = bars.add_task(event.run.name, total=event.run.rows, status="")
                bars.update(tasks[key], completed=event.rows, status=_value(event.row))
            elif isinstance(event, Finished):
                bars.advance(total)
                if event.run.key in tasks:
                    bars.remove_task(tasks.pop(event.run.key))
            elif isinstance(event, Written):
                yield event
