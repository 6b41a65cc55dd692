"""``psgd demo``: SGD, Adam and PSGD on the zebra stripes, each for the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ... import __version__
from ...experiments import demo as zebra_demo
from .. import arguments
from ..output import Json, Output, Quiet


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder that the figure is written to.")] = Path("demo"),
    iterations: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Number of mini-batches for PSGD; the others train for as many seconds."),
    ] = zebra_demo.ITERATIONS,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Seed of weights, mini-batches and probes.")
    ] = 0,
    paper: Annotated[
        bool, typer.Option("--paper", help="Also train with PSGD with the settings of the paper.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the paper's zebra-stripe classifier with SGD, Adam and PSGD, each for the same time.

    Prints loss, error rate and seconds of each optimizer, and writes the figure zebra.png. An earlier figure is
    overwritten.

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
