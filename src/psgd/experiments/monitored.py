"""Runs that a monitor has recorded: their files in a folder, and their curves as a picture."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from ..monitor import History, read
from ..monitor.record import FIRST, METRICS

#: colours and widths of a median and of a maximum
MEDIAN, LARGEST = {"color": "tab:blue", "linewidth": 1.4}, {"color": "tab:red", "linewidth": 0.8}


def histories(directory: Path) -> dict[str, History]:
    """Files of monitors in a folder, by name.

    Raises:
        HistoryError: one of them is broken
    """
    found = {}
    for path in sorted(directory.glob("[!.]*.csv")):
        with open(path, "rb") as file:
            is_one = file.readline(1000).startswith(",".join(FIRST).encode())
        if is_one:
            found[path.stem] = read(path)
    return found


def draw(history: History) -> Picture:
    """Draw loss, numbers of the blocks and, if it is known, the spectrum over steps."""
    panels = [*METRICS, "ph"] if history.curve("ph_q50")[0] else list(METRICS)
    rows = -(-(1 + len(panels)) // 3)
    picture = Picture(figsize=(9.6, 2.7 * rows), layout="constrained")
    axes = picture.subplots(rows, 3, squeeze=False).flatten()
    axes[0].plot(*history.curve("loss"), **MEDIAN)
    _dress(axes[0], "loss", history.curve("loss")[1])
    for panel, metric in zip(axes[1:], panels, strict=False):
        if metric == "ph":
            steps, middle = history.curve("ph_q50")
            largest = history.curve("ph_max")[1]
            title = "|eigenvalues| of PH"
        else:
            curves = history.over_blocks(metric)
            steps, middle, largest = curves.steps, curves.median, curves.largest
            title = METRICS[metric]
        panel.plot(steps, largest, **LARGEST, label="largest")
        panel.plot(steps, middle, **MEDIAN, label="median")
        _dress(panel, title, [*middle, *largest])
    axes[1].legend(fontsize="x-small", frameon=False)
    for panel in axes[1 + len(panels) :]:
        panel.set_visible(False)
    return picture


def _dress(panel: Axes, title: str, values: list[float]) -> None:
    panel.set_title(title, fontsize="medium")
    panel.set_xlabel("step", fontsize="small")
    panel.tick_params(which="both", labelsize="small")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    finite = [v for v in values if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) > 10 * min(finite):
        panel.set_yscale("log")
