"""Execution of runs, several at a time, with events that tell their progress."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from .environment import environment
from .run import Result, Row, Run


@dataclass(frozen=True)
class Advanced:
    """Event of a run that has a new row."""

    run: Run
    rows: int
    row: Row
    seconds: float


@dataclass(frozen=True)
class Finished:
    run: Run
    result: Result


class KilledError(Exception):
    """Error of a run whose process was ended from outside."""


Event = Advanced | Finished


def carry_out(runs: Sequence[Run], jobs: int) -> Iterator[Event]:
    """Do all runs, the longest first, and those that measure time one by one at the end.

    The result of a run does not depend on ``jobs``: it has one thread, and its own seed.
    """
    together = sorted((run for run in runs if not run.alone), key=lambda run: -run.seconds)
    alone = [run for run in runs if run.alone]
    if min(jobs, len(together)) > 1:
        yield from _in_processes(together, min(jobs, len(together)))
    else:
        alone = together + alone
    for run in alone:
        yield from _here(run)


def _here(run: Run) -> Iterator[Event]:
    rows: list[Row] = []
    seconds = 0.0
    for row, seconds in run.execute():
        rows.append(row)
        yield Advanced(run, len(rows), row, seconds)
    result = Result(run.label, run.seed, run.settings, rows, seconds, environment(run.device))
    yield Finished(run, result)


def _in_processes(runs: Sequence[Run], jobs: int) -> Iterator[Event]:
    context = multiprocessing.get_context("spawn")  # torch does not survive a fork once it has used its threads
    waiting = list(reversed(runs))
    busy: dict[Connection, Run] = {}
    processes = []
    try:
        for _ in range(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # so that the pipe ends with the process
            processes.append(process)
            busy[ours] = waiting.pop()
            ours.send(busy[ours])
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                run = busy[ready]
                try:
                    event = ready.recv()
                except (EOFError, ConnectionResetError):
                    raise KilledError(f"{run.name}: its process was killed; is there enough memory?") from None
                if isinstance(event, str):
                    raise RuntimeError(f"{run.name}:\n{event}")
                yield event
                if isinstance(event, Finished):
                    del busy[ready]
                    if waiting:
                        busy[ready] = waiting.pop()
                        ready.send(busy[ready])
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _work(connection: Connection) -> None:
    """Do runs in another process until the pipe is closed, which also happens if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent decides
    try:
        while True:
            run = connection.recv()
            try:
                for event in _here(run):
                    connection.send(event)
            except (BrokenPipeError, ConnectionResetError):
                return
            except Exception:
                connection.send(traceback.format_exc())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
