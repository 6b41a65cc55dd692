"""The demo: the zebra stripes learned by plain SGD and by PSGD, side by side, in less than a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from .. import PSGD, Dense, Joint
from . import training, zebra
from .drawing import draw_pattern

ITERATIONS = 8_000
#: number of mini-batches whose losses are averaged to one point of a curve, as in the paper's Figure 5
AVERAGED = 100
#: number of lines written while training if there is no terminal to draw on
PLAIN_LINES = 4


class Run:
    """Training with one optimizer: the network, its learning curve, and the seconds that it took."""

    def __init__(
        self, name: str, lr: float, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], seed: int
    ) -> None:
        self.name = name
        self.lr = lr
        self.model, data = zebra.start(seed)
        self._losses = training.losses(make(list(self.model.parameters())), partial(zebra.loss, self.model), data)
        self.iterations: list[int] = []
        self.losses: list[float] = []
        self.seconds = 0.0

    @property
    def loss(self) -> float:
        """Last point of the curve."""
        return self.losses[-1]

    def advance(self, iterations: int) -> None:
        """Train on ``iterations`` mini-batches, and add their mean loss to the curve."""
        begin = time.perf_counter()
        losses = list(islice(self._losses, iterations))
        self.seconds += time.perf_counter() - begin
        self.iterations.append(sum(self.iterations[-1:]) + iterations)
        self.losses.append(fmean(losses))


def runs(seed: int) -> list[Run]:
    """Both optimizers before their first step, with the same weights and the same mini-batches.

    SGD has the best of the learning rates 0.5, 1, 1.5, 2, 3 and 5: the lowest loss after 10,000 mini-batches of seed 0.
    """
    sgd, psgd = 1.0, 0.1
    return [
        Run("SGD", sgd, lambda params: torch.optim.SGD(params, lr=sgd), seed),
        Run("PSGD", psgd, lambda params: PSGD(params, psgd, preconditioner=Dense(), blocks=Joint(), seed=seed), seed),
    ]


def race(seed: int, iterations: int) -> Iterator[list[Run]]:
    """Train both in turns, and yield them whenever each has a new point on its curve.

    If the number of mini-batches is not a multiple, the first point averages fewer, as the last is the result.
    """
    both = runs(seed)
    full, rest = divmod(iterations, AVERAGED)
    with _one_thread():
        for size in [rest] * (rest > 0) + [AVERAGED] * full:
            for run in both:
                run.advance(size)
            yield both


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: products of this size are no faster with more, which would only keep the cores busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def demo(console: Console, *, iterations: int = ITERATIONS, seed: int = 0) -> list[Run]:
    """Train both, and show progress."""
    console.print(
        f"Zebra stripes, a network of 401 parameters, {iterations:,} mini-batches of {zebra.BATCH} points for each "
        "optimizer, the same ones from the same start.",
        highlight=False,
    )
    show = _show_bars if console.file.isatty() else _show_lines
    return show(console, race(seed, iterations), iterations)


# ---------------------------------------------------------------- while it runs


def _show_bars(console: Console, progress: Iterator[list[Run]], iterations: int) -> list[Run]:
    columns = (
        TextColumn("{task.description:>4}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
    )
    both: list[Run] = []
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}
        for both in progress:
            for run in both:
                status = f"loss {run.loss:.3f}, {run.seconds:4.1f} s"
                if run.name not in tasks:
                    tasks[run.name] = bars.add_task(run.name, total=iterations, status=status)
                bars.update(tasks[run.name], completed=run.iterations[-1], status=status)
    return both


def _show_lines(console: Console, progress: Iterator[list[Run]], iterations: int) -> list[Run]:
    both: list[Run] = []
    lines = 0
    for both in progress:
        done = both[0].iterations[-1]
        if done * PLAIN_LINES >= (lines + 1) * iterations:
            lines = done * PLAIN_LINES // iterations
            losses = ", ".join(f"{run.name} {run.loss:.3f}" for run in both)
            console.print(f"{done:>7,} of {iterations:,} mini-batches: loss {losses}", highlight=False)
    return both


# ---------------------------------------------------------------- what is left of it


def table(finished: Sequence[Run]) -> Table:
    """Loss, error rate and cost of each optimizer."""
    averaged = min(AVERAGED, finished[0].iterations[-1])
    rows = Table(caption=f"loss: of the last {averaged} mini-batches; wrong: of {zebra.GRID**2:,} grid points")
    for heading in ("", "step size", "loss", "wrong", "seconds", "ms per mini-batch"):
        rows.add_column(heading, justify="right" if heading else "left")
    for run in finished:
        rows.add_row(
            run.name,
            f"{run.lr:g}",
            f"{run.loss:.3f}",
            f"{zebra.error_rate(run.model):.1%}",
            f"{run.seconds:.1f}",
            f"{1000 * run.seconds / run.iterations[-1]:.2f}",
        )
    return rows


def numbers(finished: Sequence[Run]) -> list[dict[str, Any]]:
    """Table and curves as numbers, for programs."""
    return [
        {
            "name": run.name,
            "lr": run.lr,
            "loss": run.loss,
            "error_rate": zebra.error_rate(run.model),
            "seconds": run.seconds,
            "curve": {"iterations": run.iterations, "losses": run.losses},
        }
        for run in finished
    ]


def draw(finished: Sequence[Run], points: int = 400) -> Figure:
    """Draw the learning curves above; the true pattern and the learned ones below."""
    figure = Figure(figsize=(9, 7.2), layout="constrained")
    grid = figure.add_gridspec(2, 1 + len(finished), height_ratios=(1, 1.05))
    curves = figure.add_subplot(grid[0, :])
    for run, color in zip(finished, ("tab:orange", "tab:blue"), strict=True):
        label = f"{run.name}, step size {run.lr:g} ({run.seconds:.1f} s)"
        marker = "o" if len(run.losses) == 1 else None
        curves.plot(run.iterations, run.losses, color=color, marker=marker, label=label)
    curves.set_title("Learning the zebra stripes")
    curves.set_xlabel("mini-batches")
    curves.set_ylabel("cross entropy")
    curves.set_ylim(bottom=0)
    curves.xaxis.set_major_formatter("{x:,.0f}")
    curves.spines[["top", "right"]].set_visible(False)
    curves.grid(alpha=0.3)
    curves.legend(frameon=False)
    panels = [figure.add_subplot(grid[1, column]) for column in range(1 + len(finished))]
    draw_pattern(panels[0], zebra.label(zebra.grid(points)))
    panels[0].set_title("to be learned", fontsize="medium")
    for panel, run in zip(panels[1:], finished, strict=True):
        draw_pattern(panel, zebra.probability(run.model, points))
        panel.set_title(f"learned by {run.name}: {zebra.error_rate(run.model):.1%} wrong", fontsize="medium")
    return figure
