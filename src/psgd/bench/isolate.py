"""One measurement in its own process, with a time limit: whatever a peer does, the others are still measured."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

#: measured values by name: numbers, strings, or None
Row = dict[str, Any]


def plain(row: Row) -> Iterator[tuple[str, Any]]:
    """Items of a row for JSON, which has neither infinity nor NaN."""
    for name, value in row.items():
        yield name, None if isinstance(value, float) and not math.isfinite(value) else value


#: seconds in which a process must start and import torch, before its time limit begins
STARTUP = 120.0


class MissingPackageError(Exception):
    """Error of an optional package that is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'psgd[bench]'")


class SkippedError(Exception):
    """Error of a measurement that is impossible here without anything being wrong, such as for missing data."""


@dataclass(frozen=True)
class Task:
    """A measurement: ``work(**settings)`` yields rows.

    ``work`` is a function at the top of a module and the settings can be pickled, so that another process finds both.

    Args:
        label: name that is unique among the tasks of a benchmark
        work: yields the rows, each as soon as it is known: those before a time limit are kept
        settings: arguments of ``work``
        limit: time limit in seconds, without the start of the process
        threads: number of threads that torch may use on the CPU
    """

    label: str
    work: Callable[..., Iterator[Row]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 600.0
    threads: int = 1


@dataclass(frozen=True)
class Outcome:
    """Rows of a task, its seconds and, if it did not finish, the reason in one line."""

    task: Task
    rows: list[Row]
    seconds: float
    failure: str | None = None
    details: str = ""

    @property
    def label(self) -> str:
        return self.task.label

    @property
    def row(self) -> Row:
        """All rows as one; later values replace earlier ones."""
        return {name: value for row in self.rows for name, value in row.items()}


@dataclass(frozen=True)
class _End:
    """Last message of a process."""

    failure: str | None = None
    details: str = ""


def measure(
    task: Task, advanced: Callable[[Row], object] = lambda row: None, stop: Connection | None = None
) -> Outcome:
    """Do the task in a new process.

    It never raises for errors of the task. When it returns or is interrupted, the process and all that it started have
    ended.

    Args:
        task: the measurement
        advanced: called with every row as it comes
        stop: the measurement ends when this can be read, or its other end is closed
    """
    context = multiprocessing.get_context("spawn")  # a new interpreter: no peer sees the effects of another
    ours, theirs = context.Pipe(duplex=False)
    rows: list[Row] = []
    with tempfile.NamedTemporaryFile(prefix="psgd-bench-") as log:
        process = context.Process(target=_work, args=(task, theirs, log.name), daemon=False)
        begin, allowed = time.monotonic(), STARTUP
        end: _End | None = None
        try:
            with _unmoved_by_interrupts():
                process.start()
            theirs.close()  # so that the pipe ends with the process
            while end is None:
                ready = wait([ours, *([] if stop is None else [stop])], max(begin + allowed - time.monotonic(), 0.0))
                if ours not in ready:
                    end = _End("interrupted" if ready else f"timed out after {allowed:g} s")
                    break
                try:
                    message = ours.recv()
                except (EOFError, OSError):
                    process.join()
                    end = _End(_killed(process), Path(log.name).read_text(errors="replace")[-2000:])
                    break
                if isinstance(message, _End):
                    end = message
                elif message is None:  # it has started
                    begin, allowed = time.monotonic(), task.limit
                else:
                    rows.append(message)
                    advanced(message)
            seconds = time.monotonic() - begin
        finally:
            _kill(process)
            ours.close()
    return Outcome(task, rows, seconds, end.failure, end.details)


def at_once(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[int, Outcome]]:
    """Measure ``jobs`` tasks at the same time; yield the number and the outcome of each as it ends.

    When the caller stops or is interrupted, all processes have ended.
    """
    stop, go_on = multiprocessing.Pipe(duplex=False)
    pool = ThreadPoolExecutor(jobs)
    try:
        futures = {pool.submit(measure, task, stop=stop): number for number, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        go_on.close()
        pool.shutdown(cancel_futures=True)
        stop.close()


def _killed(process: BaseProcess) -> str:
    code = process.exitcode or 0
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"its process ended {how}; is there enough memory?"


def _kill(process: BaseProcess) -> None:
    """Kill the process and the group that it leads, as compilers start processes of their own."""
    if process.pid is None:
        return
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # it leads no group yet, or none any more
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    process.close()


@contextmanager
def _unmoved_by_interrupts() -> Iterator[None]:
    """Hide Ctrl-C, which goes to all processes of a terminal, from processes that are started here.

    For the parent it is only delayed until the end of the block.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first process starts it, and clears the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(task: Task, connection: Connection, log: str) -> None:
    """Do the task, in the other process."""
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(log, "ab", buffering=0) as file:  # output of peers is not for the table
        sys.stdout.flush()
        sys.stderr.flush()
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(task.threads)
    with suppress(BrokenPipeError):
        connection.send(None)
        connection.send(_carry_out(task, connection))


def _carry_out(task: Task, connection: Connection) -> _End:
    try:
        for row in task.work(**task.settings):
            connection.send(row)
    except BrokenPipeError:
        raise
    except (MissingPackageError, SkippedError) as error:
        return _End(str(error))
    except ModuleNotFoundError as error:
        return _End(str(MissingPackageError(error.name or str(error))), traceback.format_exc())
    except BaseException as error:
        lines = traceback.format_exception_only(type(error), error)[-1].strip().splitlines()
        return _End(lines[0] if lines else type(error).__name__, traceback.format_exc())
    return _End()


def _end_with_parent() -> None:
    """End this process with its parent, which may be killed without notice."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        if hasattr(os, "killpg"):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)
