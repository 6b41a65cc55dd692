"""Measurements that take no time, for the tests of what is done with measurements; at the top of a module, so that
another process finds them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure as Picture

from psgd.bench.benchmark import Benchmark, Plan
from psgd.bench.isolate import MissingPackageError, Outcome, Row, SkippedError, Task
from psgd.experiments.figure import Table


def count(to: int = 3) -> Iterator[Row]:
    print("not for the table")
    print("nor this", file=sys.stderr)
    for k in range(to):
        yield {"k": k, "pid": os.getpid(), "threads": torch.get_num_threads()}


def raises(before: int = 1) -> Iterator[Row]:
    yield from count(before)
    raise ArithmeticError("no such number\nand more about it")


def sleeps(mark: str = "", seconds: float = 600.0) -> Iterator[Row]:
    """One row, then a process of its own and nothing for a long time."""
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    if mark:
        with open(mark, "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
    yield {"k": 0, "child": child.pid}
    time.sleep(seconds)


def dies(how: int = signal.SIGKILL) -> Iterator[Row]:
    yield {"k": 0}
    os.kill(os.getpid(), how)
    time.sleep(60)


def exits() -> Iterator[Row]:
    yield {"k": 0}
    os._exit(3)


def misses() -> Iterator[Row]:
    import no_such_package_at_all  # noqa: F401

    yield {}


def wants() -> Iterator[Row]:
    raise MissingPackageError("abacus")
    yield {}


def skips() -> Iterator[Row]:
    raise SkippedError("skipped: no beads")
    yield {}


def no_number() -> Iterator[Row]:
    yield {"k": float("nan"), "name": "x"}


def table(outcomes: Sequence[Outcome]) -> Table:
    return Table("a caption", ("", "k"), [[o.label, str(o.row.get("k", "–"))] for o in outcomes])


def draw(outcomes: Sequence[Outcome]) -> Picture:
    picture = Picture(figsize=(2, 2))
    picture.subplots().plot([o.row.get("k", 0) for o in outcomes])
    return picture


def benchmark(*tasks: Task, **options: Any) -> Benchmark:
    def all_tasks(plan: Plan) -> list[Task]:
        return list(tasks)

    return Benchmark("toy", "A toy", "What it is about.", all_tasks, table, draw, **options)
