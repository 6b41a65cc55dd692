"""``psgd report``: one page of what ``reproduce`` or monitors wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ... import __version__
from ...experiments import report as html_report
from .. import arguments
from ..output import Json, Output


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that reproduce or monitors wrote to.")],
    as_json: Json = False,
) -> None:
    """Make one HTML page of all results in a folder, and print its path.

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
