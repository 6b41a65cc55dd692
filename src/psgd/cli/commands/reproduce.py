"""``psgd reproduce``: the paper's experiments, and whether its claims hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ... import __version__
from ...experiments import mnist, pool, progress
from ...experiments import report as html_report
from ...experiments.figures import FIGURES
from ...experiments.reproduce import Order
from ...experiments.reproduce import reproduce as reproduce_figures
from .. import arguments
from ..output import FailedError, Json, Output, Quiet, verdicts


def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIGURE", help=f"Figures to reproduce: {', '.join(FIGURES)}, or all.", show_default="all"
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Use the paper's sizes; this needs hours instead of minutes.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of seeds for each figure, instead of the figure's default."),
    ] = None,
    first_seed: Annotated[
        int, typer.Option(metavar="SEED", min=0, help="First seed; the others of a figure are the numbers after it.")
    ] = 0,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of runs at the same time.", show_default="cores"),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="Device to train on: cpu or cuda.")] = "cpu",
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with MNIST; otherwise $PSGD_DATA, the cache, or a download is used."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder that the results are written to.")] = Path("results"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the paper's experiments, draw their figures, and check its claims.

    For each figure NAME, the command writes NAME.png, NAME.svg, NAME.csv and NAME.json; report.html shows them all. If
    the command was stopped, the same command continues where it stopped. Claims that do not hold are not a failure:
    they are printed, and "holds" is false in the JSON.

    \b
    Examples:
      psgd reproduce                         # all figures, a quarter of an hour on two cores
      psgd reproduce fig6 --full             # one figure at the size of the paper
      psgd reproduce --first-seed 100        # all figures with other seeds
      psgd reproduce fig1 --json --quiet | jq '.figures[].claims[] | {name, holds}'
    """
    names = arguments.names(figures or ["all"], FIGURES, "'FIGURE'")
    arguments.check_device(device)
    printer = Output(as_json=as_json, quiet=quiet)
    with arguments.writing(out):
        arguments.try_writing(out)
    orders = [Order.of(FIGURES[name], full, seeds, first_seed) for name in names]
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
