"""One measurement in a process of its own, with a time limit: whatever a peer does, the others are still measured."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

#: what was measured, by name: numbers, strings, or None
Row = dict[str, Any]

#: seconds that a process may take to start and to import torch, before its own time begins
STARTUP = 120.0


class MissingPackageError(Exception):
    """An optional package is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'psgd[bench]'")


class SkippedError(Exception):
    """A measurement cannot be made here, for a reason that is nobody's fault, such as data that are not there."""


@dataclass(frozen=True)
class Task:
    """What is to be measured: ``work(**settings)`` yields rows.

    ``work`` is a function at the top of a module and the settings can be pickled, so that another process finds both.

    Args:
        label: unique among the tasks of a benchmark
        work: yields the rows, each as soon as it is known: those before a time limit are kept
        settings: its arguments
        limit: seconds it may take, not counting the start of its process
        threads: that torch may use on the CPU
    """

    label: str
    work: Callable[..., Iterator[Row]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 600.0
    threads: int = 1


@dataclass(frozen=True)
class Outcome:
    """The rows of a task, the seconds it took, and where it did not come to its end the reason, in one line."""

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
        """All rows as one, later values over earlier ones."""
        return {name: value for row in self.rows for name, value in row.items()}


@dataclass(frozen=True)
class _End:
    """The last message of a process."""

    failure: str | None = None
    details: str = ""


def measure(task: Task, advanced: Callable[[Row], object] = lambda row: None) -> Outcome:
    """Do the task in a fresh process; ``advanced`` is told of every row as it comes.

    Never raises for what the task does. When it returns or is interrupted, the process and all it started are gone.
    """
    context = multiprocessing.get_context("spawn")  # a fresh interpreter: no peer sees what another has left behind
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
                if not wait([ours], max(begin + allowed - time.monotonic(), 0.0)):
                    end = _End(f"timed out after {allowed:g} s")
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


def _killed(process: BaseProcess) -> str:
    code = process.exitcode or 0
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"its process ended {how}; is there enough memory?"


def _kill(process: BaseProcess) -> None:
    """The process, and the group that it leads: compilers start processes of their own."""
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
    """A process that is started here never sees Ctrl-C, which goes to all of a terminal; the parent decides.

    For the parent it is only put off until the end of the block.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it is started by the first process otherwise, and clears the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(task: Task, connection: Connection, log: str) -> None:
    """In the other process."""
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(log, "ab", buffering=0) as file:  # what peers print is not for the table
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
    """A parent that is killed can tell nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        if hasattr(os, "killpg"):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)
