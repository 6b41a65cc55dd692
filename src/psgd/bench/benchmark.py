"""A benchmark: what it measures, its table and its picture; how it is run, and the files that it writes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Picture
from rich.console import Console
from rich.table import Table as RichTable

from ..experiments.drawing import images
from ..experiments.environment import MACHINE, VERSIONS, environment, together
from ..experiments.figure import Table
from ..experiments.store import write_bytes
from .isolate import Outcome, Row, Task, at_once, measure, plain
from .peers import PEERS, Peer


@dataclass(frozen=True)
class Effort:
    """How much of the protocol is run, for benchmarks that can be run in parts; None is all of it.

    Args:
        rates: number of learning rates
        seeds: number of seeds of the results
        default_seeds: number of seeds of the results with default settings, if it is another
        steps: number of steps of a run
        tuning_steps: number of steps of a run that tunes, if it is another
    """

    rates: int | None = None
    seeds: int | None = None
    default_seeds: int | None = None
    steps: int | None = None
    tuning_steps: int | None = None

    def options(self) -> list[str]:
        """Options of the command line."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@dataclass(frozen=True)
class Plan:
    """Options of a benchmark.

    Args:
        device: device of the measurements
        peers: optimizers to compare with
        model: the name of one of the benchmark's models; None for its default, which may depend on the device
        quick: whether to measure less, for a first look
        limit: seconds for each measurement, instead of the benchmark's own number
        text: a file to train a language model on
        effort: how much of the protocol is run
        runs: folder where finished runs are kept, so that another command need not repeat them
        until: time (of ``time.time``) after which no run may end; those that would are left to another command
        jobs: number of measurements at the same time
    """

    device: str = "cpu"
    peers: Sequence[Peer] = ()
    model: str | None = None
    quick: bool = False
    limit: float | None = None
    text: Path | None = None
    effort: Effort = Effort()
    runs: Path | None = None
    until: float | None = None
    jobs: int = 1

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def options(self) -> list[str]:
        """Options of the command line that repeat the run."""
        words = ["--device", self.device, "--peers", ",".join(peer.name for peer in self.peers) or "none"]
        words += ["--model", self.model] if self.model is not None else []
        words += ["--quick"] if self.quick else []
        words += ["--limit", f"{self.limit:g}"] if self.limit is not None else []
        words += ["--text", self.text.name] if self.text is not None else []
        return words + self.effort.options()


@dataclass(frozen=True)
class Benchmark:
    """One table and one picture.

    Args:
        name: name on the command line
        title: a heading
        about: what is measured, and how; for readers of the table
        tasks: the measurements of a plan, each of which gets its own process. The framework lists those that fail
            under the table.
        table: makes the table from all outcomes; those that failed may have rows or none
        draw: makes the picture from all outcomes; there may be nothing to draw
        models: names for ``--model``; none for a benchmark that has no such choice
        peers: names of optimizers it can compare with; none for a benchmark without comparison
        parts: options with which it can be run in parts: fields of ``Effort``, ``total`` if it keeps finished runs and
            ends in time, ``jobs`` if its numbers do not depend on what else the machine does
    """

    name: str
    title: str
    about: str
    tasks: Callable[[Plan], list[Task]]
    table: Callable[[Sequence[Outcome]], Table]
    draw: Callable[[Sequence[Outcome]], Picture]
    models: Sequence[str] = ()
    peers: Collection[str] = field(default_factory=lambda: PEERS)
    parts: Collection[str] = ()

    def command(self, plan: Plan) -> str:
        options = plan.options()
        if not self.peers:
            del options[2:4]
        return shlex.join(["psgd", "bench", self.name, *options])


def run(benchmark: Benchmark, plan: Plan, console: Console) -> list[Outcome]:
    """Measure the tasks and show progress: one after the other, so that they do not share the machine, or ``jobs``.

    Ctrl-C ends the present measurements and skips the rest: the table then has what was measured.
    """
    tasks = benchmark.tasks(plan)
    outcomes: dict[int, Outcome] = {}
    console.print(f"{benchmark.name}: {benchmark.title}, on {environment(plan.device)['device']}", highlight=False)
    try:
        for number, outcome in _measured(tasks, console) if plan.jobs == 1 else at_once(tasks, plan.jobs):
            outcomes[number] = outcome
            end = outcome.failure or f"{_brief(outcome.row)} ({outcome.seconds:.1f} s)"
            console.print(f"{_title(number, tasks)}: {end}", highlight=False, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        if not outcomes:
            raise
        console.print("interrupted: these are the measurements so far", highlight=False)
    return [outcomes[number] for number in sorted(outcomes)]


def _measured(tasks: Sequence[Task], console: Console) -> Iterator[tuple[int, Outcome]]:
    for number, task in enumerate(tasks):
        text = _title(number, tasks)
        with console.status(text, spinner="line") as status:  # shown on a terminal alone
            outcome = measure(task, lambda row, text=text: status.update(f"{text}: {_brief(row)}"))  # type: ignore[misc]
        yield number, outcome


def _title(number: int, tasks: Sequence[Task]) -> str:
    return f"[{number + 1}/{len(tasks)}] {tasks[number].label}"


def _brief(row: Row) -> str:
    """Last few numbers of a row."""
    return ", ".join(f"{name} {value:.4g}" for name, value in list(row.items())[-3:] if isinstance(value, int | float))


def show(benchmark: Benchmark, outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the table, and what failed."""
    table = benchmark.table(outcomes)
    rich = RichTable(title=benchmark.title, caption=table.caption, caption_justify="left", title_justify="left")
    for k, column in enumerate(table.columns):
        rich.add_column(column, justify="right" if k else "left", no_wrap=not k)
    for row in table.rows:
        rich.add_row(*row)
    console.print(rich)
    for outcome in failed(outcomes):
        console.print(f"{outcome.label}: {outcome.failure}", highlight=False, markup=False, soft_wrap=True)


def failed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.failure is not None]


def write(benchmark: Benchmark, plan: Plan, outcomes: Sequence[Outcome], directory: Path) -> list[Path]:
    """Write ``NAME.json``, ``NAME.png`` and ``NAME.svg``, each completely or not at all; return their paths."""
    files = images(benchmark.draw(outcomes), benchmark.name)
    files["json"] = (json.dumps(summary(benchmark, plan, outcomes), indent=1, ensure_ascii=False) + "\n").encode()
    paths = []
    for kind, content in sorted(files.items()):
        paths.append(directory / f"{benchmark.name}.{kind}")
        write_bytes(paths[-1], content)
    return paths


def summary(benchmark: Benchmark, plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    here = environment(plan.device)
    table = benchmark.table(outcomes)
    versions = {peer.package: peer.version for peer in plan.peers if peer.version is not None}
    return {
        "name": benchmark.name,
        "title": benchmark.title,
        "about": benchmark.about,
        "command": benchmark.command(plan),
        "settings": {
            "device": plan.device,
            "peers": [peer.name for peer in plan.peers],
            "model": plan.model,
            "quick": plan.quick,
            "limit": plan.limit,
            **{name: value for name, value in vars(plan.effort).items() if value is not None},
        },
        "table": {"caption": table.caption, "columns": table.columns, "rows": table.rows},
        "measurements": [
            {
                "label": outcome.label,
                "failure": outcome.failure,
                "details": _anywhere(outcome.details),
                "seconds": round(outcome.seconds, 2),
                "limit": outcome.task.limit,
                "threads": outcome.task.threads,
                "settings": {name: _named(value) for name, value in outcome.task.settings.items()},
                "rows": [dict(plain(row)) for row in outcome.rows],
            }
            for outcome in outcomes
        ],
        "versions": together([here], VERSIONS) | versions,
        "machine": together([here], MACHINE),
        "complete": len(outcomes) == len(benchmark.tasks(plan)),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _anywhere(details: str) -> str:
    """Traceback without the folders of this machine, as results are published."""
    return re.sub(r'File "[^"]*?((?:[^/\\"]+[/\\]){0,2}[^/\\"]+)"', r'File "\1"', details)


def _named(value: Any) -> Any:
    """Setting for JSON: numbers and texts unchanged, objects by their names."""
    return value if isinstance(value, int | float | str | list) else getattr(value, "name", repr(value))
