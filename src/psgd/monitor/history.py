"""Reader of a monitor's file, also while it is being written."""

from __future__ import annotations

import csv
import math
import os
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from statistics import median

from .files import text_of
from .record import FIRST


class HistoryError(Exception):
    """A file is missing or is not one of a monitor; the message is one line for people."""


@dataclass(frozen=True)
class Curves:
    """Median and maximum of a number over the blocks, at the steps at which the number was measured."""

    steps: list[float]
    median: list[float]
    largest: list[float]
    #: block that has the maximum at the last step
    worst: str


class History:
    """Records of a monitor's file; ``poll`` reads the records that were added since.

    If steps were taken again, as after a crash, their records replace the earlier ones.

    Args:
        path: path of the file
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._start_over()

    def _start_over(self) -> None:
        self._offset = 0
        self._line = 0
        #: values of each column, one for each record; NaN if a record has no value
        self.columns: dict[str, array[float]] = {}
        self._names: list[str] = []
        self._inode = -1
        #: first two lines of the file, or as much of them as there is
        self._first = b""

    def __len__(self) -> int:
        return len(self.columns.get("step", ()))

    def poll(self) -> bool:
        """Read new records, and return whether there were any; an unfinished line is left for the next call."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                same = status.st_size >= self._offset and status.st_ino == self._inode
                if not same or file.read(len(self._first)) != self._first:  # another file of this name
                    self._start_over()
                    self._inode = status.st_ino
                if self._first.count(b"\n") < 2:  # the first record has a time, so it tells files apart
                    file.seek(0)
                    self._first = b"".join(line for line in (file.readline(), file.readline()) if line.endswith(b"\n"))
                file.seek(self._offset)
                new = file.read()
        except OSError as error:
            raise HistoryError(f"cannot read {self.path}: {error.strerror or error}") from None
        whole, newline, _ = new.rpartition(b"\n")
        if not newline:
            if self._offset == 0 and new and not ",".join(FIRST).encode().startswith(new[: len(",".join(FIRST))]):
                raise HistoryError(f"{self.path} is not a file of psgd.Monitor")
            return False
        self._offset += len(whole) + 1
        for cells in csv.reader(text_of(whole).splitlines()):
            self._line += 1
            self._take(cells)
        return True

    def _take(self, cells: list[str]) -> None:
        if not self._names:
            if tuple(cells[: len(FIRST)]) != FIRST:
                raise HistoryError(
                    f"{self.path} is not a file of psgd.Monitor: it begins with {','.join(cells)[:40]!r}"
                )
            self._names = cells
            self.columns = {name: array("d") for name in cells if name != "model"}
            return
        if len(cells) != len(self._names):
            raise HistoryError(
                f"{self.path}, line {self._line}: {len(cells)} values where there should be {len(self._names)}"
            )
        row = {name: cell for name, cell in zip(self._names, cells, strict=True) if name != "model"}
        try:
            values = {name: float(cell) if cell else math.nan for name, cell in row.items()}
        except ValueError as error:
            raise HistoryError(f"{self.path}, line {self._line}: {error}") from None
        for name, most in (("step", 2.0**53), ("time", 2.0**40)):
            if not 0 <= values[name] < most:
                raise HistoryError(f"{self.path}, line {self._line}: it has no {name} that can be one")
        again = bisect_left(self.columns["step"], values["step"])
        for name, column in self.columns.items():
            del column[again:]
            column.append(values[name])

    def curve(self, column: str) -> tuple[list[float], list[float]]:
        """Steps at which a column has a value, and the values."""
        known = self.columns.get(column, array("d"))
        pairs = [(s, v) for s, v in zip(self.columns.get("step", ()), known, strict=False) if not math.isnan(v)]
        return [s for s, _ in pairs], [v for _, v in pairs]

    def blocks(self) -> list[str]:
        """Names of the blocks."""
        return [name.partition("/")[2] for name in self._names if name.startswith("residual/")]

    def over_blocks(self, metric: str, having: str = "") -> Curves:
        """Curves of a metric, over the blocks whose names contain a text."""
        start = f"{metric}/"
        names = {column: column.removeprefix(start) for column in self.columns if column.startswith(start)}
        mine = {name: self.columns[column] for column, name in names.items() if having in name}
        steps, medians, largest, worst = [], [], [], ""
        for step, row in zip(self.columns.get("step", ()), zip(*mine.values(), strict=True), strict=False):
            known = [v for v in row if not math.isnan(v)]
            if known:
                steps.append(step)
                medians.append(median(known))
                largest.append(max(known))
                worst = list(mine)[row.index(largest[-1])]
        return Curves(steps, medians, largest, worst)


def read(path: str | os.PathLike[str]) -> History:
    """Read all records of a monitor's file.

    >>> read("run.csv").over_blocks("residual").median  # doctest: +SKIP
    [1.37, 0.21, 0.05]
    """
    history = History(path)
    history.poll()
    return history
