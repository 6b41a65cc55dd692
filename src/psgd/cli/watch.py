"""Curves of a monitor's file on a terminal, drawn again while the file grows."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..monitor.history import History, HistoryError
from ..monitor.record import METRICS

#: styles of the curves: the first is drawn last, over the others
STYLES = ("cyan", "red")
#: bits of the dots of a Braille character, by row and column
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
#: width from which on two plots stand side by side, and width of the numbers beside an axis
WIDE, MARGIN = 76, 9
#: default height of a picture, and its width if there is no terminal
ROWS, WIDEST = 24, 110


class Plot:
    """Curves over steps in a box of characters.

    Args:
        title: title of the plot
        curves: values for the same steps
        steps: the steps
        note: text beside the title
        unicode: whether to draw with Braille, eight dots to a character; else with stars
    """

    def __init__(
        self,
        title: str,
        steps: Sequence[float],
        curves: Sequence[Sequence[float]],
        note: str = "",
        unicode: bool = True,
    ) -> None:
        self.title, self.note, self.unicode = title, note, unicode
        self.steps, self.curves = steps, curves
        finite = [v for curve in curves for v in curve if math.isfinite(v)]
        #: whether the axis is logarithmic, which shows small values beside large ones
        self.log = bool(finite) and min(finite) > 0 and max(finite) > 10 * min(finite)
        scaled = [math.log10(v) for v in finite] if self.log else finite
        self.low, self.high = (min(scaled), max(scaled)) if scaled else (0.0, 1.0)
        if self.low == self.high:
            self.low, self.high = self.low - (abs(self.low) or 1) / 2, self.high + (abs(self.high) or 1) / 2

    def lines(self, width: int, height: int) -> list[Text]:
        """Plot as ``height`` lines of ``width`` characters, with title and steps."""
        rows, columns = max(height - 2, 1), max(width - MARGIN - 1, 1)
        cells = self._cells(rows, columns)
        head = Text(self.title, "bold", no_wrap=True, overflow="crop")
        head.append(f"  {self.note}", "not bold")
        head.truncate(width, pad=True)
        lines = [head]
        corner, side = ("└", "│") if self.unicode else ("+", "|")
        for row in range(rows):
            label = self._value(self.high) if row == 0 else self._value(self.low) if row == rows - 1 else ""
            line = Text(f"{label:>{MARGIN - 1}} {side}", "dim")
            for sign, style in cells[row]:
                line.append(sign, f"not dim {style}")
            lines.append(line)
        first, last = (f"{self.steps[k]:.0f}" if self.steps else "" for k in (0, -1))
        last = last if len(self.steps) > 1 else ""
        foot = f"{'':{MARGIN}}{corner}{first}{last:>{max(columns - len(first), 0)}}"
        lines.append(Text(foot[:width].ljust(width), "dim"))
        return lines

    def _value(self, v: float) -> str:
        return f"{10**v if self.log else v:.3g}"

    def _cells(self, rows: int, columns: int) -> list[list[tuple[str, str]]]:
        across, down = (2, 4) if self.unicode else (1, 1)
        bits = [[0] * columns for _ in range(rows)]
        styles = [[""] * columns for _ in range(rows)]
        for curve, style in reversed(list(zip(self.curves, STYLES, strict=False))):
            for x, top, bottom in self._strokes(curve, columns * across, rows * down):
                for y in range(top, bottom + 1):
                    bits[y // down][x // across] |= DOTS[y % down][x % across] if self.unicode else 1
                    styles[y // down][x // across] = style
        signs = [" ", *(chr(0x2800 + b) if self.unicode else "*" for b in range(1, 256))]
        return [[(signs[b], s) for b, s in zip(*row, strict=True)] for row in zip(bits, styles, strict=True)]

    def _strokes(self, curve: Sequence[float], columns: int, rows: int) -> list[tuple[int, int, int]]:
        """Column, first and last row of each stroke: all values in a column of dots, connected to the value before."""
        start, span = (self.steps[0], (self.steps[-1] - self.steps[0]) or 1) if self.steps else (0, 1)
        found: dict[int, tuple[int, int]] = {}
        last: tuple[int, int] | None = None
        for step, value in zip(self.steps, curve, strict=True):
            if not math.isfinite(value) or (self.log and value <= 0):
                last = None
                continue
            x = round((step - start) / span * (columns - 1))
            share = ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)
            y = round((1 - min(max(share, 0.0), 1.0)) * (rows - 1))
            for at in range(last[0] + 1, x) if last else ():  # a straight line between records
                between = round(last[1] + (y - last[1]) * (at - last[0]) / (x - last[0])) if last else y
                found[at] = (between, between)
            top, bottom = found.get(x, (y, y))
            if last and abs(last[1] - y) > 1 and x - last[0] <= 1:
                near = last[1] + (1 if y > last[1] else -1)
                top, bottom = min(top, near), max(bottom, near)
            found[x] = (min(top, y), max(bottom, y))
            last = (x, y)
        return [(x, top, bottom) for x, (top, bottom) in found.items()]


def plots(history: History, block: str = "", unicode: bool = True) -> list[Plot]:
    """Plots of a picture: the loss, each number of the blocks, and the spectrum if there is one."""
    steps, losses = history.curve("loss")
    found = [Plot("loss", steps, [losses], f"{losses[-1]:.4g}" if losses else "not told", unicode)]
    for metric, title in METRICS.items():
        curves = history.over_blocks(metric, block)
        note = "not measured yet"
        if curves.steps:
            note = f"{curves.median[-1]:.3g}, most {curves.largest[-1]:.3g} {curves.worst}"
        found.append(Plot(title, curves.steps, [curves.median, curves.largest], note, unicode))
    steps, middle = history.curve("ph_q50")
    _, most = history.curve("ph_max")
    if steps:
        note = f"{middle[-1]:.3g}, most {most[-1]:.3g}"
        found.append(Plot("|eigenvalues| of PH", steps, [middle, most], note, unicode))
    return found


def picture(history: History, width: int, height: int, block: str = "", unicode: bool = True) -> list[Text]:
    """All plots below a headline, as lines of text; they may exceed the height, which is that of a screen."""
    if not len(history):
        return [Text(f"{history.path}: no record yet")]
    skipped, rate = history.curve("skipped")[1], history.curve("lr")[1] or history.curve("lr/0")[1]
    clock = history.curve("time")[1]
    passed = timedelta(seconds=round(clock[-1] - clock[0]))
    count = sum(block in name for name in history.blocks())
    top = f"step {history.columns['step'][-1]:.0f}, {count} block{'s' * (count != 1)}, "
    top += f"lr {rate[-1]:.3g}, " * bool(rate) + f"{skipped[-1]:.0f} skipped, {len(history)} records in {passed}, "
    top += history.path
    all_plots = plots(history, block, unicode)
    beside = 2 if width >= WIDE else 1
    each = (width - 2 * (beside - 1)) // beside
    rows = -(-len(all_plots) // beside)
    high = max((height - 1) // rows, 6)
    lines = [Text(top[:width], "bold")]
    for start in range(0, len(all_plots), beside):
        drawn = [plot.lines(each, high) for plot in all_plots[start : start + beside]]
        lines += [Text("  ").join(parts) for parts in zip(*drawn, strict=True)]
    for line in lines:
        line.rstrip()
    return lines


def _waited_for(console: Console, path: str, interval: float) -> bool:
    """Wait until a file is there; false if that was interrupted."""
    try:
        if not os.path.exists(path):
            console.print(f"Waiting for {path}, which is not there yet; Ctrl-C ends this.", soft_wrap=True)
        while not os.path.exists(path):
            time.sleep(interval)
    except KeyboardInterrupt:
        return False
    return True


def watch(console: Console, path: str, *, interval: float, once: bool, block: str = "") -> None:
    """Show a file; on a terminal, again at every interval until interrupted, which leaves the last picture visible.

    On a terminal a file that is not there yet is waited for, as a run writes it after its first steps.

    Raises:
        HistoryError: the file is missing, or was not written by a monitor
    """
    follows = not once and console.is_terminal and not console.is_dumb_terminal
    if follows and not _waited_for(console, path, interval):
        return
    history = History(path)
    history.poll()
    names = history.blocks()
    if names and not any(block in name for name in names):
        raise HistoryError(f"{path}: no block has {block!r} in its name; there are {', '.join(names)}")
    unicode = (console.encoding or "").lower().startswith("utf")

    def drawn(height: int) -> Group:
        width = console.width if console.is_terminal else min(console.width, WIDEST)
        return Group(*picture(history, width, height, block, unicode))

    if follows:
        with (
            suppress(KeyboardInterrupt),
            Live(drawn(console.height - 1), console=console, screen=True, auto_refresh=False) as live,
        ):
            live.refresh()
            while True:
                time.sleep(interval)
                history.poll()
                live.update(drawn(console.height - 1), refresh=True)
    console.print(drawn(ROWS), highlight=False, soft_wrap=True)
