"""The demo: the zebra stripes learned by SGD, Adam and PSGD, each for the same time, in less than a minute."""

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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from .. import PSGD, Dense, FiniteDifference, Joint
from . import training, zebra
from .drawing import draw_pattern

#: number of mini-batches for PSGD; the others have as many seconds
ITERATIONS = 4_000
#: number of mini-batches whose losses are averaged to one point of a curve, as in the paper's Figure 5
AVERAGED = 100
#: number of mini-batches in a turn of an optimizer, after which the bar moves
TURN = 20
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
        self._open: list[float] = []
        self.done = 0
        self.iterations: list[int] = []
        self.losses: list[float] = []
        self.times: list[float] = []
        self.seconds = 0.0

    @property
    def loss(self) -> float:
        """Last point of the curve."""
        return self.losses[-1]

    def loss_after(self, iterations: int) -> float:
        """Point of the curve after some mini-batches, or the first one after these."""
        return next(loss for done, loss in zip(self.iterations, self.losses, strict=True) if done >= iterations)

    @property
    def complete(self) -> bool:
        """Whether the curve has a point for all mini-batches so far."""
        return not self._open

    def advance(self, iterations: int, point: int) -> None:
        """Train on ``iterations`` mini-batches; ``point`` mini-batches, averaged, are a point of the curve."""
        begin = time.perf_counter()
        self._open += islice(self._losses, min(iterations, point - len(self._open)))
        self.seconds += time.perf_counter() - begin
        if len(self._open) == point:
            self.iterations.append(sum(self.iterations[-1:]) + point)
            self.losses.append(fmean(self._open))
            self.times.append(self.seconds)
            self._open.clear()
        self.done = sum(self.iterations[-1:]) + len(self._open)


def runs(seed: int, paper: bool = False) -> list[Run]:
    """All optimizers before their first step, with the same weights and the same mini-batches.

    SGD has the best of the learning rates 0.5, 1, 1.5, 2, 3 and 5: the lowest loss after 10,000 mini-batches of seed 0;
    Adam the best of 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3 and 1 after 2,000. PSGD has its defaults.

    Args:
        seed: seed of weights, mini-batches and probes
        paper: whether PSGD with the settings of the paper is among them
    """
    choices: dict[str, Any] = {"preconditioner": Dense(), "blocks": Joint(), "seed": seed}
    found = [
        Run("PSGD", FiniteDifference.lr, lambda params: PSGD(params, **choices), seed),
        Run("SGD", 1.0, lambda params: torch.optim.SGD(params, lr=1.0), seed),
        Run("Adam", 0.1, lambda params: torch.optim.Adam(params, lr=0.1), seed),
    ]
    if paper:
        choices = {**choices, "precond_lr": 0.01, **training.AS_IN_THE_PAPER}
        found.append(Run("paper", 0.1, lambda params: PSGD(params, 0.1, **choices), seed))
    return found


def race(seed: int, iterations: int, paper: bool = False) -> Iterator[list[Run]]:
    """Train all in turns, and yield them after each turn of all.

    The others go on until they have had as many mini-batches and as many seconds as PSGD. If the number of mini-batches
    is not a multiple, the first point averages fewer, as the last is the result.
    """
    first, *others = found = runs(seed, paper)
    rest = iterations % AVERAGED
    with _one_thread():
        while first.done < iterations:
            first.advance(TURN, _point(first, rest))
            for run in others:
                while run.done < first.done or run.seconds < first.seconds:
                    run.advance(TURN, _point(run, rest))
                while first.done == iterations and not run.complete:
                    run.advance(TURN, _point(run, rest))
            yield found


def _point(run: Run, rest: int) -> int:
    """Number of mini-batches of the next point of a curve."""
    return rest if rest and not run.iterations else AVERAGED


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: products of this size are no faster with more, which would only keep the cores busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def demo(console: Console, *, iterations: int = ITERATIONS, seed: int = 0, paper: bool = False) -> list[Run]:
    """Train all, and show progress."""
    console.print(
        f"Zebra stripes, a network of 401 parameters: {iterations:,} mini-batches of {zebra.BATCH} points for PSGD. "
        "The others have the same ones, from the same start, until they have had as much time.",
        highlight=False,
    )
    show = _show_bars if console.file.isatty() else _show_lines
    return show(console, race(seed, iterations, paper), iterations)


# ---------------------------------------------------------------- while it runs


def _show_bars(console: Console, progress: Iterator[list[Run]], iterations: int) -> list[Run]:
    columns = (
        TextColumn("{task.description:>4}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
    )
    found: list[Run] = []
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("PSGD", total=iterations, status="")
        for found in progress:
            bars.update(task, completed=found[0].done, status=_status(found))
    return found


def _show_lines(console: Console, progress: Iterator[list[Run]], iterations: int) -> list[Run]:
    found: list[Run] = []
    lines = 0
    for found in progress:
        done = found[0].done
        if done * PLAIN_LINES >= (lines + 1) * iterations:
            lines = done * PLAIN_LINES // iterations
            console.print(f"{done:>7,} of {iterations:,} mini-batches: {_status(found)}", highlight=False)
    return found


def _status(found: Sequence[Run]) -> str:
    losses = ", ".join(f"{run.name} {run.loss:.3f}" for run in found if run.losses)
    return f"{found[0].seconds:.1f} s each" + (f", loss {losses}" if losses else "")


# ---------------------------------------------------------------- what is left of it


def table(finished: Sequence[Run]) -> Table:
    """Loss of each optimizer at the same number of mini-batches and at the same time, its error rate and its cost."""
    iterations = finished[0].iterations[-1]
    averaged = min(AVERAGED, iterations)
    rows = Table(caption=f"losses: of the last {averaged} mini-batches; wrong: of {zebra.GRID**2:,} grid points")
    headings = (
        "",
        "learning rate",
        f"loss after {iterations:,}",
        "at the same time",
        "wrong",
        "seconds",
        "mini-batches",
    )
    for heading in headings:
        rows.add_column(heading, justify="right" if heading else "left")
    for run in finished:
        rows.add_row(
            run.name,
            f"{run.lr:g}",
            f"{run.loss_after(iterations):.3f}",
            f"{run.loss:.3f}",
            f"{zebra.error_rate(run.model):.1%}",
            f"{run.seconds:.1f}",
            f"{run.iterations[-1]:,}",
        )
    return rows


def numbers(finished: Sequence[Run]) -> list[dict[str, Any]]:
    """Table and curves as numbers, for programs."""
    iterations = finished[0].iterations[-1]
    return [
        {
            "name": run.name,
            "lr": run.lr,
            "loss": run.loss,
            "loss_after_iterations": run.loss_after(iterations),
            "error_rate": zebra.error_rate(run.model),
            "seconds": run.seconds,
            "curve": {"iterations": run.iterations, "losses": run.losses, "seconds": run.times},
        }
        for run in finished
    ]


def draw(finished: Sequence[Run], points: int = 400) -> Figure:
    """Draw the learning curves over mini-batches and over seconds; the true pattern and the learned ones below."""
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 0.95), squeeze=False)[:, 0]
    by_count, by_time = above.subplots(1, 2, sharey=True)
    iterations = finished[0].iterations[-1]
    for run, color in zip(finished, ("tab:blue", "tab:orange", "tab:green", "tab:grey"), strict=False):
        label = f"{run.name}, learning rate {run.lr:g}"
        marker = "o" if len(run.losses) == 1 else None
        within = sum(done <= iterations for done in run.iterations)
        by_count.plot(run.iterations[:within], run.losses[:within], color=color, marker=marker, label=label)
        by_time.plot(run.times, run.losses, color=color, marker=marker, label=label)
    by_count.set_xlabel("mini-batches")
    by_count.set_ylabel("cross entropy")
    by_count.set_ylim(0, 1)
    by_count.xaxis.set_major_formatter("{x:,.0f}")
    by_time.set_xlabel("seconds")
    above.suptitle("Learning the zebra stripes: the same mini-batches, and the same time")
    for axes in (by_count, by_time):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    by_count.legend(frameon=False)
    panels = below.subplots(1, 1 + len(finished))
    draw_pattern(panels[0], zebra.label(zebra.grid(points)))
    panels[0].set_title("to be learned", fontsize="medium")
    for panel, run in zip(panels[1:], finished, strict=True):
        draw_pattern(panel, zebra.probability(run.model, points))
        panel.set_title(f"learned by {run.name}: {zebra.error_rate(run.model):.1%} wrong", fontsize="medium")
    return figure
