"""``psgd watch``: curves of a monitor on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...monitor.history import HistoryError
from .. import watch as terminal
from ..output import Stream


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
