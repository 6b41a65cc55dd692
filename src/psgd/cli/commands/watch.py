"""``psgd watch``: curves of a monitor on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...monitor.history import HistoryError
from .. import watch as terminal
from ..output import Stream


def watch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV file of a psgd.Monitor.")],
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and exit; this is the default without a terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Seconds from one picture to the next.")
    ] = 2.0,
    block: Annotated[str, typer.Option(metavar="TEXT", help="Show only blocks whose names contain this text.")] = "",
) -> None:
    """Show the curves of a psgd.Monitor while a model is trained, until Ctrl-C.

    \b
    Examples:
      psgd watch run.csv
      psgd watch run.csv --once --block 0.weight
    """
    try:
        terminal.watch(Stream(), str(file), interval=interval, once=once, block=block)
    except HistoryError as error:
        raise typer.BadParameter(str(error), param_hint="'FILE'") from None
