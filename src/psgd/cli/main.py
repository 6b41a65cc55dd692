"""Commands of ``psgd``, with their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..bench import BENCHMARKS, benchmark
from ..bench import peers as bench_peers
from ..experiments import demo as zebra_demo
from ..experiments import mnist, pool, progress
from ..experiments import report as html_report
from ..experiments.figures import FIGURES
from ..experiments.reproduce import Order
from ..experiments.reproduce import reproduce as reproduce_figures
from ..monitor.history import HistoryError
from . import arguments
from . import plan as plan_command
from . import watch as terminal
from .output import Commands, FailedError, Json, Output, Quiet, Stream, interrupted, run, verdicts

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help is plain text, which can be piped and searched
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return run(app, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        Stream().say(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def psgd(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Preconditioned stochastic gradient descent for PyTorch: the paper's experiments, benchmarks, and plans.

    \b
    Examples:
      psgd demo                              # SGD, Adam and PSGD, in a minute
      psgd reproduce fig1 fig5               # two figures of the paper, and whether its claims hold
      psgd bench step --device cuda --json   # what a step costs beside other optimizers, for a script
      psgd plan gpt2 --ranks 8               # memory of the optimizer's state
      psgd watch run.csv                     # curves of a psgd.Monitor, while a model is trained

    \b
    Exit codes:
      0    done; claims that do not hold and measurements that fail are results too
      1    failed on the way: a full disk, a process that was killed, a download
      2    could not begin: a wrong argument, a folder that cannot be written, a missing package
      130  interrupted by Ctrl-C, which is how watch ends: there it is 0
      141  its output is no longer read, as after psgd ... | head

    An error is one line on stderr. With --json stdout holds one JSON document and nothing else, or nothing after an
    error. Colours and bars are for terminals only; NO_COLOR=1 turns colours off there too.
    """
    if context.invoked_subcommand is None:
        Stream().say(context.get_help())


@app.command(short_help="Train with SGD, Adam and PSGD, and draw what they learn.")
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the figure is written.")] = Path("demo"),
    iterations: Annotated[
        int, typer.Option(metavar="N", min=1, help="Mini-batches for PSGD; the others have as many seconds.")
    ] = zebra_demo.ITERATIONS,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Of weights, mini-batches and probes.")
    ] = 0,
    paper: Annotated[bool, typer.Option("--paper", help="Also PSGD with the settings of the paper.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the paper's zebra-stripe classifier with SGD, Adam and PSGD, each for the same time.

    Prints loss, error rate and seconds of all, and writes the figure zebra.png; an earlier one is overwritten.

    \b
    Examples:
      psgd demo
      psgd demo --paper --seed 1 --out elsewhere
      psgd demo --iterations 1000 --json --quiet
    """
    printer = Output(as_json=as_json, quiet=quiet)
    with arguments.writing(out):
        arguments.try_writing(out)
    path = out / "zebra.png"
    finished = zebra_demo.demo(printer.progress, iterations=iterations, seed=seed, paper=paper)
    printer.results.print(zebra_demo.table(finished))
    with arguments.saving(path):
        zebra_demo.draw(finished).savefig(path, dpi=150)
    printer.results.say(f"Figure: {path}")
    numbers = {"iterations": iterations, "seed": seed, "runs": zebra_demo.numbers(finished)}
    printer.document({**numbers, "figure": str(path), "version": __version__})


@app.command(short_help="Run the paper's experiments and check its claims.")
def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIGURE", help=f"{', '.join(FIGURES)}, or all.", show_default="all"),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The paper's sizes: hours instead of minutes.")] = False,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Seeds for each figure, instead of its own number.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Runs at the same time.", show_default="cores")
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu or cuda.")] = "cpu",
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where MNIST is; else $PSGD_DATA, the cache, or a download.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the results are written.")] = Path("results"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the paper's experiments, draw their figures, and check its claims.

    For each figure NAME the folder gets NAME.png, NAME.svg, NAME.csv and NAME.json; report.html shows them all. A
    command that was stopped continues when it is given again. Claims that do not hold are not a failure: they are
    printed, and "holds" is false in the JSON.

    \b
    Examples:
      psgd reproduce                         # all of it, a quarter of an hour on two cores
      psgd reproduce fig6 --full             # one figure at the size of the paper
      psgd reproduce fig1 --json --quiet | jq '.figures[].claims[] | {name, holds}'
    """
    names = arguments.names(figures or ["all"], FIGURES, "'FIGURE'")
    arguments.check_device(device)
    printer = Output(as_json=as_json, quiet=quiet)
    with arguments.writing(out):
        arguments.try_writing(out)
    orders = [Order.of(FIGURES[name], full, seeds) for name in names]
    if any(order.figure.digits and order.unfinished(out, device) for order in orders):
        try:
            mnist.load(data, say=printer.progress.say)  # now, once for all processes
        except mnist.DataError as error:
            if data is None:
                raise FailedError(str(error)) from None
            raise typer.BadParameter(str(error), param_hint="'--data'") from None
    jobs = jobs or arguments.cores()
    happenings = reproduce_figures(orders, out, jobs=jobs, device=device, data=data)
    events = progress.show(printer.progress, happenings, jobs)
    summaries = []
    try:
        while True:
            with arguments.saving(out):
                written = next(events, None)
            if written is None:
                break
            summaries.append(written.summary)
            printer.results.say(verdicts(written.summary))
    except pool.KilledError as error:
        raise FailedError(str(error)) from None
    try:
        with arguments.saving(out):
            page = html_report.write(out)
    except html_report.ReportError as error:
        raise FailedError(str(error)) from None
    printer.results.say(f"Report: {page}")
    brief = [{key: summary[key] for key in ("name", "title", "size", "seeds", "claims")} for summary in summaries]
    printer.document({"figures": brief, "report": str(page), "version": __version__})


@app.command(short_help="Make one page of what reproduce or monitors wrote.")
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What reproduce or monitors wrote.")],
    as_json: Json = False,
) -> None:
    """Make one page of all results in a directory, and print its path.

    \b
    Examples:
      psgd report results
      xdg-open "$(psgd report results)"
    """
    printer = Output(as_json=as_json)
    try:
        with arguments.writing(directory, "'DIR'"):
            page = html_report.write(directory)
    except html_report.ReportError as error:
        raise typer.BadParameter(str(error), param_hint="'DIR'") from None
    printer.results.say(page)
    printer.document({"report": str(page), "version": __version__})


@app.command(short_help="Show on the terminal what a monitor records.")
def watch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The CSV file of a psgd.Monitor.")],
    once: Annotated[bool, typer.Option("--once", help="Print one picture, as is done without a terminal.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="From one picture to the next.")] = 2.0,
    block: Annotated[str, typer.Option(metavar="TEXT", help="Only blocks whose names contain this.")] = "",
) -> None:
    """Show what a psgd.Monitor writes while a model is trained, until Ctrl-C.

    \b
    Examples:
      psgd watch run.csv
      psgd watch run.csv --once --block 0.weight
    """
    try:
        terminal.watch(Stream(), str(file), interval=interval, once=once, block=block)
    except HistoryError as error:
        raise typer.BadParameter(str(error), param_hint="'FILE'") from None


@app.command(short_help="Measure costs and gains beside other optimizers.")
def bench(
    benchmarks: Annotated[
        list[str] | None,
        typer.Argument(metavar="BENCHMARK", help=f"{', '.join(BENCHMARKS)}, or all.", show_default="all"),
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu or cuda.")] = "cpu",
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Optimizers to compare with: names with commas, packages, all or none.",
            show_default="all",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="For benchmarks that have several.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, for a first look.")] = False,
    limit: Annotated[float | None, typer.Option(metavar="SECONDS", min=1, help="For each measurement.")] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="What the language model is trained on.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the results are written.")] = Path("bench"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what the optimizer costs and gains compared with others: a table, a JSON file and a plot per benchmark.

    Every measurement has its own process and a time limit; one that fails is listed as failed, and the others go on.
    Ctrl-C ends the present measurement: the table has those before it.

    \b
    Examples:
      psgd bench dense --quick
      psgd bench step --device cuda --peers AdamW,Muon
      psgd bench fit --json --quiet | jq '.benchmarks[].table'
    """
    wanted = [BENCHMARKS[name] for name in arguments.names(benchmarks or ["all"], BENCHMARKS, "'BENCHMARK'")]
    arguments.check_device(device)
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
    printer = Output(as_json=as_json, quiet=quiet)
    with arguments.writing(out):
        arguments.try_writing(out)
    summaries = []
    for one in wanted:
        among = [peer for peer in chosen if peer.name in one.peers]
        plan = benchmark.Plan(device, among, model if model in one.models else None, quick, limit, text)
        outcomes = benchmark.run(one, plan, printer.progress)
        benchmark.show(one, outcomes, printer.results)
        with arguments.saving(out):
            paths = benchmark.write(one, plan, outcomes, out)
        printer.results.say(f"Results: {', '.join(map(str, paths))}")
        summaries.append({**benchmark.summary(one, plan, outcomes), "files": [str(path) for path in paths]})
        if not summaries[-1]["complete"]:
            break
    printer.document({"benchmarks": summaries, "version": __version__})
    if not summaries[-1]["complete"]:
        raise typer.Exit(interrupted())


app.command("plan", short_help="Tell beforehand what the state of PSGD takes.")(plan_command.plan)
