"""Destinations of records: a CSV file, or TensorBoard."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .record import FIRST, Named, Record, columns, fingerprint

#: longest line in bytes that a monitor writes: a file with a longer first line is not read to its end
LONGEST = 2**26


class CSVFile:
    """File with a header and a line for each record, which grows by whole lines.

    It is opened for every record and closed again, so that others see the line at once, on network file systems too.

    Args:
        path: the file; missing folders are made
        blocks: blocks whose numbers will be written
        groups: number of param groups
        overwrite: replace a file that exists already, instead of appending to it
    """

    def __init__(self, path: str | os.PathLike[str], blocks: Iterable[Named], groups: int, overwrite: bool) -> None:
        self.path = Path(path)
        blocks = list(blocks)
        self.columns = columns(blocks, groups)
        self.model = fingerprint(blocks)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if overwrite:
            self.path.write_bytes(b"")
        with open(self.path, "a+b") as file:  # an error comes now, and not at the first record
            file.seek(0)
            header = file.readline(LONGEST)
            if header:
                self._check(header, file.readline(LONGEST))
                _cut(file)

    def _check(self, header: bytes, first: bytes) -> None:
        found, row = (_cells(line) for line in (header, first))
        advice = "give Monitor another file name, or overwrite=True"
        if tuple(found[: len(FIRST)]) != FIRST:
            raise ValueError(f"{self.path}: not a file of psgd.Monitor; {advice}")
        if found != self.columns:
            differences = [f": it has {name!r}" for name in found if name not in self.columns]
            differences += [f": it has no {name!r}" for name in self.columns if name not in found]
            example = differences[0] if differences else ""
            raise ValueError(f"{self.path}: written for another model, or other blocks{example}; {advice}")
        if first.endswith(b"\n") and row[2:3] != [self.model]:
            raise ValueError(f"{self.path}: written for blocks of other shapes or structures; {advice}")

    def __call__(self, record: Record) -> None:
        cells = {**record.to_dict(), "model": self.model}
        line = _line([_text(cells[name]) for name in self.columns])
        with open(self.path, "ab", buffering=0) as file:
            start = file.tell()
            rest = memoryview(line if start else _line(self.columns) + line)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                os.truncate(self.path, start)  # half a line would make the next one unreadable
                raise


class TensorBoard:
    """Writer of records for TensorBoard. The tags are the names of the columns of a CSV file.

    Args:
        to: folder for event files, or a ``torch.utils.tensorboard.SummaryWriter``

    >>> monitor = Monitor(optimizer, TensorBoard("runs/first"))  # doctest: +SKIP
    """

    def __init__(self, to: str | os.PathLike[str] | Any) -> None:
        self._own = isinstance(to, (str, os.PathLike))
        if not self._own and not callable(getattr(to, "add_scalar", None)):
            raise TypeError(f"to={to!r}: TensorBoard wants a folder, or a SummaryWriter")
        if self._own:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ModuleNotFoundError(
                    "tensorboard is missing; pip install 'psgd[monitor]', or give Monitor a CSV file",
                    name="tensorboard",
                ) from None
            to = SummaryWriter(os.fspath(to))
        self.writer: Any = to

    def __call__(self, record: Record) -> None:
        for name, value in record.to_dict().items():
            if name not in ("step", "time") and value is not None:
                self.writer.add_scalar(name, value, record.step, walltime=record.time)
        self.writer.flush()

    def close(self) -> None:
        """Close the event file; a ``SummaryWriter`` that you gave stays open."""
        if self._own:
            self.writer.close()


def _cut(file: Any) -> None:
    """Remove an unfinished last line, which a crash may leave."""
    end = file.seek(0, os.SEEK_END)
    size = 0
    while size < end:
        size = min(end, max(2 * size, 1 << 16))
        file.seek(end - size)
        last = file.read(size).rfind(b"\n")
        if last >= 0:
            file.truncate(end - size + last + 1)
            return
    file.truncate(0)


def _text(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return str(value) if isinstance(value, int) else f"{value:.9g}" if abs(value) < 1e9 else f"{value:.16g}"


def _line(cells: Iterable[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def text_of(content: bytes) -> str:
    """Text of a file that may be damaged; Python 3.10 refuses to read CSV with zero bytes."""
    return content.replace(b"\0", b"?").decode("utf-8", "replace")


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([text_of(line)]), [])
