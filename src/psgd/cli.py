"""The command line: the only place where strings become objects."""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from typer.core import TyperGroup

from . import __version__
from . import watch as terminal
from .bench import BENCHMARKS, benchmark
from .bench import peers as bench_peers
from .experiments import demo as zebra_demo
from .experiments import mnist, pool, progress
from .experiments import report as html_report
from .experiments.figures import FIGURES
from .experiments.reproduce import Order
from .experiments.reproduce import reproduce as reproduce_figures
from .monitor.history import HistoryError

#: what typer raises for a wrong option, argument or command; it has no public name in typer
USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)


class Commands(TyperGroup):
    """Answers Ctrl-C; what typer itself makes of it depends on its version."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # some terminals have no Greek
    try:
        return int(app(args, prog_name="psgd", standalone_mode=False) or 0)
    except USAGE_ERROR as error:
        return failed(error.format_message())


def failed(message: str) -> int:
    print(f"psgd: {message}", file=sys.stderr)
    return 2


def interrupted() -> int:
    """The exit code that shells expect of a command that was ended by Ctrl-C."""
    print("psgd: interrupted", file=sys.stderr)
    return 130


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def psgd(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Preconditioned stochastic gradient descent for PyTorch."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the figure is written.")] = Path("demo"),
    iterations: Annotated[int, typer.Option(min=1, help="Mini-batches for each optimizer.")] = zebra_demo.ITERATIONS,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of weights, mini-batches and probes.")] = 0,
) -> None:
    """Train the paper's zebra-stripe classifier with plain SGD and with PSGD, and draw what they learn."""
    console = Console()
    with _writing(out):
        _try_writing(out)
    path = out / "zebra.png"
    finished = zebra_demo.demo(console, iterations=iterations, seed=seed)
    with _writing(path):
        zebra_demo.draw(finished).savefig(path, dpi=150)
    console.print(f"Figure: {path}", highlight=False, soft_wrap=True)


@app.command()
def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FIGURE]...", help=f"{', '.join(FIGURES)}, or all.", show_default="all"),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The paper's sizes: hours instead of minutes.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds for each figure, instead of its own number.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at the same time.", show_default="cores")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where MNIST is; else $PSGD_DATA, the cache, or a download.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the results are written.")] = Path("results"),
) -> None:
    """Run the paper's experiments, draw their figures, and check its claims.

    A command that was stopped carries on where it was, when it is given again.
    """
    names = _names(figures or ["all"], FIGURES, "'FIGURE'")
    _check_device(device)
    console = Console()
    with _writing(out):
        _try_writing(out)
    orders = [Order.of(FIGURES[name], full, seeds) for name in names]
    if any(order.figure.digits and order.unfinished(out, device) for order in orders):
        try:
            mnist.load(data)  # now, and once for all processes
        except mnist.DataError as error:
            raise typer.BadParameter(str(error), param_hint="'--data'") from None
    jobs = jobs or _cores()
    events = progress.show(console, reproduce_figures(orders, out, jobs=jobs, device=device, data=data), jobs)
    try:
        while True:
            with _writing(out):
                written = next(events, None)
            if written is None:
                break
            _print_verdicts(console, written.summary)
    except pool.KilledError as error:
        raise typer.BadParameter(str(error), param_hint="'--jobs'") from None
    page = _write_report(out, "'--out'")
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)


@app.command()
def report(directory: Annotated[Path, typer.Argument(metavar="DIR", help="What reproduce or monitors wrote.")]) -> None:
    """Make one page of all results in a directory."""
    print(_write_report(directory, "'DIR'"))


@app.command()
def watch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The CSV file of a psgd.Monitor.")],
    once: Annotated[bool, typer.Option("--once", help="Print one picture, as is done without a terminal.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds from one picture to the next.")] = 2.0,
    block: Annotated[str, typer.Option(metavar="TEXT", help="Only blocks whose names contain this.")] = "",
) -> None:
    """Show what a monitor writes while a model is trained, until Ctrl-C."""
    try:
        terminal.watch(Console(), str(file), interval=interval, once=once, block=block)
    except HistoryError as error:
        raise typer.BadParameter(str(error), param_hint="'FILE'") from None


@app.command()
def bench(
    benchmarks: Annotated[
        list[str] | None,
        typer.Argument(metavar="[BENCHMARK]...", help=f"{', '.join(BENCHMARKS)}, or all.", show_default="all"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    peers: Annotated[
        str | None,
        typer.Option(help="Optimizers to compare with: names with commas, packages, all or none.", show_default="all"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="For benchmarks that have several.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, for a first look.")] = False,
    limit: Annotated[float | None, typer.Option(min=1, help="Seconds for each measurement.")] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="What the language model is trained on.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the results are written.")] = Path("bench"),
) -> None:
    """Measure what the optimizer costs and gains beside others: a table, a JSON file and a plot for each benchmark.

    Every measurement has a process of its own and a time limit; what fails is reported.
    """
    wanted = [BENCHMARKS[name] for name in _names(benchmarks or ["all"], BENCHMARKS, "'BENCHMARK'")]
    _check_device(device)
    comparable = [name for name in bench_peers.PEERS if any(name in one.peers for one in wanted)]
    if peers is not None and not comparable:
        raise typer.BadParameter(f"{wanted[0].name} compares with no others", param_hint="'--peers'")
    try:
        chosen = bench_peers.chosen(peers, comparable) if peers is not None else bench_peers.chosen("all")
    except bench_peers.UnknownPeerError as error:
        raise typer.BadParameter(str(error), param_hint="'--peers'") from None
    models = [name for one in wanted for name in one.models]
    if model is not None and model not in models:
        right = f"{model!r} is none of {', '.join(models)}" if models else f"{wanted[0].name} has no choice of models"
        raise typer.BadParameter(right, param_hint="'--model'")
    if text is not None and not text.is_file():
        raise typer.BadParameter(f"{text} is not a file", param_hint="'--text'")
    console = Console()
    with _writing(out):
        _try_writing(out)
    for one in wanted:
        among = [peer for peer in chosen if peer.name in one.peers]
        plan = benchmark.Plan(device, among, model if model in one.models else None, quick, limit, text)
        outcomes = benchmark.run(one, plan, console)
        benchmark.show(one, outcomes, console)
        with _writing(out):
            paths = benchmark.write(one, plan, outcomes, out)
        console.print(f"Results: {', '.join(map(str, paths))}", highlight=False, soft_wrap=True)
        if len(outcomes) < len(one.tasks(plan)):
            raise typer.Exit(interrupted())


def _write_report(directory: Path, hint: str) -> Path:
    try:
        with _writing(directory, hint):
            return html_report.write(directory)
    except html_report.ReportError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from None


def _names(wanted: Sequence[str], known: Collection[str], hint: str) -> list[str]:
    names = [name for word in wanted for name in (known if word == "all" else [word])]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}, all", param_hint=hint)
    return list(dict.fromkeys(names))


def _check_device(device: str) -> None:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="'--device'")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise typer.BadParameter(f"{device!r} cannot be used: {reason}", param_hint="'--device'") from None


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print_verdicts(console: Console, summary: dict[str, Any]) -> None:
    holding = sum(claim["holds"] for claim in summary["claims"])
    console.print(
        f"{summary['name']}: {summary['title']}: {holding} of {len(summary['claims'])} claims hold", highlight=False
    )
    for claim in summary["claims"]:
        verdict = "holds:         " if claim["holds"] else "does not hold: "
        text = f"  {verdict}{claim['text']} ({claim['measured']})"
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _try_writing(directory: Path) -> None:
    """Now, and not after minutes of training."""
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()


@contextmanager
def _writing(path: Path, hint: str = "'--out'") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror or error}", param_hint=hint) from None
